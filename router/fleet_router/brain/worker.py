"""A worker as the brain knows it: what every edge sees, and its load, faults and breaker."""

from __future__ import annotations

from dataclasses import dataclass, field

from fleet_router.decide.load import SlotLoad, Speed
from fleet_router.decide.retry import Breaker
from fleet_router.table import WorkerView


@dataclass(slots=True, eq=False)
class Worker(WorkerView):
    """It lives until it is removed and has no request in flight."""

    load: SlotLoad = field(kw_only=True)
    drain_deadline: str | None = None
    inflight: int = 0
    faults: int = 0
    breaker: Breaker = field(default_factory=Breaker)

    @property
    def speed(self) -> Speed:
        return self.load.speed

    @property
    def says_draining(self) -> bool:
        """By its own load report."""
        return self.load.report is not None and self.load.report.draining
