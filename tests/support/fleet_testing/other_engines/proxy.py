"""A TCP forwarder that can be cut: what is sent meanwhile is lost to whoever subscribed through it."""

from __future__ import annotations

import asyncio
import contextlib


class CutProxy:
    """From a port of its own to one of 127.0.0.1."""

    def __init__(self, target: int) -> None:
        self.port = 0
        self._target = target
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    @classmethod
    async def start(cls, target: int) -> CutProxy:
        self = cls(target)
        await self.mend()
        return self

    async def mend(self) -> None:
        """Forwards, from now on and at the same port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        """Ends all connections and takes no new ones."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()

    async def close(self) -> None:
        self.cut()
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            back, forth = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers.add(forth)
        await asyncio.gather(self._pump(reader, forth), self._pump(back, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        self._writers.discard(writer)
        writer.close()
