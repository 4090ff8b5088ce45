"""Which picks a load report holds, and when a report is due."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from fleet_contract.worker import LoadReport, Seen
from fleet_runtime.scheduler.load import MAX_MISSING, ROUTER_SILENT_S, LoadReporter, SeenPicks
from fleet_testing.scheduler_harness import VirtualScheduler, rid_of


@given(st.permutations(range(20)), st.integers(0, 20))
def test_seen_is_exactly_what_arrived_whatever_the_order(order: list[int], arrived: int) -> None:
    seen = SeenPicks()
    for pick in order[:arrived]:
        seen.note("r", pick, 0.0)
    report = seen.report(0.0).get("r", Seen())
    assert {n for n in range(20) if n <= report.up_to and n not in report.missing} == set(order[:arrived])


def test_a_first_pick_does_not_claim_those_before_it() -> None:
    seen = SeenPicks()
    seen.note("r", 1000, 0.0)
    report = seen.report(0.0)["r"]
    assert report.up_to == 1000 and report.missing == list(range(1000 - MAX_MISSING, 1000))


def test_silent_routers_are_forgotten() -> None:
    seen = SeenPicks()
    seen.note("old", 0, 0.0)
    seen.note("new", 0, 50.0)
    assert set(seen.report(ROUTER_SILENT_S + 1)) == {"new"}


def test_a_report_comes_on_change_at_most_every_50_ms_and_else_each_second() -> None:
    worker = VirtualScheduler()
    reporter = LoadReporter(worker.scheduler, incarnation="i", clock=worker.clock)

    def due() -> LoadReport | None:
        data = reporter.due()
        return None if data is None else msgspec.msgpack.decode(data, type=LoadReport)

    first = due()
    assert first is not None and first.seq == 1 and due() is None
    worker.clock.advance(0.5)
    assert due() is None
    answer = worker.admit(rid_of(1), list(range(100)), 500)
    changed = due()
    assert changed is not None and (changed.seq, changed.pend, changed.run) == (2, 100, 0)
    worker.scheduler.iterate()
    worker.clock.advance(0.02)
    assert due() is None, "at most 20 a second"
    worker.clock.advance(0.05)
    running = due()
    assert running is not None and running.run == 1 and running.pend == 0 and running.ctx == 101
    assert running.kv_used == 7 * 16 and answer.ids
    worker.clock.advance(1.0)
    assert due() is not None


def test_waiting_tokens_do_not_count_what_the_cache_holds() -> None:
    worker = VirtualScheduler()
    worker.answer(list(range(64)), 4)
    worker.admit(rid_of(1), [*range(64), 1, 2, 3], 4)
    assert worker.scheduler.prompt_tokens_waiting == 3
