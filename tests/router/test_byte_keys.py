"""Prompts that nobody tokenises here: keys of their bytes, lengths that are learned, sessions that go back to their worker."""

from __future__ import annotations

import asyncio
import io
import json
import zipfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_contract.prefix import BLOCK_BYTES, bytes_chain, bytes_namespace_hash, namespace_hash
from fleet_router.api.body import TOKENS_PER_BYTE, Parsed, Prompt, parse_body
from fleet_router.api.canonical import MEDIA_BYTES, canonical
from fleet_router.api.dialects import ANTHROPIC, OPENAI, RESPONSES
from fleet_router.api.paths import CHAT, COMPLETIONS, PATHS
from fleet_router.decide.fleet import Fleet as Deciding
from fleet_router.decide.index import PrefixIndex
from fleet_router.decide.keys import STRIDE
from fleet_router.decide.lives import GPU
from fleet_router.decide.load import Speed
from fleet_router.decide.queue import Waiting
from fleet_router.decide.rule import Ask, Member, Pool
from fleet_router.edge.token_rates import MAX_TOKENS_PER_BYTE, TokenRates
from fleet_testing.engines.kv_publisher import KvPublisher
from fleet_testing.engines.server import PrefixCache
from fleet_testing.engines.sglang import FakeSglang
from fleet_testing.engines.vllm import FakeVllm
from fleet_testing.fake_worker import tiny_tokenizer_zip
from fleet_testing.prompts import read_prompt
from fleet_testing.router_fleet import Fleet, MakeFleet, MakeWorker
from fleet_testing.router_process import until

REV = "0123456789abcdef"
KINDS: list[Any] = [FakeVllm, FakeSglang]
Start = Callable[..., Awaitable[Any]]
Front = Callable[..., Awaitable[Fleet]]
Json = dict[str, Any]

TEXTS = st.text(max_size=400) | st.text('ab \n"\\/é😀', max_size=40).map(lambda t: t * 20)


def part(kind: str, **fields: Any) -> Json:
    return {"type": kind, **fields}


PARTS = (
    st.builds(lambda t: part("text", text=t), TEXTS)
    | st.builds(lambda u: part("image_url", image_url={"url": f"data:image/png;base64,{u}"}), st.text("ABCD", min_size=1, max_size=900))
    | st.builds(lambda i, t: part("tool_result", tool_use_id=i, content=[part("text", text=t)]), st.text("01", min_size=1, max_size=4), TEXTS)
)
CALLS = st.builds(lambda a: [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": a}}], TEXTS)
MESSAGES = (
    st.builds(lambda r, t: {"role": r, "content": t}, st.sampled_from(["system", "user", "assistant"]), TEXTS)
    | st.builds(lambda p: {"role": "user", "content": p}, st.lists(PARTS, min_size=1, max_size=3))
    | st.builds(lambda c: {"role": "assistant", "content": None, "tool_calls": c}, CALLS)
    | st.builds(lambda t: {"role": "tool", "tool_call_id": "c1", "content": t}, TEXTS)
)
CHATS = st.lists(MESSAGES, min_size=1, max_size=6)
TOOLS = st.builds(lambda d: [{"type": "function", "function": {"name": "f", "description": d, "parameters": {"type": "object"}}}], TEXTS)


def parsed(path: str = CHAT.path, **fields: Any) -> Parsed:
    return parse_body(PATHS[path], json.dumps({"model": "m", **fields}).encode())


def data_of(path: str = CHAT.path, **fields: Any) -> bytes:
    """The canonical bytes of a body."""
    found = parsed(path, **fields)
    assert found.route.layout is not None
    made = canonical(found.route.layout, found.fields)
    assert made is not None
    return made.data


async def prompt_of(path: str = CHAT.path, revision: str = REV, **fields: Any) -> Prompt:
    """Of a model without a tokenizer."""
    return await read_prompt(parsed(path, **fields), None, revision)


def shared(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """How many first keys are equal; no key behind them may be in both."""
    n = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert not set(a[n:]) & set(b[n:])
    return n


# -- bytes and keys


@given(chat=CHATS, more=st.lists(MESSAGES, min_size=1, max_size=3), tools=TOOLS | st.none())
@settings(deadline=None)
def test_the_bytes_of_a_chat_begin_those_of_its_next_turn(chat: list[Json], more: list[Json], tools: Any) -> None:
    first, second = (data_of(messages=m, tools=tools, temperature=t) for m, t in ((chat, 0), (chat + more, 1)))
    assert second.startswith(first) and len(second) > len(first)
    assert bytes_chain(1, second)[: len(first) // BLOCK_BYTES] == bytes_chain(1, first)


@given(a=CHATS, b=CHATS)
@settings(deadline=None)
def test_chats_that_differ_have_other_bytes(a: list[Json], b: list[Json]) -> None:
    def told(chat: list[Json]) -> list[Json]:
        """A list that is one text is that text; what says nothing is not there."""
        out = []
        for message in chat:
            content = message["content"]
            if isinstance(content, list) and len(content) == 1 and content[0]["type"] == "text":
                content = content[0]["text"]
            out.append({**message, "content": content or ""})
        return out

    assert (data_of(messages=a) == data_of(messages=b)) == (told(a) == told(b))


@pytest.mark.rule("R1")
@given(a=st.binary(max_size=2000), b=st.binary(max_size=2000), common=st.binary(max_size=2000))
@settings(deadline=None)
def test_r1_two_prompts_share_the_blocks_before_their_difference_and_none_behind(a: bytes, b: bytes, common: bytes) -> None:
    one, other = common + a, common + b
    same = next((n for n, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), min(len(one), len(other)))
    assert shared(bytes_chain(7, one), bytes_chain(7, other)) == same // BLOCK_BYTES


@pytest.mark.rule("R1")
async def test_r1_tools_images_and_any_message_are_in_the_keys() -> None:
    def chat(*, schema: str = "a", image: str = "AAAA", second: str = "x") -> Json:
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "title": schema}}}]
        picture = part("image_url", image_url={"url": f"data:image/png;base64,{image * 500}"})
        messages = [
            {"role": "user", "content": [part("text", text="look " * 200), picture]},
            {"role": "user", "content": second + " and so on" * 100},
            {"role": "user", "content": "the end " * 100},
        ]
        return {"tools": tools, "messages": messages}

    plain = (await prompt_of(**chat())).keys
    tools = len(data_of(**chat())) - len(data_of(messages=chat()["messages"]))
    before_image = (tools + len(data_of(messages=[{"role": "user", "content": "look " * 200}]))) // BLOCK_BYTES
    assert shared(plain, (await prompt_of(**chat(schema="b"))).keys) == 0
    assert shared(plain, (await prompt_of(**chat(image="AAAB"))).keys) == before_image
    assert shared(plain, (await prompt_of(**chat(second="y"))).keys) == before_image + MEDIA_BYTES // BLOCK_BYTES
    assert plain == (await prompt_of(**chat())).keys


@pytest.mark.rule("R2")
async def test_r2_revisions_and_salts_share_no_key_and_no_key_of_bytes_is_one_of_tokens() -> None:
    body = {"messages": [{"role": "user", "content": "word " * 400}]}
    prompts = [await prompt_of(**body), await prompt_of(**body, cache_salt="a"), await prompt_of(revision="f" * 16, **body)]
    assert all(len(p.keys) == 7 for p in prompts) and len({key for p in prompts for key in p.keys}) == 21
    assert bytes_namespace_hash(REV) != namespace_hash(REV) and bytes_namespace_hash(REV, salt="s") != bytes_namespace_hash(REV, lora="s")


@pytest.mark.parametrize("loads", [{}, {"ensure_ascii": False}, {"indent": 2}, {"separators": (",", ":")}])
def test_how_a_client_writes_its_json_changes_nothing(loads: Json) -> None:
    said = 'Grüße 😀 "quoted" \\ / \n\t\b\x7f\x01'
    call = {"id": "1", "function": {"name": "f", "arguments": '{"é": 1.5}'}}
    chat = [{"role": "system", "content": said}, {"role": "user", "content": [part("text", text=said), part("image_url", image_url={"url": said})]},
            {"role": "assistant", "content": None, "tool_calls": [call]}]  # fmt: skip
    body = json.dumps({"model": "m", "messages": chat}, **loads).replace("\\/", "/")
    found = canonical(PATHS[CHAT.path].layout, parse_body(CHAT, body.encode()).fields)  # type: ignore[arg-type]
    assert found is not None and found.data == data_of(messages=chat)


def test_marks_that_move_and_fields_that_say_nothing_are_not_in_the_bytes() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    result = {"type": "tool_result", "tool_use_id": "1"}

    def turns(*, marked: bool) -> list[Json]:
        more = mark if marked else {}
        empty: Json = {"refusal": None, "annotations": []} if marked else {}
        asked: Any = [part("text", text="hello", **more)] if marked else "hello"
        return [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": [part("tool_use", id="1", name="f", input={"a": 1}, **more)], **empty},
            {"role": "user", "content": [{**result, "content": [part("text", text="5", **more)] if marked else "5", **more}]},
        ]

    system = [part("text", text="s", **mark)]
    plain = data_of("/v1/messages", system="s", messages=turns(marked=False))
    assert plain == data_of("/v1/messages", system=system, messages=turns(marked=True))


async def test_all_kinds_of_body_have_keys_and_what_has_no_prompt_has_none() -> None:
    text = "word " * 110
    chat = [{"role": "user", "content": text}]
    for path, fields in {
        CHAT.path: {"messages": chat}, "/v1/messages": {"messages": chat}, "/api/chat": {"messages": chat}, "/api/generate": {"prompt": text},
        "/v1/responses": {"input": text}, COMPLETIONS.path: {"prompt": text}, "/v1/embeddings": {"input": [text]}, "/api/embed": {"input": text},
    }.items():  # fmt: skip
        prompt = await prompt_of(path, **fields)
        assert (len(prompt.keys), prompt.made_of, prompt.ids) == (2, "bytes", None), path
        assert prompt.key_tokens == BLOCK_BYTES * TOKENS_PER_BYTE and 135 < prompt.tokens < 145
    alike = ((CHAT.path, {"messages": chat}), ("/v1/responses", {"input": text}), ("/api/generate", {"prompt": text}))
    same = [await prompt_of(path, **fields) for path, fields in alike]
    assert len({p.keys for p in same}) == 1, "one chat is one chat, whatever its API"
    several = [text, text]
    for path, fields in (
        ("/v1/rerank", {"query": text}),
        (COMPLETIONS.path, {"prompt": several}),
        (COMPLETIONS.path, {"prompt": 5}),
        (CHAT.path, {}),
    ):
        assert (await prompt_of(path, **fields)).made_of == "none", path
    assert (await prompt_of(COMPLETIONS.path, prompt=["a", "b"], n=2)).choices == 4


async def test_ids_need_no_tokenizer_and_odd_texts_have_keys_too() -> None:
    ids = await prompt_of(COMPLETIONS.path, prompt=list(range(200)))
    assert (ids.made_of, ids.tokens, len(ids.keys)) == ("tokens", 200, 3) and ids.ids is not None
    for content in ("\ud83d\ude00 " * 100, [{"type": ["odd"], "text": 5, "n": 10**400, "x": "y" * 300}], "x" * (300 << 10)):
        prompt = await prompt_of(messages=[{"role": "user", "content": content}])
        assert prompt.made_of == "bytes", content
    deep = b'{"model":"m","messages":[{"role":"user","content":' + b"[" * 500 + b"]" * 500 + b"}]}"
    assert (await read_prompt(parse_body(CHAT, deep), None, REV)).tokens > 0


def test_a_model_s_tokens_per_byte_are_learned_and_bounded() -> None:
    rates = TokenRates()
    assert rates.get("m") == TOKENS_PER_BYTE
    for _ in range(100):
        rates.learn("m", 4000, 1600)
    assert rates.get("m") == pytest.approx(0.4, rel=0.05) and rates.get("other") == TOKENS_PER_BYTE
    for _ in range(1000):
        rates.learn("m", 4000, 1000)
    assert rates.get("m") == pytest.approx(0.25, rel=0.05), "what is long ago is forgotten"
    rates.learn("m", 100, 10**12)
    rates.learn("m", 0, 5)
    assert rates.get("m") < MAX_TOKENS_PER_BYTE


def test_a_prompt_s_tokens_are_read_in_the_words_of_each_api() -> None:
    assert OPENAI.prompt_tokens(b'{"usage": {"prompt_tokens": 12, "prompt_tokens_details": {"cached_tokens": 4}}}') == 12
    assert ANTHROPIC.prompt_tokens(b'{"usage":{"input_tokens":12,"cache_read_input_tokens":30,"output_tokens":1}}') == 42
    assert RESPONSES.prompt_tokens(b'{"usage":{"input_tokens":12,"input_tokens_details":{"cached_tokens":4}}}') == 12
    assert OPENAI.prompt_tokens(b'{"choices":[]}') is None


# -- the index


def test_keys_of_bytes_are_judged_by_history_whatever_the_events_say() -> None:
    index = PrefixIndex()
    index.add_slot(0, 6400, by_history=False)
    index.add_slot(1, 6400, by_history=True)
    keys = bytes_chain(1, b"x" * 256 * 10)
    for slot in (0, 1):
        assert index.expect(slot, keys, 0, 80.0) is None
    assert index.hits(keys, 2, 80.0)[0].tolist() == [800.0, 800.0]
    assert (index.held_tokens(0), index.held_tokens(1)) == (0, 800), "events tell all that is held"
    index.store(0, GPU, 0, 1, 99, STRIDE)
    assert index.hits((99,), 2)[0].tolist() == [64.0, 0.0]
    index.begin_snapshot(0)
    index.commit_snapshot(0)  # its stream was repaired
    index.set_by_history(0, by_history=True)
    index.set_doubted(0, doubted=True)
    assert index.hits(keys, 2, 80.0)[0].tolist() == [800.0, 800.0], "what events say and do not say changes nothing"
    index.check_integrity()
    index.clear_written(0)
    assert index.hits(keys, 2, 80.0)[0].tolist() == [0.0, 800.0], "a cache that was cleared is empty"
    index.remove_slot(1)
    assert index.hits(keys, 2, 80.0)[0].tolist() == [0.0, 0.0]
    while index.sweep():
        pass
    index.check_integrity()
    assert len(index) == 0


@pytest.mark.rule("R8")
def test_r8_keys_of_bytes_are_bounded_by_the_worker_s_tokens_and_by_what_it_says_it_had() -> None:
    index = PrefixIndex()
    index.add_slot(0, 6400, by_history=False)
    prompts = [bytes_chain(n, b"y" * 256 * 10) for n in range(30)]

    def held(key_tokens: float) -> int:
        index.check_integrity()
        return int(sum(index.hits(p, 1, key_tokens)[0][0] for p in prompts))

    for prompt in prompts:
        index.expect(0, prompt, 0, 64.0)
    assert held(64.0) == 6400
    index.expect(0, prompts[-1], 0, 128.0)
    assert held(128.0) == 6400, "a block stands for more tokens than was thought"
    for _ in range(5):
        index.feedback(0, 1280, 1100, 128.0)  # within what an estimate may be off
    assert held(128.0) == 6400
    for _ in range(5):
        index.feedback(0, 1280, 0, 128.0)
    assert held(128.0) < 4000


# -- workers without a tokenizer


def said(answer: Any) -> int:
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


async def session(fleet: Fleet, n: int, turn: int, history: dict[int, list[Json]], **fields: Any) -> Any:
    """The next turn of one of several chats."""
    chat = history.setdefault(n, [{"role": "system", "content": f"You are of help to {n}. " * 30}])
    chat.append({"role": "user", "content": f"session {n} turn {turn}: " + f"question {n * 31 + turn} " * 60})
    answer = await fleet.post("/v1/chat/completions", {"model": "org/tiny", "messages": chat, **fields})
    assert answer.status_code == 200
    chat.append(answer.json()["choices"][0]["message"])
    return answer


@pytest.mark.rule("R42")
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("kind", KINDS)
async def test_r42_sessions_go_back_to_their_worker_without_a_tokenizer(kind: Any, split: bool, start_engine: Start, front: Front) -> None:
    engines = [await start_engine(kind(cache=PrefixCache())) for _ in range(3)]
    fleet = await front(*(e.url() for e in engines), split=split)
    fleet.keep_speeds()
    history: dict[int, list[Json]] = {}
    workers: dict[int, set[str]] = {}
    told: list[tuple[int, int]] = []
    for turn in range(5):
        for n in range(9):
            answer = await session(fleet, n, turn, history)
            workers.setdefault(n, set()).add(answer.headers["x-router-worker"])
            assert answer.headers["x-router-keys"] == "bytes"
            if turn == 4:
                told.append((int(answer.headers["x-router-hit-tokens"]), said(answer)))
    assert all(len(went) == 1 for went in workers.values()), "each came back"
    assert len({worker for went in workers.values() for worker in went}) == 3, "and they are spread"
    for predicted, actual in told:
        assert 0.85 * actual < predicted < 1.15 * actual, "in the worker's own tokens"
    await until(lambda: fleet.counter("cached_tokens_total") > 0, "the counts have arrived")
    predicted, actual = fleet.counter("predicted_cached_tokens_total"), fleet.counter("cached_tokens_total")
    assert 0.6 * actual < predicted < 1.1 * actual
    body = json.dumps({"model": "org/tiny", "messages": history[0]}).encode()
    explained = await fleet.edge.service.explain(body)
    assert (explained["keys"], explained["tokenized"]) == ("bytes", False)
    assert max(explained["workers"], key=lambda w: w["hitTokens"])["chosen"]
    await fleet.idle()


@pytest.mark.parametrize("maps", [False, True])
async def test_events_of_tokens_do_not_disturb_what_is_known_in_bytes(maps: bool, start_engine: Start, front: Front) -> None:
    engines, publishers = [], []
    for _ in range(2):
        engines.append(await start_engine(FakeVllm(cache=PrefixCache())))
        publishers.append(KvPublisher(maps=maps))
    fleet = await front(*(e.url(events=p.port, replay=p.replay_port) for e, p in zip(engines, publishers, strict=True)))
    fleet.keep_speeds()
    try:
        history: dict[int, list[Json]] = {}
        went: dict[int, set[str]] = {}
        for turn in range(3):
            for n in range(4):
                went.setdefault(n, set()).add((await session(fleet, n, turn, history)).headers["x-router-worker"])
            for p in publishers:
                await p.publish(p.stored([turn + 1], list(range(16)), parent=turn or None))
        assert all(len(w) == 1 for w in went.values())
        trusts = [w["events"]["trust"] for w in fleet.told()]
        assert trusts == ["live", "live"], "the events are read all the same: prompts of ids, and what its cache holds"
        first = next(w["worker"] for w in (await fleet.edge.service.explain(_chat(history[0])))["workers"] if w["hitTokens"])
        flushed = next(p for e, p in zip(engines, publishers, strict=True) if first.endswith(str(e.port)))
        await flushed.publish(flushed.cleared())

        async def hit() -> bool:
            return any(w["hitTokens"] for w in (await fleet.edge.service.explain(_chat(history[0])))["workers"] if w["worker"] == first)

        for _ in range(200):
            if not await hit():
                break
            await fleet.edge.pool.loop.run_in_executor(None, lambda: None)
        assert not await hit(), "a flush empties that too"
    finally:
        for p in publishers:
            await p.close()


def _chat(messages: list[Json]) -> bytes:
    return json.dumps({"model": "org/tiny", "messages": messages}).encode()


async def test_a_hot_prefix_is_copied_when_its_worker_is_busy(start_engine: Start, front: Front) -> None:
    engines = [await start_engine(FakeVllm(cache=PrefixCache())) for _ in range(3)]
    for e in engines:
        e.timing.prefill_s = 0.3
    fleet = await front(*(e.url() for e in engines))
    hot = "the same long beginning " * 400

    async def one(n: int) -> str:
        asked = {"role": "user", "content": f"{hot} {n} " + "tail " * 300}
        answer = await fleet.post("/v1/chat/completions", {"model": "org/tiny", "messages": [asked]})
        return str(answer.headers["x-router-worker"])

    assert len(set(await asyncio.gather(*(one(n) for n in range(24))))) == 3


async def test_a_prompt_s_length_comes_from_what_the_worker_counts(start_engine: Start, front: Front) -> None:
    engine = await start_engine(FakeVllm())
    fleet = await front(engine.url())
    messages = [{"role": "user", "content": "one two three " * 100}]
    body = json.dumps({"model": "org/tiny", "messages": messages}).encode()
    before = (await fleet.edge.service.explain(body))["promptTokens"]
    for _ in range(40):
        await fleet.post("/v1/chat/completions", body)
    after = (await fleet.edge.service.explain(body))["promptTokens"]
    true = len(json.dumps(messages))  # one token a character
    assert before < 0.3 * true and 0.7 * true < after < 1.1 * true


async def test_without_a_brain_an_edge_keeps_sessions_together_by_bytes_too(start_engine: Start, front: Front) -> None:
    engines = [await start_engine(FakeVllm()) for _ in range(2)]
    fleet = await front(*(e.url() for e in engines), split=True)
    await until(lambda: fleet.edge.desk.synced, "the edge has a table")
    fleet.edge.server.close()
    await fleet.edge._link.close()
    await until(lambda: bool(fleet.edge.desk.degraded), "the brain is gone")
    history: dict[int, list[Json]] = {}
    went: dict[int, set[str]] = {}
    for turn in range(3):
        for n in range(8):
            answer = await session(fleet, n, turn, history)
            went.setdefault(n, set()).add(answer.headers["x-router-worker"])
            assert answer.headers["x-router-keys"] == "bytes"
    assert all(len(w) == 1 for w in went.values())
    assert fleet.counter("safe_picks_total") == 24


async def test_prompts_that_a_tokenizer_cannot_read_have_keys_of_bytes_beside_the_others(tmp_path: Path, start_engine: Start, front: Front) -> None:
    with zipfile.ZipFile(io.BytesIO(tiny_tokenizer_zip())) as files:
        files.extractall(tmp_path)
    engines = [await start_engine(FakeVllm(cache=PrefixCache())) for _ in range(2)]
    fleet = await front(*(e.url(tokenizer=tmp_path) for e in engines))
    fleet.keep_speeds()
    image = part("image_url", image_url={"url": "data:image/png;base64," + "ABCD" * 200})
    for content, made_of in (("plain " * 200, "tokens"), ([part("text", text="look at this " * 100), image], "bytes")):
        answers = [
            await fleet.post("/v1/chat/completions", {"model": "org/tiny", "messages": [{"role": "user", "content": content}]}) for _ in range(4)
        ]
        assert [a.headers["x-router-keys"] for a in answers] == [made_of] * 4
        assert len({a.headers["x-router-worker"] for a in answers}) == 1
        assert [int(a.headers["x-router-hit-tokens"]) > 0 for a in answers] == [False, True, True, True]


@pytest.mark.rule("R35")
def test_r35_requests_that_wait_are_known_by_their_bytes() -> None:
    fleet = Deciding(lambda n: 0)
    for slot in range(3):
        fleet.add_worker(slot, Speed(1000.0, 0.01, 0.0, 0.0, 100_000), by_history=False, learn=False)
    members = tuple(Member(slot, f"w{slot}", "unified") for slot in range(3))
    fleet.set_pools({"p": Pool(members)})
    keys, ask = bytes_chain(1, b"z" * 256 * 40), Ask(2000, 10, 48.0)
    first = fleet.decide(Pool(members[1:2]), ask, keys, 0.0)
    assert first is not None
    fleet.release(fleet.take(first, keys, 0.0))
    busy = [fleet.load.slots[slot].pick(3000, 3000, 3000, 0.0) for slot in range(3)]
    assert fleet.offer("p", Waiting(ask, keys, 0.0, 60.0), 0.0) is None
    for slot, pick in enumerate(busy):
        fleet.load.slots[slot].release(pick)
    found = fleet.pump("p", 1.0)
    assert found is not None and found[1].chosen.first == 1 and found[1].hits.gpu[:3].tolist() == [0.0, 40 * 48.0, 0.0]
    taken = fleet.take(found[1], keys, 1.0, key="p")
    assert taken.predicted_tokens == 40 * 48
    fleet.release(taken)
    fleet.check_integrity()


async def test_prompts_of_our_workers_are_compared_by_bytes_until_their_tokenizer_is_here(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    workers = [await make_worker() for _ in range(2)]
    fleet = await make_fleet(*workers)
    fleet.keep_speeds()
    revision = workers[0].record.model_revision
    ready = fleet.edge.encoders._ready.pop(revision)
    fleet.edge.encoders.want = lambda *args: None  # type: ignore[method-assign]
    told = [(await fleet.chat("one long question " * 60)).headers for _ in range(3)]
    fleet.edge.encoders.put(revision, *ready)
    told += [(await fleet.chat("one long question " * 60)).headers for _ in range(3)]
    assert [t["x-router-keys"] for t in told] == ["bytes"] * 3 + ["tokens"] * 3
    assert len({t["x-router-worker"] for t in told[:3]}) == len({t["x-router-worker"] for t in told[3:]}) == 1
    assert [int(t["x-router-hit-tokens"]) > 0 for t in told] == [False, True, True] * 2


def test_a_picture_weighs_the_same_whatever_its_size_and_a_written_document_what_it_says() -> None:
    def size(**fields: Any) -> int:
        return len(data_of("/v1/messages", messages=[{"role": "user", "content": [fields]}]))

    small, large = (size(type="image", source={"type": "base64", "data": "A" * n}) for n in (10, 100_000))
    assert small == large and MEDIA_BYTES <= small < MEDIA_BYTES + 50
    short, long = (size(type="document", source={"type": "text", "data": "A" * n}) for n in (10, 100_000))
    assert long - short == 99_990
