"""The scheduler's sockets towards the other processes of its runtime, and the rule whose mail counts.

Mail that is addressed to another incarnation, or that comes from a process that is not a peer now, is dropped: it belongs to a predecessor.
Sending never blocks: the queue towards a neighbour has no limit, and ends with the neighbour (`PeerDied` closes its socket).
"""

from __future__ import annotations

import logging
from typing import Final

import zmq

from fleet_runtime import messages as m
from fleet_runtime.messages import DETOKENIZER, HTTP, SCHEDULER, SUPERVISOR

log = logging.getLogger(__name__)
MAX_BURST: Final = 1000  # messages taken in one go, so that a flood cannot stop the steps


class Mail:
    """See the module. Implements the book's Outbox."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], run_dir: str, incarnation: str, wake_fd: int | None = None) -> None:
        self._context = context
        self._run_dir = run_dir
        self._me = incarnation
        self.peers: dict[str, str] = {}  # process -> incarnation
        self._pull = context.socket(zmq.PULL)
        self._pull.setsockopt(zmq.RCVHWM, 0)
        self._pull.bind(m.endpoint(run_dir, SCHEDULER))
        self._push: dict[str, zmq.Socket[bytes]] = {}
        self._poller = zmq.Poller()
        self._poller.register(self._pull, zmq.POLLIN)
        if wake_fd is not None:
            self._poller.register(wake_fd, zmq.POLLIN)

    def receive(self, timeout_s: float) -> list[m.Message]:
        """Messages that count, in order; waits for the first, or for the wake-up descriptor, up to the timeout."""
        self._poller.poll(round(timeout_s * 1000))
        out: list[m.Message] = []
        for _ in range(MAX_BURST):
            try:
                frame = self._pull.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            message = m.decode(frame)
            if self._counts(message):
                out.append(message)
                self._follow(message)
        return out

    def _counts(self, message: m.Message) -> bool:
        match message:
            case m.Peers() | m.PeerDied() | m.Drain():
                return message.to in ("", self._me)
            case m.Admit() | m.Abort() | m.RoomRejected():
                # Without a detokenizer no answer could leave; http itself ends what it carries when it hears of that death.
                return message.to == self._me and message.sender == self.peers.get(HTTP) and DETOKENIZER in self.peers
            case m.Stopped():
                return message.to == self._me and message.sender == self.peers.get(DETOKENIZER)
        return False

    def _follow(self, message: m.Message) -> None:
        """Keeps `peers` true while messages are read, so that the next one is judged rightly."""
        if isinstance(message, m.Peers):
            self.peers = {HTTP: message.http, DETOKENIZER: message.detokenizer}
        elif isinstance(message, m.PeerDied) and self.peers.get(message.who) == message.incarnation:
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

    def _to_detokenizer(self, message: m.SampledBatch | m.Failed | m.HandedOver) -> None:
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
