"""The stream over real sockets: numbers, heartbeats, late readers, gaps, snapshots, slow and rude readers."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import zmq

from fleet_contract.kv_events import END_SEQUENCE, Cleared, Stored, decode_batch, encode_sequence, epoch_of
from fleet_runtime.cache.radix import RadixTree, namespace_of
from fleet_runtime.errors import StartError
from fleet_runtime.events import answers
from fleet_runtime.events.publisher import EventPublisher, Stream
from fleet_testing.kv_reader import Follower, Reader, Shadow

INCARNATION = "fedcba9876543210"
PAGE = 16


def key(*letters: int) -> bytes:
    return np.repeat(np.array(letters, dtype=np.int32), PAGE).tobytes()


class Worker:
    """A tree and its publisher; the test plays the scheduler's loop."""

    def __init__(self, replay_batches: int = 10_000, **fields: object) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.tree = RadixTree()
        given = {"host": "127.0.0.1", "events_port": 0, "replay_port": 0, "pod_uid": "pod", "model_revision": "model", "incarnation": INCARNATION}
        stream = Stream(**{**given, "replay_batches": replay_batches, **fields})  # type: ignore[arg-type]
        self.publisher = EventPublisher(self.context, stream, self.tree)
        self.pages = 0

    def store(self, *letters: int, namespace: bytes = b"") -> None:
        """One step that inserts a prefix."""
        self.tree.insert(self.tree.root, 0, key(*letters), [self.pages + i for i in range(len(letters))], namespace)
        self.pages += len(letters)
        self.publisher.publish()

    def evict(self, n: int) -> None:
        self.tree.evict(n)
        self.publisher.publish()

    def held(self) -> set[int]:
        return {h for run in self.tree.runs() for h in run.hashes}

    def close(self) -> None:
        self.publisher.close()
        self.context.destroy(linger=0)


def replayed(worker: Worker, reader: Reader) -> tuple[list[tuple[int, bytes]], Shadow]:
    """A replay from 0, and what it tells, once all is sent that was handed over: a thread of its own sends."""
    end = time.monotonic() + 60
    while True:
        messages, shadow = reader.replay(0), Shadow()
        for _, payload in messages:
            shadow.apply(payload)
        if set(shadow.blocks) == worker.held():
            return messages, shadow
        assert time.monotonic() < end, "what is replayed is not what is held"
        time.sleep(0.01)


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.close()


@pytest.fixture
def reader(worker: Worker) -> Iterator[Reader]:
    with Reader(worker.publisher.events_port, worker.publisher.replay_port, b"kv@pod@model") as made:
        yield made


class Loop:
    """The scheduler's loop in a thread of its own: works and publishes until it is told to stop, so that snapshots can come."""

    def __init__(self, worker: Worker, work: Callable[[int], None] = lambda _: None) -> None:
        self._ending = threading.Event()
        self._worker = worker
        self._work = work
        self.turns = 0
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._ending.is_set():
            self._work(self.turns)
            self._worker.publisher.publish()
            self.turns += 1
            self._ending.wait(0.001)

    def __enter__(self) -> Loop:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()


def test_a_stream_begins_with_a_clear_and_counts_from_zero(worker: Worker, reader: Reader) -> None:
    for letter in range(5):
        worker.store(letter)
    messages, shadow = replayed(worker, reader)
    assert [s for s, _ in messages] == list(range(len(messages)))
    first = decode_batch(messages[0][1])
    assert first.events == [Cleared(epoch_of(INCARNATION))] and first.rank == 0 and abs(first.ts - time.time()) < 60
    assert shadow.epochs == {epoch_of(INCARNATION)}


def test_a_quiet_stream_beats_each_second(worker: Worker, reader: Reader) -> None:
    first, _ = reader.live()
    second, payload = reader.live()
    assert second == first + 1 and decode_batch(payload).events == []


def test_live_messages_come_in_order_and_each_once(worker: Worker, reader: Reader) -> None:
    start, _ = reader.live()
    for letter in range(300):
        worker.store(letter % 7, letter)
    shadow = Shadow()
    for _, payload in reader.replay(0)[: start + 1]:
        shadow.apply(payload)
    follower = Follower(reader, shadow)
    follower.next = start + 1
    follower.until(lambda: set(shadow.blocks) == worker.held())
    assert shadow.events == 301


def test_a_run_says_its_namespace(worker: Worker, reader: Reader) -> None:
    worker.store(1, 2, namespace=namespace_of("adapter", "salt"))
    worker.store(1, 2, 3, namespace=namespace_of("adapter", "salt"))
    messages, _ = replayed(worker, reader)
    _, first, second = (decode_batch(payload).events[0] for _, payload in messages[:3])
    assert isinstance(first, Stored) and isinstance(second, Stored)
    assert (first.lora, first.salt, second.lora, second.salt) == ("adapter", "salt", "adapter", "salt")
    assert (first.base, second.base, second.parent) == (0, 2, first.hashes[1])


def test_a_late_reader_replays_what_it_missed(worker: Worker) -> None:
    for letter in range(50):
        worker.store(letter, letter)
    worker.evict(30)
    with Reader(worker.publisher.events_port, worker.publisher.replay_port) as late:
        _, shadow = replayed(worker, late)
        assert len(shadow.blocks) == 70


def test_history_that_is_gone_shows_in_the_first_sequence_and_a_snapshot_helps() -> None:
    worker = Worker(replay_batches=16)
    try:
        for letter in range(100):
            worker.store(letter)
        with Reader(worker.publisher.events_port, worker.publisher.replay_port) as late, Loop(worker):
            late.live()
            assert late.replay(0)[0][0] > 0
            shadow = Shadow()
            Follower(late, shadow).begin()
            assert set(shadow.blocks) == worker.held() and len(shadow.blocks) == 100
    finally:
        worker.close()


def test_a_gap_is_filled_by_a_replay_from_the_sequence_that_is_missing(worker: Worker, reader: Reader) -> None:
    with Loop(worker):
        shadow = Shadow()
        follower = Follower(reader, shadow).begin()
    for letter in range(40):
        worker.store(letter)
    for _ in range(20):
        reader.live()  # lost on the way
    follower.until(lambda: set(shadow.blocks) == worker.held())
    assert len(shadow.blocks) == 40


def test_a_snapshot_taken_while_the_tree_changes_joins_the_stream_without_a_seam(worker: Worker, reader: Reader) -> None:
    def work(turn: int) -> None:
        worker.tree.insert(worker.tree.root, 0, key(turn % 5, turn % 11, turn), [worker.pages + i for i in range(3)])
        worker.pages += 3
        if turn % 3 == 0:
            worker.tree.evict(7)
        if turn % 97 == 0:
            worker.tree.clear()

    with Loop(worker, work) as loop:
        followers = []
        for _ in range(3):
            shadow = Shadow()
            followers.append(Follower(reader, shadow).begin())
            turns = loop.turns
            followers[-1].until(lambda: loop.turns > turns + 50)  # noqa: B023
    last = followers[-1]
    last.until(lambda: set(last.shadow.blocks) == worker.held())


def test_the_snapshot_of_an_empty_tree_is_one_empty_batch(worker: Worker, reader: Reader) -> None:
    with Loop(worker):
        last, _ = reader.live()
        barrier, payloads = reader.snapshot()
    assert barrier >= last and [decode_batch(p).events for p in payloads] == [[]]


def test_a_req_client_gets_the_first_batch_and_can_ask_again(worker: Worker) -> None:
    for letter in range(5):
        worker.store(letter)
    context = zmq.Context()
    req = context.socket(zmq.REQ)
    req.connect(f"tcp://127.0.0.1:{worker.publisher.replay_port}")
    try:
        for start in (0, 3):
            for _ in range(20):  # a REQ socket takes what is left of the answer before for the next one's: it asks again
                req.send(encode_sequence(start))
                assert req.poll(5000)
                topic, sequence, payload = req.recv_multipart()
                if sequence == encode_sequence(start):
                    break
            assert topic == b"kv@pod@model" and sequence == encode_sequence(start) and len(decode_batch(payload).events) == 1
    finally:
        context.destroy(linger=0)


def test_a_plain_dealer_needs_no_empty_frame(worker: Worker, reader: Reader) -> None:
    reader.live()
    reader.dealer.send(encode_sequence(0))
    assert reader.dealer.poll(5000)
    assert reader.dealer.recv_multipart()[:2] == [b"kv@pod@model", encode_sequence(0)]


@pytest.mark.parametrize("start", [b"", b"\0" * 7, b"\0" * 9, b"0"])
def test_a_request_without_a_sequence_gets_the_end_marker_alone(reader: Reader, start: bytes) -> None:
    reader.dealer.send_multipart([b"", start])
    assert reader.dealer.poll(5000)
    assert reader.dealer.recv_multipart() == [b"", b"kv@pod@model", encode_sequence(END_SEQUENCE), b""]


def test_a_replay_from_the_future_is_empty(reader: Reader) -> None:
    assert reader.replay(10**9) == [] and reader.replay(END_SEQUENCE) == []


def test_rude_requests_leave_the_stream_alive(worker: Worker, reader: Reader) -> None:
    reader.dealer.send_multipart([b"", b"a", b"b", b"c"])
    reader.dealer.send_multipart([b"x", encode_sequence(0)])
    reader.dealer.send_multipart([b"", b"x" * 100_000])  # over the limit: the connection is closed, and made anew
    with socket.create_connection(("127.0.0.1", worker.publisher.replay_port)) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
    with Reader(worker.publisher.events_port, worker.publisher.replay_port) as other:
        other.live()
        assert other.replay(0)[0][0] == 0


def test_a_reader_that_takes_nothing_delays_neither_live_messages_nor_other_replays(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "STALLED_S", 0.5)
    for letter in range(3000):
        worker.store(*range(letter, letter + 8))
    context = zmq.Context()
    slow = context.socket(zmq.DEALER)
    slow.setsockopt(zmq.RCVHWM, 1)
    slow.setsockopt(zmq.RCVBUF, 4096)
    slow.connect(f"tcp://127.0.0.1:{worker.publisher.replay_port}")
    slow.send_multipart([b"", encode_sequence(0)])
    try:
        with Reader(worker.publisher.events_port, worker.publisher.replay_port) as reader:
            start, _ = reader.live()
            assert [s for s, _ in reader.replay(0)][: start + 1] == list(range(start + 1))
            worker.store(1_000_000)
            sequence, payload = start, b""
            while not payload or not decode_batch(payload).events:
                previous, (sequence, payload) = sequence, reader.live(timeout_s=3)
                assert sequence == previous + 1
            stalled = worker.publisher._sender._answers
            end = time.monotonic() + 10
            while len(stalled):
                assert time.monotonic() < end, "the reader that takes nothing is not given up"
                time.sleep(0.05)
    finally:
        context.destroy(linger=0)


def test_what_was_handed_over_before_the_end_is_still_sent() -> None:
    worker = Worker()
    with Reader(worker.publisher.events_port, worker.publisher.replay_port) as reader:
        reader.live()
        for letter in range(20):
            worker.store(letter)
        worker.publisher.close()
        got = 0
        while got < 20:
            _, payload = reader.live()
            got += len(decode_batch(payload).events)
    worker.context.destroy(linger=0)


def test_ports_of_a_higher_rank_are_offset_and_a_taken_port_is_named() -> None:
    with socket.socket() as a, socket.socket() as b:
        for s in (a, b):
            s.bind(("127.0.0.1", 0))
            s.listen()
        for field, flag, taken in (("events_port", "--events-port", a), ("replay_port", "--replay-port", b)):
            port = taken.getsockname()[1]
            with pytest.raises(StartError, match=rf"{port}.*{flag}"):
                Worker(rank=2, **{field: port - 2})


def test_two_streams_have_two_epochs_and_the_second_begins_anew(worker: Worker) -> None:
    worker.store(1)
    other = Worker(incarnation="00000000000000ff")
    try:
        with Reader(other.publisher.events_port, other.publisher.replay_port) as reader:
            reader.live()
            first = reader.replay(0)[0]
            assert first[0] == 0 and decode_batch(first[1]).events == [Cleared(255)]
    finally:
        other.close()
