"""Load reports for routers: what this worker has to do, and which picks the report already holds. Format: docs/contract.md section 5.

`SeenPicks` and `LoadReporter.due` are pure over a clock that is handed in; only `LoadPublisher` owns a socket.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import msgspec
import zmq

from fleet_contract.names import PAGE_SIZE
from fleet_contract.worker import LoadReport, Seen, load_topic
from fleet_runtime.cache import pages as owners
from fleet_runtime.errors import StartError
from fleet_runtime.scheduler.loop import Scheduler

LEAST_INTERVAL_S: Final = 0.05
IDLE_INTERVAL_S: Final = 1.0
ROUTER_SILENT_S: Final = 60.0
MAX_MISSING: Final = 64  # gaps that are remembered per router; older ones count as seen: those requests never came here


class SeenPicks:
    """Per router the highest pick that arrived, and the gaps below it. Picks of one router to one worker count up by one."""

    def __init__(self) -> None:
        self._routers: OrderedDict[str, tuple[Seen, float]] = OrderedDict()  # in order of last use

    def note(self, router: str, pick: int, now: float) -> None:
        """A request with this pick has arrived."""
        seen, _ = self._routers.get(router, (Seen(up_to=max(-1, pick - 1 - MAX_MISSING)), 0.0))
        if pick > seen.up_to:
            first = max(seen.up_to + 1, pick - MAX_MISSING)
            seen.missing = (seen.missing + list(range(first, pick)))[-MAX_MISSING:]
            seen.up_to = pick
        elif pick in seen.missing:
            seen.missing.remove(pick)
        self._routers[router] = (seen, now)
        self._routers.move_to_end(router)

    def report(self, now: float) -> dict[str, Seen]:
        """What a report says; routers that were silent for long are forgotten."""
        while self._routers and next(iter(self._routers.values()))[1] < now - ROUTER_SILENT_S:
            self._routers.popitem(last=False)
        return {router: seen for router, (seen, _) in self._routers.items()}


class LoadReporter:
    """Decides when a report is due, and makes it."""

    def __init__(self, scheduler: Scheduler, *, incarnation: str, clock: Callable[[], float]) -> None:
        self.seen = SeenPicks()
        self._scheduler = scheduler
        self._incarnation = incarnation
        self._clock = clock
        self._seq = 0
        self._last: bytes = b""
        self._last_at = float("-inf")

    def due(self) -> bytes | None:
        """The next report if it is time for one: on a change at most 20 a second, else one each second."""
        now = self._clock()
        if now - self._last_at < LEAST_INTERVAL_S:
            return None
        report = self._facts(now)
        content = msgspec.msgpack.encode(report)
        if content == self._last and now - self._last_at < IDLE_INTERVAL_S:
            return None
        self._last, self._last_at = content, now
        self._seq += 1
        report.seq = self._seq
        return msgspec.msgpack.encode(report)

    def _facts(self, now: float) -> LoadReport:
        book = self._scheduler.book
        pages = book.memory.pages
        return LoadReport(
            incarnation=self._incarnation,
            pend=self._scheduler.prompt_tokens_waiting,
            run=book.running,
            ctx=sum(r.computed for r in book.prefilling) + sum(r.length for r in book.decoding),
            kv_used=(pages.num_pages - pages.count(owners.FREE)) * PAGE_SIZE,
            kv_capacity=pages.num_pages * PAGE_SIZE,
            draining=self._scheduler.draining,
            seen=self.seen.report(now),
        )


class LoadPublisher:
    """The PUB socket; a slow reader loses reports and never delays the scheduler."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], *, host: str, port: int, pod_uid: str) -> None:
        self._topic = load_topic(pod_uid)
        self._socket = context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 100)
        self._socket.setsockopt(zmq.IPV6, int(":" in host))
        try:
            self._socket.bind(f"tcp://{f'[{host}]' if ':' in host else host}:{port or '*'}")
        except zmq.ZMQError as e:
            raise StartError("PortInUse", f"cannot bind the load port {host}:{port}: {e.strerror}; choose another with --load-port") from e
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def publish(self, report: bytes) -> None:
        """Sends one report to whoever listens."""
        self._socket.send_multipart([self._topic, report])

    def close(self) -> None:
        self._socket.close()
