"""A scripted worker on 127.0.0.1: speaks the internal port of a runtime over real sockets, and does exactly what a test tells it.

`await FakeWorker.start(...)`, then queue `Script`s; each request takes the next one, or the default. Everything received is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import secrets
import zipfile
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import httptools
import msgspec
import zmq
import zmq.asyncio
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from fleet_contract import names
from fleet_contract.wire import RoutedHeaders, parse_routed_headers, split_ids_body
from fleet_contract.worker import LoadReport, Ports, PrefillAnswer, Profile, WorkerRecord, load_topic

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


def tiny_tokenizer_zip() -> bytes:
    """Byte tokenizer with a chat template, as `GET /tokenizer` gives it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as z:
        z.writestr("tokenizer.json", tokenizer.to_str())
        z.writestr("tokenizer_config.json", "{}")
        z.writestr("chat_template.jinja", TEMPLATE)
    return out.getvalue()


def sse(*objects: Any, done: bool = True) -> bytes:
    """Events of a stream."""
    events = b"".join(b"data: " + json.dumps(o).encode() + b"\n\n" for o in objects)
    return events + (b"data: [DONE]\n\n" if done else b"")


DEFAULT_STREAM = sse(*({"choices": [{"index": 0, "delta": {"content": t}}]} for t in ("Hel", "lo", "!")))


def error_body(code: str, message: str = "scripted", type: str = "server_error") -> bytes:
    return json.dumps({"error": {"message": message, "type": type, "code": code, "param": None, "request_id": "w"}}).encode()


@dataclass
class Script:
    """What one request gets."""

    status: int = 200
    body: bytes | None = None  # None: a stream when the request asks for one, else a small JSON
    pieces: list[bytes] | None = None  # the stream's bytes as they are written
    stream_type: str = "text/event-stream; charset=utf-8"
    headers: dict[str, str] = field(default_factory=dict)
    wait: asyncio.Event | None = None  # before anything is answered
    wait_after: tuple[int, asyncio.Event] | None = None  # after so many pieces
    delay_s: float = 0.0
    close_before: bool = False  # take the request, then close
    truncate: bool = False  # close instead of ending the answer
    cached_tokens: int = 0


@dataclass
class Received:
    """One request as it came."""

    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes
    json: Any = None
    ids: list[int] | None = None
    routed: RoutedHeaders = field(default_factory=RoutedHeaders)
    gone: asyncio.Event = field(default_factory=asyncio.Event)  # its connection was closed by the router

    def header(self, name: str) -> str | None:
        return next((v for n, v in self.headers if n.lower() == name.lower()), None)


class FakeWorker:
    """See the module."""

    def __init__(self, record: WorkerRecord) -> None:
        self.record = record
        self.ready = True
        self.silent_polls = 0  # so many questions for /readyz get no answer; below 0: none does
        self.scripts: deque[Script] = deque()
        self.default = Script()
        self.received: list[Received] = []
        self.aborts: list[str] = []
        self.tokenizer = tiny_tokenizer_zip()
        self.connections = 0
        self.idle_close = False  # close each connection when a request comes on it again
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self._context = zmq.asyncio.Context()
        self._context.set(zmq.BLOCKY, 0)
        self._load = self._context.socket(zmq.PUB)
        self._load.setsockopt(zmq.LINGER, 0)
        self._seq = 0
        self.changed = asyncio.Condition()

    @classmethod
    async def start(
        cls,
        *,
        role: str = "unified",
        revision: str = "aaaaaaaa",
        namespace: str = "demo",
        service: str = "tiny",
        served: tuple[str, ...] | None = None,
        port: int = 0,
        capacity: int = 100_000,
        model_revision: str = "00112233aabbccdd",
        prefill_tokens_per_s: float = 1000.0,
    ) -> FakeWorker:
        """Listens; answers at once."""
        uid = secrets.token_hex(8)
        self = cls(
            WorkerRecord(
                pod_uid=uid,
                incarnation=secrets.token_hex(8),
                namespace=namespace,
                service=service,
                role=role,
                revision=revision,
                model_revision=model_revision,
                served_names=list(served if served is not None else (service, f"{namespace}/{service}")),
                kv_capacity_tokens=capacity,
                max_rows=64,
                context_length=4096,
                transfer_backends=["tcp"],
                profile=Profile(prefill_tokens_per_s=prefill_tokens_per_s, step_base_s=0.01),
            )
        )
        load_port = self._load.bind_to_random_port("tcp://127.0.0.1")
        try:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        except OSError:
            self._context.destroy(linger=0)
            raise
        port = self._server.sockets[0].getsockname()[1]
        ports = Ports(internal=port, data=port, bootstrap=port + 1 if role != "decode" and port < 65535 else 0, load=load_port)
        self.record = msgspec.structs.replace(self.record, ports=ports)
        return self

    @property
    def port(self) -> int:
        return self.record.ports.internal

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def legs(self) -> list[Received]:
        """Requests that ask for an answer."""
        return [r for r in self.received if r.path.startswith(("/v1/", "/api/"))]

    async def stop(self) -> None:
        """Ends the server and every connection."""
        if self._server is not None:
            self._server.close()
        self.cut_connections()
        self._load.close()
        self._context.destroy(linger=0)

    def cut_connections(self) -> None:
        """What a killed process looks like."""
        for writer in list(self._writers):
            writer.transport.abort()

    def restart(self) -> None:
        """A new incarnation on the same port."""
        self.record = msgspec.structs.replace(self.record, incarnation=secrets.token_hex(8))
        self.cut_connections()

    async def publish(self, **report: Any) -> None:
        """One load report."""
        self._seq += 1
        body = msgspec.msgpack.encode(LoadReport(incarnation=self.record.incarnation, seq=self._seq, **report))
        await self._load.send_multipart([load_topic(self.record.pod_uid), body])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        self.connections += 1
        served = 0
        try:
            while (request := await read_request(reader)) is not None:
                if self.idle_close and served:
                    return
                served += 1
                if not await self._answer(request, reader, writer):
                    return
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # cancelled: the test's loop ends
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        if request.path == "/readyz" and self.silent_polls:
            self.silent_polls -= 1
            await reader.read(1)  # until the router hangs up
            return False
        simple = self._simple(request)
        if simple is not None:
            status, body, kind = simple
            await write_answer(writer, status, body, kind, {})
            return True
        decode(request)
        async with self.changed:
            self.received.append(request)
            self.changed.notify_all()
        script = self.scripts.popleft() if self.scripts else self.default
        work = asyncio.ensure_future(self._play(script, request, writer))
        watch = asyncio.ensure_future(reader.read(1))
        for task in (work, watch):
            task.add_done_callback(lambda t: t.cancelled() or t.exception())  # a broken connection is no surprise here
        await asyncio.wait([work, watch], return_when=asyncio.FIRST_COMPLETED)
        if not work.done():  # the router hung up (it never pipelines)
            request.gone.set()
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work
            return False
        if not watch.done():
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch
        return work.result()

    def _simple(self, request: Received) -> tuple[int, bytes, str] | None:
        if request.path == "/readyz":
            return (200, b"{}", "application/json") if self.ready else (503, b'{"status":"starting"}', "application/json")
        if request.path == "/worker":
            return 200, msgspec.json.encode(self.record), "application/json"
        if request.path == "/tokenizer":
            return 200, self.tokenizer, "application/zip"
        if request.path == "/abort_request":
            self.aborts.append(json.loads(request.body)["rid"])
            return 200, b'{"state":"aborted"}', "application/json"
        return None

    async def _play(self, script: Script, request: Received, writer: asyncio.StreamWriter) -> bool:
        """Does what the script says; False when the connection has to end."""
        if script.delay_s:
            await asyncio.sleep(script.delay_s)
        if script.wait is not None:
            await script.wait.wait()
        if script.close_before:
            return False
        if request.routed.leg == "prefill" and script.status == 200 and script.body is None:
            body = msgspec.json.encode(PrefillAnswer(request.routed.rid or "", script.cached_tokens, len(request.ids or [])))
            await write_answer(writer, 200, body, "application/json", script.headers)
            return True
        wants_stream = isinstance(request.json, dict) and request.json.get("stream") is True
        if script.status != 200 or script.body is not None or not wants_stream:
            body = script.body if script.body is not None else json.dumps({"choices": [{"text": "hello"}], "usage": {"prompt_tokens": 1}}).encode()
            await write_answer(writer, script.status, body, "application/json", script.headers, truncate=script.truncate)
            return not script.truncate
        return await self._stream(script, writer)

    async def _stream(self, script: Script, writer: asyncio.StreamWriter) -> bool:
        pieces = script.pieces if script.pieces is not None else [DEFAULT_STREAM]
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: {script.stream_type}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        for n, piece in enumerate(pieces):
            if script.wait_after is not None and n == script.wait_after[0]:
                await writer.drain()
                await script.wait_after[1].wait()
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
            await asyncio.sleep(0)
        if script.wait_after is not None and script.wait_after[0] >= len(pieces):
            await script.wait_after[1].wait()
        if script.truncate:
            return False
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


def decode(request: Received) -> None:
    """Reads a routed request as a runtime would; a broken one fails the test."""
    request.routed = parse_routed_headers(request.headers)
    text = request.body
    if request.header("Content-Type") == names.CONTENT_TYPE_IDS:
        text, request.ids = split_ids_body(int(request.header(names.HEADER_JSON_LENGTH) or -1), request.body)
    request.json = json.loads(text)


async def write_answer(writer: asyncio.StreamWriter, status: int, body: bytes, kind: str, headers: dict[str, str], *, truncate: bool = False) -> None:
    """One answer with a length; truncated: half of the body only."""
    lines = [f"HTTP/1.1 {status} Scripted", f"Content-Type: {kind}", f"Content-Length: {len(body)}", *(f"{k}: {v}" for k, v in headers.items())]
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + (body[: len(body) // 2] if truncate else body))
    await writer.drain()


async def read_request(reader: asyncio.StreamReader) -> Received | None:
    """The next whole request of a connection; None at its end."""
    done: list[Received] = []
    headers: list[tuple[str, str]] = []
    body: list[bytes] = []
    url: list[bytes] = []

    class Callbacks:
        def on_url(self, data: bytes) -> None:
            url.append(data)

        def on_header(self, name: bytes, value: bytes) -> None:
            headers.append((name.decode("latin-1"), value.decode("latin-1")))

        def on_body(self, data: bytes) -> None:
            body.append(data)

        def on_message_complete(self) -> None:
            done.append(Received(parser.get_method().decode(), b"".join(url).decode(), headers, b"".join(body)))

    parser = httptools.HttpRequestParser(Callbacks())
    while not done:
        data = await reader.read(65536)
        if not data:
            return None
        parser.feed_data(data)
    return done[0]
