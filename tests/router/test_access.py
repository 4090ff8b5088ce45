"""Who may call the data port, as whom and how often: API keys, classes and tenants, limits, browsers, TLS, and what answers tell in their head."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_contract.access import LOOK_AGAIN_S, parse_keys
from fleet_contract.errors import ApiError
from fleet_contract.names import PRIORITY_CLASSES
from fleet_router.decide.queue import CLASSES
from fleet_router.edge.callers import Bucket, Callers
from fleet_router.edge.trace_context import is_parent
from fleet_router.settings import BadFlag, Settings, parse
from fleet_testing.certificates import self_signed
from fleet_testing.fake_worker import DEFAULT_STREAM, FakeWorker, Script
from fleet_testing.router_fleet import MakeFleet, MakeWorker
from fleet_testing.router_process import until

KEY, OTHER = "rf-0123456789", "another-key-entirely"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def line(key: str = KEY, **more: Any) -> str:
    return json.dumps({"key": key, **more})


def keys_in(folder: Path, *lines: str) -> str:
    path = folder / "keys"
    path.write_text("\n".join(lines))
    return str(path)


def bearer(key: str = KEY) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_the_classes_are_those_of_the_queue() -> None:
    assert PRIORITY_CLASSES == CLASSES


def test_a_key_file_has_plain_keys_digests_and_objects() -> None:
    digest = hashlib.sha256(OTHER.encode()).digest()
    found = parse_keys(f"# team a\n{KEY}\n\n{line('sha256:' + digest.hex(), name='b', models=['tiny'], tokensPerMinute=5)}\n")
    assert [k.digest for k in found] == [hashlib.sha256(KEY.encode()).digest(), digest]
    assert found[0].line is None and found[1].line is not None and found[1].line.tokens_per_minute == 5


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (line(nosuch=1), "line 1.*nosuch"), (line(key="short"), "line 1.*8 visible"), (f"{KEY}\n{line()}", "line 2.*earlier line"),
        (line(priorityClass="vip"), "line 1.*'vip' does not exist"), (line(requestsPerMinute=-1), "line 1.*below 0"), ("{", "line 1"),
    ],
)  # fmt: skip
def test_a_wrong_line_is_named(text: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        parse_keys(text)


def test_flags_that_cannot_hold_end_the_start_with_a_sentence(tmp_path: Path) -> None:
    cert, _ = self_signed(tmp_path, "a")
    _, other = self_signed(tmp_path, "b")
    static = ("--static", "http://127.0.0.1:1")
    for flags, words in (
        (("--api-key-file", str(tmp_path / "none")), "--api-key-file"),
        (("--tls-cert-file", str(cert)), "--tls-key-file is not"),
        (("--tls-cert-file", str(cert), "--tls-key-file", str(other)), "belong together"),
        (("--cors-origins", "a.example"), "scheme://host"),
    ):
        with pytest.raises(BadFlag, match=words):
            parse([*static, *flags])


def status(callers: Callers, key: str) -> int:
    try:
        callers.admit(f"Bearer {key}".encode(), None).count_request(0.0)
    except ApiError as e:
        return e.status
    return 200


def test_keys_are_read_again_and_a_caller_keeps_what_it_has_used(tmp_path: Path) -> None:
    now = [0.0]
    path = keys_in(tmp_path, line(requestsPerMinute=1), OTHER)
    callers = Callers(path, lambda: now[0])
    assert [status(callers, k) for k in (KEY, KEY, OTHER, "unknown-key")] == [200, 429, 200, 401]
    new = tmp_path / "new"
    new.write_text(line(requestsPerMinute=1))
    os.replace(new, path)
    assert status(callers, OTHER) == 200  # not looked at yet
    now[0] += LOOK_AGAIN_S
    assert [status(callers, k) for k in (KEY, OTHER)] == [429, 401]
    Path(path).write_text("bad")
    now[0] += LOOK_AGAIN_S
    assert status(callers, KEY) == 429  # a file that is wrong locks nobody out
    Path(path).write_text(line(requestsPerMinute=2))
    now[0] += LOOK_AGAIN_S
    assert [status(callers, KEY) for _ in range(3)] == [200, 200, 429]


@given(st.integers(1, 1000), st.lists(st.tuples(st.floats(0, 100), st.integers(0, 3000), st.integers(0, 3000)), max_size=40))
def test_a_bucket_never_gives_more_than_its_rate_and_one_minute(per_minute: int, steps: list[tuple[float, int, int]]) -> None:
    """Naive model: what was used in all is never more than a full bucket, the time's share, and one request too large for it."""
    bucket, now, used, largest = Bucket.full(per_minute, 0.0), 0.0, 0, 0
    for pause, charge, real in steps:
        now += pause
        wait = bucket.wait_s(charge, now)
        assert wait >= 0
        if wait == 0:
            bucket.take(charge)
            bucket.take(real - charge)
            used, largest = used + real, max(largest, real)
            assert used <= per_minute + now * per_minute / 60 + largest + 1e-6
        elif wait < 1e6:
            assert bucket.wait_s(charge, now + wait + 1e-6) == 0.0
            now += wait + 1e-6


async def test_without_a_known_key_nothing_is_served_in_any_dialect(make_worker: MakeWorker, make_fleet: MakeFleet, tmp_path: Path) -> None:
    worker = await make_worker()
    fleet = await make_fleet(worker, api_key_file=keys_in(tmp_path, KEY))
    for path, kind in (("/v1/chat/completions", dict), ("/v1/messages", dict), ("/api/chat", str), ("/v1/embeddings", dict), ("/tokenize", dict)):
        for headers in ({}, bearer("wrong-key-1"), {"authorization": "Basic x"}):
            refused = await fleet.post(path, CHAT, **headers)
            assert refused.status_code == 401 and isinstance(refused.json()["error"], kind) and refused.headers["www-authenticate"] == "Bearer"
    assert (await fleet.http.get(fleet.url + "/v1/models")).status_code == 401
    assert not worker.received
    assert [(await fleet.http.get(fleet.url + p)).status_code for p in ("/livez", "/readyz", "/health")] == [200] * 3
    for headers in (bearer(), {"x-api-key": KEY}):
        assert (await fleet.post("/v1/chat/completions", CHAT, **headers)).status_code == 200
    assert all(r.header("authorization") is None and r.header("x-api-key") is None for r in worker.received)  # the key stays here


async def test_a_key_sees_and_uses_its_models_alone(make_worker: MakeWorker, make_fleet: MakeFleet, tmp_path: Path) -> None:
    workers = [await make_worker(), await make_worker(service="other")]
    keys = keys_in(tmp_path, line(models=["tiny"]), line(OTHER, models=["demo/*"]))
    fleet = await make_fleet(*workers, api_key_file=keys)

    async def seen(key: str) -> set[str]:
        return {m["id"] for m in (await fleet.http.get(fleet.url + "/v1/models", headers=bearer(key))).json()["data"]}

    assert await seen(KEY) == {"tiny", "demo/tiny"} and await seen(OTHER) == {"tiny", "demo/tiny", "other", "demo/other"}
    for model, code in (("tiny", 200), ("demo/tiny", 200), ("other", 403), ("nosuch", 404)):
        assert (await fleet.post("/v1/chat/completions", CHAT | {"model": model}, **bearer())).status_code == code
    assert "other" not in (await fleet.post("/v1/chat/completions", CHAT | {"model": "nosuch"}, **bearer())).text
    refused = await fleet.post("/v1/messages", CHAT | {"model": "other", "max_tokens": 1}, **bearer())
    assert refused.json()["error"]["type"] == "permission_error"
    assert (await fleet.http.get(fleet.url + "/v1/models/other", headers=bearer())).status_code == 404


async def test_limits_of_a_key_are_kept_and_say_when_to_come_again(make_worker: MakeWorker, make_fleet: MakeFleet, tmp_path: Path) -> None:
    worker = await make_worker()
    keys = keys_in(tmp_path, line(requestsPerMinute=2), line(OTHER, tokensPerMinute=100))
    fleet = await make_fleet(worker, api_key_file=keys)
    assert [(await fleet.post("/v1/chat/completions", CHAT, **bearer())).status_code for _ in range(2)] == [200, 200]
    refused = await fleet.post("/v1/messages", CHAT, **bearer())
    assert refused.status_code == 429 and 1 <= int(refused.headers["retry-after"]) <= 60
    assert refused.json()["error"]["type"] == "rate_limit_error" and "2 requests a minute" in refused.json()["error"]["message"]
    usage = b'{"choices": [{"text": "x"}], "usage": {"prompt_tokens": 20, "completion_tokens": 30}}'
    worker.default = Script(body=usage)  # what the answer took counts, not what was feared
    asked = CHAT | {"max_tokens": 60}
    codes = [(await fleet.post("/v1/chat/completions", asked, **bearer(OTHER))).status_code for _ in range(3)]
    assert codes == [200, 429, 429]
    worker.default = Script(status=500, body=b"{}")
    fleet.edge.access.callers.admit(None, OTHER.encode()).tokens.level = 100.0  # type: ignore[union-attr]
    assert [(await fleet.post("/v1/chat/completions", asked, **bearer(OTHER))).status_code for _ in range(2)] == [500, 500]  # failures cost nothing
    worker.default = Script()
    streamed = await fleet.post("/v1/chat/completions", asked | {"stream": True}, **bearer(OTHER))
    assert streamed.content == DEFAULT_STREAM
    level = fleet.edge.access.callers.admit(None, OTHER.encode()).tokens.level  # type: ignore[union-attr]
    assert 60 < level < 90  # its events were counted: it tells no usage
    await fleet.idle()


async def test_a_class_is_what_the_key_may_use(make_worker: MakeWorker, make_fleet: MakeFleet, tmp_path: Path) -> None:
    worker = await make_worker()
    keys = keys_in(tmp_path, line(name="a", priorityClass="interactive"), line(OTHER, name="b", priorityClasses=["system"]))
    fleet = await make_fleet(worker, api_key_file=keys)
    wants: list[tuple[str, str]] = []
    begin = fleet.brain.begin

    def look(want: Any, timeout_s: float) -> Any:
        wants.append((want.tenant, want.klass))
        return begin(want, timeout_s)

    fleet.brain.begin = look
    for key, asked, code in (
        (KEY, None, 200), (KEY, "batch", 200), (KEY, "Interactive", 200), (KEY, "system", 403), (KEY, "default", 403), (KEY, "vip", 400),
        (OTHER, None, 200), (OTHER, "system", 200), (OTHER, "batch", 403),
    ):  # fmt: skip
        headers = {"x-priority-class": asked} if asked else {}
        assert (await fleet.post("/v1/chat/completions", CHAT, **bearer(key), **headers)).status_code == code, (key, asked)
    assert wants == [("a", "interactive"), ("a", "batch"), ("a", "interactive"), ("b", "default"), ("b", "system")]
    open_fleet = await make_fleet(worker)
    for asked, code in (("batch", 200), ("interactive", 200), ("system", 403)):
        assert (await open_fleet.post("/v1/chat/completions", CHAT, **{"x-priority-class": asked})).status_code == code


@pytest.mark.rule("R37")
async def test_a_tenant_with_many_requests_does_not_hold_up_one_with_a_single_one(
    make_worker: MakeWorker, make_fleet: MakeFleet, tmp_path: Path
) -> None:
    """All wait for one worker; whoever is served second of the waiting is the light tenant's, though forty of the other came before."""
    worker = await make_worker()
    fleet = await make_fleet(worker, api_key_file=keys_in(tmp_path, line(name="heavy"), line(OTHER, name="light")))
    prompt = "many words without a common beginning " * 60
    gates = [asyncio.Event() for _ in range(42)]
    worker.scripts.extend(Script(wait=gate) for gate in gates)

    def ask(key: str, n: int) -> asyncio.Task[httpx.Response]:
        body = {"model": "tiny", "messages": [{"role": "user", "content": f"{n} {prompt}"}], "stream": True}
        return asyncio.create_task(fleet.post("/v1/chat/completions", body, **bearer(key)))

    heavy = [ask(KEY, 0)]
    await until(lambda: len(worker.legs) == 1, "the worker has the first")
    heavy += [ask(KEY, n) for n in range(1, 41)]
    await until(lambda: sum(len(q) for _, q in fleet.brain.queues()) == 40, "forty wait")
    light = ask(OTHER, 99)
    await until(lambda: sum(len(q) for _, q in fleet.brain.queues()) == 41, "and one of another tenant")
    for n in range(3):
        gates[n].set()
        await until(lambda n=n: len(worker.legs) == n + 2, "the next goes")  # type: ignore[misc]
    served = [json.loads(leg.body[: int(leg.header("x-radixfleet-json-length") or 0)])["messages"][0]["content"][:2] for leg in worker.legs]
    assert "99" in served[1:4], served
    for gate in gates:
        gate.set()
    assert {r.status_code for r in await asyncio.gather(light, *heavy)} == {200}
    await fleet.idle()


async def test_browsers_of_listed_origins_may_ask_and_read(make_worker: MakeWorker, make_fleet: MakeFleet, tmp_path: Path) -> None:
    worker = await make_worker()
    fleet = await make_fleet(worker, cors_origins="https://a.example", api_key_file=keys_in(tmp_path, KEY))
    ask = {"origin": "https://a.example", "access-control-request-method": "POST", "access-control-request-headers": "authorization,x"}
    allowed = await fleet.http.options(fleet.url + "/v1/chat/completions", headers=ask)
    assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == "https://a.example"
    assert allowed.headers["access-control-allow-headers"] == "authorization,x" and "POST" in allowed.headers["access-control-allow-methods"]
    refused = await fleet.http.options(fleet.url + "/v1/chat/completions", headers=ask | {"origin": "https://b.example"})
    assert refused.status_code == 405 and "access-control-allow-origin" not in refused.headers
    for key, code in ((KEY, 200), ("wrong-key-1", 401)):  # an error can be read too
        answer = await fleet.post("/v1/chat/completions", CHAT | {"stream": True}, origin="https://a.example", **bearer(key))
        assert (answer.status_code, answer.headers["access-control-allow-origin"], answer.headers["vary"]) == (code, "https://a.example", "Origin")
    assert "X-Router-Worker" in answer.headers["access-control-expose-headers"]
    closed = await make_fleet(worker)
    assert "access-control-allow-origin" not in (await closed.post("/v1/chat/completions", CHAT, origin="https://a.example")).headers


async def test_an_answer_tells_its_worker_its_hits_and_its_wait_and_passes_a_trace_on(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    prefill, decode = await make_worker("prefill"), await make_worker("decode")
    fleet = await make_fleet(prefill, decode)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    body = CHAT | {"messages": [{"role": "user", "content": "a prompt of several blocks " * 20}], "stream": True}
    for n in range(2):
        answer = await fleet.post("/v1/chat/completions", body, traceparent=parent, tracestate="a=b", **{"x-request-id": f"mine-{n}"})
        assert answer.headers["x-request-id"] == f"mine-{n}" and answer.headers["x-router-worker"] == f"127.0.0.1:{decode.record.ports.internal}"
        assert answer.headers["x-router-queue-ms"] == "0" and (int(answer.headers["x-router-hit-tokens"]) >= 448) == (n == 1)
    for worker in (prefill, decode):
        assert [worker.legs[0].header(h) for h in ("traceparent", "tracestate", "x-request-id")] == [parent, "a=b", "mine-0"]
    await fleet.post("/v1/messages", body | {"max_tokens": 5, "stream": False}, traceparent="00-xyz", tracestate="a=b")
    assert decode.legs[-1].header("traceparent") is None and decode.legs[-1].header("tracestate") is None


@pytest.mark.parametrize(
    ("value", "ok"),
    [
        (b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", True), (b"01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-x", True),
        (b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-x", False), (b"ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", False),
        (b"00-00000000000000000000000000000000-b7ad6b7169203331-01", False), (b"00-0AF7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", False),
        (b"", False), (b"00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01", False),
    ],
)  # fmt: skip
def test_what_is_a_traceparent(value: bytes, ok: bool) -> None:
    assert is_parent(value) is ok


async def test_real_processes_speak_tls_ask_for_keys_and_renew_both(make_worker: MakeWorker, make_router: Any, tmp_path: Path) -> None:
    """One client that never finishes its handshake holds up nobody."""
    worker: FakeWorker = await make_worker()
    cert, key = self_signed(tmp_path, "first")
    keys = keys_in(tmp_path, KEY)
    router = await make_router("--static", worker.url, "--tls-cert-file", str(cert), "--tls-key-file", str(key), "--api-key-file", keys)
    url = f"https://127.0.0.1:{router.data_port}"
    _, hanging = await asyncio.open_connection("127.0.0.1", router.data_port)
    hanging.write(b"\x16\x03\x01")
    async with httpx.AsyncClient(timeout=20.0, trust_env=False, verify=ssl.create_default_context(cafile=str(cert))) as client:
        for stream in (False, True):
            answer = await client.post(url + "/v1/chat/completions", json=CHAT | {"stream": stream}, headers=bearer())
            assert answer.status_code == 200
        assert answer.content == DEFAULT_STREAM
        assert (await client.post(url + "/v1/messages", json=CHAT)).json()["error"]["type"] == "authentication_error"
        large = json.dumps(CHAT | {"metadata": {"x": "x" * (2 << 20)}}).encode()
        assert (await client.post(url + "/v1/chat/completions", content=large, headers=bearer())).status_code == 200
        assert worker.legs[-1].body.startswith(large)
    flushed = await router.http.post(f"{router.control}/flush_cache", json={"model": "tiny"})
    assert [w["ok"] for w in flushed.json()["workers"].values()] == [True]
    assert (await router.http.post(f"{router.control}/abort_request", json={"request_id": "nosuch"})).json() == {"aborted": 0}
    new_cert, new_key = self_signed(tmp_path, "second")
    os.replace(new_key, key)
    os.replace(new_cert, cert)
    (tmp_path / "keys.new").write_text(OTHER)
    os.replace(tmp_path / "keys.new", keys)

    async def renewed() -> bool:
        try:
            async with httpx.AsyncClient(timeout=20.0, trust_env=False, verify=ssl.create_default_context(cafile=str(cert))) as fresh:
                return (await fresh.post(url + "/v1/chat/completions", json=CHAT, headers=bearer(OTHER))).status_code == 200
        except httpx.HTTPError:
            return False

    deadline = asyncio.get_running_loop().time() + 20
    while not await renewed():
        assert asyncio.get_running_loop().time() < deadline, router.log.read_text()
        await asyncio.sleep(0.2)
    hanging.close()
    assert Settings().tls_cert_file == ""
