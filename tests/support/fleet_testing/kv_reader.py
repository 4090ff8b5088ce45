"""Reads a worker's KV events as a router would: a shadow of its tree, and the sockets that feed it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

from fleet_contract.kv_events import SNAPSHOT_START, Cleared, Removed, Stored, decode_batch, encode_sequence, split_live, split_replay
from fleet_contract.names import PAGE_SIZE
from fleet_contract.prefix import chain_hashes, namespace_hash


@dataclass
class Shadow:
    """The blocks that a stream says are held: hash -> (hash of the block before, its tokens). Refuses what cannot be."""

    model_revision: str = "model"
    blocks: dict[int, tuple[int | None, tuple[int, ...]]] = field(default_factory=dict)
    epochs: set[int] = field(default_factory=set)
    events: int = 0

    def apply(self, payload: bytes) -> None:
        """Takes one batch."""
        batch = decode_batch(payload)
        assert not batch.faults
        for event in batch.events:
            self.events += 1
            self.epochs.add(event.epoch or 0)
            match event:
                case Stored():
                    self._store(event)
                case Removed():
                    for h in event.hashes:
                        del self.blocks[h]
                case Cleared():
                    self.blocks.clear()

    def _store(self, event: Stored) -> None:
        assert event.placeable and event.medium == "GPU" and event.block_size == PAGE_SIZE
        assert event.parent is None or event.parent in self.blocks, "a run without its beginning"
        start = namespace_hash(self.model_revision, event.lora, event.salt) if event.parent is None else event.parent
        assert event.hashes == event.seq_hashes == chain_hashes(event.tokens, start)
        assert event.base == self.depth(event.parent)
        parent = event.parent
        for i, h in enumerate(event.hashes):
            assert h not in self.blocks, "stored twice"
            self.blocks[h] = (parent, tuple(event.tokens[i * PAGE_SIZE : (i + 1) * PAGE_SIZE]))
            parent = h

    def depth(self, block: int | None) -> int:
        """Blocks from the root to the end of this one."""
        n = 0
        while block is not None:
            block = self.blocks[block][0]
            n += 1
        return n


class Reader:
    """SUB and DEALER sockets of one stream. Keeps every live message until it is taken."""

    def __init__(self, events_port: int, replay_port: int, topic: bytes = b"kv@") -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.setsockopt(zmq.RCVHWM, 0)
        self.sub.setsockopt(zmq.SUBSCRIBE, topic)
        self.sub.connect(f"tcp://127.0.0.1:{events_port}")
        self.dealer = self.context.socket(zmq.DEALER)
        self.dealer.setsockopt(zmq.RCVHWM, 0)
        self.dealer.connect(f"tcp://127.0.0.1:{replay_port}")

    def live(self, timeout_s: float = 5.0) -> tuple[int, bytes]:
        """The next live message: sequence, payload."""
        assert self.sub.poll(int(timeout_s * 1000)), f"no message within {timeout_s} s"
        _, sequence, payload = split_live(self.sub.recv_multipart())
        return sequence, payload

    def replay(self, start: int, timeout_s: float = 5.0) -> list[tuple[int, bytes]]:
        """All that a replay from `start` brings."""
        self.dealer.send_multipart([b"", encode_sequence(start)])
        out = []
        while True:
            assert self.dealer.poll(int(timeout_s * 1000)), "the replay stands still"
            answer = split_replay(self.dealer.recv_multipart())
            if answer is None:
                return out
            out.append(answer)

    def snapshot(self, timeout_s: float = 5.0) -> tuple[int, list[bytes]]:
        """The barrier's sequence, and the payloads."""
        messages = self.replay(SNAPSHOT_START, timeout_s)
        assert messages and len({sequence for sequence, _ in messages}) == 1
        return messages[0][0], [payload for _, payload in messages]

    def close(self) -> None:
        self.context.destroy(linger=0)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Follower:
    """Follows a stream from wherever it is: snapshot or replay first, then live messages without a gap."""

    def __init__(self, reader: Reader, shadow: Shadow) -> None:
        self.reader = reader
        self.shadow = shadow
        self.next = -1  # sequence expected; -1: not begun

    def begin(self) -> Follower:
        """Starts from a snapshot. The subscription must have reached the publisher: a live message proves it."""
        self.reader.live()
        barrier, payloads = self.reader.snapshot()
        for payload in payloads:
            self.shadow.apply(payload)
        self.next = barrier + 1
        return self

    def step(self, timeout_s: float = 5.0) -> None:
        """Takes one live message; fills a gap before it by a replay."""
        sequence, payload = self.reader.live(timeout_s)
        if sequence < self.next:
            return
        if sequence > self.next:
            missed = self.reader.replay(self.next)
            assert [s for s, _ in missed] == list(range(self.next, self.next + len(missed))) and self.next + len(missed) > sequence
            for _, old in missed:
                self.shadow.apply(old)
            self.next += len(missed)
            return
        self.shadow.apply(payload)
        self.next += 1

    def until(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
        """Takes messages until a condition holds."""
        end = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < end, f"not within {timeout_s} s"
            self.step()
