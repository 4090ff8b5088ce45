"""The scheduler's sockets towards the other processes of its runtime, and the rule whose mail counts.

Mail that is addressed to another incarnation, or that comes from a process that is not a peer now, is dropped: it belongs to a predecessor.
Sending never blocks: the queue towards a neighbour has no limit, and ends with the neighbour (`PeerDied` closes its socket).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

import zmq

from fleet_runtime import messages as m
from fleet_runtime.messages import DETOKENIZER, HTTP, SCHEDULER, SUPERVISOR

log = logging.getLogger(__name__)
MAX_EARLY: Final = 10_000
MAX_BURST: Final = 1000  # messages taken in one go, so that a flood cannot stop the steps


class Mail:
    """See the module. Implements the book's Outbox."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], run_dir: str, incarnation: str, wake_fds: Sequence[int] = ()) -> None:
        self._context = context
        self._run_dir = run_dir
        self._me = incarnation
        self.peers: dict[str, str] = {}  # process -> incarnation
        self._gone: set[str] = set()  # incarnations that were peers
        self._early: list[m.Message] = []  # addressed to us by senders that no `Peers` has named yet
        self._pull = context.socket(zmq.PULL)
        self._pull.setsockopt(zmq.RCVHWM, 0)
        self._pull.bind(m.endpoint(run_dir, SCHEDULER))
        self._push: dict[str, zmq.Socket[bytes]] = {}
        self._poller = zmq.Poller()
        self._poller.register(self._pull, zmq.POLLIN)
        for wake_fd in wake_fds:
            self._poller.register(wake_fd, zmq.POLLIN)

    def receive(self, timeout_s: float) -> list[m.Message]:
        """Messages that count, in order; waits for the first, or for a wake-up descriptor, up to the timeout."""
        self._poller.poll(round(timeout_s * 1000))
        out: list[m.Message] = []
        for _ in range(MAX_BURST):
            try:
                frame = self._pull.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._sort_in(m.decode(frame), out)
        return out

    def _sort_in(self, message: m.Message, out: list[m.Message]) -> None:
        """Channels are not ordered among each other: mail of a peer may come before the `Peers` that names it, and waits for that."""
        if self._counts(message):
            out.append(message)
            self._follow(message)
            if isinstance(message, m.Peers):
                early, self._early = self._early, []
                for waiting in early:
                    self._sort_in(waiting, out)
        elif message.to == self._me and message.sender not in self._gone and len(self._early) < MAX_EARLY:
            self._early.append(message)

    def _counts(self, message: m.Message) -> bool:
        match message:
            case m.Peers() | m.PeerDied() | m.Drain():
                return message.to in ("", self._me)
            case m.Admit() | m.Abort() | m.RoomRejected() | m.Control():
                # Without a detokenizer no answer could leave: it waits for the next `Peers`. Http aborts what it ended when it heard of that
                # death, and such an Abort waits behind its Admit.
                return message.to == self._me and message.sender == self.peers.get(HTTP) and DETOKENIZER in self.peers
            case m.Stopped():
                return message.to == self._me and message.sender in (self.peers.get(DETOKENIZER), self.peers.get(HTTP))
        return False

    def _follow(self, message: m.Message) -> None:
        """Keeps `peers` true while messages are read, so that the next one is judged rightly."""
        if isinstance(message, m.Peers):
            self._gone |= set(self.peers.values()) - {message.http, message.detokenizer}
            self.peers = {HTTP: message.http, DETOKENIZER: message.detokenizer}
        elif isinstance(message, m.PeerDied):
            self._gone.add(message.incarnation)
            self._early = [e for e in self._early if e.sender != message.incarnation]
            if self.peers.get(message.who) != message.incarnation:
                return
            del self.peers[message.who]
            if (socket := self._push.pop(message.who, None)) is not None:
                socket.close(linger=0)

    def ready(self, pid: int, info: m.SchedulerInfo) -> None:
        """Tells the supervisor that this process can work."""
        self._send(SUPERVISOR, m.Ready(who=SCHEDULER, pid=pid, scheduler_info=info, sender=self._me))

    def sampled(self, items: list[m.Sampled]) -> None:
        self._to_detokenizer(m.SampledBatch(items=items))

    def failed(self, message: m.Failed) -> None:
        self._to_detokenizer(message)

    def handed_over(self, message: m.HandedOver) -> None:
        self._to_detokenizer(message)

    def embedded(self, message: m.Embedded) -> None:
        self._to_detokenizer(message)

    def control_reply(self, message: m.ControlReply) -> None:
        self._to_detokenizer(message)

    def _to_detokenizer(self, message: m.SampledBatch | m.Failed | m.HandedOver | m.Embedded | m.ControlReply) -> None:
        if (to := self.peers.get(DETOKENIZER)) is not None:
            message.sender, message.to = self._me, to
            self._send(DETOKENIZER, message)

    def _send(self, process: str, message: m.Message) -> None:
        socket = self._push.get(process)
        if socket is None:
            socket = self._push[process] = self._context.socket(zmq.PUSH)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(m.endpoint(self._run_dir, process))
        socket.send(m.encode(message), zmq.NOBLOCK)

    def close(self) -> None:
        """Closes all sockets; what was not sent is lost."""
        for socket in (self._pull, *self._push.values()):
            socket.close(linger=0)
