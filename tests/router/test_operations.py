"""What an operator may do with requests and caches through the router: end a request by its id, flush the workers of a model."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from fleet_contract.errors import ApiError
from fleet_router.messages import Ask
from fleet_testing.fake_worker import Script, error_body, sse
from fleet_testing.router_fleet import Fleet, MakeFleet, MakeWorker
from fleet_testing.router_process import until

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


async def ask(fleet: Fleet, what: str, **body: str) -> dict[str, object]:
    said: dict[str, object] = msgspec.json.decode(await fleet.edge.answers.answer(Ask(0, what, [], msgspec.json.encode(body))))
    return said


@pytest.mark.rule("R20")
async def test_a_request_is_ended_by_its_id_wherever_it_is(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    worker = await make_worker()
    fleet = await make_fleet(worker)
    never = asyncio.Event()
    worker.scripts.extend([Script(wait=never), Script(pieces=[sse({"t": 1}, done=False)] * 2, wait_after=(1, never))])
    before = asyncio.create_task(fleet.post("/v1/chat/completions", CHAT, **{"x-request-id": "before"}))
    await until(lambda: len(worker.legs) == 1, "it has no token yet")
    during = asyncio.create_task(fleet.stream())
    await until(lambda: len(worker.legs) == 2, "the other one streams")
    prompt = {"messages": [{"role": "user", "content": "many words without a common beginning " * 120}]}
    worker.scripts.append(Script(wait=never))
    holder = asyncio.create_task(fleet.post("/v1/chat/completions", CHAT | prompt, **{"x-request-id": "holder"}))
    await until(lambda: len(worker.legs) == 3, "the worker is busy")
    waiting = asyncio.create_task(fleet.post("/v1/messages", CHAT | prompt | {"max_tokens": 1}, **{"x-request-id": "waiting"}))
    await until(lambda: sum(len(q) for _, q in fleet.brain.queues()) == 1, "the last one waits in the router")
    assert await ask(fleet, "abort", request_id="nosuch") == {"aborted": 0}
    for name in ("before", worker.legs[1].header("x-request-id") or "", "holder", "waiting"):
        assert await ask(fleet, "abort", request_id=name) == {"aborted": 1}, name
    for task, kind in ((before, "code"), (holder, "code"), (waiting, "type")):
        answer = await task
        assert answer.status_code == 409 and "/abort_request" in answer.json()["error"]["message"] and answer.json()["error"][kind]
    got, complete, _ = await during
    assert not complete and b"request_aborted" in got
    await until(lambda: len(worker.aborts) == 3, "the worker is told of those that it had")
    assert len(fleet.edge.service.dispatcher.running) == 0
    await fleet.idle()
    fleet.brain.deciding.check_integrity()


async def test_a_model_s_workers_forget_their_caches(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    workers = [await make_worker("prefill"), await make_worker("decode"), await make_worker(service="other")]
    fleet = await make_fleet(*workers)
    workers[1].scripts.append(Script(status=409, body=error_body("busy", "2 requests are here")))
    said = await ask(fleet, "flush", model="demo/tiny")
    told = said["workers"]
    assert isinstance(told, dict) and sorted(t["ok"] for t in told.values()) == [False, True]
    assert [r.path for w in workers[:2] for r in w.received] == ["/flush_cache"] * 2 and not workers[2].received
    assert "2 requests" in str(told)
    for body, status in (({"model": "nosuch"}, 404), ({}, 400)):
        with pytest.raises(ApiError) as refused:
            await ask(fleet, "flush", **body)
        assert refused.value.status == status
