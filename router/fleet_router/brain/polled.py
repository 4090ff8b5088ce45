"""The load of an engine that sends no reports, as a report: what it says of all its requests, less those that are ours.

Our own picks are counted by us from the choice on; counted again by the engine's numbers they would weigh twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from fleet_contract.worker import LoadReport
from fleet_router.engines.base import PolledLoad

if TYPE_CHECKING:
    from fleet_router.decide.load import SlotLoad

UNKNOWN_PROMPT_TOKENS: Final = 512  # of a request that waits and is nobody's we know


def load_of_others(polled: PolledLoad, load: SlotLoad) -> LoadReport:
    """A report for `SlotLoad.take_report` that names none of our picks, nor of those that other routers told us. Pure."""
    ours = list(load.all_picks())
    others = max(0, polled.running + polled.waiting - len(ours))
    running = min(polled.running, others)
    prompt = sum(p.room_tokens for p in ours) // len(ours) if ours else UNKNOWN_PROMPT_TOKENS
    held = sum(p.prompt_tokens for p in ours if p.started)
    return LoadReport(
        seq=load.report.seq + 1 if load.report is not None else 1,
        pend=(others - running) * prompt,
        run=running,
        ctx=max(0, polled.used_tokens - held) if running else 0,
        kv_used=polled.used_tokens,
        kv_capacity=load.speed.kv_capacity_tokens,
    )
