"""`make router-profile`: where the microseconds of a request go, stage by stage, in one process without sockets.

The product's own objects on an event loop; only the two ends of the wire are played: a client that sends its next request when it has
its answer, and workers that answer in the same turn of the loop. So the kernel's part (about four system calls a request) is not in it.
Processor time of this thread; each stage is the best of several rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, cast

import msgspec
import uvloop

from fleet_contract.cache_folder import cache_folder
from fleet_contract.worker import Ports, Profile, WorkerRecord
from fleet_router.api.body import Prompt, begin_prompt, parse_body
from fleet_router.api.paths import CHAT
from fleet_router.brain.registry import Endpoint
from fleet_router.desk import Lease, Want
from fleet_router.edge.encoders import with_chains
from fleet_router.http.client import Connection
from fleet_router.http.exchange import Exchange
from fleet_router.http.request import Request
from fleet_router.http.server import DataProtocol, ServerState
from fleet_router.settings import Settings
from fleet_router.single import Single
from fleet_text.chat import chat_inputs
from fleet_text.prompt import PromptEncoder, TokenizerFilesError
from fleet_text.words import find_words

ROUNDS: Final = 5
REVISION: Final = "00112233445566aa"
WORKERS: Final = 4
_WORDS: Final = " ".join(f"word{n * 7 % 97}" for n in range(1, 401))
_ANSWER: Final = msgspec.json.encode({
    "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "bench",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hello there, how can I help you today?"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 500, "completion_tokens": 10, "total_tokens": 510},
})  # fmt: skip
ANSWER: Final = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(_ANSWER), _ANSWER)
_EVENT: Final = b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":" hello"}}]}\n\n'
CHUNK: Final = b"%x\r\n%b\r\n" % (len(_EVENT), _EVENT)
STREAM_HEAD: Final = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
STREAM_END: Final = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


class Wire(asyncio.Transport):
    """The far end of a connection: gets what is written."""

    def __init__(self, on_write: Callable[[bytes], None]) -> None:
        super().__init__()
        self._on_write = on_write

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._on_write(bytes(data))

    def writelines(self, parts: Iterable[bytes | bytearray | memoryview]) -> None:
        self._on_write(b"".join(parts))

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def write_eof(self) -> None: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...


def chat(n: int, *, stream: bool = False) -> bytes:
    """A chat of 2.8 KB: one of sixteen systems, a question of its own."""
    messages = [{"role": "system", "content": f"group {n % 16} {_WORDS}"}, {"role": "user", "content": f"question {n}"}]
    return msgspec.json.encode({"model": "bench", "messages": messages, "max_tokens": 16, "stream": stream})


def request(body: bytes) -> bytes:
    """Head and body."""
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:8000\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    return head + body


def best_us(call: Callable[[], object], count: int) -> float:
    """Processor time of one call."""
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.thread_time()
        for _ in range(count):
            call()
        best = min(best, time.thread_time() - began)
    return 1e6 * best / count


class Rig:
    """An edge with workers that answer in the same turn."""

    def __init__(self, encoder: PromptEncoder | None) -> None:
        self.loop = asyncio.get_running_loop()
        self.edge = Single(Settings(static=("http://127.0.0.1:1",)), max_files=1024)
        self.connections: list[Connection] = []
        self.streams: list[Connection] = []
        self.model = REVISION if encoder is not None else ""  # without a name nobody is asked for its tokenizer
        if encoder is not None:
            self.edge.encoders.put(REVISION, *with_chains(encoder))
        for n in range(WORKERS):
            self._add_worker(9000 + n)

    def _add_worker(self, port: int) -> None:
        record = WorkerRecord(
            pod_uid=f"w{port}", incarnation=f"{port:016x}", revision="r1", model_revision=self.model, served_names=["bench"],
            kv_capacity_tokens=20_000_000, ports=Ports(internal=port), profile=Profile(prefill_tokens_per_s=1e7, step_base_s=0.001),
        )  # fmt: skip
        self.edge.brain.take_endpoint(Endpoint(f"127.0.0.1:{port}", "127.0.0.1", port, record=record, healthy=True, asked=True))
        connection = Connection(self.edge.pool, ("127.0.0.1", port))

        def answer(data: bytes) -> None:
            if b'"stream":true' in data:
                self.streams.append(connection)
            else:
                self.loop.call_soon(connection.data_received, ANSWER)

        connection.connection_made(Wire(answer))
        self.edge.pool.keep(connection)
        self.connections.append(connection)

    def _stay(self) -> None:
        """Kept connections are not too old to be used, whatever was measured since."""
        for connection in self.connections:
            connection.idle_since = self.loop.time()

    async def whole_us(self, count: int) -> float:
        """Requests one after another, from a client's bytes to its answer's."""
        self._stay()
        requests = [request(chat(n)) for n in range(count)]
        done: asyncio.Future[None] = self.loop.create_future()
        left = iter(requests[1:])
        refused = b""

        def on_answer(data: bytes) -> None:
            nonlocal refused
            following = next(left, None)
            if not data.startswith(b"HTTP/1.1 200"):
                refused = data
            if following is not None and not refused:
                self.loop.call_soon(client.data_received, following)
            elif not done.done():
                done.set_result(None)

        client = DataProtocol(self.edge.server_state)
        client.connection_made(Wire(on_answer))
        began = time.thread_time()
        client.data_received(requests[0])
        await done
        used = time.thread_time() - began
        if refused:
            raise RuntimeError(f"a request was refused: {refused.decode(errors='replace')}")
        return 1e6 * used / count

    async def chunk_us(self, count: int) -> float:
        """Chunks of one stream, each for itself."""
        self._stay()
        client = DataProtocol(self.edge.server_state)
        client.connection_made(Wire(lambda data: None))
        client.data_received(request(chat(0, stream=True)))
        while not self.streams:
            await asyncio.sleep(0)
        worker = self.streams.pop()
        worker.data_received(STREAM_HEAD + CHUNK)

        def one() -> None:
            worker.data_received(CHUNK)
            client.flush()  # as at the end of a turn of the loop

        took = best_us(one, count)
        worker.data_received(STREAM_END)
        await asyncio.sleep(0)
        return took


def head_us(state: ServerState, count: int, *, known: bool) -> float:
    """A head and its body, with an answer at once."""

    def answer(request: Request, exchange: Exchange) -> None:
        exchange.respond(200, b"{}")

    plain = ServerState(state.limits, answer, state.make_request_id, lambda limit: None)
    client = DataProtocol(plain)
    client.connection_made(Wire(lambda data: None))
    data = request(chat(1))

    def one() -> None:
        if not known:
            plain.heads.clear()
        client.data_received(data)
        client.flush()  # as at the end of a turn of the loop

    took = best_us(one, count)
    client.connection_lost(None)
    return took


def stages(rig: Rig, encoder: PromptEncoder | None, count: int) -> list[tuple[str, float]]:
    """Each stage alone."""
    parsed = parse_body(CHAT, chat(1))
    out = [
        ("head and answer's head, seen before", head_us(rig.edge.server_state, count, known=True)),
        ("  a head not seen before", head_us(rig.edge.server_state, count, known=False)),
        ("JSON", best_us(lambda: parse_body(CHAT, parsed.body), count)),
    ]
    chains = rig.edge.encoders.chains(REVISION)
    if encoder is None:
        out.append(("keys of its bytes", best_us(lambda: begin_prompt(parsed, None, REVISION), count)))
    else:
        messages = msgspec.json.decode(parsed.body)["messages"]
        inputs = chat_inputs({"messages": messages})
        text = encoder.render_chat(inputs)
        out.append(("chat template", best_us(lambda: encoder.render_chat(inputs), count)))
        if chains is not None:
            numbers = iter(range(10**9))
            chains.read(chains.look(text, 1))
            out.append(("token ids and keys, a new question", best_us(lambda: chains.read(chains.look(f"{text} {next(numbers)}", 1)), count)))
            out.append(("  all of it known", best_us(lambda: chains.read(chains.look(text, 1)), count)))
        if (words := find_words(encoder)) is not None:
            out.append(("  a new text of known words", best_us(lambda: words.encode(text), count)))
        out.append(("  a new text, without a table of words", best_us(lambda: encoder.encode(text, add_special_tokens=False), max(1, count // 20))))
    prompt = cast(Prompt, begin_prompt(parsed, encoder, REVISION, chains))
    service = next(iter(rig.edge.brain.table.services.values()))
    want = Want(service.key, prompt.tokens, 16, "r1", prompt.keys, silent=True, key_tokens=prompt.key_tokens)

    def choose() -> None:
        lease = rig.edge.brain.begin(want, 1.0)
        assert isinstance(lease, Lease)
        lease.release()

    out.append(("choice, counted and given back", best_us(choose, count)))
    return out


async def profile(encoder: PromptEncoder | None, count: int) -> list[tuple[str, float]]:
    """All lines of the table."""
    rig = Rig(encoder)
    try:
        out = stages(rig, encoder, count)
        known = sum(us for name, us in out if not name.startswith("  "))
        whole = min([await rig.whole_us(count) for _ in range(ROUNDS)])
        out.append(("dispatch, answer, and what binds them", whole - known))
        out.append(("a whole request", whole))
        out.append(("a chunk of a stream", await rig.chunk_us(count)))
        return out
    finally:
        await rig.edge.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0, or 2 when the model's folder has no tokenizer."""
    p = argparse.ArgumentParser(prog="make router-profile ARGS=", description="Where the microseconds of a routed request go.")
    p.add_argument("--model-folder", type=Path, default=cache_folder() / "models/smollm2-135m-instruct", help="whose tokenizer is used")
    p.add_argument("--requests", type=int, default=2000, help="of each round (default %(default)s)")
    a = p.parse_args(argv)
    try:
        encoder = PromptEncoder.from_folder(a.model_folder)
    except TokenizerFilesError as e:
        print(f"router-profile: --model-folder {a.model_folder}: {e}", file=sys.stderr)
        return 2
    for title, used in (("with token ids", encoder), ("without a tokenizer", None)):
        print(f"{title}, 2.8 KB chats, {WORKERS} workers:")
        for name, us in uvloop.run(profile(used, a.requests)):
            print(f"  {us:9.1f} us  {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
