"""Counters of the operator, and their text for Prometheus (exposition format 0.0.4)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Metrics:
    """Filled by the reconciler and the loops, printed by the health server."""

    looks: Counter[str] = field(default_factory=Counter)  # by result: ok, failed, crashed
    look_seconds: float = 0.0
    status_writes: int = 0
    watch_missed: int = 0
    resyncs: int = 0

    def text(self, *, queue_depth: int, is_leader: bool, calls: Counter[tuple[str, int]]) -> str:
        """All series."""
        lines = [
            "# TYPE radixfleet_operator_leader gauge",
            f"radixfleet_operator_leader {int(is_leader)}",
            "# TYPE radixfleet_operator_queue_depth gauge",
            f"radixfleet_operator_queue_depth {queue_depth}",
            "# TYPE radixfleet_operator_reconciles_total counter",
            *(f'radixfleet_operator_reconciles_total{{result="{result}"}} {n}' for result, n in sorted(self.looks.items())),
            "# TYPE radixfleet_operator_reconcile_seconds_total counter",
            f"radixfleet_operator_reconcile_seconds_total {self.look_seconds:.6f}",
            "# TYPE radixfleet_operator_status_writes_total counter",
            f"radixfleet_operator_status_writes_total {self.status_writes}",
            "# TYPE radixfleet_operator_watch_missed_total counter",
            f"radixfleet_operator_watch_missed_total {self.watch_missed}",
            "# TYPE radixfleet_operator_resyncs_total counter",
            f"radixfleet_operator_resyncs_total {self.resyncs}",
            "# TYPE radixfleet_operator_api_calls_total counter",
            *(f'radixfleet_operator_api_calls_total{{verb="{verb}",status="{status}"}} {n}' for (verb, status), n in sorted(calls.items())),
        ]
        return "\n".join(lines) + "\n"
