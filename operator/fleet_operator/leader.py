"""One writer: a Lease of our own, and a deadline on the monotonic clock before which every write must start.

Only changes of the Lease are compared with our own clock, never its times with our time, so skewed clocks do no harm. A process that was
frozen finds its deadline passed when it thaws, before it can write.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

from fleet_contract import names
from fleet_operator.cluster import LEASE, Cluster
from fleet_operator.errors import ClusterError, LeaseLost
from fleet_operator.facts import Obj

log = logging.getLogger(__name__)
NAME: Final = names.FIELD_MANAGER
RETRY_S: Final = 1.0


class Elector:
    """Gets, holds and gives back the Lease. `identity` is unique per process."""

    def __init__(self, cluster: Cluster, *, namespace: str, identity: str, duration_s: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster, self._namespace, self._identity, self._duration_s, self._clock = cluster, namespace, identity, duration_s, clock
        self._deadline = float("-inf")
        self._lease: Obj | None = None
        self._seen: tuple[str, float] = ("", 0.0)  # resourceVersion of another's Lease, and when we first saw it

    @property
    def is_leader(self) -> bool:
        """True while writing is allowed."""
        return self._clock() < self._deadline

    def check(self) -> None:
        """Called before every write. Raises LeaseLost when the Lease may have passed to another."""
        if not self.is_leader:
            raise LeaseLost("the Lease was not renewed in time; another operator may be writing")

    async def acquire(self) -> None:
        """Waits until this process holds the Lease."""
        while True:
            try:
                if await self._try():
                    log.info("leading", extra={"identity": self._identity})
                    return
            except ClusterError as e:
                log.warning("the Lease cannot be read or written", extra={"error": e.message})
            await asyncio.sleep(RETRY_S)

    async def hold(self) -> None:
        """Renews until the Lease is lost, then raises LeaseLost."""
        pause_s = self._duration_s / 3
        while True:
            await asyncio.sleep(pause_s)
            left_s = self._deadline - self._clock()
            if left_s <= 0:
                raise LeaseLost("the Lease was not renewed in time")
            try:
                async with asyncio.timeout(left_s):
                    if not await self._try():
                        raise LeaseLost("another operator has the Lease")
                pause_s = self._duration_s / 3
            except (ClusterError, TimeoutError) as e:
                log.warning("the Lease was not renewed", extra={"error": str(e) or "no answer"})
                pause_s = RETRY_S

    async def release(self) -> None:
        """Gives the Lease back, so that the next operator need not wait for it to run out."""
        if self._lease is not None and self.is_leader:
            self._deadline = float("-inf")
            self._lease["spec"]["holderIdentity"] = ""
            try:
                await self._cluster.replace(LEASE, self._lease)
            except ClusterError as e:
                log.warning("the Lease was not given back", extra={"error": e.message})

    async def _try(self) -> bool:
        """One attempt to take or renew; False when another holds it. Raises ClusterError."""
        began = self._clock()
        lease = await self._cluster.get(LEASE, self._namespace, NAME)
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        if lease is None:
            spec = {
                "holderIdentity": self._identity,
                "leaseDurationSeconds": self._duration_s,
                "acquireTime": now,
                "renewTime": now,
                "leaseTransitions": 0,
            }
            meta = {"name": NAME, "namespace": self._namespace}
            return await self._written(
                began, self._cluster.create, {"apiVersion": LEASE.api_version, "kind": LEASE.kind, "metadata": meta, "spec": spec}
            )
        spec = lease.setdefault("spec", {})
        if spec.get("holderIdentity") != self._identity:
            if spec.get("holderIdentity") and not self._has_run_out(lease):
                return False
            spec |= {"acquireTime": now, "leaseTransitions": int(spec.get("leaseTransitions") or 0) + 1}
        spec |= {"holderIdentity": self._identity, "leaseDurationSeconds": self._duration_s, "renewTime": now}
        return await self._written(began, self._cluster.replace, lease)

    def _has_run_out(self, lease: Obj) -> bool:
        """Unchanged for its whole duration, by our own clock."""
        version = str(lease["metadata"]["resourceVersion"])
        if version != self._seen[0]:
            self._seen = (version, self._clock())
        return self._clock() - self._seen[1] >= float(lease["spec"].get("leaseDurationSeconds") or self._duration_s)

    async def _written(self, began: float, write: Callable[..., object], lease: Obj) -> bool:
        try:
            written = await write(LEASE, lease)  # type: ignore[misc]
        except ClusterError as e:
            if e.status == 409 and self._lease is None:
                return False  # another was quicker
            raise
        self._lease = written
        # Two thirds: a write that starts just before the deadline has the rest of the duration to arrive.
        self._deadline = began + self._duration_s * 2 / 3
        return True
