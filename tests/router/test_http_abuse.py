"""What a broken or hostile client can send: each is answered in the one shape or ended by a limit, and nothing else suffers."""

from __future__ import annotations

import asyncio
import errno
import json
import re
import socket
from typing import Any

import pytest

from fleet_contract import names
from fleet_router.edge import edge
from fleet_router.http.server import HIGH_WATER
from fleet_testing.fake_worker import DEFAULT_STREAM, Script, sse
from fleet_testing.router_fleet import MakeFleet, MakeWorker
from fleet_testing.router_process import until

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}


def post(body: bytes, *lines: str, path: str = "/v1/chat/completions") -> bytes:
    head = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *lines]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def parts(answer: bytes) -> tuple[int, dict[str, str], bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode("latin-1").split("\r\n")
    return int(status.split()[1]), {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}, body


def split_answers(data: bytes) -> list[bytes]:
    return re.split(rb"HTTP/1\.1 (?=\d{3} )", data)[1:]


def error_of(answer: bytes) -> tuple[int, str]:
    status, headers, body = parts(answer)
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "code", "param", "request_id"}
    assert error["request_id"] == headers["x-request-id"]
    return status, error["code"]


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        (b"{", 400, "invalid_json", None),
        (b"", 400, "invalid_json", None),
        (b'{"model": "tiny", "messages": "\xff"}', 400, "invalid_json", None),
        (b'{"model": "tiny", "messages": ' + b"[" * 100_000, 400, "invalid_json", None),
        (b"[1]", 400, "invalid_type", None),
        (b"{}", 400, "missing_required_parameter", "model"),
        (b'{"model": 5}', 400, "invalid_type", "model"),
        (b'{"model": ""}', 400, "invalid_type", "model"),
        (b'{"model": ["tiny"]}', 400, "invalid_type", "model"),
        (b'{"model": null}', 400, "invalid_type", "model"),
        (b'{"model": "nope", "messages": []}', 404, "model_not_found", "model"),
        (b'{"model": "tiny", "bootstrap_room": 1}', 400, "reserved_field", "bootstrap_room"),
        (b'{"model": "tiny", "bootstrap_host": "evil"}', 400, "reserved_field", "bootstrap_host"),
    ],
    ids=lambda v: repr(v)[:40],
)
async def test_bad_json_is_refused_with_its_place(
    body: bytes, status: int, code: str, param: str | None, make_worker: MakeWorker, make_fleet: MakeFleet
) -> None:
    worker = await make_worker()
    fleet = await make_fleet(worker)
    response = await fleet.post("/v1/chat/completions", body)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (status, code, param)
    assert worker.legs == []


async def test_an_unknown_model_is_told_what_there_is(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    fleet = await make_fleet(await make_worker())
    message = (await fleet.chat(model="gpt-4")).json()["error"]["message"]
    assert "'gpt-4'" in message and "demo/tiny, tiny" in message


@pytest.mark.parametrize("name", [names.HEADER_RID, names.HEADER_ROOM, names.HEADER_BOOTSTRAP, names.HEADER_LEG, "x-RADIXFLEET-anything"])
async def test_the_router_s_own_headers_are_refused_from_clients(name: str, make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    worker = await make_worker()
    fleet = await make_fleet(worker)
    response = await fleet.post("/v1/chat/completions", CHAT, **{name: "1"})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "reserved_header")
    assert worker.legs == []


async def test_the_token_id_content_type_is_refused_from_clients(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    fleet = await make_fleet(await make_worker())
    response = await fleet.http.post(f"{fleet.url}/v1/completions", content=b"x", headers={"content-type": names.CONTENT_TYPE_IDS + "; v=1"})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "reserved_content_type")


async def test_unknown_paths_and_wrong_methods_have_the_same_shape(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    fleet = await make_fleet(await make_worker())
    for method, path, status in (("GET", "/", 404), ("GET", "/v1/chat/completions", 405), ("POST", "/v1/models", 405), ("DELETE", "/nope", 404)):
        response = await fleet.http.request(method, fleet.url + path)
        assert response.status_code == status
        assert response.json()["error"]["request_id"] == response.headers["x-request-id"]


@pytest.mark.rule("R19")
async def test_a_body_at_the_limit_passes_and_one_byte_more_is_refused_by_the_name_of_the_flag(
    make_worker: MakeWorker, make_fleet: MakeFleet
) -> None:
    fleet = await make_fleet(await make_worker(), max_body_bytes=100_000)
    frame = len(json.dumps({**CHAT, "x": ""}))
    for extra, status in ((0, 200), (1, 413)):
        body = json.dumps({**CHAT, "x": "y" * (100_000 - frame + extra)}).encode()
        response = await fleet.post("/v1/chat/completions", body)
        assert response.status_code == status
    assert "--max-body-bytes" in response.json()["error"]["message"]

    async def chunks() -> Any:
        for _ in range(100):
            yield b"z" * 10_000

    response = await fleet.http.post(f"{fleet.url}/v1/chat/completions", content=chunks())
    assert response.status_code == 413
    assert (await fleet.chat()).status_code == 200


async def test_a_chunked_body_is_read(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    worker = await make_worker()
    fleet = await make_fleet(worker)
    body = json.dumps({**CHAT, "stream": True}).encode()
    chunked = (
        b"".join(b"%x\r\n%b\r\n" % (len(body[i : i + 7]), body[i : i + 7]) for i in range(0, len(body), 7)) + b"0\r\nX-Radixfleet-Room: 1\r\n\r\n"
    )
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    status, headers, _ = parts(await fleet.raw(head + chunked))
    assert status == 200 and headers["transfer-encoding"] == "chunked"
    assert worker.legs[0].json == {**CHAT, "stream": True}


@pytest.mark.parametrize(
    "data",
    [
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: +3\r\n\r\nabc",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 3,3\r\n\r\nabc",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n\r\n",
        b"GET /livez HTTP/1.1\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: a\r\n folded: x\r\n\r\n",
        b"GET /livez HTTP/1.1\nHost: a\n\n",
        b"nonsense\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(50),
    ],
    ids=lambda d: repr(d[:60]),
)
async def test_ambiguous_or_broken_http_is_refused_and_the_connection_ends(data: bytes, make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    worker = await make_worker()
    fleet = await make_fleet(worker)
    assert error_of(await fleet.raw(data)) == (400, "invalid_http")
    assert worker.legs == []
    assert (await fleet.chat()).status_code == 200


async def test_other_http_versions_and_long_heads_are_refused(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    fleet = await make_fleet(await make_worker(), max_head_bytes=2000)
    assert error_of(await fleet.raw(b"GET /livez HTTP/2.0\r\nHost: x\r\n\r\n"))[0] in (400, 505)
    assert error_of(await fleet.raw(b"GET /livez HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 3000 + b"\r\n\r\n")) == (431, "head_too_large")
    assert error_of(await fleet.raw(b"GET /" + b"a" * 3000 + b" HTTP/1.1\r\nHost: x\r\n\r\n")) == (431, "head_too_large")


async def test_pipelined_requests_are_answered_in_order(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    worker = await make_worker()
    fleet = await make_fleet(worker)
    worker.scripts.append(Script(delay_s=0.1))
    chat = json.dumps({**CHAT, "stream": True}).encode()
    data = (
        post(chat) + b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n" * 40 + post(b"{") + b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    )
    answers = (await fleet.raw(data)).split(b"HTTP/1.1 ")[1:]
    assert [int(a[:3]) for a in answers] == [200] * 41 + [400, 200]
    assert b"[DONE]" in answers[0] and b"demo/tiny" in answers[-1]


async def test_a_bad_request_behind_a_good_one_is_answered_in_its_turn(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    worker = await make_worker()
    fleet = await make_fleet(worker)
    worker.scripts.append(Script(delay_s=0.1))
    answers = split_answers(await fleet.raw(post(json.dumps(CHAT).encode()) + b"garbage\r\n\r\n"))
    assert [int(a[:3]) for a in answers] == [200, 400]


async def test_expect_continue_is_answered_and_an_oversized_body_is_refused_before_it_is_sent(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    fleet = await make_fleet(await make_worker(), max_body_bytes=10_000)
    reader, writer = await fleet.connect()
    body = json.dumps(CHAT).encode()
    writer.write(post(body, "Expect: 100-continue")[: -len(body)])
    assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5) == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(body)
    assert (await asyncio.wait_for(reader.readuntil(b"\r\n"), 5)).startswith(b"HTTP/1.1 200")
    writer.close()
    refused = await fleet.raw(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 99999\r\n\r\n")
    assert error_of(refused) == (413, "body_too_large")


@pytest.mark.parametrize("pieces", [1, 7, 10_000])
async def test_an_offer_to_upgrade_is_ignored_and_the_request_served(pieces: int, make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    """As curl --http2 and Java's client send it to every http:// address, also with a body."""
    fleet = await make_fleet(await make_worker())
    body = json.dumps({"model": "tiny", "prompt": "hi"}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    offer = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    get = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    last = b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close, Upgrade\r\nUpgrade: h2c\r\n\r\n"
    data = offer + get + offer + last
    reader, writer = await fleet.connect()
    for at in range(0, len(data), -(-len(data) // pieces)):
        writer.write(data[at : at + -(-len(data) // pieces)])
        await asyncio.sleep(0)
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    assert answer.count(b"HTTP/1.1 200 OK") == 4 and answer.count(b"hello") == 2


async def test_old_clients_are_served_without_chunks(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    fleet = await make_fleet(await make_worker())
    body = json.dumps({**CHAT, "stream": True}).encode()
    status, headers, got = parts(await fleet.raw(post(body).replace(b"HTTP/1.1", b"HTTP/1.0")))
    assert status == 200 and "transfer-encoding" not in headers and got == DEFAULT_STREAM


async def test_head_and_ids_of_requests(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    fleet = await make_fleet(await make_worker())
    response = await fleet.http.head(f"{fleet.url}/livez")
    assert (response.status_code, response.content) == (200, b"")
    assert (await fleet.http.get(f"{fleet.url}/livez", headers={"X-Request-Id": "mine-1"})).headers["x-request-id"] == "mine-1"
    assert (await fleet.http.get(f"{fleet.url}/livez", headers={"X-Request-Id": "a b<c>"})).headers["x-request-id"].startswith("req-")
    assert (await fleet.http.get(f"{fleet.url}/livez", headers={"X-Request-Id": "a" * 500})).headers["x-request-id"].startswith("req-")


@pytest.mark.parametrize(
    ("data", "flag"),
    [
        (b"POST /v1/completions HTTP/1.1\r\nHo", "--head-timeout"),
        (post(b"x" * 100)[:-50], "--body-timeout"),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab", "--body-timeout"),
    ],
    ids=["half a head", "half a body", "half a chunk"],
)
async def test_a_half_sent_request_ends_by_a_limit_that_is_named(data: bytes, flag: str, make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    fleet = await make_fleet(await make_worker(), head_timeout=0.2, body_timeout=0.2)
    answer = await fleet.raw(data)
    assert error_of(answer) == (408, "request_timeout")
    assert flag.encode() in answer
    await until(lambda: not fleet.edge.server_state.connections, "no connection is left")


async def test_a_body_that_drips_cannot_stretch_its_limit(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    fleet = await make_fleet(await make_worker(), body_timeout=0.3)
    reader, writer = await fleet.connect()
    writer.write(post(b"x" * 1000)[:-1000])

    async def drip() -> None:
        while True:
            writer.write(b"x")
            await asyncio.sleep(0.02)

    task = asyncio.create_task(drip())
    try:
        answer = await asyncio.wait_for(reader.read(), 5)
    finally:
        task.cancel()
        writer.close()
    assert error_of(answer) == (408, "request_timeout")


async def test_an_idle_connection_ends(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    fleet = await make_fleet(await make_worker(), idle_timeout=0.2, head_timeout=0.2)
    assert await fleet.raw(b"") == b""
    status, _, _ = parts(await fleet.raw(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"))
    assert status == 200


@pytest.mark.rule("R18")
async def test_a_client_that_never_reads_is_ended_and_its_worker_told(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    worker = await make_worker()
    fleet = await make_fleet(worker, write_timeout=0.5)
    event = sse({"t": "x" * 60_000}, done=False)
    worker.default = Script(pieces=[event] * 2000)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", fleet.port))
    await asyncio.get_running_loop().sock_sendall(sock, post(json.dumps({**CHAT, "stream": True}).encode()))
    try:
        await until(lambda: fleet.counter("limits_total") == 1, "the write limit ends it")
        await until(lambda: len(worker.aborts) == 1, "the worker is told")
        await fleet.idle()
    finally:
        sock.close()


@pytest.mark.rule("R21")
async def test_a_slow_reader_slows_its_worker_and_gets_every_byte(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    worker = await make_worker()
    fleet = await make_fleet(worker)
    event = sse({"t": "x" * 60_000}, done=False)
    worker.default = Script(pieces=[event] * 300 + [b"data: [DONE]\n\n"])
    reader, writer = await fleet.connect()
    writer.write(post(json.dumps({**CHAT, "stream": True}).encode(), "Connection: close"))
    await reader.readuntil(b"\r\n\r\n")

    def buffered() -> int:
        return sum(c.transport.get_write_buffer_size() for c in fleet.edge.server_state.connections if c.transport is not None)

    await until(lambda: buffered() > 0, "the client's side is full")
    most = 0
    for _ in range(50):
        most = max(most, buffered())
        await asyncio.sleep(0.01)
    assert most <= len(event) + HIGH_WATER + 64  # events go whole: what was below the mark, and one more
    got = 0
    while chunk := await asyncio.wait_for(reader.read(1 << 20), 10):
        got += len(chunk)
    assert got > 300 * len(event)
    writer.close()
    await fleet.idle()


async def test_many_broken_clients_leave_nothing_behind(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    fleet = await make_fleet(await make_worker())
    whole = post(json.dumps({**CHAT, "stream": True}).encode())

    async def cut(at: int) -> None:
        _, writer = await fleet.connect()
        writer.write(whole[:at])
        await writer.drain()
        writer.transport.abort()

    for start in range(1, len(whole), 40):
        await asyncio.gather(*(cut(at) for at in range(start, min(start + 40, len(whole) + 1))))
    await until(lambda: not fleet.edge.server_state.connections, "no connection is left")
    await fleet.idle()
    assert (await fleet.chat()).status_code == 200


async def test_more_connections_than_open_files_allow_are_told_why_and_the_others_go_on(make_fleet: MakeFleet, make_worker: MakeWorker) -> None:
    worker = await make_worker()
    fleet = await make_fleet(worker, max_files=edge.RESERVED_FILES + edge.FILES_PER_REQUEST * 4)
    held = [await fleet.connect() for _ in range(4)]
    await until(lambda: len(fleet.edge.server_state.connections) == 4, "four connections")
    body = json.dumps(CHAT).encode()
    answer = await fleet.raw(post(body))
    assert error_of(answer) == (503, "too_many_connections")
    assert parts(answer)[1]["retry-after"] and b"4 connections" in answer
    reader, writer = held[0]
    writer.write(post(body, "Connection: close"))
    assert parts(await asyncio.wait_for(reader.read(), 10))[0] == 200, "a client that is in is served"
    for _, other in held:
        other.close()


async def test_a_worker_is_not_blamed_when_the_router_is_out_of_files(make_fleet: MakeFleet, make_worker: MakeWorker) -> None:
    worker = await make_worker()
    fleet = await make_fleet(worker)
    (endpoint,) = fleet.edge.registry.endpoints.values()
    loop = asyncio.get_running_loop()
    refused = 0

    async def no_files(*_: Any, **__: Any) -> Any:
        nonlocal refused
        refused += 1
        raise OSError(errno.EMFILE, "Too many open files")

    for connection in list(fleet.edge.pool._open):
        connection.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleet.edge.pool, "_reusable", lambda address: None)
        patch.setattr(type(loop), "create_connection", no_files)
        fleet.edge.registry.poke(endpoint.key)
        await until(lambda: refused > 3, "the router asks in vain")
        assert endpoint.healthy
    assert (await fleet.post("/v1/chat/completions", CHAT)).status_code == 200
