"""Two real scheduler processes, joined by TCP: the whole hand-over, and what happens when one of them is killed, frozen or replaced."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fleet_runtime import messages as m
from fleet_testing.scheduler_harness import Answer, SchedulerProcess, VirtualScheduler, flags_of, rid_of, wait_for

pytestmark = pytest.mark.processes

Start = Callable[..., SchedulerProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[SchedulerProcess] = []

    def make(role: str, **fields: object) -> SchedulerProcess:
        worker = SchedulerProcess(
            tmp_path / str(len(started)),
            flags_of(**{"pages": 512, "role": role, **fields}),  # type: ignore[arg-type]
            pod_uid=f"{role}-{len(started)}",
        )
        started.append(worker)
        return worker

    yield make
    for worker in started:
        worker.stop()


@pytest.fixture
def pair(start: Start) -> tuple[SchedulerProcess, SchedulerProcess]:
    prefill, decode = start("prefill"), start("decode")
    return prefill.start(), decode.start()


def prompt(n: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(256), k=n)


def ask(prefill: SchedulerProcess, decode: SchedulerProcess, n: int, ids: list[int], max_new: int = 8) -> tuple[Answer, Answer]:
    first = prefill.admit(rid_of(n), ids, max_new, leg="prefill", room=n)
    address = f"127.0.0.1:{prefill.info.bootstrap_port}"
    return first, decode.admit(rid_of(n), ids, max_new, leg="decode", room=n, bootstrap=address, prefill_incarnation=prefill.incarnation)


def test_many_rooms_at_once_give_the_tokens_of_a_unified_worker(pair: tuple[SchedulerProcess, SchedulerProcess]) -> None:
    prefill, decode = pair
    asked = {n: prompt(40 + 7 * n, seed=n) for n in range(1, 33)}
    answers = {n: ask(prefill, decode, n, ids, 16) for n, ids in asked.items()}
    unified = VirtualScheduler(flags_of(512))
    for n, (first, second) in answers.items():
        assert isinstance(prefill.wait_end(first), m.HandedOver)
        assert decode.wait_end(second) == "length"
        assert second.ids == unified.answer(asked[n], 16)
    prefill.wait_idle()
    decode.wait_idle()
    assert decode.counters()["prefilled_tokens_total"] == 0
    assert decode.counters()["transfer_rooms_total"] == prefill.counters()["transfer_rooms_total"] == 32
    assert decode.counters()["transfer_bytes_total"] == prefill.counters()["transfer_bytes_total"] > 0


def _held_pair(start: Start) -> tuple[SchedulerProcess, SchedulerProcess, Answer, Answer]:
    """A pair whose room 1 hangs in the middle: decode has promised its pages, prefill sends none."""
    prefill, decode = start("prefill", transfer_hold=True, transfer_timeout=60), start("decode")
    prefill.start()
    decode.start()
    first, second = ask(prefill, decode, 1, prompt(100))
    wait_for(lambda: decode.counters()["pages_request"] > 0, "decode has promised its pages")
    wait_for(lambda: prefill.counters()["prefilled_tokens_total"] == 100, "prefill knows of them, and has computed its own")
    return prefill, decode, first, second


@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_kill_9_of_one_side_fails_the_rooms_of_the_other_at_once_and_frees_them(start: Start, victim: str) -> None:
    prefill, decode, first, second = _held_pair(start)
    dead, alive, answer = (prefill, decode, second) if victim == "prefill" else (decode, prefill, first)
    dead.signal(signal.SIGKILL)
    alive.wait_end(answer)
    assert (answer.failed.status, answer.failed.code) == (503, "transfer_failed")
    assert "pings" not in answer.failed.message, "the closed connection is noticed, before any ping is missed"
    alive.wait_idle(5)


@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_a_frozen_side_is_noticed_by_its_missing_pings_and_cannot_write_after_it_thaws(start: Start, victim: str) -> None:
    prefill, decode, first, second = _held_pair(start)
    frozen, alive, answer = (prefill, decode, second) if victim == "prefill" else (decode, prefill, first)
    frozen.signal(signal.SIGSTOP)
    try:
        alive.wait_end(answer, 8)
        assert answer.failed.code in ("transfer_failed", "peer_failed")
        alive.wait_idle(8)
    finally:
        frozen.signal(signal.SIGCONT)
    thawed, other = (first, prefill) if victim == "prefill" else (second, decode)
    other.wait_end(thawed, 8)
    frozen.wait_idle(8)
    plain = alive.admit(rid_of(50), prompt(30), 5)
    assert alive.wait_end(plain) == "length"


def test_a_restarted_prefill_worker_serves_the_next_room_and_old_addresses_are_stale(start: Start) -> None:
    prefill, decode, _, second = _held_pair(start)
    old_port = {"bootstrap_port": prefill.info.bootstrap_port, "transfer_port": prefill.info.transfer_port}
    prefill.signal(signal.SIGKILL)
    prefill.process.wait(10)
    decode.wait_end(second)
    new = start("prefill", **old_port).start()
    stale = decode.admit(
        rid_of(2), prompt(20), leg="decode", room=2, bootstrap=f"127.0.0.1:{new.info.bootstrap_port}", prefill_incarnation=prefill.incarnation
    )
    decode.wait_end(stale)
    assert (stale.failed.status, stale.failed.code) == (409, "stale_worker")
    _, answer = ask(new, decode, 3, prompt(60), 6)
    assert decode.wait_end(answer) == "length"
    decode.wait_idle()


def test_an_unresponsive_neighbour_does_not_stop_the_scheduler(start: Start) -> None:
    """Nobody reads the detokenizer's socket: messages queue up, steps go on."""
    worker = start("unified").start()
    for n in range(1, 20):
        worker.admit(rid_of(n), prompt(30, seed=n), 200)
    wait_for(lambda: worker.counters()["finished_requests_total"] == 19, "all ran to their end unread", 30)
    for n in range(1, 20):
        assert worker.wait_end(worker.inbox.of(rid_of(n))) == "length"


def test_sigterm_of_a_worker_with_open_rooms_closes_them_for_its_peer(start: Start) -> None:
    prefill, decode, _, second = _held_pair(start)
    prefill.signal(signal.SIGTERM)
    decode.wait_end(second, 5)
    assert second.failed.code == "transfer_failed"
    assert prefill.process.wait(5) == 0
    decode.wait_idle()
