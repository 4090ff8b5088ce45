"""Answers to replay and snapshot requests: sent in slices between live messages, at the pace of each reader. Owned by the publisher's thread.

The ROUTER socket refuses what a reader has no room for (ROUTER_MANDATORY), so a slow one costs a retry and no memory; one that takes nothing
for STALLED_S is given up.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Final

import zmq

from fleet_contract.kv_events import END_SEQUENCE, encode_sequence

log = logging.getLogger(__name__)
SLICE: Final = 64  # messages to one reader before the next, and before live ones
MAX_OPEN: Final = 256  # answers under way
STALLED_S: Final = 30.0

Message = tuple[int, bytes]  # sequence, payload


@dataclass(slots=True)
class _Answer:
    envelope: list[bytes]  # the reader's identity and, of a REQ, the empty delimiter
    messages: Iterator[Message]  # the end marker included
    refused: Message | None  # taken from `messages`, not yet from us
    moved_at: float


class Answers:
    """See the module."""

    def __init__(self, socket: zmq.Socket[bytes], topic: bytes, clock: Callable[[], float]) -> None:
        self._socket = socket
        self._topic = topic
        self._clock = clock
        self._open: list[_Answer] = []
        self.blocked = False  # none of them could take anything when they were last served

    def __len__(self) -> int:
        return len(self._open)

    def start(self, envelope: list[bytes], messages: Iterator[Message]) -> None:
        """Opens an answer; its end marker is added here."""
        if len(self._open) >= MAX_OPEN:
            log.warning("a replay request is not answered: %d answers are under way", len(self._open))
            return
        self._open.append(_Answer(envelope, chain(messages, [(END_SEQUENCE, b"")]), None, self._clock()))

    def serve(self) -> None:
        """Sends the next slice of every answer."""
        moved = [self._slice(answer) for answer in list(self._open)]
        self.blocked = bool(self._open) and not any(moved)

    def _slice(self, answer: _Answer) -> bool:
        """Sends a slice; True if anything went."""
        for n in range(SLICE):
            message = answer.refused or next(answer.messages, None)
            answer.refused = None
            if message is None:
                self._open.remove(answer)
                return True
            try:
                self._socket.send_multipart([*answer.envelope, self._topic, encode_sequence(message[0]), message[1]], zmq.DONTWAIT)
            except zmq.Again:
                answer.refused = message
                if n:
                    answer.moved_at = self._clock()
                elif self._clock() - answer.moved_at > STALLED_S:
                    log.warning("a reader took nothing of its replay for %.0f s; it is given up", STALLED_S)
                    self._open.remove(answer)
                return n > 0
            except zmq.ZMQError as e:
                if e.errno != errno.EHOSTUNREACH:
                    raise
                self._open.remove(answer)  # the reader is gone
                return True
        answer.moved_at = self._clock()
        return True
