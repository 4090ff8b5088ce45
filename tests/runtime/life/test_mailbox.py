"""Whose mail counts, over real ipc sockets: a restarted process takes none of its predecessor's, and none is lost for coming early."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from fleet_runtime import messages as m
from fleet_runtime.mailbox import Mailbox
from fleet_testing.runtime import wait_for

HTTP, SCHEDULER, DETOKENIZER, SUPERVISOR = "a" * 16, "b" * 16, "c" * 16, "d" * 16


class Post:
    """Sends to one mailbox in anybody's name."""

    def __init__(self, run_dir: str, to: str) -> None:
        self._context = zmq.Context()
        self._push = self._context.socket(zmq.PUSH)
        self._push.connect(m.endpoint(run_dir, to))

    def send(self, message: m.Message, sender: str, to: str) -> None:
        message.sender, message.to = sender, to
        self._push.send(m.encode(message))

    def close(self) -> None:
        self._push.close(linger=0)
        self._context.term()


@pytest.fixture
def run_dir() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="rf", dir="/tmp") as folder:
        yield folder


@pytest.fixture
def mailbox(run_dir: str) -> Iterator[Mailbox]:
    box = Mailbox(run_dir, m.HTTP, HTTP)
    yield box
    box.close()


@pytest.fixture
def post(run_dir: str, mailbox: Mailbox) -> Iterator[Post]:
    p = Post(run_dir, m.HTTP)
    yield p
    p.close()


def peers(detokenizer: str = DETOKENIZER) -> m.Peers:
    return m.Peers(http=HTTP, scheduler=SCHEDULER, detokenizer=detokenizer, scheduler_info=m.SchedulerInfo())


def text(rid: str) -> m.TextBatch:
    return m.TextBatch(items=[m.Text(rid, 0, "x", [], 1, 1, 0)])


def receive(mailbox: Mailbox, count: int) -> list[m.Message]:
    got: list[m.Message] = []
    wait_for(lambda: got.extend(mailbox.receive()) or len(got) >= count, f"{count} messages")
    assert not mailbox.poll(50) and len(got) == count
    return got


def test_mail_that_comes_before_its_sender_is_named_waits(mailbox: Mailbox, post: Post) -> None:
    post.send(text("early"), DETOKENIZER, HTTP)
    assert wait_for(lambda: mailbox.poll(100), "it is there") and mailbox.receive() == []
    post.send(peers(), SUPERVISOR, HTTP)
    got = receive(mailbox, 2)
    assert isinstance(got[0], m.Peers) and isinstance(got[1], m.TextBatch) and got[1].items[0].rid == "early"
    assert mailbox.peers == {m.SCHEDULER: SCHEDULER, m.DETOKENIZER: DETOKENIZER}


def test_mail_of_the_dead_and_for_the_dead_is_dropped(mailbox: Mailbox, post: Post) -> None:
    post.send(peers(), SUPERVISOR, HTTP)
    post.send(m.PeerDied(who=m.DETOKENIZER, incarnation=DETOKENIZER, cause="x"), SUPERVISOR, HTTP)
    receive(mailbox, 2)
    assert m.DETOKENIZER not in mailbox.peers and not mailbox.send(m.DETOKENIZER, text("x"))
    post.send(text("of the dead"), DETOKENIZER, HTTP)
    post.send(text("for a predecessor"), SCHEDULER, "e" * 16)
    post.send(peers("f" * 16), SUPERVISOR, HTTP)
    post.send(text("of the new one"), "f" * 16, HTTP)
    got = receive(mailbox, 2)
    assert isinstance(got[1], m.TextBatch) and got[1].items[0].rid == "of the new one"
    assert mailbox.dropped == 2


def test_a_process_that_is_not_there_does_not_stop_its_writer(mailbox: Mailbox, post: Post, run_dir: str) -> None:
    post.send(peers(), SUPERVISOR, HTTP)
    receive(mailbox, 1)
    for _ in range(5000):
        assert mailbox.send(m.SCHEDULER, m.Abort(rid="x"))
    assert not Path(run_dir, "scheduler.in").exists()


def test_a_successor_on_the_same_address_gets_new_mail(mailbox: Mailbox, post: Post, run_dir: str) -> None:
    post.send(peers(), SUPERVISOR, HTTP)
    receive(mailbox, 1)
    first = Mailbox(run_dir, m.SCHEDULER, SCHEDULER)
    mailbox.send(m.SCHEDULER, m.Abort(rid="one"))
    assert wait_for(lambda: first.poll(100), "it came")
    first.close()
    second = Mailbox(run_dir, m.SCHEDULER, "9" * 16)
    new = peers()
    new.scheduler = "9" * 16
    post.send(new, SUPERVISOR, HTTP)
    receive(mailbox, 1)
    introduction = Post(run_dir, m.SCHEDULER)
    introduction.send(new, SUPERVISOR, "9" * 16)
    mailbox.send(m.SCHEDULER, m.Abort(rid="two"))
    got: list[m.Message] = []
    wait_for(lambda: got.extend(second.receive()) or len(got) == 2, "both came")
    assert sorted(type(g).__name__ for g in got) == ["Abort", "Peers"]
    introduction.close()
    second.close()
