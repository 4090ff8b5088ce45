"""Requests that wait in the router because all workers are busy; workers that fail again and again (R18, R24, R25, R35)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from fleet_router.brain import reports
from fleet_router.decide.retry import BUDGET_FLOOR
from fleet_router.edge.remote_desk import RemoteDesk
from fleet_router.messages import Granted, NoWorker, Over, Refused, TableNews
from fleet_testing.fake_worker import DEFAULT_STREAM, FakeWorker, Script, error_body
from fleet_testing.router_fleet import Fleet, MakeFleet, MakeWorker
from fleet_testing.router_process import until

PROMPT = "many words without a common beginning " * 60  # over 2,000 tokens


def waiting(fleet: Fleet) -> float:
    return sum(v for n, _, v in reports.snapshot(fleet.brain, 0).gauges if n == "waiting")


async def hold(worker: FakeWorker, fleet: Fleet) -> tuple[asyncio.Event, asyncio.Task[httpx.Response]]:
    """One streamed request whose prompt takes the worker until the event is set."""
    gate = asyncio.Event()
    worker.scripts.append(Script(wait=gate, pieces=[DEFAULT_STREAM]))
    before = len(worker.legs)
    task = asyncio.create_task(fleet.chat(f"0 {PROMPT}", stream=True))
    await until(lambda: len(worker.legs) == before + 1, "the worker has it")
    return gate, task


@pytest.mark.rule("R35")
async def test_a_request_waits_in_the_router_and_goes_when_the_worker_is_free(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    worker = await make_worker()
    fleet = await make_fleet(worker)
    gate, first = await hold(worker, fleet)
    second = asyncio.create_task(fleet.chat(f"1 {PROMPT}"))
    await until(lambda: waiting(fleet) == 1, "it waits in the router")
    assert len(worker.legs) == 1
    report = fleet.report("demo", "tiny")
    assert sum(r.queued for r in report.revisions.values()) == 1
    gate.set()
    assert (await first).status_code == 200 and (await second).status_code == 200
    assert len(worker.legs) == 2 and waiting(fleet) == 0
    await fleet.idle()
    fleet.brain.deciding.check_integrity()


async def test_of_two_that_wait_the_one_whose_prompt_is_cached_goes_first(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    worker = await make_worker()
    fleet = await make_fleet(worker)
    await fleet.chat(f"warm {PROMPT}", stream=True)
    gate, first = await hold(worker, fleet)
    cold = asyncio.create_task(fleet.chat(f"cold {PROMPT}", stream=True))
    await until(lambda: waiting(fleet) == 1, "the cold one waits")
    warm = asyncio.create_task(fleet.chat(f"warm {PROMPT} again", stream=True))
    await until(lambda: waiting(fleet) == 2, "the warm one waits")
    gate.set()
    await asyncio.gather(first, cold, warm)
    last = [c.as_json()["workers"][0]["hitTokens"] > 1000 for c in fleet.brain.decisions][-2:]
    assert last == [True, False]


@pytest.mark.rule("R18")
async def test_what_waits_too_long_is_told_when_to_come_again(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    worker = await make_worker()
    fleet = await make_fleet(worker, busy_timeout=0.3)
    gate, first = await hold(worker, fleet)
    late = await fleet.chat(f"1 {PROMPT}")
    assert (late.status_code, late.json()["error"]["code"]) == (503, "all_busy")
    assert int(late.headers["retry-after"]) >= 2 and "--busy-timeout" in late.json()["error"]["message"]
    gate.set()
    assert (await first).status_code == 200


async def test_more_than_the_queue_holds_are_refused_at_once(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    worker = await make_worker()
    fleet = await make_fleet(worker, max_queue=2)
    gate, first = await hold(worker, fleet)
    two = [asyncio.create_task(fleet.chat(f"{n} {PROMPT}", stream=True)) for n in (1, 2)]
    await until(lambda: waiting(fleet) == 2, "two wait")
    refused = await fleet.chat(f"3 {PROMPT}")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
    gate.set()
    assert [r.status_code for r in await asyncio.gather(first, *two)] == [200] * 3


async def test_a_client_that_leaves_while_it_waits_is_never_sent_to_a_worker(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    worker = await make_worker()
    fleet = await make_fleet(worker)
    gate, first = await hold(worker, fleet)
    leaver = asyncio.create_task(fleet.chat(f"1 {PROMPT}"))
    await until(lambda: waiting(fleet) == 1, "it waits")
    leaver.cancel()
    await until(lambda: waiting(fleet) == 0, "it waits no more")
    gate.set()
    await first
    assert len(worker.legs) == 1
    await fleet.idle()
    fleet.brain.deciding.check_integrity()


async def test_requests_that_wait_go_to_a_worker_that_comes(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    workers = [await make_worker(), await make_worker()]
    workers[1].ready = False
    fleet = await make_fleet(*workers, wait=False)
    await until(lambda: fleet.ready() == 1 and fleet.edge.encoders.get(workers[0].record.model_revision) is not None, "one worker is ready")
    gate, first = await hold(workers[0], fleet)
    second = asyncio.create_task(fleet.chat(f"1 {PROMPT}"))
    await until(lambda: waiting(fleet) == 1, "it waits")
    workers[1].ready = True
    assert (await asyncio.wait_for(second, 10)).status_code == 200
    assert len(workers[1].legs) == 1
    gate.set()
    await first


async def test_requests_that_wait_when_the_last_worker_goes_wait_for_any(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    worker = await make_worker()
    fleet = await make_fleet(worker, queue_timeout=0.3)
    gate, first = await hold(worker, fleet)
    second = asyncio.create_task(fleet.chat(f"1 {PROMPT}"))
    await until(lambda: waiting(fleet) == 1, "it waits")
    worker.ready = False
    answer = await asyncio.wait_for(second, 10)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_ready_worker")
    gate.set()
    await first


@pytest.mark.parametrize("split", [False, True])
async def test_a_request_that_waits_goes_to_another_revision_that_is_ready(split: bool, make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    """A rolling update: the workers that it waits for go, others are there. It slept for its whole time, since nothing changed any more."""
    old, new = await make_worker(), await make_worker(revision="bbbbbbbb")
    new.ready = False
    fleet = await make_fleet(old, new, wait=False, split=split, queue_timeout=8.0)
    await until(lambda: fleet.ready() == 1 and fleet.edge.encoders.get(old.record.model_revision) is not None, "the old one serves")
    gate, first = await hold(old, fleet)
    second = asyncio.create_task(fleet.chat(f"1 {PROMPT}"))
    await until(lambda: waiting(fleet) == 1, "it waits for the old one")
    new.ready = True
    await until(lambda: fleet.ready() == 2, "the new one is ready")
    old.ready = False
    answer = await asyncio.wait_for(second, 6)
    gate.set()
    await first
    assert answer.status_code == 200 and len(new.legs) == 1


async def test_a_no_that_is_outdated_when_it_is_read_keeps_nobody_waiting(
    make_worker: MakeWorker, make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The brain says that nobody is ready, and a table with a worker follows in the same frame."""
    worker = await make_worker()
    fleet = await make_fleet(worker, split=True, queue_timeout=8.0)
    desk = fleet.edge.desk
    assert isinstance(desk, RemoteDesk)
    take = desk._take_answer

    def no_then_table(message: Granted | NoWorker | Refused) -> None:
        monkeypatch.setattr(desk, "_take_answer", take)
        assert isinstance(message, Granted)
        desk._send(Over(message.number))
        take(NoWorker(message.number, desk._version))
        desk._take_table(TableNews(desk._version + 1, True, None, [], []))

    monkeypatch.setattr(desk, "_take_answer", no_then_table)
    answer = await asyncio.wait_for(fleet.chat(), 6)
    assert answer.status_code == 200
    await fleet.idle()


async def test_a_short_prompt_goes_to_a_worker_that_decodes_many_without_waiting(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    """Busy means prompts that wait, not answers that run."""
    worker = await make_worker()
    fleet = await make_fleet(worker)
    gate = asyncio.Event()
    worker.default = Script(pieces=[DEFAULT_STREAM[:40] + b"\n\n", DEFAULT_STREAM], wait_after=(1, gate))
    running = [asyncio.create_task(fleet.chat(f"{n} hello", stream=True)) for n in range(12)]
    await until(lambda: len(worker.legs) == 12, "all are with the worker")
    assert waiting(fleet) == 0
    gate.set()
    await asyncio.gather(*running, return_exceptions=True)


@pytest.mark.rule("R25")
async def test_r25_a_worker_that_fails_again_and_again_gets_nothing_for_a_while(
    make_worker: Callable[..., Awaitable[FakeWorker]], make_fleet: MakeFleet
) -> None:
    bad, good = await make_worker(), await make_worker()
    fleet = await make_fleet(bad, good)
    bad.default = Script(status=500, body=error_body("internal", "broken"))
    for n in range(60):
        await fleet.chat(f"{n} {PROMPT}")
    assert fleet.counter("breakers_opened_total") >= 1
    state = {w["address"]: w["breaker"] for w in fleet.told()}
    assert state[f"127.0.0.1:{good.port}"] == "closed"
    seen = len(bad.legs)
    assert seen <= 8, "it got requests although it fails"
    await fleet.idle()


@pytest.mark.rule("R25")
async def test_r25_wrong_requests_and_busy_answers_open_no_breaker(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    worker = await make_worker()
    fleet = await make_fleet(worker)
    for status, code in ((400, "bad"), (429, "slow_down"), (503, "busy")) * 4:
        worker.default = Script(status=status, body=error_body(code))
        await fleet.chat("hello")
    assert fleet.counter("breakers_opened_total") == 0
    assert [w["breaker"] for w in fleet.told()] == ["closed"]


async def test_a_worker_alone_is_used_however_often_it_failed(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    worker = await make_worker()
    fleet = await make_fleet(worker)
    worker.default = Script(status=500, body=error_body("internal"))
    for _ in range(5):
        assert (await fleet.chat("hello")).status_code == 500
    worker.default = Script()
    assert (await fleet.chat("hello")).status_code == 200


@pytest.mark.rule("R24")
async def test_r24_when_all_workers_fail_retries_stay_within_their_budget(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    workers = [await make_worker() for _ in range(3)]
    fleet = await make_fleet(*workers)
    for worker in workers:
        worker.default = Script(status=503, body=error_body("overloaded"))
    requests = 150

    async def one(n: int) -> Any:
        return await fleet.chat(f"{n} hello")

    for start in range(0, requests, 25):
        await asyncio.gather(*(one(n) for n in range(start, start + 25)))
    starts = sum(len(w.legs) for w in workers)
    assert requests < starts <= requests * 1.1 + 2 * BUDGET_FLOOR
    assert fleet.counter("retries_refused_total") > 0
    await fleet.idle()


# -- requests without an answer to decode


async def embed(fleet: Fleet, text: str) -> httpx.Response:
    return await fleet.post("/v1/embeddings", {"model": "tiny", "input": text})


@pytest.mark.rule("R35")
@pytest.mark.rule("R12")
@pytest.mark.parametrize("roles", [("unified",), ("prefill", "decode")])
async def test_embeddings_wait_in_the_same_queue_as_generations(roles: tuple[str, ...], make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    worker, *partners = [await make_worker(role) for role in roles]
    fleet = await make_fleet(worker, *partners)
    gate = asyncio.Event()
    worker.scripts.append(Script(wait=gate, status=200, body=b"{}"))
    first = asyncio.create_task(embed(fleet, f"0 {PROMPT}"))
    await until(lambda: len(worker.legs) == 1, "the worker has it")
    others = [asyncio.create_task(embed(fleet, f"1 {PROMPT}")), asyncio.create_task(fleet.chat(f"2 {PROMPT}"))]
    await until(lambda: waiting(fleet) == 2, "both wait in the router")
    assert len(worker.legs) == 1
    assert len({id(queue) for _, queue in fleet.brain.queues() if len(queue)}) == 1
    fleet.brain.deciding.check_integrity()
    gate.set()
    assert [(await task).status_code for task in (first, *others)] == [200] * 3
    assert all(not p.legs or p.legs[0].path == "/v1/chat/completions" for p in partners)
    await fleet.idle()


@pytest.mark.rule("R18")
async def test_embeddings_are_refused_when_the_queue_is_full_or_their_time_is_over(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    worker = await make_worker()
    fleet = await make_fleet(worker, max_queue=1, busy_timeout=0.5)
    gate, first = await hold(worker, fleet)
    late = asyncio.create_task(embed(fleet, f"1 {PROMPT}"))
    await until(lambda: waiting(fleet) == 1, "it waits")
    full = await embed(fleet, f"2 {PROMPT}")
    assert full.status_code in (429, 503) and "queue" in full.json()["error"]["code"]
    told = await late
    assert (told.status_code, told.json()["error"]["code"]) == (503, "all_busy") and int(told.headers["retry-after"]) >= 1
    gate.set()
    assert (await first).status_code == 200


async def test_what_computes_nothing_does_not_wait(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    worker = await make_worker()
    fleet = await make_fleet(worker)
    gate, first = await hold(worker, fleet)
    assert (await fleet.post("/tokenize", {"model": "tiny", "prompt": PROMPT})).status_code == 200
    gate.set()
    assert (await first).status_code == 200
