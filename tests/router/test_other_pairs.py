"""Prefill/decode pairs of vLLM (NIXL, Mooncake) and SGLang: hand-over, failure of each leg at each phase, cancels, no KV left behind."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from fleet_router.edge import relay
from fleet_router.engines.rooms import START_BITS, Rooms
from fleet_testing.engines.server import Timing, answer_tokens, prompt_text, said_text
from fleet_testing.engines.sglang import FakeSglang
from fleet_testing.engines.sglang import Rooms as Meetings
from fleet_testing.engines.vllm import FakeVllm, Transfers
from fleet_testing.router_fleet import Fleet
from fleet_testing.router_process import until

Start = Callable[..., Awaitable[Any]]
Front = Callable[..., Awaitable[Fleet]]
PROTOCOLS = ("nixl", "mooncake", "sglang")
CANCELS = int(os.environ.get("RADIXFLEET_TEST_CANCELS", "120"))  # of R28; `make cancels` takes 1,000


def words(**fields: Any) -> dict[str, Any]:
    return {"model": "org/tiny", "messages": [{"role": "user", "content": "hello"}], **fields}


@dataclass
class Pairs:
    """Prefill and decode engines of one protocol, and an edge in front."""

    protocol: str
    prefills: list[Any]
    decodes: list[Any]
    fleet: Fleet

    @property
    def engines(self) -> list[Any]:
        return [*self.prefills, *self.decodes]

    async def ask(self, **fields: Any) -> httpx.Response:
        return await self.fleet.post("/v1/chat/completions", words(**fields))

    async def free(self, limit_s: float = 10.0) -> None:
        """Nothing is in flight in the router, nothing runs or is pinned in an engine that lives."""
        await self.fleet.idle(limit_s)
        alive = [e for e in self.engines if not e.dead]
        await until(lambda: all(e.running == 0 and e.pinned_blocks == 0 for e in alive), "all KV is free", limit_s)


MakePairs = Callable[..., Awaitable[Pairs]]


@pytest.fixture
def make_pairs(start_engine: Start, front: Front) -> MakePairs:
    async def make(protocol: str, prefills: int = 1, decodes: int = 1, timing: Timing | None = None, **settings: Any) -> Pairs:
        timing = timing or Timing()
        if protocol == "sglang":
            meetings = Meetings()
            p: list[Any] = [
                await start_engine(FakeSglang(mode="prefill", rooms=meetings, timing=timing, bootstrap_port=9000 + n)) for n in range(prefills)
            ]
            d: list[Any] = [await start_engine(FakeSglang(mode="decode", rooms=meetings, timing=timing)) for _ in range(decodes)]
            urls = [e.url() for e in (*p, *d)]
        else:
            transfers = Transfers()
            p = [await start_engine(FakeVllm(transfers=transfers, timing=timing)) for _ in range(prefills)]
            d = [await start_engine(FakeVllm(transfers=transfers, timing=timing)) for _ in range(decodes)]
            urls = [e.url(role="prefill", transfer=protocol, **({"bootstrap": e.bootstrap_port} if protocol == "mooncake" else {})) for e in p]
            urls += [e.url(role="decode", transfer=protocol) for e in d]
        return Pairs(protocol, p, d, await front(*urls, **settings))

    return make


def right(response: httpx.Response, body: dict[str, Any], n: int = 3) -> bool:
    said = said_text(response.content) if body.get("stream") else response.json()["choices"][0]["message"]["content"]
    return bool(said == "".join(answer_tokens(prompt_text(body), n)))


# -- the hand-over


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_pair_answers_with_the_prefill_s_kv(protocol: str, stream: bool, make_pairs: MakePairs) -> None:
    pairs = await make_pairs(protocol, timing=Timing(step_s=0.003))
    for n in range(5):
        body = words(stream=stream, max_tokens=n + 2, messages=[{"role": "user", "content": f"{n}" * 40}])
        response = await pairs.fleet.post("/v1/chat/completions", body)
        assert response.status_code == 200 and right(response, body, n + 2)
        assert b'"usage"' not in response.content or not stream
    assert [len(e.generations) for e in pairs.engines] == [5, 5]
    assert pairs.fleet.counter("cached_tokens_total") == 5 * 16  # what the prefill had, not what the decode was given
    await pairs.free()


async def test_nixl_s_legs_carry_what_its_connector_reads(make_pairs: MakePairs) -> None:
    pairs = await make_pairs("nixl")
    await pairs.ask(stream=True, max_completion_tokens=7, min_tokens=2, stream_options={"include_usage": True})
    prefill, decode = pairs.prefills[0].generations[0], pairs.decodes[0].generations[0]
    assert prefill.json == words(stream=False, max_completion_tokens=1, max_tokens=1, kv_transfer_params=prefill.json["kv_transfer_params"])
    assert decode.json["kv_transfer_params"]["remote_engine_id"] == pairs.prefills[0].engine_id
    rest = {k: v for k, v in decode.json.items() if k != "kv_transfer_params"}
    assert rest == words(stream=True, max_completion_tokens=7, min_tokens=2, stream_options={"include_usage": True})
    assert prefill.header("X-Request-Id") == decode.header("X-Request-Id")


async def test_mooncake_s_legs_share_a_transfer_id(make_pairs: MakePairs) -> None:
    pairs = await make_pairs("mooncake")
    await pairs.ask()
    given, asked = (e.generations[0].json["kv_transfer_params"] for e in (pairs.decodes[0], pairs.prefills[0]))
    assert given["transfer_id"] == asked["transfer_id"]
    assert given["remote_engine_id"] == pairs.prefills[0].engine_id
    assert given["remote_bootstrap_addr"] == f"http://127.0.0.1:{pairs.prefills[0].bootstrap_port}"


async def test_sglang_s_legs_meet_in_one_room(make_pairs: MakePairs) -> None:
    pairs = await make_pairs("sglang")
    await pairs.ask(n=1)
    bodies = [e.generations[0].json for e in pairs.engines]
    for name in ("bootstrap_host", "bootstrap_port", "bootstrap_room", "rid"):
        assert bodies[0][name] == bodies[1][name]
    assert bodies[0]["bootstrap_port"] == 9000


@pytest.mark.case("C112")
@pytest.mark.parametrize("protocol", ["nixl", "mooncake"])
async def test_several_answers_of_one_transfer_are_refused_at_once(protocol: str, make_pairs: MakePairs) -> None:
    pairs = await make_pairs(protocol)
    response = await pairs.ask(n=2)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "unsupported_by_pair")
    assert all(e.starts == 0 for e in pairs.engines)
    await pairs.free()


async def test_engines_of_two_kinds_never_pair(start_engine: Start, front: Front) -> None:
    prefill = await start_engine(FakeSglang(mode="prefill"))
    decode = await start_engine(FakeVllm())
    fleet = await front(prefill.url(service="s", revision="r"), decode.url(role="decode", service="s", revision="r"), queue_timeout=0.2)
    response = await fleet.post("/v1/chat/completions", words())
    assert response.status_code == 503
    assert (prefill.starts, decode.starts) == (0, 0)


@pytest.mark.case("C115")
async def test_a_decode_that_refuses_what_the_prefill_took_costs_no_kv(make_pairs: MakePairs) -> None:
    pairs = await make_pairs("nixl")
    response = await pairs.ask(max_tokens=100_000)
    assert response.status_code == 400 and "maximum context length" in response.json()["error"]["message"]
    await pairs.free()
    assert pairs.decodes[0].reads == 1


@pytest.mark.rule("R26")
def test_r26_a_million_rooms_are_distinct_and_belong_to_their_rank() -> None:
    rooms = Rooms()
    found = [rooms.take(dp_size=8)[0] for _ in range(1_000_000)]
    assert len(set(found)) == len(found)
    assert min(found) > 0 and max(found) < 2**63
    assert [room % 8 for room in found[:16]] == [*range(8), *range(8)]


@pytest.mark.rule("R26")
@pytest.mark.parametrize("dp_size", [1, 2, 3, 1 << 20])
@pytest.mark.parametrize("choices", [1, 2, 5, 128])
def test_r26_rooms_of_several_choices_never_overlap(dp_size: int, choices: int) -> None:
    rooms = Rooms(start=2**START_BITS)
    taken = [rooms.take(choices, dp_size=dp_size) for _ in range(1000)]
    flat = [room for several in taken for room in several]
    assert len(set(flat)) == len(flat) and max(flat) < 2**63
    assert all(several == tuple(range(several[0], several[0] + choices)) for several in taken)
    assert [several[0] % dp_size for several in taken] == [n % dp_size for n in range(1000)]


# -- failure of a leg


PHASES = {
    "nixl": [("prefill", "prefill"), ("prefill", "answered"), ("decode", "transfer"), ("decode", "first"), ("decode", "later")],
    "mooncake": [("prefill", "prefill"), ("decode", "waiting"), ("decode", "transfer"), ("decode", "first"), ("decode", "later")],
    "sglang": [
        ("prefill", "bootstrap"), ("prefill", "prefill"), ("prefill", "transfer"), ("decode", "prealloc"), ("decode", "waiting"),
        ("decode", "first"), ("decode", "later"),
    ],
}  # fmt: skip


@pytest.mark.rule("R27")
@pytest.mark.parametrize(("protocol", "leg", "phase"), [(k, *p) for k in PROTOCOLS for p in PHASES[k]])
async def test_r27_a_leg_killed_at_any_phase_costs_one_more_attempt_or_ends_the_stream(
    protocol: str, leg: str, phase: str, make_pairs: MakePairs
) -> None:
    pairs = await make_pairs(protocol, 2, 2, timing=Timing(0.01, 0.01, 0.005))
    doom = {phase}
    for engine in pairs.prefills if leg == "prefill" else pairs.decodes:
        engine.doom = doom
    body = words(stream=True, max_tokens=6)
    began = time.monotonic()
    task = asyncio.create_task(pairs.fleet.post("/v1/chat/completions", body))
    await until(lambda: not doom, "the leg is killed")
    if phase == "later":
        with pytest.raises(httpx.RemoteProtocolError):
            await task
    else:
        response = await task
        assert response.status_code == 200, response.text
        assert right(response, body, 6)
    assert time.monotonic() - began < 5.0
    requests = 1
    attempts = sum(len(e.generations) for e in pairs.prefills)
    assert attempts <= requests + 1  # one re-pair
    await pairs.fleet.idle()
    alive = [e for e in pairs.engines if not e.dead]
    await until(lambda: all(e.running == 0 for e in alive), "nothing runs on")
    if protocol != "mooncake":  # its prefill drops by its own limit what nobody fetches
        await until(lambda: all(e.pinned_blocks == 0 for e in alive), "no KV is left behind", 5.0)


@pytest.mark.rule("R27")
@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_r27_a_leg_that_stands_still_is_given_up_at_the_transfer_s_own_deadline(
    protocol: str, make_pairs: MakePairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "TRANSFER_S", 0.3)
    pairs = await make_pairs(protocol, 1, 2)
    stalls = {"first"}
    for engine in pairs.decodes:
        engine.stalls = stalls
    body = words(stream=True)
    task = asyncio.create_task(pairs.fleet.post("/v1/chat/completions", body))
    await until(lambda: not stalls, "one stands still")
    response = await task
    assert response.status_code == 200 and right(response, body)
    await pairs.free()


@pytest.mark.rule("R27")
@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_r27_the_first_error_is_the_one_reported(protocol: str, make_pairs: MakePairs) -> None:
    pairs = await make_pairs(protocol)
    pairs.prefills[0].refuse = (422, "the true cause")
    response = await pairs.ask(stream=True)
    assert response.status_code == 422 and response.json().get("error", response.json())["message"] == "the true cause"
    await pairs.free()


@pytest.mark.rule("R24")
@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_r24_a_fleet_in_which_legs_fail_starts_hardly_more_than_it_is_asked(protocol: str, make_pairs: MakePairs) -> None:
    """Engines that refuse with 503, half of the time for a while: the retry budget bounds what they are given."""
    pairs = await make_pairs(protocol, 2, 2)
    rng = random.Random(3)
    requests = 150
    for _ in range(requests):
        if rng.random() < 0.5:
            rng.choice(pairs.prefills).refuse = (503, "overloaded")
        response = await pairs.ask(stream=True)
        assert response.status_code in (200, 503)
    starts = sum(e.starts for e in pairs.prefills)
    assert starts <= 1.1 * requests
    await pairs.free()


# -- cancels


@pytest.mark.rule("R28")
@pytest.mark.parametrize(
    ("protocol", "phase"), [("nixl", "prefill"), ("nixl", "transfer"), ("mooncake", "prefill"), ("mooncake", "waiting"), ("mooncake", "transfer")]
)
async def test_r28_nothing_is_ended_between_the_hand_over_and_the_first_token(protocol: str, phase: str, make_pairs: MakePairs) -> None:
    pairs = await make_pairs(protocol, timing=Timing(0.1, 0.1, 0.05))
    task = asyncio.create_task(pairs.ask(stream=True, max_tokens=60))
    await until(lambda: any(phase in e.phases for e in pairs.engines), "it is that far")
    task.cancel()
    await until(lambda: pairs.decodes[0].reads == 1, "the KV is read all the same")
    await pairs.free(2.0)
    assert pairs.fleet.counter("client_gone_total") == 1
    assert len(pairs.decodes[0].phases) < 30  # it does not answer to the end


async def test_a_client_that_leaves_nixl_s_prefill_gets_one_token_made_for_nobody(make_pairs: MakePairs) -> None:
    pairs = await make_pairs("nixl", timing=Timing(prefill_s=0.1))
    task = asyncio.create_task(pairs.ask(stream=False, max_tokens=60))
    await until(lambda: "prefill" in pairs.prefills[0].phases, "the prefill works")
    task.cancel()
    await until(lambda: pairs.decodes[0].ends == 1, "the decode was sent")
    assert pairs.decodes[0].generations[0].json["max_tokens"] == 1
    await pairs.free()


@pytest.mark.rule("R28")
@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_r28_random_cancels_leave_no_block_pinned(protocol: str, make_pairs: MakePairs) -> None:
    pairs = await make_pairs(protocol, 2, 2, timing=Timing(0.004, 0.003, 0.002))
    rng = random.Random(protocol)

    async def one(n: int) -> None:
        task = asyncio.create_task(pairs.ask(stream=n % 2 == 0, max_tokens=8, messages=[{"role": "user", "content": f"{n}" * 30}]))
        await asyncio.wait([task], timeout=rng.uniform(0, 0.06))
        task.cancel()
        await asyncio.wait([task])

    for begin in range(0, CANCELS, 20):
        await asyncio.gather(*(one(n) for n in range(begin, min(CANCELS, begin + 20))))
    await pairs.free(20.0)
    for engine in pairs.engines:
        assert engine.starts == engine.ends
    for worker in pairs.fleet.brain.workers:
        assert worker.load.picks == {}


async def test_a_closing_router_lets_a_hand_over_end(make_pairs: MakePairs) -> None:
    pairs = await make_pairs("nixl", timing=Timing(prefill_s=0.2))
    task = asyncio.create_task(pairs.ask(stream=True))
    await until(lambda: "prefill" in pairs.prefills[0].phases, "the prefill works")
    task.cancel()
    await until(lambda: not pairs.fleet.edge.server_state.connections, "the client is gone")
    await pairs.fleet.edge.service.dispatcher.aborter.settle()
    assert pairs.decodes[0].reads == 1
