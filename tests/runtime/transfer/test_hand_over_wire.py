"""One real end and one played by the test, message by message: who owns the pages when, what is late, what breaks the format."""

from __future__ import annotations

import socket
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec
import pytest

from fleet_contract import handoff
from fleet_contract.handoff import FRAME_HEADER, Abort, Alloc, Done, Drained, Failed, Handoff, Hello, Pages, Ping, Queued, Received, Route
from fleet_runtime import messages as m
from fleet_runtime.engine.simulated import PAGE_BYTES
from fleet_runtime.scheduler.request import State
from fleet_testing.hand_over_harness import QUICK, Pair, RealClockScheduler, Workers
from fleet_testing.scheduler_harness import VirtualScheduler, flags_of, rid_of

INCARNATION = "e" * 16
T = TypeVar("T")


class Peer:
    """The played end of one transfer connection; blocking."""

    def __init__(self, connection: socket.socket, hello: Hello) -> None:
        self._connection = connection
        connection.settimeout(10)
        self.send(hello)
        self.hello = self.next(Hello)

    def send(self, message: Handoff, payload: bytes = b"") -> None:
        self._connection.sendall(handoff.encode(message, len(payload)) + payload)

    def send_raw(self, data: bytes) -> None:
        self._connection.sendall(data)

    def _exactly(self, n: int) -> bytes:
        data = b""
        while len(data) < n:
            part = self._connection.recv(n - len(data))
            if not part:
                raise EOFError
            data += part
        return data

    def frame(self) -> tuple[Handoff | None, bytes]:
        size, payload = handoff.decode_header(self._exactly(FRAME_HEADER.size))
        return handoff.decode(self._exactly(size)), self._exactly(payload)

    def next(self, kind: type[T]) -> T:
        """The next message of a kind; others are passed over."""
        while not isinstance(message := self.frame()[0], kind):
            pass
        return message

    def closed(self) -> bool:
        """Reads until the other end closes."""
        try:
            while True:
                self.frame()
        except (EOFError, ConnectionError):
            return True

    def close(self) -> None:
        self._connection.close()


class PlayedPrefill:
    """Listens as a prefill worker would: bootstrap port and transfer port."""

    def __init__(self, decode: RealClockScheduler) -> None:
        self._bootstrap = socket.create_server(("127.0.0.1", 0))
        self._transfer = socket.create_server(("127.0.0.1", 0))
        self._hello = msgspec.structs.replace(decode.transfer._shared.hello, incarnation=INCARNATION, pod_uid="played")
        self.address = f"127.0.0.1:{self._bootstrap.getsockname()[1]}"
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    def _answer(self) -> None:
        route = msgspec.json.encode(Route(incarnation=INCARNATION, transfer_port=self._transfer.getsockname()[1]))
        while True:
            try:
                connection, _ = self._bootstrap.accept()
            except OSError:
                return
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + route)

    def accept(self) -> Peer:
        self._transfer.settimeout(10)
        return Peer(self._transfer.accept()[0], self._hello)

    def close(self) -> None:
        self._bootstrap.shutdown(socket.SHUT_RDWR)
        self._bootstrap.close()
        self._transfer.close()
        self._thread.join(10)


@pytest.fixture
def make() -> Iterator[Workers]:
    workers = Workers()
    yield workers
    workers.close()


@pytest.fixture
def decode(make: Workers) -> RealClockScheduler:
    return make("decode", tick_s=5.0)


@pytest.fixture
def prefill_end(decode: RealClockScheduler) -> Iterator[PlayedPrefill]:
    played = PlayedPrefill(decode)
    yield played
    played.close()


IDS = [7] * 40  # three pages


def _alloc(decode: RealClockScheduler, played: PlayedPrefill, n: int = 1) -> tuple[Peer, Alloc]:
    """Room `n` of a decode leg, up to its Alloc."""
    decode.admit(rid_of(n), IDS, 4, leg="decode", room=n, bootstrap=played.address, prefill_incarnation=INCARNATION)
    peer = played.accept()
    _turn(decode, lambda: decode.state(rid_of(n)) is State.RECEIVING, "it has promised its pages")
    return peer, peer.next(Alloc)


def _turn(worker: RealClockScheduler, until: Callable[[], object], what: str) -> None:
    Pair(worker, worker).turn(until, what, decode=False)


def _pages(count: int = 3) -> tuple[list[bytes], list[int]]:
    """What a prefill worker would have in the pages of IDS."""
    worker = VirtualScheduler(flags_of(debug_checks=False))  # freed pages keep their bytes
    worker.answer(IDS, 1)
    node_pages = [worker.executor.read_page(p) for p in range(count)]
    return node_pages, [zlib.crc32(page) for page in node_pages]


def _send(peer: Peer, alloc: Alloc, data: list[bytes], crc: list[int], *, first: int = 0, generation: int | None = None) -> None:
    number = alloc.generation if generation is None else generation
    peer.send(Pages(room=alloc.room, generation=number, first=first, count=len(data), crc=crc), b"".join(data))


def _limbo_pages(worker: RealClockScheduler) -> int:
    return worker.scheduler.counters()["pages_request"]


def test_alloc_names_room_incarnation_and_pages_beyond_decodes_prefix(decode: RealClockScheduler, prefill_end: PlayedPrefill) -> None:
    peer, alloc = _alloc(decode, prefill_end)
    assert (alloc.room, alloc.prefill_incarnation, alloc.prefix_pages, len(alloc.pages)) == (1, INCARNATION, 0, 3)
    peer.close()


def test_pages_of_an_aborted_room_are_kept_until_prefill_has_drained(decode: RealClockScheduler, prefill_end: PlayedPrefill) -> None:
    peer, alloc = _alloc(decode, prefill_end)
    data, crc = _pages()
    _send(peer, alloc, data[:1], crc[:1])
    decode.scheduler.handle(m.Abort(rid=rid_of(1), reason="gone"))
    assert decode.inbox.of(rid_of(1)).failed.code == "aborted", "the client is answered at once"
    assert peer.next(Abort) == Abort(room=1, generation=alloc.generation, reason="gone")
    _send(peer, alloc, data[1:], crc[1:], first=1)  # a write that was under way
    _turn(decode, lambda: decode.transfer.counters.late_messages > 0, "the late pages were seen")
    assert _limbo_pages(decode) == 3 and decode.book.limbo
    untouched = [decode.executor.read_page(p) for p in alloc.pages[1:]]
    assert data[1] not in untouched, "pages of an ended room were written"
    peer.send(Drained(room=1, generation=alloc.generation))
    _turn(decode, decode.idle, "the pages are free")
    peer.close()


def test_a_room_that_ends_within_a_frame_writes_none_of_its_rest(decode: RealClockScheduler, prefill_end: PlayedPrefill) -> None:
    peer, alloc = _alloc(decode, prefill_end)
    data, crc = _pages()
    message = Pages(room=1, generation=alloc.generation, first=0, count=3, crc=crc)
    peer.send_raw(handoff.encode(message, 3 * PAGE_BYTES) + data[0])
    _turn(decode, lambda: decode.transfer.counters.pages == 1, "the first page is written")
    decode.scheduler.handle(m.Abort(rid=rid_of(1)))
    peer.next(Abort)
    before = [decode.executor.read_page(p) for p in alloc.pages[1:]]
    peer.send_raw(data[1] + data[2])
    peer.send(Drained(room=1, generation=alloc.generation))
    _turn(decode, lambda: not decode.book.limbo, "the pages are free")
    assert decode.transfer.counters.pages == 1 and data[1] not in before
    peer.close()


@pytest.mark.parametrize("end", ["closed", "failed"])
def test_pages_of_an_aborted_room_are_free_once_prefill_is_gone_or_failed(decode: RealClockScheduler, prefill_end: PlayedPrefill, end: str) -> None:
    peer, alloc = _alloc(decode, prefill_end)
    decode.scheduler.handle(m.Abort(rid=rid_of(1)))
    peer.next(Abort)
    assert _limbo_pages(decode) == 3
    if end == "closed":
        peer.close()
    else:
        peer.send(Failed(room=1, generation=alloc.generation))
    _turn(decode, decode.idle, "the pages are free")
    peer.close()


def test_a_peer_without_pings_is_dead_after_three_and_its_pages_are_free(make: Workers) -> None:
    decode = make("decode", **QUICK)
    played = PlayedPrefill(decode)
    peer, _ = _alloc(decode, played)
    _turn(decode, lambda: decode.idle() and decode.inbox.of(rid_of(1)).end is not None, "the room is given up")
    assert "missed 3 pings" in decode.inbox.of(rid_of(1)).failed.message
    assert peer.closed()
    played.close()


def test_a_room_that_prefill_no_longer_speaks_of_fails_while_the_connection_lives(make: Workers) -> None:
    decode = make("decode", **QUICK)
    played = PlayedPrefill(decode)
    peer, alloc = _alloc(decode, played)
    stop = threading.Event()

    def ping() -> None:
        n = 0
        while not stop.wait(0.05):
            n += 1
            peer.send(Ping(incarnation=INCARNATION, n=n, steps=n))

    thread = threading.Thread(target=ping)
    thread.start()
    try:
        answer = decode.inbox.of(rid_of(1))
        _turn(decode, lambda: answer.end is not None, "the room fails")
        assert "went silent about room 1" in answer.failed.message
        assert _limbo_pages(decode) == 3, "its pages are still promised"
        assert peer.next(Failed).generation == alloc.generation
        peer.send(Drained(room=1, generation=alloc.generation))
        _turn(decode, decode.idle, "the pages are free")
    finally:
        stop.set()
        thread.join()
        peer.close()
        played.close()


def test_messages_of_other_generations_and_duplicates_are_ignored_and_counted(decode: RealClockScheduler, prefill_end: PlayedPrefill) -> None:
    peer, alloc = _alloc(decode, prefill_end)
    data, crc = _pages()
    other = alloc.generation + 100
    _send(peer, alloc, [b"\xee" * PAGE_BYTES], [zlib.crc32(b"\xee" * PAGE_BYTES)], generation=other)
    peer.send(Done(room=1, generation=other, first_token=65, prompt_tokens=40))
    peer.send(Failed(room=1, generation=other, message="old"))
    _send(peer, alloc, data, crc)
    _send(peer, alloc, data[:1], crc[:1])  # once more
    peer.send_raw(_unknown_message())
    peer.send(Done(room=1, generation=alloc.generation, first_token=65, prompt_tokens=40, cached_tokens=16))
    assert peer.next(Received) == Received(room=1, generation=alloc.generation)
    answer = decode.inbox.of(rid_of(1))
    _turn(decode, lambda: answer.end is not None, "it runs to its end")
    assert answer.end == "length" and answer.ids[0] == 65 and answer.cached_tokens == 16
    assert decode.transfer.counters.late_messages == 4
    peer.close()


def _unknown_message() -> bytes:
    body = msgspec.msgpack.encode(["of a newer writer", 1, 2])
    return FRAME_HEADER.pack(len(body), 0) + body


@pytest.mark.parametrize(
    ("what", "text"),
    [("early done", "after 1 of 3 pages"), ("pages beyond", "came for a room of 3 pages"), ("wrong prompt", "the two legs differ")],
)
def test_a_prefill_that_breaks_the_order_fails_the_room_only(decode: RealClockScheduler, prefill_end: PlayedPrefill, what: str, text: str) -> None:
    peer, alloc = _alloc(decode, prefill_end)
    data, crc = _pages()
    if what == "early done":
        _send(peer, alloc, data[:1], crc[:1])
        peer.send(Done(room=1, generation=alloc.generation, prompt_tokens=40))
    elif what == "pages beyond":
        _send(peer, alloc, data, crc, first=1)
    else:
        _send(peer, alloc, data, crc)
        peer.send(Done(room=1, generation=alloc.generation, prompt_tokens=41))
    answer = decode.inbox.of(rid_of(1))
    _turn(decode, lambda: answer.end is not None, "the room fails")
    assert text in answer.failed.message and answer.failed.status == 500
    peer.send(Drained(room=1, generation=alloc.generation))
    _turn(decode, decode.idle, "the pages are free")
    peer.close()


@pytest.mark.parametrize("data", [b"\xff" * 64, FRAME_HEADER.pack(3, 0) + b"\xc1\xc1\xc1", FRAME_HEADER.pack(1 << 21, 0)])
def test_bytes_that_are_no_frame_end_the_connection_and_its_rooms(decode: RealClockScheduler, prefill_end: PlayedPrefill, data: bytes) -> None:
    peer, _ = _alloc(decode, prefill_end)
    peer.send_raw(data)
    assert peer.closed()
    answer = decode.inbox.of(rid_of(1))
    _turn(decode, lambda: answer.end is not None and decode.idle(), "the room fails")
    assert answer.failed.code == "transfer_failed"


# The prefill end, dialled by the test.


@pytest.fixture
def prefill(make: Workers) -> RealClockScheduler:
    return make("prefill", tick_s=1.0)


@pytest.fixture
def peer(prefill: RealClockScheduler) -> Iterator[Peer]:
    hello = msgspec.structs.replace(prefill.transfer._shared.hello, incarnation=INCARNATION, pod_uid="played")
    peer = Peer(socket.create_connection(("127.0.0.1", prefill.transfer.transfer_port)), hello)
    yield peer
    peer.close()


def test_prefill_says_queued_and_computes_only_after_alloc(prefill: RealClockScheduler, peer: Peer) -> None:
    peer.send(Queued(room=5, generation=9))
    prefill.admit(rid_of(1), IDS, 4, leg="prefill", room=5)
    assert peer.next(Queued) == Queued(room=5, generation=9)
    prefill.scheduler.iterate()
    assert prefill.state(rid_of(1)) is State.BOOTSTRAPPING and prefill.scheduler.counters()["prefilled_tokens_total"] == 0
    peer.send(Alloc(room=5, generation=9, prefix_pages=1, pages=[3, 4]))
    _turn(prefill, lambda: prefill.state(rid_of(1)) is State.TRANSFERRING, "it is computed")
    pages, payload = peer.frame()
    while not isinstance(pages, Pages):
        pages, payload = peer.frame()
    assert (pages.first, pages.count, len(payload)) == (0, 2, 2 * PAGE_BYTES)
    data, _ = _pages()
    assert payload == b"".join(data[1:]) and pages.crc == [zlib.crc32(page) for page in data[1:]]
    done = peer.next(Done)
    assert (done.room, done.generation, done.prompt_tokens, done.first_token) == (5, 9, 40, VirtualScheduler().answer(IDS, 1)[0])
    assert _limbo_pages(prefill) == 1, "the partial page is still the request's"
    peer.send(Received(room=5, generation=8))  # another generation: ignored
    peer.send(Received(room=5, generation=9))
    _turn(prefill, prefill.idle, "the room is done")
    assert isinstance(prefill.inbox.of(rid_of(1)).end, m.HandedOver)
    assert prefill.transfer.counters.late_messages == 1
    assert prefill.scheduler.counters()["pages_tree"] == 2, "the finished prompt stays in the tree"


@pytest.mark.parametrize("end", [Abort(room=5, generation=9, reason="gone"), Failed(room=5, generation=9, message="no")])
@pytest.mark.parametrize("known", [True, False])
def test_decodes_end_of_a_room_is_answered_by_drained(prefill: RealClockScheduler, peer: Peer, end: Abort | Failed, known: bool) -> None:
    if known:
        prefill.admit(rid_of(1), IDS, 4, leg="prefill", room=5)
        peer.send(Alloc(room=5, generation=9, prefix_pages=0, pages=[3, 4, 5]))
        _turn(prefill, lambda: prefill.state(rid_of(1)) is State.TRANSFERRING, "it is computed")
    peer.send(end)
    assert peer.next(Drained) == Drained(room=5, generation=9)
    if not known:
        prefill.admit(rid_of(1), IDS, 4, leg="prefill", room=5)  # the tombstone answers
    answer = prefill.inbox.of(rid_of(1))
    _turn(prefill, lambda: answer.end is not None and prefill.idle(), "the leg is over")
    assert answer.failed.code == ("aborted" if isinstance(end, Abort) else "peer_failed")


def test_an_alloc_for_another_incarnation_is_409(prefill: RealClockScheduler, peer: Peer) -> None:
    peer.send(Alloc(room=5, generation=9, prefill_incarnation="d" * 16, pages=[1, 2, 3]))
    assert (answer := peer.next(Failed)).status == 409 and answer.code == "stale_worker"


@pytest.mark.parametrize(("prefix", "pages"), [(-1, 4), (3, 0), (0, 2), (0, 4), (2**40, 1)])
def test_an_alloc_that_does_not_fit_the_prompt_is_refused(prefill: RealClockScheduler, peer: Peer, prefix: int, pages: int) -> None:
    prefill.admit(rid_of(1), IDS, 4, leg="prefill", room=5)
    peer.send(Alloc(room=5, generation=9, prefix_pages=prefix, pages=list(range(pages))))
    answer = prefill.inbox.of(rid_of(1))
    _turn(prefill, lambda: answer.end is not None and prefill.idle(), "the leg fails")
    assert answer.failed.code == "room_mismatch"
    assert peer.next(Failed).code == "room_mismatch"


def test_prefill_frees_nothing_before_received(prefill: RealClockScheduler, peer: Peer) -> None:
    prefill.admit(rid_of(1), IDS, 4, leg="prefill", room=5)
    peer.send(Alloc(room=5, generation=9, prefix_pages=0, pages=[3, 4, 5]))
    _turn(prefill, lambda: prefill.state(rid_of(1)) is State.TRANSFERRING, "it is computed")
    peer.next(Done)
    for _ in range(50):
        prefill.scheduler.iterate()
    assert _limbo_pages(prefill) == 1 and prefill.book.memory.tree.protected == 2
    peer.close()
    _turn(prefill, prefill.idle, "decode is gone")
    assert prefill.inbox.of(rid_of(1)).failed.code == "transfer_failed"
