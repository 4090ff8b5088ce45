"""What the scripted vLLM and SGLang have in common: real sockets on 127.0.0.1, a tiny 'model', streams, kills, counted blocks.

The answer to a prompt is a function of the prompt that the engine really holds, so a lost hand-over shows as a wrong text.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from fleet_testing.fake_worker import Received, read_request, write_answer

BLOCK_TOKENS = 16
DEFAULT_ANSWER = 3


def prompt_text(body: dict[str, Any]) -> str:
    """The prompt of a chat or completion, as one text."""
    return json.dumps(body["messages"] if "messages" in body else body["prompt"], sort_keys=True)


def answer_tokens(prompt: str, n: int) -> list[str]:
    """What the model says to a prompt."""
    return [hashlib.sha256(f"{prompt}|{i}".encode()).hexdigest()[:6] + " " for i in range(n)]


class PrefixCache:
    """What an engine has cached: blocks of 16 tokens, one token a character, never all of a prompt. It forgets nothing."""

    def __init__(self) -> None:
        self._held: set[str] = set()

    def use(self, prompt: str) -> int:
        """Tokens of a prompt that were here; now all its whole blocks are."""
        cached = 0
        for end in range(BLOCK_TOKENS, len(prompt), BLOCK_TOKENS):
            prefix = hashlib.sha256(prompt[:end].encode()).hexdigest()
            if prefix in self._held and cached == end - BLOCK_TOKENS:
                cached = end
            self._held.add(prefix)
        return cached


def num_blocks(prompt: str) -> int:
    return 1 + len(prompt) // BLOCK_TOKENS


class Refused(Exception):
    """An error answer: status and text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass
class Timing:
    """How long the engine's phases take; 0 still gives the loop a turn."""

    prefill_s: float = 0.0
    transfer_s: float = 0.0
    step_s: float = 0.0


@dataclass(eq=False)
class FakeEngine:
    """One server. The first request that comes to a phase in `doom`, which engines may share, kills its server; in `stalls` it stays there."""

    served: str = "org/tiny"
    timing: Timing = field(default_factory=Timing)
    received: list[Received] = field(default_factory=list)
    starts: int = 0  # requests that the engine began to work on
    ends: int = 0
    pinned: dict[str, int] = field(default_factory=dict)  # blocks of each request or transfer
    health: int = 200
    doom: set[str] = field(default_factory=set)
    stalls: set[str] = field(default_factory=set)
    refuse: tuple[int, str] | None = None  # the next request gets this answer
    api_key: str = ""
    cache: PrefixCache | None = None  # else it makes up what it has cached
    port: int = 0
    dead: bool = False
    phases: list[str] = field(default_factory=list)
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)
    _servers: list[asyncio.Server] = field(default_factory=list)

    scheme = ""

    async def start(self, port: int = 0) -> None:
        """Listens."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.port = server.sockets[0].getsockname()[1]
        self._servers.append(server)
        self.dead = False

    def url(self, **words: object) -> str:
        """For --static."""
        query = "&".join(f"{k}={v}" for k, v in words.items())
        return f"{self.scheme}+http://127.0.0.1:{self.port}{'?' + query if query else ''}"

    @property
    def generations(self) -> list[Received]:
        return [r for r in self.received if r.method == "POST" and r.path.startswith("/v1/")]

    def cached_tokens(self, prompt: str) -> int:
        """Of a prompt that is computed now."""
        return self.cache.use(prompt) if self.cache is not None else len(prompt) // 32 * 16

    @property
    def pinned_blocks(self) -> int:
        return sum(self.pinned.values())

    @property
    def running(self) -> int:
        return self.starts - self.ends

    def kill(self) -> None:
        """As SIGKILL: no port, no connections, no memory."""
        self.dead = True
        for server in self._servers:
            server.close()
        self._servers.clear()
        for writer in list(self._writers):
            writer.transport.abort()
        self.pinned.clear()

    async def stop(self) -> None:
        self.kill()
        await asyncio.sleep(0)

    # -- of the kinds

    def simple(self, request: Received) -> tuple[int, bytes, str] | None:
        """The answer to what is no generation."""
        raise NotImplementedError

    async def work(self, body: dict[str, Any], request: Received, out: Output) -> None:
        """One generation. Cancelled when the client goes."""
        raise NotImplementedError

    def error_body(self, status: int, text: str) -> bytes:
        raise NotImplementedError

    # -- inside

    async def phase(self, name: str, seconds: float) -> None:
        """The request has come so far."""
        self.phases.append(name)
        if name in self.doom:
            self.doom.discard(name)
            self.kill()
            raise ConnectionAbortedError(name)
        if name in self.stalls:
            self.stalls.discard(name)
            await asyncio.Event().wait()
        await asyncio.sleep(seconds)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while (request := await read_request(reader)) is not None and await self._answer(request, reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        self.received.append(request)
        if self.api_key and request.path != "/health" and request.header("Authorization") != f"Bearer {self.api_key}":
            await write_answer(writer, 401, self.error_body(401, "Unauthorized"), "application/json", {})
            return True
        simple = self.simple(request)
        if simple is not None:
            await write_answer(writer, *simple, {})
            return True
        request.json = json.loads(request.body)
        task = asyncio.ensure_future(self._generate(request, writer))
        watch = asyncio.ensure_future(reader.read(1))
        await asyncio.wait([task, watch], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            request.gone.set()
            task.cancel()
        watch.cancel()
        with contextlib.suppress(asyncio.CancelledError, ConnectionError):
            await watch
        try:
            return await task
        except (asyncio.CancelledError, ConnectionError):
            return False

    async def _generate(self, request: Received, writer: asyncio.StreamWriter) -> bool:
        out = Output(self, request.json, writer)
        try:
            if self.refuse is not None:
                (status, text), self.refuse = self.refuse, None
                raise Refused(status, text)
            self.starts += 1
            try:
                await self.work(request.json, request, out)
            finally:
                self.ends += 1
        except Refused as e:
            if out.begun:
                await out.event({"error": {"message": str(e), "type": "server_error", "code": e.status}})
                await out.end()
            else:
                await write_answer(writer, e.status, self.error_body(e.status, str(e)), "application/json", {})
        return True


class Output:
    """The answer of one generation: a stream or one JSON."""

    def __init__(self, engine: FakeEngine, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.engine = engine
        self.body = body
        self.writer = writer
        self.is_stream = body.get("stream") is True
        self.begun = False

    async def begin(self) -> None:
        self.begun = True
        self.writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n")
        await self.writer.drain()

    async def event(self, said: Any) -> None:
        await self.piece(b"data: " + (said if isinstance(said, bytes) else json.dumps(said, separators=(",", ":")).encode()) + b"\n\n")

    async def piece(self, data: bytes) -> None:
        self.writer.write(b"%x\r\n%b\r\n" % (len(data), data))
        await self.writer.drain()

    async def end(self) -> None:
        await self.event(b"[DONE]")
        self.writer.write(b"0\r\n\r\n")
        await self.writer.drain()

    def usage(self, prompt: str, made: int, cached: int) -> dict[str, Any]:
        n = len(prompt)
        return {"prompt_tokens": n, "completion_tokens": made, "total_tokens": n + made, "prompt_tokens_details": {"cached_tokens": cached}}

    async def say(self, prompt: str, *, cached: int = 0, extra: dict[str, Any] | None = None) -> None:
        """The whole answer, token by token."""
        asked = self.body.get("max_completion_tokens") or self.body.get("max_tokens") or DEFAULT_ANSWER
        tokens = answer_tokens(prompt, min(int(asked), 64))
        timing = self.engine.timing
        is_chat = "messages" in self.body
        if not self.is_stream:
            for n, _ in enumerate(tokens):
                await self.engine.phase("first" if n == 0 else "later", timing.step_s)
            text = "".join(tokens)
            choice = {"index": 0, "finish_reason": "length", **({"message": {"role": "assistant", "content": text}} if is_chat else {"text": text})}
            said = {"id": "x", "object": "x", "choices": [choice], "usage": self.usage(prompt, len(tokens), cached), **(extra or {})}
            await write_answer(self.writer, 200, json.dumps(said).encode(), "application/json", {})
            return
        if not self.begun:
            await self.begin()
        for n, token in enumerate(tokens):
            await self.engine.phase("first" if n == 0 else "later", timing.step_s)
            await self.event({"id": "x", "choices": [{"index": 0, **({"delta": {"content": token}} if is_chat else {"text": token})}]})
        options = self.body.get("stream_options") or {}
        if options.get("include_usage"):
            await self.event({"id": "x", "choices": [], "usage": self.usage(prompt, len(tokens), cached)})
        await self.end()


def said_text(stream: bytes) -> str:
    """All text of a stream's events."""
    out = ""
    for line in stream.split(b"\n"):
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:]).get("choices", []):
                out += choice.get("text") or choice.get("delta", {}).get("content") or ""
    return out
