"""The scheduler as a real process: hand-shake, mail rules, failures of neighbours and of its own start, its end."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from fleet_contract.worker import LoadReport, decode_start_failure, load_topic
from fleet_runtime import messages as m
from fleet_runtime.heartbeat import PHASE_DRAINING, PHASE_READY, PHASE_STARTING
from fleet_runtime.server.health import look, not_live
from fleet_testing.scheduler_harness import (
    DETOKENIZER_INCARNATION,
    HTTP_INCARNATION,
    SchedulerProcess,
    VirtualScheduler,
    flags_of,
    rid_of,
    wait_for,
)

pytestmark = pytest.mark.processes

Start = Callable[..., SchedulerProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[SchedulerProcess] = []

    def make(**fields: object) -> SchedulerProcess:
        worker = SchedulerProcess(tmp_path / str(len(started)), flags_of(**{"pages": 256, **fields}))  # type: ignore[arg-type]
        started.append(worker)
        return worker.start()

    yield make
    for worker in started:
        worker.stop()


def test_a_request_is_answered_with_the_same_tokens_as_in_process(start: Start) -> None:
    worker = start()
    answer = worker.admit(rid_of(1), [7] * 40, 12)
    assert worker.wait_end(answer) == "length"
    assert answer.ids == VirtualScheduler().answer([7] * 40, 12)
    assert answer.opened == m.OpenText(prompt_tail=[7] * 8, stop=[], prompt_tokens=40, serial=1)
    assert all(32 <= token < 127 for token in answer.ids)
    worker.wait_idle()
    wait_for(lambda: worker.counters()["finished_requests_total"] == 1, "the counters reach the board")
    assert worker.counters()["prefilled_tokens_total"] == 40
    row = worker.board.row(m.SCHEDULER)
    assert row.phase == PHASE_READY and row.percent == 100 and row.silent_s() < 5 and row.steps > 0
    enough = worker.admit(rid_of(2), [1] * 20, 2000)
    wait_for(lambda: worker.pump() or enough.ids, "the second runs")
    worker.send(m.Stopped(rid=rid_of(2), index=0))
    assert worker.wait_end(enough) == "stop", "http may end a choice well"


def test_mail_of_and_for_other_incarnations_is_dropped(start: Start) -> None:
    worker = start()
    strange = worker.inbox.of(rid_of(1))
    worker.send(m.Admit(rid=rid_of(1), ids=b"\1\0\0\0", sender="0" * 16))
    worker.send(m.Admit(rid=rid_of(2), ids=b"\1\0\0\0", to="1" * 16))
    answer = worker.admit(rid_of(3), [1, 2, 3], 2)
    assert worker.wait_end(answer) == "length"
    assert strange.end is None and worker.inbox.of(rid_of(2)).end is None


@pytest.mark.parametrize("who", [m.HTTP, m.DETOKENIZER])
def test_the_death_of_a_neighbour_frees_all_it_carried_and_its_successor_is_served(start: Start, who: str) -> None:
    worker = start(simulated_step_base_ms=5)
    answer = worker.admit(rid_of(1), [1] * 20, 2000)
    wait_for(lambda: worker.pump() or answer.ids, "the request runs")
    incarnation = HTTP_INCARNATION if who == m.HTTP else DETOKENIZER_INCARNATION
    worker.send(m.PeerDied(who=who, incarnation=incarnation, cause="exit code 1"), sender="supervisor")
    worker.wait_idle()
    if who == m.HTTP:
        wait_for(lambda: worker.pump() or answer.end, "the detokenizer hears of the end")
        assert answer.failed.code == "peer_failed"
    else:
        assert answer.end is None, "there is nobody to tell"
    new = {"http": "c" * 16} if who == m.HTTP else {"detokenizer": "c" * 16}
    worker.introduce(**new)
    second = worker.inbox.of(rid_of(2))
    worker.send(m.Admit(rid=rid_of(2), ids=b"\1\0\0\0", max_new=3), sender=new.get("http", HTTP_INCARNATION))
    assert worker.wait_end(second) == "length"


def test_load_reports_say_what_waits_and_which_picks_they_hold(start: Start) -> None:
    worker = start(simulated_step_base_ms=5)
    context = zmq.Context()
    sub = context.socket(zmq.SUB)
    sub.connect(f"tcp://127.0.0.1:{worker.info.load_port}")
    sub.setsockopt(zmq.SUBSCRIBE, load_topic("pod"))
    try:
        idle = _report(sub)
        assert idle.incarnation == worker.incarnation and idle.run == 0 and idle.kv_capacity == 256 * 16
        worker.admit(rid_of(1), [1] * 20, 1000, router_id="r1", pick=0)
        worker.admit(rid_of(2), [2] * 20, 1000, router_id="r1", pick=2)
        wait_for(lambda: (r := _report(sub)).run == 2 and r.ctx > 40 and r.seen["r1"].up_to == 2 and r.seen["r1"].missing == [1], "both run")
        first = _report(sub)
        second = _report(sub)
        assert second.seq > first.seq
        worker.send(m.Drain(deadline=time.monotonic() + 60), sender="supervisor")
        wait_for(lambda: _report(sub).draining, "it says that it drains")
    finally:
        sub.close(linger=0)
        context.term()


def _report(sub: zmq.Socket[bytes]) -> LoadReport:
    assert sub.poll(5000), "no load report"
    return msgspec.msgpack.decode(sub.recv_multipart()[1], type=LoadReport)


def test_draining_refuses_new_requests_and_ends_the_running_at_the_deadline(start: Start) -> None:
    worker = start(simulated_step_base_ms=5)
    running = worker.admit(rid_of(1), [1] * 20, 3000)
    wait_for(lambda: worker.pump() or running.ids, "the request runs")
    worker.send(m.Drain(deadline=time.monotonic() + 0.5), sender="supervisor")
    refused = worker.admit(rid_of(2), [1] * 20)
    worker.wait_end(refused)
    assert (refused.failed.status, refused.failed.code) == (503, "draining")
    worker.wait_end(running)
    assert (running.failed.status, running.failed.code) == (503, "drain_deadline")
    assert worker.board.row(m.SCHEDULER).phase == PHASE_DRAINING


def test_a_taken_port_is_a_readable_start_failure(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        worker = SchedulerProcess(tmp_path, flags_of(role="prefill", transfer_port=port))
        try:
            assert worker.process.wait(30) == 3
            failure = decode_start_failure((tmp_path / "scheduler.failure").read_text())
            assert failure is not None and failure.reason == "PortInUse"
            assert str(port) in failure.message and "--transfer-port" in failure.message
        finally:
            worker.stop()


def test_sigterm_ends_it_at_once_also_while_it_works(start: Start) -> None:
    worker = start(simulated_step_base_ms=5)
    answer = worker.admit(rid_of(1), [1] * 20, 3000)
    wait_for(lambda: worker.pump() or answer.ids, "the request runs")
    worker.signal(signal.SIGTERM)
    assert worker.process.wait(5) == 0


def test_loading_shows_on_the_board_and_sigterm_ends_it(tmp_path: Path) -> None:
    worker = SchedulerProcess(tmp_path, flags_of(simulated_load_s=60))
    try:
        row = worker.board.row(m.SCHEDULER)
        wait_for(lambda: "loading" in row.text and row.silent_s() < 5, "it says that it loads", 30)
        assert row.phase == PHASE_STARTING and row.percent < 100
        worker.signal(signal.SIGTERM)
        assert worker.process.wait(10) == 0
    finally:
        worker.stop()


def test_the_heart_beats_while_a_long_step_is_computed(start: Start) -> None:
    worker = start(simulated_step_base_ms=2500)
    row = worker.board.row(m.SCHEDULER)
    worker.admit(rid_of(1), [1] * 20, 3)
    wait_for(lambda: row.pending == 1, "the request is there")
    steps, beats = row.steps, set[int]()

    def beaten() -> bool:
        beats.add(row._get("beat_ns"))
        return len(beats) > 5

    wait_for(beaten, "the beats go on")
    assert row.steps == steps, "all of them within one step"


def test_a_step_that_never_ends_stops_the_heart(start: Start) -> None:
    worker = start(simulated_step_base_ms=60_000, stall_timeout=1)
    worker.admit(rid_of(1), [1] * 20, 3)
    row = worker.board.row(m.SCHEDULER)
    wait_for(lambda: row.silent_s() > 1, "the beats stop")
    assert not_live(look(worker.board), 1) is not None


@pytest.mark.case("C85")
def test_an_abort_is_answered_while_a_long_step_is_computed_and_its_pages_come_free_with_it(start: Start) -> None:
    """C85. Seen red with a loop that waits for its step: the abort was read when the step was over."""
    worker = start(simulated_step_base_ms=1000)
    answer = worker.admit(rid_of(1), [1] * 20, 50)
    wait_for(lambda: worker.counters()["pages_request"] > 0, "the step is out")
    steps = worker.counters()["steps_total"]
    worker.send(m.Abort(rid=rid_of(1)))
    worker.wait_end(answer)
    assert answer.failed.code == "aborted" and worker.counters()["steps_total"] == steps
    worker.wait_idle()
    assert worker.counters()["steps_total"] <= steps + 2


@pytest.mark.case("C88")
def test_probes_of_a_stopped_scheduler_leave_nothing_behind(start: Start) -> None:
    """C88: probes look at the heartbeat board and send nothing. Seen red with an `Admit` for each of them in the
    place of the look at the board."""
    worker = start()
    worker.signal(signal.SIGSTOP)
    try:
        for _ in range(200):
            not_live(look(worker.board), 1)
    finally:
        worker.signal(signal.SIGCONT)
    answer = worker.admit(rid_of(1), [1] * 20, 3)
    assert worker.wait_end(answer) == "length"
    worker.wait_idle()
    assert worker.counters()["finished_requests_total"] == 1 and worker.counters()["waiting_requests"] == 0


def test_answers_of_a_batch_on_the_engine_thread_are_those_of_each_alone(start: Start) -> None:
    worker = start(simulated_step_base_ms=0.2, max_step_tokens=48)
    prompts = [[n] * (10 + 9 * n) for n in range(8)]
    answers = [worker.admit(rid_of(n), ids, 20) for n, ids in enumerate(prompts)]
    for answer in answers:
        worker.wait_end(answer)
    assert [a.ids for a in answers] == [VirtualScheduler().answer(ids, 20) for ids in prompts]
    worker.wait_idle()


def test_grammars_and_control_calls_are_answered_by_the_process(start: Start) -> None:
    worker = start()
    good = worker.admit(rid_of(2), [1] * 20, 5, grammar=m.Grammar("choice", '["yes", "no"]'))
    assert worker.wait_end(good) == "stop" and bytes(good.ids) in (b"yes", b"no")
    bad = worker.admit(rid_of(1), [1] * 20, 5, grammar=m.Grammar("regex", "(a"))
    worker.wait_end(bad)
    assert (bad.failed.status, bad.failed.code) == (400, "invalid_grammar")
    worker.send(m.Control(id="1", op="internals"))
    numbers = iter(range(2, 1000))

    def flushed() -> bool:  # 409 while a step that is under way holds pages of what has ended
        number = str(next(numbers))
        worker.send(m.Control(id=number, op="flush_cache"))
        wait_for(lambda: worker.pump() or number in worker.inbox.replies, "the flush is answered")
        assert worker.inbox.replies[number].status in (200, 409)
        return worker.inbox.replies[number].status == 200

    wait_for(flushed, "it is flushed")
    wait_for(lambda: worker.pump() or "1" in worker.inbox.replies, "the other is answered")
    assert worker.inbox.replies["1"].status == 200
