"""KV events of vLLM and SGLang, through the router's own adapters: a real router in front of scripted engines, and recorded bytes of a real vLLM."""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from fleet_testing.engines.kv_publisher import KvPublisher
from fleet_testing.engines.sglang import FakeSglang
from fleet_testing.engines.vllm import FakeVllm
from fleet_testing.router_process import RouterProcess, until_async

Start = Callable[..., Awaitable[Any]]
MakeRouter = Callable[..., Awaitable[RouterProcess]]
MakeEngine = Callable[..., Awaitable["Engine"]]
RECORDED = Path(__file__).parent / "recorded" / "vllm-0.32"
PROMPT = list(range(100, 740))  # ten blocks of the index
# Kind of engine, events as maps, frames of a replay, how it writes a hash.
STREAMS = {
    "vllm": (FakeVllm, True, 3, lambda h: h),
    "vllm-bytes": (FakeVllm, True, 3, lambda h: h.to_bytes(32, "big")),
    "old-vllm": (FakeVllm, False, 2, lambda h: h),
    "sglang": (FakeSglang, False, 2, lambda h: h - 2**63),
    "new-sglang": (FakeSglang, True, 3, lambda h: h - 2**63),
}


class Engine:
    """A scripted server with its stream of KV events; its hashes mean nothing to anybody else."""

    def __init__(self, server: Any, events: KvPublisher, hashed: Callable[[int], Any]) -> None:
        self.server = server
        self.events = events
        self._hashed = hashed
        self._known: dict[tuple[int, ...], Any] = {}

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    def stored(self, prompt: list[int], parent: list[int] | None = None) -> Any:
        """An event of the blocks that a prompt has behind another one's."""
        begin = len(parent or [])
        ends = range(begin + 16, len(prompt) + 1, 16)
        hashes = [self._known.setdefault(tuple(prompt[:end]), self._hashed(secrets.randbits(64))) for end in ends]
        return self.events.stored(hashes, prompt[begin : ends[-1]], parent=self._known[tuple(parent)] if parent else None)

    def removed(self, prompt: list[int], parent: list[int]) -> Any:
        return self.events.removed([self._known[tuple(prompt[:end])] for end in range(len(parent) + 16, len(prompt) + 1, 16)])

    async def restart(self) -> None:
        """Away and back at the same ports, with an empty cache."""
        port = self.server.port
        self.server.kill()
        self.events.restart()
        self._known.clear()
        await self.server.start(port)


@pytest.fixture(params=list(STREAMS))
async def make_engine(request: pytest.FixtureRequest, start_engine: Start) -> AsyncIterator[MakeEngine]:
    """Starts scripted engines of one kind, and ends them."""
    kind, maps, frames, hashed = STREAMS[request.param]
    streams: list[KvPublisher] = []

    async def make() -> Engine:
        streams.append(KvPublisher(maps=maps, frames=frames))
        return Engine(await start_engine(kind()), streams[-1], hashed)

    yield make
    for stream in streams:
        await stream.close()


def targets(engines: list[Engine], folder: Path, **words: Any) -> str:
    return ",".join(e.server.url(**({"events": e.events.port, "replay": e.events.replay_port, "tokenizer": folder} | words)) for e in engines)


async def explained(router: RouterProcess, prompt: list[int], **fields: Any) -> dict[str, int]:
    """Tokens that the router believes cached, by worker; empty while it has no tokenizer."""
    body = {"model": "org/tiny", "prompt": prompt, **fields}
    told = (await router.http.post(f"{router.control}/debug/route", json=body)).json()
    return {w["worker"]: w["hitTokens"] for w in told["workers"]} if told.get("tokenized") else {}


async def until_held(router: RouterProcess, engine: Engine, prompt: list[int], tokens: int) -> None:
    async def held() -> bool:
        return (await explained(router, prompt)).get(engine.name) == tokens

    await until_async(held, f"{tokens} tokens of the prompt are known at {engine.name}")


async def served_by(router: RouterProcess, prompt: list[int]) -> tuple[str, int]:
    answer = await router.http.post(f"{router.url}/v1/completions", json={"model": "org/tiny", "prompt": prompt, "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    return answer.headers["x-router-worker"], int(answer.headers["x-router-hit-tokens"])


async def streams(router: RouterProcess) -> dict[str, dict[str, Any]]:
    return {w["address"]: w["events"] for w in (await router.get("/workers"))["workers"] if w["state"] == "ready"}


async def until_live(router: RouterProcess, count: int) -> None:
    async def live() -> bool:
        return [s["trust"] for s in (await streams(router)).values()] == ["live"] * count

    await until_async(live, "the streams are believed")


async def until_subscribed(router: RouterProcess, engine: Engine) -> None:
    """A message has come by the live stream: what is published from now on, and not lost, arrives."""
    while (await streams(router))[engine.name]["lagSeconds"] is None:
        await engine.events.publish(engine.stored(secrets.SystemRandom().sample(range(2000, 3000), 64)))


@pytest.mark.rule("R5")
async def test_r5_a_choice_uses_what_foreign_events_told(make_engine: MakeEngine, make_router: MakeRouter, tokenizer_folder: Path) -> None:
    engines = [await make_engine() for _ in range(3)]
    holder = engines[1]
    await holder.events.publish(holder.stored(PROMPT[:320]), holder.stored(PROMPT, parent=PROMPT[:320]))  # before any router was there
    router = await make_router("--static", targets(engines, tokenizer_folder))
    await router.until_workers(3)
    await until_held(router, holder, PROMPT, 624)  # all but the page with the last token
    assert await explained(router, PROMPT) == {e.name: 624 if e is holder else 0 for e in engines}
    longer = [*PROMPT, 1, 2, 3]
    assert await served_by(router, longer) == (holder.name, 640)
    other = [7, *PROMPT]
    await until_subscribed(router, engines[2])
    await engines[2].events.publish(engines[2].stored(other))
    await until_held(router, engines[2], [*other, 1], 640)
    assert await served_by(router, [*other, 1]) == (engines[2].name, 640)
    await until_subscribed(router, holder)
    await holder.events.publish(holder.removed(PROMPT, PROMPT[:320]))
    await until_held(router, holder, longer, 320)
    await holder.events.publish(holder.events.cleared())
    await until_held(router, holder, longer, 0)
    await router.until_idle()


async def test_what_an_answer_in_one_piece_has_computed_is_expected_until_its_events_come(
    make_engine: MakeEngine, make_router: MakeRouter, tokenizer_folder: Path
) -> None:
    """Red before: the answer's end took the expectation back, and a client's next turn could come before the event."""
    engine = await make_engine()
    router = await make_router("--static", targets([engine], tokenizer_folder))
    await until_live(router, 1)
    await until_held(router, engine, PROMPT, 0)
    await served_by(router, PROMPT)
    assert await explained(router, [*PROMPT, 1]) == {engine.name: 640}
    await until_held(router, engine, [*PROMPT, 1], 0)  # it told nothing: so it holds nothing


@pytest.mark.rule("R4")
async def test_r4_a_gap_of_a_foreign_stream_is_replayed_and_believed_again(
    make_engine: MakeEngine, make_router: MakeRouter, tokenizer_folder: Path
) -> None:
    engine = await make_engine()
    router = await make_router("--static", targets([engine], tokenizer_folder))
    await until_live(router, 1)
    await until_subscribed(router, engine)
    asked = len(engine.events.asked)
    first = await engine.events.publish(engine.stored(PROMPT[:320]), lost=True)
    await engine.events.publish(engine.stored(PROMPT, parent=PROMPT[:320]), lost=True)
    assert await explained(router, PROMPT) == {engine.name: 0}
    await engine.events.publish(engine.stored([9, *PROMPT]))
    await until_held(router, engine, [*PROMPT, 1], 640)
    assert engine.events.asked[asked:] == [first - 1]  # one message more than is missing: it shows that it is the same life
    stream = (await streams(router))[engine.name]
    assert (stream["trust"], stream["gaps"]) == ("live", 1)


@pytest.mark.rule("R7")
async def test_r7_an_engine_that_restarts_at_its_ports_counts_from_0_and_holds_nothing(
    make_engine: MakeEngine, make_router: MakeRouter, tokenizer_folder: Path
) -> None:
    engine = await make_engine()
    await engine.events.publish(engine.stored(PROMPT))
    router = await make_router("--static", targets([engine], tokenizer_folder))
    await until_held(router, engine, [*PROMPT, 1], 640)
    await engine.restart()
    await engine.events.publish(engine.stored([5, *PROMPT]))
    await until_held(router, engine, [5, *PROMPT, 1], 640)
    assert await explained(router, [*PROMPT, 1]) == {engine.name: 0}
    await until_live(router, 1)


@pytest.mark.rule("R4")
async def test_r4_a_foreign_stream_whose_begin_is_lost_is_not_believed_until_all_is_cleared(
    make_engine: MakeEngine, make_router: MakeRouter, tokenizer_folder: Path
) -> None:
    engine = await make_engine()
    for _ in range(3):
        await engine.events.publish(engine.stored(PROMPT))
    del engine.events.kept[:2]  # the engine keeps so many messages and no more
    router = await make_router("--static", targets([engine], tokenizer_folder))

    async def is_history() -> bool:
        return (await streams(router)).get(engine.name, {}).get("trust") == "history"

    await until_async(is_history, "the stream is given up")
    assert set((await explained(router, PROMPT)).values()) <= {0}
    await served_by(router, PROMPT)
    await until_held(router, engine, [*PROMPT, 1], 640)  # by our own pick
    for _ in range(100):
        await engine.events.publish(engine.events.cleared())
        if (await streams(router))[engine.name]["trust"] == "live":
            break
    await until_live(router, 1)
    await until_held(router, engine, [*PROMPT, 1], 0)


@pytest.mark.rule("R41")
async def test_r41_recorded_events_of_a_real_vllm_promise_what_it_had_cached(
    start_engine: Start, make_router: MakeRouter, tokenizer_folder: Path
) -> None:
    told = json.loads((RECORDED / "kv-events.json").read_text())
    first, longer = told["prompts"]["first"], told["prompts"]["longer"]
    frames = [[base64.b64decode(f) for f in message] for message in told["live"]]
    replay = [[base64.b64decode(f) for f in message] for message in told["replay"]]
    assert [m[-2:] for m in replay[:-1]] == [m[-2:] for m in frames] and replay[-1] == [b"", b"", b"\xff" * 8, b""]
    vllm = await start_engine(FakeVllm(block_size=128))
    events = KvPublisher(maps=True, topic=frames[0][0])
    try:
        events.kept = [(int.from_bytes(sequence, "big"), payload) for _, sequence, payload in frames]
        events.sequence = len(frames)
        engine = Engine(vllm, events, lambda h: h)
        router = await make_router("--static", targets([engine], tokenizer_folder))
        await until_held(router, engine, longer, 384)
        cached = [u["prompt_tokens_details"]["cached_tokens"] for u in told["usage"]]
        assert cached == [0, 256, 0]  # of the first prompt, a longer one, and the first with a salt
        assert await explained(router, [*longer[:300], 1]) == {engine.name: cached[1]}
        assert await explained(router, first, cache_salt=told["salt"]) == {engine.name: 256}
        assert await explained(router, longer, cache_salt=told["salt"]) == {engine.name: 256}
        assert await explained(router, first, cache_salt="another") == {engine.name: 0}
        # A block of vLLM is found whole or not at all; the last token is computed always.
        assert await explained(router, longer[:200]) == {engine.name: 128}
        assert await explained(router, longer[:256]) == {engine.name: 128}
        assert await explained(router, [*longer[:200], *longer[:200]]) == {engine.name: 128}
    finally:
        await events.close()


@pytest.mark.rule("R2")
async def test_r2_an_adapter_s_prefixes_are_its_own_and_only_workers_with_it_serve_it(
    start_engine: Start, make_router: MakeRouter, tokenizer_folder: Path
) -> None:
    """Red before: the base model's blocks counted for the adapter, and a worker without it answered with the base model."""
    streams = [KvPublisher(maps=True) for _ in range(2)]
    try:
        servers = [await start_engine(FakeVllm()), await start_engine(FakeVllm(adapters=("poet",)))]
        plain, adapted = (Engine(server, events, lambda h: h) for server, events in zip(servers, streams, strict=True))
        base, lora = plain.stored(PROMPT), adapted.stored(PROMPT[:320])
        await plain.events.publish(base)
        await adapted.events.publish({**lora, "lora_name": "poet", "lora_id": 1, "extra_keys": [["poet"]] * len(lora["block_hashes"])})
        router = await make_router("--static", targets([plain, adapted], tokenizer_folder))
        await router.until_workers(2)
        await until_held(router, plain, [*PROMPT, 1], 640)
        assert await explained(router, [*PROMPT, 1]) == {plain.name: 640, adapted.name: 0}
        assert await explained(router, [*PROMPT, 1], model="poet") == {adapted.name: 320}
        for n in range(6):
            body = {"model": "poet", "prompt": [n, *PROMPT], "max_tokens": 1}
            answer = await router.http.post(f"{router.url}/v1/completions", json=body)
            assert (answer.status_code, answer.headers["x-router-worker"]) == (200, adapted.name)
        assert {r.json["model"] for r in adapted.server.generations} == {"poet"} and not plain.server.generations
        listed = (await router.http.get(f"{router.url}/v1/models")).json()["data"]
        assert {m["id"] for m in listed} >= {"org/tiny", "poet"}
    finally:
        for events in streams:
            await events.close()
