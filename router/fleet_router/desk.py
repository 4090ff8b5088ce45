"""The seam between the HTTP half and the deciding half: all that an edge asks of the brain.

`brain.Brain` is a desk itself, for an edge in its own process. All methods that do not wait return at once and count before they return.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

from fleet_router.lease import Lease, Leg, Want
from fleet_router.metrics import Counters
from fleet_router.table import Service, Table, WorkerView


class Desk(Protocol):
    """See the module."""

    counters: Counters  # of this process
    draining: bool

    @property
    def table(self) -> Table[Any]:
        """The last one that the deciding half published."""

    @property
    def degraded(self) -> str:
        """Why choices are worse than they should be; empty when they are not."""

    @property
    def synced(self) -> bool:
        """Once since its start the router has known all that discovery knows."""

    def choose_revision(self, service: Service[Any], exclude: Collection[WorkerView] = ()) -> str | None:
        """A revision with ready workers, by the operator's weights; None without any."""

    async def acquire(self, want: Want, timeout_s: float) -> Lease | None:
        """Chooses and counts: at once when the best worker is not busy, else when it is the request's turn. None when no worker is ready.

        Raises ApiError when too many wait, or its time is over. Cancelled: it does not wait any more.
        """

    async def explain(self, want: Want) -> dict[str, Any] | None:
        """The decision that would be made now, in words, without making it. None when no worker is ready."""

    async def wait_change(self, service: Service[Any], timeout_s: float) -> None:
        """Waits until something in the table changed, or the time is over. Raises ApiError when too many wait."""

    def blame(self, worker: WorkerView) -> None:
        """A fault of the worker itself."""

    def praise(self, worker: WorkerView) -> None:
        """It answered well."""

    def suspect(self, worker: WorkerView, why: str) -> None:
        """A request found it unreachable: it is asked again before it gets another."""

    # -- of leases; called by Lease alone

    def first_token(self, lease: Lease) -> None:
        """The prompt of a lease is computed."""

    def give_back(self, lease: Lease, leg: Leg) -> None:
        """A leg is over."""

    def forget(self, lease: Lease) -> None:
        """All legs of a lease are over."""

    def learn_cached(self, lease: Lease, actual: int) -> None:
        """What the worker that computed the prompt had cached, in tokens."""

    def learn_step(self, lease: Lease, steps: int, seconds: float) -> None:
        """The serving worker made so many tokens after its first in so long."""
