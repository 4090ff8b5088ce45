"""The sockets behind the index: one subscription per worker incarnation, a question to its replay port when its stream has to be repaired.

Lives on the brain's event loop, beside the brain: told of workers as a `WorkerWatcher`, started and closed by whoever owns the brain. In one
turn of the loop it works for TURN_S at most, whatever comes. While a stream is repaired its live messages stay in the socket; when that is
full they wait at the publisher, which drops what it cannot keep: a gap, which is repaired in turn. So memory is bounded everywhere.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

import zmq

from fleet_contract.kv_events import Batch, Cleared, decode_batch, encode_sequence, kv_topic, split_live, split_replay
from fleet_contract.wire import WireError
from fleet_router.brain.brain import Brain
from fleet_router.brain.worker import Worker
from fleet_router.decide.events import EventBook
from fleet_router.grid import Presence, call_on_tick
from fleet_router.kv_feed import follow
from fleet_router.kv_feed.apply import ORPHAN, UNDECODABLE, Content, Writer, tells_epochs
from fleet_router.kv_feed.follow import Follower, Question

log = logging.getLogger(__name__)

TURN_S: Final = 0.003
TICK_S: Final = 0.1
LIVE_HWM: Final = 2_000  # messages
ANSWER_HWM: Final = 4  # of up to some 300 KB each: a publisher waits for us
MAX_MESSAGE_BYTES: Final = 64 << 20
MAX_SOCKETS: Final = 65_536
WARM_S: Final = 3.0  # a starting router waits so long for its streams before it is ready
CLEARED_WORD: Final = b"AllBlocksCleared"


class KvReader:
    """All streams. `start` makes it a watcher of the brain."""

    def __init__(self, brain: Brain) -> None:
        self._brain = brain
        self._book = EventBook(brain.index)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.BLOCKY, 0)  # its end waits for nobody, also when it is only forgotten
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._feeds: dict[int, _Feed] = {}  # by slot
        self._due: deque[_Feed] = deque()  # may have something to do now
        self._turning = False
        self._timer: asyncio.TimerHandle | None = None
        self._presence = Presence()
        self._loop = asyncio.get_running_loop()

    def start(self) -> None:
        """Reads the streams of the brain's workers from now on."""
        self._brain.stream_of = self.report
        self._brain.streams_settled = self.settled
        self._brain.watch(self)

    async def close(self) -> None:
        """Ends all streams; the index stays as it is."""
        self._brain.unwatch(self)
        if self._timer is not None:
            self._timer.cancel()
        for feed in self._feeds.values():
            feed.close()
        self._feeds.clear()
        self._due.clear()
        self._context.destroy(linger=0)

    def added(self, worker: Worker) -> None:
        """A new incarnation; called by the brain."""
        if worker.record.ports.events:
            feed = self._feeds[worker.slot] = _Feed(self, worker)
            feed.start()
            if self._timer is None:
                self._set_timer()

    def gone(self, worker: Worker) -> None:
        """An incarnation is over; called by the brain, which clears the slot."""
        feed = self._feeds.pop(worker.slot, None)
        if feed is not None:
            feed.close()
            self._book.forget(worker.slot)

    def report(self, worker: Worker) -> dict[str, Any]:
        """How a worker's stream is, for /workers."""
        feed = self._feeds.get(worker.slot)
        if feed is None or feed.worker is not worker:
            return {"trust": follow.NONE, "sequence": None, "lagSeconds": None, "gaps": 0}
        follower = feed.follower
        told = follower.trust in (follow.LIVE, follow.SILENT, follow.REPAIRING)
        return {"trust": follower.trust, "sequence": follower.next - 1 if told else None, "lagSeconds": feed.lag_s, "gaps": follower.gaps}

    def settled(self) -> bool:
        """Every stream is believed, was given up once, or is read for WARM_S already."""
        now = self._brain.clock()
        return all(feed.follower.settled or now - feed.since > WARM_S for feed in self._feeds.values())

    # -- for the feeds

    def wake(self, feed: _Feed) -> None:
        """A feed may have something to do."""
        if not feed.is_due:
            feed.is_due = True
            self._due.append(feed)
        if not self._turning:
            self._turning = True
            self._loop.call_soon(self._turn)

    @property
    def brain(self) -> Brain:
        return self._brain

    @property
    def book(self) -> EventBook:
        return self._book

    @property
    def context(self) -> zmq.Context[zmq.Socket[bytes]]:
        return self._context

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    # -- inside

    def _turn(self) -> None:
        """Serves the feeds in turn for a short while."""
        end = time.perf_counter() + TURN_S
        while self._due:
            feed = self._due.popleft()
            feed.is_due = False
            if feed.step():
                feed.is_due = True
                self._due.append(feed)
            if time.perf_counter() >= end:
                break
        self._turning = bool(self._due)
        if self._turning:
            self._loop.call_soon(self._turn)

    def _set_timer(self) -> None:
        self._timer = call_on_tick(self._loop, TICK_S, self._tick)

    def _tick(self) -> None:
        """While there are streams."""
        timer, self._timer = self._timer, None
        if self._feeds:
            self._set_timer()
        if timer is not None and not self._presence.is_sure(self._loop.time(), timer.when()):
            return  # what the streams have brought meanwhile is read first
        now = self._brain.clock()
        for feed in list(self._feeds.values()):
            feed.tick(now)
        if (late := self._book.expire(now)) > 0:
            self._brain.counters.add("bad_events_total", late, (("reason", ORPHAN),))


class _Feed:
    """One stream: its sockets, its follower, the message in hand."""

    def __init__(self, reader: KvReader, worker: Worker) -> None:
        self.worker = worker
        self.is_due = False
        self.lag_s: float | None = None
        self._reader = reader
        self._loop = reader.loop
        record, counters = worker.record, reader.brain.counters
        self._content = Content(reader.brain.index, reader.book, worker.slot)
        self._writer = Writer(reader.book, worker.slot, record, lambda reason: counters.add("bad_events_total", 1, (("reason", reason),)))
        self.follower = Follower(self._content, can_ask=record.ports.replay > 0, count=counters.add, probe=lambda: reader.brain.probe(worker))
        self._live = _socket(reader.context, zmq.SUB, LIVE_HWM)
        self._live_fd = self._live.fileno()
        self._reads_live = False
        self._asked: zmq.Socket[bytes] | None = None
        self._question: Question | None = None  # that `_asked` was opened for
        self._held: tuple[int, bytes] | None = None  # a live message that waits for the repair
        self._work: Iterator[None] | None = None  # the message in hand
        self._era = 0  # of the content that `_work` writes to
        self._told_trust = ""
        self.since = self._now()

    def start(self) -> None:
        """Subscribes, then begins."""
        record = self.worker.record
        self._live.setsockopt(zmq.SUBSCRIBE, kv_topic(record.pod_uid, record.model_revision) if tells_epochs(record) else b"")
        self._live.connect(_address(self.worker.host, record.ports.events))
        self.follower.start(self._now())
        self._follow()

    def close(self) -> None:
        """Ends the sockets."""
        self._stop_reading()
        self._hang_up()
        self._live.close()
        self._work = self._held = None

    def tick(self, now: float) -> None:
        """A tenth of a second is over."""
        self.follower.tick(now)
        self._follow()

    def step(self) -> bool:
        """One piece of work; False when there is none now."""
        if self._live.closed:
            return False
        more = self._step()
        self._follow()
        return more

    # -- inside

    def _now(self) -> float:
        return self._reader.brain.clock()

    def _step(self) -> bool:
        if self._work is not None:
            self._go_on(self._work)
            return True
        if self.follower.asking is not None:
            return self._read_answer()
        if self.follower.reads_live:
            return self._read_live()
        return False

    def _go_on(self, work: Iterator[None]) -> None:
        """The next piece of the message in hand."""
        if self._era == self._content.era and next(work, self) is None:
            return
        self._work = None
        if self._era != self._content.era:
            return  # what it was written to is no more
        if self._writer.overflow:
            self._writer.overflow = False
            self.follower.wrong(self._now())
        self._tell_cached()

    def _tell_cached(self) -> None:
        """The load model counts what the cache holds."""
        self.worker.load.set_cached(self._reader.brain.index.held_tokens(self.worker.slot))

    def _take(self, batch: Batch) -> None:
        """Begins to apply a message."""
        self.follower.beats = self.follower.beats or not batch.events
        if self._writer.is_of_another_life(batch):
            self.follower.other_life()
            return
        self._work, self._era = self._writer.write(batch, self._now()), self._content.era

    def _read_live(self) -> bool:
        if self._held is not None:
            (sequence, payload), self._held = self._held, None
        else:
            try:
                _, sequence, payload = split_live(self._live.recv_multipart(zmq.DONTWAIT))
            except zmq.Again:
                return False
            except WireError:
                self._bad()
                return True
        mark = hash(payload)
        verdict = self.follower.judge(sequence, mark, self._now())
        if verdict == follow.HOLD:
            self._held = (sequence, payload)
        elif verdict == follow.APPLY or (verdict == follow.LOOK and CLEARED_WORD in payload):
            batch = self._decode(payload)
            if batch is not None:
                if batch.ts:
                    self.lag_s = max(0.0, round(time.time() - batch.ts, 6))
                if verdict == follow.LOOK:
                    self._look(sequence, mark, batch)
                else:
                    self._take(batch)
        return True

    def _look(self, sequence: int, mark: int, batch: Batch) -> None:
        """A stream that is not believed: complete from a clear on."""
        clears = [n for n, event in enumerate(batch.events) if isinstance(event, Cleared)]
        if not clears or self._writer.is_of_another_life(batch):
            return
        batch.events = batch.events[clears[-1] :]
        self.follower.cleared(sequence, mark, self._now())
        self._take(batch)

    def _read_answer(self) -> bool:
        assert self._asked is not None
        try:
            frames = self._asked.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return False
        try:
            answer = split_replay(frames)
        except WireError:
            self._bad()
            return True
        if answer is None:
            self.follower.answers_end(self._now())
            self._tell_cached()
            return True
        sequence, payload = answer
        if self.follower.judge_answer(sequence, hash(payload), self._now()) == follow.APPLY and (batch := self._decode(payload)) is not None:
            self._take(batch)
        return True

    def _decode(self, payload: bytes) -> Batch | None:
        try:
            return decode_batch(payload)
        except WireError:
            self._bad()
            return None

    def _bad(self) -> None:
        self._reader.brain.counters.add("bad_events_total", 1, (("reason", UNDECODABLE),))

    # -- sockets follow the follower

    def _follow(self) -> None:
        """Makes the sockets what the follower wants."""
        if self._live.closed:
            return
        question = self.follower.asking
        if question is not self._question:
            self._hang_up()
            if question is not None:
                self._ask(question)
        if self.follower.reads_live and not self._reads_live:
            self._reads_live = True
            self._loop.add_reader(self._live_fd, self._reader.wake, self)
            self._reader.wake(self)  # what is there already makes no new sign
        elif not self.follower.reads_live:
            self._stop_reading()
        trust = self.follower.trust
        if trust != self._told_trust:
            level = logging.WARNING if trust in (follow.HISTORY, follow.SILENT) else logging.INFO
            log.log(level, "KV events of a worker: %s", trust, extra={"worker": self.worker.name, "sequence": self.follower.next - 1})
            self._told_trust = trust

    def _ask(self, question: Question) -> None:
        self._question = question
        self._asked = _socket(self._reader.context, zmq.DEALER, ANSWER_HWM)
        self._asked.connect(_address(self.worker.host, self.worker.record.ports.replay))
        self._asked.send_multipart([b"", encode_sequence(question.start)])
        self._loop.add_reader(self._asked.fileno(), self._reader.wake, self)
        self._reader.wake(self)

    def _hang_up(self) -> None:
        if self._asked is not None:
            self._loop.remove_reader(self._asked.fileno())
            self._asked.close()
        self._asked = self._question = None

    def _stop_reading(self) -> None:
        if self._reads_live:
            self._reads_live = False
            self._loop.remove_reader(self._live_fd)


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, hwm: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, hwm)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
    socket.setsockopt(zmq.IPV6, 1)
    return socket


def _address(host: str, port: int) -> str:
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port}"
