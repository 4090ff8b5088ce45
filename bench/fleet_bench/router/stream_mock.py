"""`python -m fleet_bench.router.stream_mock PORT[,PORT...] CHUNKS PAUSE_S`: workers that stream, cheap enough to be no bottleneck."""

from __future__ import annotations

import asyncio
import resource
import sys
from collections.abc import Sequence
from typing import Final, cast

import uvloop

from fleet_bench.router.mocks import ABOUT, ANSWER, record

EVENT: Final = (
    b'data: {"id":"chatcmpl-123456789","object":"chat.completion.chunk","created":1700000000,"model":"bench",'
    b'"choices":[{"index":0,"delta":{"content":" hello"},"logprobs":null,"finish_reason":null}]}\n\n'
)
CHUNK: Final = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
DONE: Final = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
STREAM_HEAD: Final = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def whole(body: str, status: bytes = b"200 OK") -> bytes:
    """An answer that is no stream."""
    return b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body.encode())


class Streaming(asyncio.Protocol):
    """One connection of a router, one request at a time."""

    def __init__(self, port: int, chunks: int, pause_s: float) -> None:
        self.loop = asyncio.get_running_loop()
        self.chunks, self.pause_s = chunks, pause_s
        self.buffer = b""
        self.made = 0
        self.transport: asyncio.Transport | None = None
        self.answers = {b"/worker": whole(record(port)), b"/tokenizer": whole("{}", b"404 Not Found"), b"/readyz": whole('{"status":"ready"}')}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None

    def data_received(self, data: bytes) -> None:
        data, self.buffer = self.buffer + data, b""
        end = data.find(b"\r\n\r\n")
        head = data[:end].lower()
        at = head.find(b"content-length:")
        length = int(head[at + 15 :].split(b"\r", 1)[0]) if at >= 0 else 0
        if end < 0 or len(data) < end + 4 + length:
            self.buffer = data
            return
        path = data[:200].split(b" ", 2)[1]
        transport = self.transport
        if transport is None:
            return
        if path.endswith(b"completions") and b'"stream":true' in data[end:]:
            transport.write(STREAM_HEAD + (b"" if self.chunks else CHUNK))
            if self.chunks:
                self.made = 0
                self.loop.call_later(self.pause_s, self.tick)
        else:
            transport.write(self.answers.get(path) or whole(ANSWER if path.endswith(b"completions") else ABOUT))

    def tick(self) -> None:
        """The next event; after the last the end."""
        if self.transport is None or self.transport.is_closing():
            return
        self.made += 1
        if self.made == self.chunks:
            self.transport.write(CHUNK + DONE)
        else:
            self.transport.write(CHUNK)
            self.loop.call_later(self.pause_s, self.tick)


async def serve(ports: Sequence[int], chunks: int, pause_s: float) -> None:
    """Until the process ends."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    loop = asyncio.get_running_loop()
    for port in ports:
        await loop.create_server(lambda port=port: Streaming(port, chunks, pause_s), "127.0.0.1", port, backlog=2048)  # type: ignore[misc]
    await asyncio.Event().wait()


def main(argv: Sequence[str]) -> int:
    """Three words, see the module."""
    uvloop.run(serve([int(p) for p in argv[0].split(",")], int(argv[1]), float(argv[2])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
