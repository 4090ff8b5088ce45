"""A scripted worker as a process of its own, cheap enough for hundreds of requests a second beside the router: it can be killed and stopped.

`CheapWorker(folder, ...)` starts one and starts it again on its port. What a request gets is drawn by the chances it was started with:
a whole answer or a stream, after a while, now and then an error, a busy word, or a connection that ends in the middle. With `long` every
stream has so many events and comes as fast as it is read.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import httptools
import msgspec
import uvloop

from fleet_contract import names
from fleet_contract.lifeline import die_with_parent
from fleet_contract.worker import Ports, PrefillAnswer, Profile, WorkerRecord

AT_ONCE: Final = 200  # events of a long stream in one write
EVENTS: Final = 4  # of a stream
_EVENT: Final = b'data: {"choices":[{"index":0,"delta":{"content":"word "}}]}\n\n'
_CHUNK: Final = b"%x\r\n%b\r\n" % (len(_EVENT), _EVENT)
_END: Final = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
_STREAM_HEAD: Final = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_WHOLE: Final = b'{"choices":[{"index":0,"message":{"role":"assistant","content":"word word"}}],"usage":{"prompt_tokens":9,"completion_tokens":2}}'


class State:
    """What this process did, as `GET /state` tells it."""

    def __init__(self, record: WorkerRecord, tokenizer: bytes, options: argparse.Namespace) -> None:
        self.record = record
        self.tokenizer = tokenizer
        self.errors: float = options.errors
        self.busy: float = options.busy
        self.cuts: float = options.cuts
        self.seconds: float = options.seconds
        self.long: int = options.long
        self.running: set[Serving] = set()
        self.starts = self.aborts = self.gone = 0

    def told(self) -> bytes:
        return json.dumps({"running": len(self.running), "starts": self.starts, "aborts": self.aborts, "gone": self.gone}).encode()


class Serving(asyncio.Protocol):
    """One connection of the router."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.transport: asyncio.Transport | None = None
        self.loop = asyncio.get_running_loop()
        self.timer: asyncio.TimerHandle | None = None
        self.left = 0
        self.paused = False
        self.cut_at = -1
        self._begin()

    def _begin(self) -> None:
        self.parser = httptools.HttpRequestParser(self)
        self.url = b""
        self.leg = b""
        self.body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        if self.state.long:  # hundreds of streams that stand still would take the machine's memory for TCP
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        if self.timer is not None:
            self.timer.cancel()
        if self in self.state.running:
            self.state.running.discard(self)
            self.state.gone += 1

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == names.HEADER_LEG.lower().encode():
            self.leg = value

    def on_body(self, data: bytes) -> None:
        self.body.append(data)

    def on_message_complete(self) -> None:
        url, leg, body = self.url, self.leg, b"".join(self.body)
        self._begin()
        state = self.state
        if url.startswith(b"/v1/"):
            self._serve(leg, b'"stream":true' in body or b'"stream": true' in body)
        elif url == b"/abort_request":
            state.aborts += 1
            self._answer(200, b'{"state":"aborted"}')
        elif url == b"/worker":
            self._answer(200, msgspec.json.encode(state.record))
        elif url == b"/tokenizer":
            self._answer(200, state.tokenizer)
        else:
            self._answer(200, state.told() if url == b"/state" else b"{}")

    def _serve(self, leg: bytes, stream: bool) -> None:
        state = self.state
        state.starts += 1
        state.running.add(self)
        if stream and state.long:
            assert self.transport is not None
            self.transport.write(_STREAM_HEAD)
            self.left = state.long
            self._go_on()
            return
        drawn = random.random()
        after = state.seconds * random.random()
        self.cut_at = random.randrange(EVENTS) if random.random() < state.cuts else -1
        if drawn < state.errors:
            self.timer = self.loop.call_later(after, self._answer, 500, b'{"error":{"message":"drawn","type":"server_error","code":"drawn"}}')
        elif drawn < state.errors + state.busy:
            self.timer = self.loop.call_later(0, self._answer, 503, b'{"error":{"message":"drawn","type":"overloaded_error","code":"overloaded"}}')
        elif leg == b"prefill":
            self.timer = self.loop.call_later(after, self._answer, 200, msgspec.json.encode(PrefillAnswer("", 0, 9)))
        elif stream:
            self.left = EVENTS
            self.timer = self.loop.call_later(after / EVENTS, self._event, after / EVENTS)
        elif self.cut_at >= 0:
            self.timer = self.loop.call_later(after, self._close)
        else:
            self.timer = self.loop.call_later(after, self._answer, 200, _WHOLE)

    def _event(self, pause: float) -> None:
        if self.transport is None:
            return
        if self.left == self.cut_at:
            self._close()
            return
        self.transport.write(_STREAM_HEAD + _CHUNK if self.left == EVENTS else _CHUNK if self.left else _END)
        self.left -= 1
        if self.left < 0:
            self.state.running.discard(self)
        else:
            self.timer = self.loop.call_later(pause, self._event, pause)

    def _go_on(self) -> None:
        """A long stream as fast as it is read."""
        if self.transport is None or self.paused or self.left < 0:
            return
        count = min(self.left, AT_ONCE)
        self.left -= count
        self.transport.write(_CHUNK * count)
        if self.left:
            self.loop.call_soon(self._go_on)  # other streams have their turn
        else:
            self.left = -1
            self.transport.write(_END)
            self.state.running.discard(self)

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        if self.state.long:
            self._go_on()

    def _answer(self, status: int, body: bytes) -> None:
        self.state.running.discard(self)
        if self.transport is not None:
            kind = b"application/zip" if body[:2] == b"PK" else b"application/json"
            self.transport.write(b"HTTP/1.1 %d Told\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n%b" % (status, kind, len(body), body))

    def _close(self) -> None:
        self.state.running.discard(self)
        if self.transport is not None:
            self.transport.abort()


async def _live(options: argparse.Namespace) -> None:
    server_state: list[State] = []
    server = await asyncio.get_running_loop().create_server(lambda: Serving(server_state[0]), "127.0.0.1", options.port, backlog=1024)
    port = server.sockets[0].getsockname()[1]
    record = WorkerRecord(
        pod_uid=options.uid, incarnation=secrets.token_hex(8), namespace="demo", service="tiny", role=options.role, revision="aaaaaaaa",
        model_revision="00112233aabbccdd", served_names=["tiny"], kv_capacity_tokens=4_000_000, max_rows=512, context_length=4096,
        transfer_backends=["tcp"], ports=Ports(internal=port, data=port, bootstrap=port + 1 if port < 65535 else 1, load=0),
        profile=Profile(prefill_tokens_per_s=100_000.0, step_base_s=0.002),
    )  # fmt: skip
    server_state.append(State(record, Path(options.tokenizer).read_bytes(), options))
    partial = Path(options.announce + ".part")
    partial.write_text(str(port))
    partial.replace(options.announce)
    await asyncio.Event().wait()


def main() -> None:
    """The process."""
    parser = argparse.ArgumentParser()
    for name, kind, default in (
        ("errors", float, 0.0),
        ("busy", float, 0.0),
        ("cuts", float, 0.0),
        ("seconds", float, 0.05),
        ("port", int, 0),
        ("long", int, 0),
    ):
        parser.add_argument(f"--{name}", type=kind, default=default)
    for name in ("uid", "role", "tokenizer", "announce", "parent"):
        parser.add_argument(f"--{name}", required=True)
    options = parser.parse_args()
    die_with_parent(int(options.parent))
    uvloop.run(_live(options))


class CheapWorker:
    """One worker of a test: a process that is killed, stopped, continued and started again. Its port and pod stay the same."""

    def __init__(self, folder: Path, tokenizer: Path, *, role: str = "unified", **chances: float) -> None:
        self.role = role
        self.uid = secrets.token_hex(8)
        self.port = 0
        self._announce = folder / f"worker-{self.uid}"
        self._tokenizer = tokenizer
        self._chances = chances
        self.process: subprocess.Popen[bytes] | None = None
        self.stopped = False

    def start(self) -> CheapWorker:
        """Returns at once; `wait` waits for its port."""
        self._announce.unlink(missing_ok=True)
        argv = [sys.executable, "-m", "fleet_testing.cheap_worker", "--uid", self.uid, "--role", self.role, "--port", str(self.port)]
        argv += ["--tokenizer", str(self._tokenizer), "--announce", str(self._announce), "--parent", str(os.getpid())]
        argv += [word for name, value in self._chances.items() for word in (f"--{name}", str(value))]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
        self.process = subprocess.Popen(argv, env=environment, start_new_session=True)
        return self

    def wait(self, limit_s: float = 60.0) -> CheapWorker:
        """Until it listens."""
        deadline = time.monotonic() + limit_s
        while not self._announce.exists():
            assert self.process is not None and self.process.poll() is None and time.monotonic() < deadline, "the worker does not start"
            time.sleep(0.01)
        self.port = int(self._announce.read_text())
        return self

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def lives(self) -> bool:
        return self.process is not None and not self.stopped

    def send(self, number: signal.Signals) -> None:
        """KILL ends it, STOP and CONT stop it and let it go on."""
        assert self.process is not None
        self.process.send_signal(number)
        self.stopped = number == signal.SIGSTOP
        if number == signal.SIGKILL:
            self.process.wait()
            self.process = None

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def tokenizer_file(folder: Path, data: bytes) -> Path:
    """Where the workers of a test read what `GET /tokenizer` gives."""
    path = folder / "tokenizer.zip"
    path.write_bytes(data)
    return path


def told(workers: list[CheapWorker], get: Any) -> list[dict[str, int]]:
    """What each living worker says of itself. get: URL -> bytes."""
    return [json.loads(get(f"{w.url}/state")) for w in workers if w.lives]


if __name__ == "__main__":
    main()
