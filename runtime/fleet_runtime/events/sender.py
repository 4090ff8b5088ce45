"""The publisher's thread: owns the PUB and the ROUTER socket, numbers and keeps the messages, beats when it is quiet, answers replays.

Live messages go first: answers are sent in slices between them.
"""

from __future__ import annotations

import logging
import time
from typing import Final

import zmq

from fleet_contract.kv_events import SNAPSHOT_START, Event, EventBatch, decode_sequence, encode_batch, encode_sequence
from fleet_contract.wire import WireError
from fleet_runtime.cache.events import EMPTIED, wire_batches
from fleet_runtime.events.answers import Answers
from fleet_runtime.events.handover import Handover, Snapshot, Step
from fleet_runtime.events.replay import ReplayBuffer

log = logging.getLogger(__name__)
BEAT_S: Final = 1.0
RETRY_S: Final = 0.01  # while no reader of a replay takes anything
MAX_WAITING: Final = 256  # readers that wait for a snapshot
MAX_REQUESTS: Final = 32  # taken in one turn


class Sender:
    """See the module."""

    def __init__(
        self,
        handover: Handover,
        pub: zmq.Socket[bytes],
        router: zmq.Socket[bytes],
        *,
        topic: bytes,
        epoch: int,
        rank: int,
        replay_batches: int,
    ) -> None:
        self.ending = False  # set by another thread, with a wake
        self._handover = handover
        self._pub = pub
        self._router = router
        self._topic = topic
        self._epoch = epoch
        self._rank = rank
        self._kept = ReplayBuffer(replay_batches)
        self._answers = Answers(router, topic, time.monotonic)
        self._waiting: list[list[bytes]] = []  # envelopes of those that wait for a snapshot
        self._sequence = 0  # of the next message
        self._next_beat = 0.0

    def run(self) -> None:
        """Body of the thread, until `ending`."""
        try:
            self._publish(Step([EMPTIED], 0))  # the first message: what was known of an earlier life is void
            poller = zmq.Poller()
            poller.register(self._handover.wake_fd, zmq.POLLIN)
            poller.register(self._router, zmq.POLLIN)
            while not self.ending:
                ready = dict(poller.poll(self._wait_ms()))
                self._turn(asked=self._router in ready)
            self._turn(asked=False)  # what was given before the end
        except Exception:
            log.exception("the KV event stream has ended; readers see that it is silent")

    def _wait_ms(self) -> int:
        """How long nothing can be due."""
        if self._answers and not self._answers.blocked:
            return 0
        left = max(0.0, self._next_beat - time.monotonic())
        return round(1000 * (min(left, RETRY_S) if self._answers else left))

    def _turn(self, *, asked: bool) -> None:
        self._handover.calm()
        while (item := self._handover.take()) is not None:
            if isinstance(item, Step):
                self._publish(item)
            else:
                self._answer_snapshot(item)
            self._handover.sent(item)
        if time.monotonic() >= self._next_beat:
            self._send([], beat=True)
        if asked:
            self._receive_requests()
        self._answers.serve()

    def _publish(self, step: Step) -> None:
        for events in wire_batches(step.changes, self._epoch):
            self._send(events)

    def _payload(self, events: list[Event]) -> bytes:
        return encode_batch(EventBatch(time.time(), events, self._rank))

    def _send(self, events: list[Event], *, beat: bool = False) -> None:
        payload = self._payload(events)
        # A subscriber that is PUB_HWM messages behind misses some; it sees the gap and asks for a replay.
        self._pub.send_multipart([self._topic, encode_sequence(self._sequence), payload])
        self._kept.add(self._sequence, payload, beat=beat)
        self._sequence += 1
        self._next_beat = time.monotonic() + BEAT_S

    def _answer_snapshot(self, snapshot: Snapshot) -> None:
        """All that is held, under the sequence of the last message: what comes after it is not in here yet."""
        sequence = self._sequence - 1
        payloads = [self._payload(events) for events in wire_batches(snapshot.runs, self._epoch)] or [self._payload([])]
        for envelope in self._waiting:
            self._answers.start(envelope, ((sequence, payload) for payload in payloads))
        self._waiting.clear()

    def _receive_requests(self) -> None:
        for _ in range(MAX_REQUESTS):
            try:
                frames = self._router.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            self._request(frames[:-1], frames[-1])

    def _request(self, envelope: list[bytes], start: bytes) -> None:
        """One request: [identity, b"", start] of a REQ or of a DEALER that plays one, [identity, start] of a plain DEALER."""
        if len(envelope) not in (1, 2) or (len(envelope) == 2 and envelope[1]):
            log.warning("a replay request of %d frames is ignored; a sequence of 8 bytes is expected", len(envelope))
            return
        try:
            sequence = decode_sequence(start)
        except WireError as e:
            log.warning("a replay request is answered by nothing: %s", e)
            self._answers.start(envelope, iter(()))
            return
        if sequence != SNAPSHOT_START:
            self._answers.start(envelope, self._kept.since(sequence))
        elif len(self._waiting) < MAX_WAITING:
            self._waiting.append(envelope)
            self._handover.want_snapshot()
        else:
            log.warning("a snapshot request is ignored: %d readers wait for one", len(self._waiting))
