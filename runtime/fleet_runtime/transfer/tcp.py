"""KvTransfer over plain TCP: the I/O thread of the scheduler process, with both ends of the hand-over on one asyncio loop.

A prefill or unified worker listens (transfer port, bootstrap server); every worker may dial. Commands are queued onto the loop; events are
queued for `poll`, and `wake_fd` becomes readable, so that the scheduler can sleep in its poller.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from fleet_contract.errors import ApiError
from fleet_contract.handoff import Done, FrameError, Hello, Route
from fleet_runtime.errors import StartError
from fleet_runtime.transfer.base import Event, PageAccess, TransferCounters
from fleet_runtime.transfer.bootstrap import BootstrapServer
from fleet_runtime.transfer.decode_rooms import STREAM_LIMIT_BYTES, DecodeRooms
from fleet_runtime.transfer.link import HelloError, Link, Settings, Shared
from fleet_runtime.transfer.prefill_rooms import PrefillRooms

log = logging.getLogger(__name__)


class TcpTransfer:
    """See the module. Implements KvTransfer. `start` before use; `close` ends the thread."""

    def __init__(
        self,
        hello: Hello,
        pages: PageAccess,
        settings: Settings,
        *,
        listen: bool,
        host: str = "127.0.0.1",
        transfer_port: int = 0,
        bootstrap_port: int = 0,
    ) -> None:
        self.transfer_port = transfer_port if listen else 0
        self.bootstrap_port = bootstrap_port if listen else 0
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._listen = listen
        self._host = host
        self._events: deque[Event] = deque()
        self._shared = Shared(hello, pages, settings, self._emit)
        self._loop = asyncio.new_event_loop()
        self._prefill = PrefillRooms(self._shared, self._loop.time)
        self._decode = DecodeRooms(self._shared, self._loop.time)
        self._bootstrap = BootstrapServer()
        self._server: asyncio.Server | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name="transfer", daemon=True)
        self._closed = False

    # Thread.

    def start(self) -> None:
        """Binds the ports and starts the thread. Raises StartError(PortInUse)."""
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _open(self) -> None:
        if self._listen:
            try:
                flag, port = "--transfer-port", self.transfer_port
                self._server = await asyncio.start_server(self._serve, self._host, self.transfer_port, limit=STREAM_LIMIT_BYTES)
                self.transfer_port = self._server.sockets[0].getsockname()[1]
                flag, port = "--bootstrap-port", self.bootstrap_port
                await self._bootstrap.start(self._host, self.bootstrap_port)
            except OSError as e:
                raise StartError("PortInUse", f"cannot listen on {self._host}:{port}: {e.strerror}; choose another with {flag}") from e
            self.bootstrap_port = self._bootstrap.port
            hello = self._shared.hello
            self._bootstrap.route = Route(
                incarnation=hello.incarnation,
                pod_uid=hello.pod_uid,
                rank=hello.rank,
                ranks=hello.ranks,
                transfer_port=self.transfer_port,
                backends=[hello.backend],
            )
        self._ticker = asyncio.create_task(self._tick())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = Link(reader, writer, self._shared, self._prefill)
        try:
            await link.greet()
        except (HelloError, FrameError, OSError, TimeoutError, asyncio.IncompleteReadError) as e:
            log.warning("refused a transfer connection from %s: %s", writer.get_extra_info("peername"), e or type(e).__name__)
            writer.close()
            return
        self._prefill.links.add(link)
        link.start()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._shared.settings.tick_s)
            try:
                for link in (*self._prefill.links, *self._decode.links):
                    link.tick()
                self._prefill.tick()
                self._decode.tick()
            except Exception:
                log.exception("the transfer's tick failed")

    def close(self) -> None:
        """Closes every connection and ends the thread."""
        if self._closed:
            return
        self._closed = True
        asyncio.run_coroutine_threadsafe(self._shut(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        os.close(self.wake_fd)

    async def _shut(self) -> None:
        self._bootstrap.close()
        if self._server is not None:
            self._server.close()
        for link in (*self._prefill.links, *self._decode.links):
            link.close("this worker ends")
        # A stopped loop would leave half done what is under way.
        rest = asyncio.all_tasks() - {asyncio.current_task()}  # ticker, dials, questions, greetings
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    # Scheduler's side.

    def _emit(self, event: Event) -> None:
        self._events.append(event)
        os.eventfd_write(self.wake_fd, 1)

    def poll(self) -> list[Event]:
        try:
            os.eventfd_read(self.wake_fd)
        except BlockingIOError:
            return []
        out: list[Event] = []
        while self._events:
            out.append(self._events.popleft())
        return out

    @property
    def counters(self) -> TransferCounters:
        return self._shared.counters

    def beat(self) -> None:
        self._shared.beats += 1

    def _call(self, command: Callable[..., None], *args: Any) -> None:
        if not self._closed:
            self._loop.call_soon_threadsafe(command, *args)

    def expect(self, room: int) -> None:
        self._call(self._prefill.expect, room)

    def send_pages(self, room: int, first: int, pages: Sequence[int]) -> None:
        self._call(self._prefill.send_pages, room, first, pages)

    def send_done(self, room: int, done: Done) -> None:
        self._call(self._prefill.send_done, room, done)

    def cancel(self, room: int, error: ApiError) -> None:
        self._call(self._prefill.cancel, room, error)

    def dial(self, generation: int, room: int, bootstrap: str, incarnation: str) -> None:
        self._call(self._decode.dial, generation, room, bootstrap, incarnation)

    def alloc(self, generation: int, prefix_pages: int, pages: Sequence[int], prompt_tokens: int) -> None:
        self._call(self._decode.alloc, generation, prefix_pages, pages, prompt_tokens)

    def abandon(self, generation: int, error: ApiError) -> None:
        self._call(self._decode.abandon, generation, error)

    def reject(self, room: int, leg: str, bootstrap: str, incarnation: str, error: ApiError) -> None:
        if leg == "prefill":
            self._call(self._prefill.reject, room, error)
        elif bootstrap:
            self._call(self._decode.reject, room, bootstrap, incarnation, error)
