"""vLLM and SGLang as plain workers: what the router learns of them, what it sends, what reaches the client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_contract import names
from fleet_contract.kv_events import decode_batch
from fleet_router.api.body import parse_body
from fleet_router.api.dialects import OPENAI
from fleet_router.api.paths import COMPLETIONS
from fleet_router.api.sse import UsageFilter, split_events
from fleet_router.brain.polled import load_of_others
from fleet_router.decide.load import LoadTable, Speed
from fleet_router.engines.base import PolledLoad
from fleet_router.engines.openai_worker import choices, error, error_event
from fleet_router.engines.prometheus import labels_of, total
from fleet_router.engines.splice import splice
from fleet_testing.engines.kv_publisher import KvPublisher
from fleet_testing.engines.server import FakeEngine, Output, answer_tokens, prompt_text, said_text
from fleet_testing.engines.sglang import FakeSglang
from fleet_testing.engines.vllm import FakeVllm
from fleet_testing.fake_worker import FakeWorker, tiny_tokenizer_zip
from fleet_testing.router_fleet import Fleet, MakeWorker
from fleet_testing.router_process import RouterProcess, until, until_async

Start = Callable[..., Awaitable[Any]]
Front = Callable[..., Awaitable[Fleet]]
KINDS: list[Any] = [FakeVllm, FakeSglang]
MESSAGES = [{"role": "user", "content": "hello"}]


async def post(fleet: Fleet, body: dict[str, Any], path: str = "/v1/chat/completions") -> httpx.Response:
    return await fleet.post(path, {"model": "org/tiny", **body})


def expected(body: dict[str, Any], n: int = 3) -> str:
    return "".join(answer_tokens(prompt_text(body), n))


def record(fleet: Fleet, at: int = 0) -> Any:
    return fleet.brain.workers[at].record


# -- what the router learns


async def test_a_vllm_worker_is_described_by_its_own_endpoints(start_engine: Start, front: Front) -> None:
    vllm = await start_engine(FakeVllm(capacity_blocks=100))
    fleet = await front(vllm.url(events=5557, replay=5657))
    r = record(fleet)
    assert (r.engine, r.role, r.served_names, r.service) == (names.ENGINE_VLLM, "unified", ["org/tiny"], "org/tiny")
    assert (r.kv_capacity_tokens, r.page_size, r.context_length) == (1600, 16, 4096)
    assert (r.ports.events, r.ports.replay, r.pod_uid) == (5557, 5657, f"127.0.0.1:{vllm.port}")
    assert len(r.incarnation) == 16 and len(r.model_revision) == 16


@pytest.mark.parametrize("is_new", [False, True])
async def test_a_sglang_worker_is_described_by_older_and_newer_names(is_new: bool, start_engine: Start, front: Front) -> None:
    sglang = await start_engine(
        FakeSglang(is_new=is_new, dp_size=2, mode="prefill", bootstrap_port=9123, load={"num_reqs": 5, "num_waiting_reqs": 2, "num_tokens": 90})
    )
    fleet = await front(sglang.url())
    r = record(fleet)
    assert (r.engine, r.role, r.ranks, r.page_size, r.max_rows) == (names.ENGINE_SGLANG, "prefill", 2, 16, 64)
    assert (r.kv_capacity_tokens, r.ports.bootstrap) == (2 * 65536, 9123)
    endpoint = next(iter(fleet.edge.registry.endpoints.values()))
    await until(lambda: endpoint.load == PolledLoad(3, 2, 90), "its load is read")


async def test_a_worker_that_is_not_what_the_user_says_is_not_used(start_engine: Start, front: Front) -> None:
    sglang = await start_engine(FakeSglang(mode="null"))
    fleet = await front(sglang.url(role="decode"), ready=0)
    endpoint = next(iter(fleet.edge.registry.endpoints.values()))
    await until(lambda: "disaggregation_mode" in endpoint.reason, "the reason is known")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_worker_that_was_away_comes_back_as_another_incarnation(kind: Any, start_engine: Start, front: Front) -> None:
    engine = await start_engine(kind())
    fleet = await front(engine.url())
    old, port = record(fleet).incarnation, engine.port
    engine.kill()
    await until(lambda: fleet.ready() == 0, "it is gone")
    await engine.start(port)
    await until(lambda: fleet.ready() == 1 and any(w.record.incarnation != old and not w.removed for w in fleet.brain.workers), "it is new")
    engine.health = 503
    await until(lambda: fleet.ready() == 0, "its health counts")


@pytest.mark.case("C47")
@pytest.mark.parametrize("kind", KINDS)
async def test_an_api_key_goes_to_the_worker_and_nowhere_else(kind: Any, start_engine: Start, front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXFLEET_WORKER_KEY_TINY", "secret-of-the-worker")
    engine = await start_engine(kind(api_key="secret-of-the-worker"))
    fleet = await front(engine.url(key_env="RADIXFLEET_WORKER_KEY_TINY"))
    assert (await post(fleet, {"messages": MESSAGES})).status_code == 200
    assert "secret" not in json.dumps(fleet.told()) and b"secret" not in msgspec.json.encode(record(fleet))


async def test_polled_load_counts_our_own_picks_once() -> None:
    load = LoadTable().add(0, Speed(1000, 0.01, 0, 0, 10_000))
    picks = [load.pick(100, 100, 200, 0.0) for _ in range(3)]
    load.start(picks[0], 0.1)
    alone = load.now()
    load.take_report(load_of_others(PolledLoad(running=2, waiting=1, used_tokens=150), load), "r", 0.2)
    assert load.now() == alone
    load.take_report(load_of_others(PolledLoad(running=4, waiting=3, used_tokens=1100), load), "r", 0.3)
    assert (load.run, load.pend, load.ctx) == (alone.run + 4, alone.pend, alone.ctx + 1000)
    load.take_report(load_of_others(PolledLoad(running=1, waiting=4, used_tokens=0), load), "r", 0.4)
    assert load.pend == alone.pend + 200  # one request of others waits, as long as ours are
    load.table.check_integrity()


async def test_a_loaded_vllm_is_avoided_and_asked_often_an_idle_one_rarely(start_engine: Start, front: Front) -> None:
    busy, idle = await start_engine(FakeVllm(busy=(30, 50))), await start_engine(FakeVllm())
    fleet = await front(busy.url(), idle.url())
    await until(lambda: all(e.load is not None for e in fleet.edge.registry.endpoints.values()), "both were asked")
    for n in range(6):
        assert (await post(fleet, {"messages": [{"role": "user", "content": f"{n}"}]})).status_code == 200
    assert (len(busy.generations), len(idle.generations)) == (0, 6)

    def asked(engine: FakeEngine) -> int:
        return sum(r.path == "/metrics" for r in engine.received)

    before = asked(busy), asked(idle)
    await until(lambda: asked(busy) >= before[0] + 10, "the busy one is asked")
    assert asked(idle) - before[1] <= 5


# -- what is sent


@pytest.mark.parametrize("kind", KINDS)
async def test_the_client_s_bytes_are_sent_but_for_what_has_to_change(kind: Any, start_engine: Start, front: Front) -> None:
    engine = await start_engine(kind())
    fleet = await front(engine.url(service="mine"))
    text = b'{ "model" : "org/tiny", "messages":[{"role":"user",  "content":"h\\u00e9"}], "x":1.50, "seed":  7 }'
    assert (await fleet.post("/v1/chat/completions", text)).status_code == 200
    sent = engine.generations[-1]
    if kind is FakeVllm:
        assert sent.body == text
        assert (sent.header("X-Request-Id") or "").startswith("req-")
    else:
        rid = sent.json["rid"]
        assert len(rid) == 32
        assert sent.body == b'{"model":"org/tiny","messages":[{"role":"user",  "content":"h\\u00e9"}],"x":1.50,"seed":7,"rid":"%b"}' % rid.encode()


async def test_a_name_that_only_the_router_knows_becomes_the_worker_s(start_engine: Start, front: Front) -> None:
    engine = await start_engine(FakeVllm())
    fleet = await front(engine.url(service="mine"))
    key = ("", "mine")
    fleet.brain.table.names["alias"] = key
    body = {"model": "alias", "messages": MESSAGES}
    assert (await fleet.post("/v1/chat/completions", body)).status_code == 200
    assert engine.generations[-1].json["model"] == "org/tiny"


@pytest.mark.parametrize(("extra", "as_ids"), [({}, True), ({"echo": True}, False), ({"suffix": "x"}, False), ({"add_special_tokens": False}, False)])
async def test_a_completion_s_prompt_goes_as_ids_where_that_means_the_same(
    extra: dict[str, Any], as_ids: bool, start_engine: Start, front: Front, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_bytes(_tokenizer_file())
    engine = await start_engine(FakeVllm())
    fleet = await front(engine.url(tokenizer=tmp_path))
    assert (await post(fleet, {"prompt": "hello there", **extra}, "/v1/completions")).status_code == 200
    sent = engine.generations[-1].json["prompt"]
    assert sent == ([*_ids("hello there")] if as_ids else "hello there")


def _tokenizer_file() -> bytes:
    import io
    import zipfile

    return zipfile.ZipFile(io.BytesIO(tiny_tokenizer_zip())).read("tokenizer.json")


def _ids(text: str) -> list[int]:
    from tokenizers import Tokenizer

    return list(Tokenizer.from_buffer(_tokenizer_file()).encode(text).ids)


@pytest.mark.parametrize("field", ["kv_transfer_params", "bootstrap_room", "bootstrap_host", "bootstrap_port"])
async def test_fields_of_the_hand_over_are_refused_to_clients(field: str, start_engine: Start, front: Front) -> None:
    engine = await start_engine(FakeVllm())
    fleet = await front(engine.url())
    response = await post(fleet, {"messages": MESSAGES, field: 1})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "reserved_field")
    assert engine.generations == []


# -- what comes back


@pytest.mark.rule("R22")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": True}])
async def test_r22_the_client_gets_the_usage_only_if_it_asked(kind: Any, options: Any, start_engine: Start, front: Front) -> None:
    engine = await start_engine(kind())
    fleet = await front(engine.url())
    body: dict[str, Any] = {"messages": MESSAGES, "stream": True} | ({} if options is None else {"stream_options": options})
    answer = (await post(fleet, body)).content
    assert said_text(answer) == expected(body) and answer.endswith(b"data: [DONE]\n\n")
    assert engine.generations[-1].json["stream_options"] == {"include_usage": True}
    assert (b'"usage"' in answer) == (options == {"include_usage": True})
    assert fleet.counter("cached_tokens_total") == len(prompt_text(body)) // 32 * 16
    await fleet.idle()


USAGE_EVENT = b'data: {"id":"x","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2}}\n\n'
BEFORE = b'data: {"choices":[{"delta":{"content":"\\"choices\\":[] \\n\\n"}}],"usage":null}\n\n: note\r\n\r\ndata: {"choices":[]}\n\n'


@pytest.mark.rule("R22")
def test_r22_the_usage_event_is_found_and_removed_at_every_split() -> None:
    text = BEFORE + USAGE_EVENT + b"data: [DONE]\n\n"
    for cut in range(len(text) + 1):
        for second in range(cut, min(len(text), cut + 40) + 1, 7):
            assert _filtered([text[:cut], text[cut:second], text[second:]]) == (BEFORE + b"data: [DONE]\n\n", USAGE_EVENT)


@given(st.lists(st.sampled_from([BEFORE, USAGE_EVENT, b"data: [DONE]\n\n", b"event: ping\n\n"]), max_size=6))
def test_only_usage_events_are_taken_out(events: list[bytes]) -> None:
    kept, _ = _filtered([b"".join(events)])
    assert kept == b"".join(e for e in events if e != USAGE_EVENT)
    assert b"".join(split_events(b"".join(events))) == b"".join(events)


def _filtered(pieces: list[bytes]) -> tuple[bytes, bytes]:
    take, held, out = UsageFilter(), b"", b""
    for piece in pieces:
        held += piece
        end = OPENAI.event_end(held)
        out += take(held[:end])
        held = held[end:]
    return out + held, take.event


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("status", [400, 404, 422, 429])
async def test_an_engine_s_refusal_arrives_as_it_is_and_blames_nobody(kind: Any, status: int, start_engine: Start, front: Front) -> None:
    engine = await start_engine(kind())
    fleet = await front(engine.url())
    for _ in range(5):
        engine.refuse = (status, "exactly this")
        response = await post(fleet, {"messages": MESSAGES})
        assert (response.status_code, response.content) == (status, engine.error_body(status, "exactly this"))
    assert fleet.brain.workers[0].breaker.state == "closed" and fleet.brain.workers[0].faults == 0
    assert (await post(fleet, {"messages": MESSAGES})).status_code == 200


async def test_a_stream_that_begins_with_an_error_is_tried_elsewhere(start_engine: Start, front: Front) -> None:
    class Broken(FakeSglang):
        async def work(self, body: dict[str, Any], request: Any, out: Output) -> None:
            await out.begin()
            await out.event({"error": {"message": "no memory", "type": "x", "code": 503}})
            await out.end()

    engines = [await start_engine(Broken()), await start_engine(FakeSglang())]
    fleet = await front(*(e.url() for e in engines))
    body = {"messages": MESSAGES, "stream": True}
    for _ in range(6):
        response = await post(fleet, body)
        assert response.status_code == 200 and said_text(response.content) == expected(body)
    fine = engines.pop()
    await fine.stop()
    await until(lambda: fleet.ready() == 1, "only the broken one is left")
    response = await post(fleet, body)
    assert (response.status_code, response.json()["error"]["message"]) == (503, "no memory")


@pytest.mark.rule("R20")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stream", [True, False])
async def test_r20_a_client_that_leaves_ends_the_engine_s_work(kind: Any, stream: bool, start_engine: Start, front: Front) -> None:
    engine = await start_engine(kind(stalls={"first"}))
    fleet = await front(engine.url())
    task = asyncio.create_task(post(fleet, {"messages": MESSAGES, "stream": stream}))
    await until(lambda: "first" in engine.phases, "it works")
    task.cancel()
    await until(lambda: engine.running == 0, "the engine has stopped", 2.0)
    if kind is FakeSglang:
        await until(lambda: engine.aborted == [engine.generations[0].json["rid"]], "it heard the abort")
    await fleet.idle()


async def test_our_runtime_and_others_serve_side_by_side(make_worker: MakeWorker, start_engine: Start, front: Front) -> None:
    ours: FakeWorker = await make_worker()
    other = await start_engine(FakeVllm())
    fleet = await front(ours.url, other.url())
    assert (await post(fleet, {"messages": MESSAGES})).status_code == 200
    assert (await fleet.chat()).status_code == 200
    assert (len(ours.legs), len(other.generations)) == (1, 1)
    listed = (await fleet.http.get(f"{fleet.url}/v1/models")).json()["data"]
    assert {m["id"] for m in listed} >= {"org/tiny", "tiny"}


# -- pure parts


@pytest.mark.parametrize(
    ("changes", "out"),
    [
        ({}, b'{"a":1,"b":[ 1 ],"\\u00e9":"x"}'),
        ({"b": None, "c": b"true"}, b'{"a":1,"\\u00e9":"x","c":true}'),
        ({"a": b"2"}, b'{"a":2,"b":[ 1 ],"\\u00e9":"x"}'),
        ({"a": None, "b": None, "é": None}, b"{}"),
    ],
)
def test_splice(changes: dict[str, bytes | None], out: bytes) -> None:
    fields = msgspec.json.decode(b'{"a" : 0, "b": [ 1 ], "\\u00e9":"x", "a": 1}', type=dict[str, msgspec.Raw])
    assert json.loads(splice(fields, changes)) == json.loads(out)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda c: st.lists(c, max_size=3) | st.dictionaries(st.text(), c, max_size=3)
)


@given(st.dictionaries(st.text(), json_values, max_size=6), st.dictionaries(st.text(), st.none() | json_values, max_size=4))
def test_splice_equals_changing_the_decoded_object(old: dict[str, Any], new: dict[str, Any]) -> None:
    fields = msgspec.json.decode(json.dumps(old), type=dict[str, msgspec.Raw])
    changes = {k: None if v is None else json.dumps(v).encode() for k, v in new.items()}
    want = {k: new.get(k, v) for k, v in old.items() if new.get(k, v) is not None or k not in new} | {k: v for k, v in new.items() if v is not None}
    assert json.loads(splice(fields, changes)) == want


@pytest.mark.parametrize(
    ("body", "n"),
    [
        ({}, 1),
        ({"n": 3}, 3),
        ({"n": 2, "best_of": 4}, 4),
        ({"prompt": ["a", "b"], "n": 2}, 4),
        ({"prompt": [1, 2]}, 1),
        ({"n": "x"}, 1),
        ({"n": 0}, 1),
    ],
)
def test_choices(body: dict[str, Any], n: int) -> None:
    assert choices(parse_body(COMPLETIONS, json.dumps({"model": "m", **body}).encode())) == n


@pytest.mark.parametrize(
    ("body", "message", "code"),
    [
        (b'{"error":{"message":"m","code":400}}', "m", "worker_400"),
        (b'{"object":"error","message":"m","code":400}', "m", "worker_400"),
        (b'{"error":"m"}', "m", "worker_error_shape"),
        (b"<html>", "the worker answered 400: <html>", "worker_error_shape"),
        (b"[1]", "the worker answered 400: [1]", "worker_error_shape"),
    ],
)
def test_error_answers_of_all_shapes_are_read(body: bytes, message: str, code: str) -> None:
    e = error(400, body)
    assert (e.status, e.message, e.type, e.code) == (400, message, "invalid_request_error", code)


@pytest.mark.parametrize(
    ("said", "status"),
    [({"error": {"message": "m", "code": 503}}, 503), ({"error": {"message": "m", "code": "x"}}, 500), ({"choices": []}, None), (None, None)],
)
def test_error_events(said: Any, status: int | None) -> None:
    e = error_event(said)
    assert (e.status if e is not None else None) == status


def test_metrics_are_read_by_whole_names() -> None:
    text = b'# HELP a b\na{x="1",y="q\\"}{"} 2.0\na_b{x="1"} 7\nxa 9\na{x="2"} 3 1700000\na nonsense\n'
    assert total(text, "a") == 5.0
    assert total(text, "c") is None
    assert labels_of(text, "a_b") == [{"x": "1"}]


@pytest.mark.rule("R41")
@pytest.mark.parametrize("maps", [False, True])
async def test_r41_the_scripted_streams_of_both_encodings_say_the_same(maps: bool) -> None:
    publisher = KvPublisher(maps=maps)
    try:
        batch = decode_batch(
            publisher.payload(publisher.stored([2**63, 5], list(range(32))), publisher.removed([b"\0" * 24 + b"\1"]), publisher.cleared())
        )
        stored, removed, _ = batch.events
        assert (stored.hashes, stored.parent, stored.tokens, stored.block_size) == ([2**63, 5], None, list(range(32)), 16)  # type: ignore[union-attr]
        assert removed.hashes == [1]  # type: ignore[union-attr]
    finally:
        await publisher.close()


async def test_a_tokenizer_folder_without_a_tokenizer_is_named_as_the_cause(start_engine: Start, front: Front, tmp_path: Path) -> None:
    engine = await start_engine(FakeVllm())
    fleet = await front(engine.url(tokenizer=tmp_path), ready=0)
    endpoint = next(iter(fleet.edge.registry.endpoints.values()))
    await until(lambda: str(tmp_path) in endpoint.reason, "the reason is known")
    (tmp_path / "tokenizer.json").write_bytes(_tokenizer_file())
    await until(lambda: fleet.ready() == 1, "it is there now")


async def test_why_a_worker_is_not_read_or_not_ready_is_told(
    start_engine: Start, make_router: Callable[..., Awaitable[RouterProcess]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red before: a worker without its key was in no list, and why a stalled one stays so was never said again."""
    engine = await start_engine(FakeVllm(api_key="secret-of-the-worker"))
    monkeypatch.setenv("RADIXFLEET_WORKER_KEY_TINY", "secret-of-the-worker")
    router = await make_router("--static", engine.url(), ready=False)

    async def told(part: str) -> str:
        return " ".join(entry["reason"] for entry in (await router.get("/workers"))[part])

    async def refused() -> bool:
        return "401" in await told("workers")

    await until_async(refused, "the refused key is named")
    other = await make_router("--static", engine.url(key_env="RADIXFLEET_WORKER_KEY_TINY"))
    workers = (await other.get("/workers"))["workers"]
    assert [(w["state"], w["reason"]) for w in workers] == [("ready", "")]
    port = engine.port
    engine.kill()

    async def stalled(why: str) -> bool:
        found = (await other.get("/workers"))["workers"]
        return bool(found and found[0]["state"] != "ready" and why in found[0]["reason"])

    await until_async(lambda: stalled("could not be reached"), "it is away")
    engine.api_key = "a new secret"
    await engine.start(port)
    await until_async(lambda: stalled("401"), "it is back with another key")
    assert "401" in other.log.read_text()


@pytest.mark.parametrize(("kind", "path"), [(FakeVllm, "/reset_prefix_cache"), (FakeSglang, "/flush_cache")])
async def test_a_flush_asks_each_engine_in_its_own_words_and_with_its_key(
    kind: Any, path: str, start_engine: Start, make_router: Callable[..., Awaitable[RouterProcess]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red before: every engine was asked for /flush_cache, without its key."""

    class Flushed(kind):  # type: ignore[misc]
        def simple(self, request: Any) -> Any:
            return (200, b"", "text/plain") if request.path == path else super().simple(request)

    monkeypatch.setenv("RADIXFLEET_WORKER_KEY_TINY", "secret-of-the-worker")
    engines = [await start_engine(k(api_key="secret-of-the-worker")) for k in (Flushed, FakeVllm)]
    router = await make_router("--static", ",".join(e.url(key_env="RADIXFLEET_WORKER_KEY_TINY", service="s", revision="r") for e in engines))
    await router.until_workers(2)
    said = (await router.http.post(f"{router.control}/flush_cache", json={"model": "org/tiny"})).json()["workers"]
    assert said[f"127.0.0.1:{engines[0].port}"] == {"ok": True}
    refused = said[f"127.0.0.1:{engines[1].port}"]
    assert not refused["ok"] and refused["error"].startswith("POST /reset_prefix_cache: the worker does not serve this path")
