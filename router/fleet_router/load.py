"""What a worker has to do now, seen by this router: its own picks in flight joined with the worker's load reports.

A report says by `seen` which picks it already holds, so a pick is counted once: by the report when seen, else by us. No clocks of
two machines are compared; the caller says what time it is. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from fleet_contract.worker import LoadReport, Seen

REPORT_LIFE_S: Final = 3.0  # a report older than this is not truth any more


@dataclass(slots=True)
class Pick:
    """One request of ours on one worker, from the choice to its end."""

    number: int
    pend_tokens: int  # uncached prompt tokens
    room_tokens: int  # prompt and expected answer
    started: bool = False  # its first token came: the prompt is no work any more


class Load(NamedTuple):
    """Tokens and rows; inputs of the choice."""

    pend: int = 0
    run: int = 0
    ctx: int = 0
    kv_used: int = 0


@dataclass(slots=True)
class LoadBook:
    """Load of one worker incarnation. Numbers count from 0: the worker's `seen` can then close its gaps."""

    picks: dict[int, Pick] = field(default_factory=dict)
    next_number: int = 0
    report: LoadReport | None = None
    report_at: float = 0.0
    _seen: Seen | None = None

    def pick(self, pend_tokens: int, room_tokens: int) -> Pick:
        """Counts a request, at the choice and before anything is awaited."""
        pick = Pick(self.next_number, pend_tokens, room_tokens)
        self.next_number += 1
        self.picks[pick.number] = pick
        return pick

    def release(self, pick: Pick) -> None:
        """The request is over. Releasing twice changes nothing."""
        self.picks.pop(pick.number, None)

    def take_report(self, report: LoadReport, router_id: str, now: float) -> None:
        """A newer report; one with an older sequence number is ignored."""
        if self.report is not None and report.seq <= self.report.seq:
            return
        self.report, self.report_at = report, now
        self._seen = report.seen.get(router_id)

    def load(self, now: float) -> Load:
        """The sum. Without a fresh report: what we know ourselves."""
        report = self.report if self.report is not None and now - self.report_at <= REPORT_LIFE_S else None
        pend = run = ctx = kv = 0
        if report is not None:
            pend, run, ctx, kv = report.pend, report.run, report.ctx, report.kv_used
        seen = self._seen
        for number, pick in self.picks.items():
            if report is not None and seen is not None and number <= seen.up_to and number not in seen.missing:
                continue
            run += 1
            kv += pick.room_tokens
            if not pick.started:
                pend += pick.pend_tokens
            else:
                ctx += pick.room_tokens
        return Load(pend, run, ctx, kv)
