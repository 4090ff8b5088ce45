"""One process's ends of the ipc channels: its PULL socket, PUSH sockets to neighbours, and who its peers are.

Called by the http process and by the detokenizer. Mail is accepted only from the supervisor and from current peers. Channels are not
ordered among each other, so mail of a peer can arrive before the `Peers` that names it: such mail waits for that message.
"""

from __future__ import annotations

from typing import Final

import zmq

from fleet_runtime import messages as m

_SEND_LIMIT: Final = 100_000  # messages that wait for one neighbour; above it, it is as good as dead
_RECONNECT_MS: Final = 20
_EARLY_LIMIT: Final = 10_000


class Mailbox:
    """Not thread-safe: one loop owns it. Close it at the end of the process."""

    def __init__(self, run_dir: str, who: str, incarnation: str) -> None:
        """Binds the PULL socket of `who`."""
        self.who = who
        self.incarnation = incarnation
        self.peers: dict[str, str] = {}  # process -> incarnation, as the last `Peers` said, without those that died since
        self.dropped = 0  # messages of other incarnations, and messages that found a full channel
        self._run_dir = run_dir
        self._context = zmq.Context()
        self._pull = self._context.socket(zmq.PULL)
        self._pull.setsockopt(zmq.RCVHWM, _SEND_LIMIT)
        self._pull.setsockopt(zmq.LINGER, 0)
        self._pull.bind(m.endpoint(run_dir, who))
        self._push: dict[str, zmq.Socket[bytes]] = {}
        self._dead: set[str] = set()
        self._early: list[m.Message] = []

    @property
    def fd(self) -> int:
        """Edge-triggered descriptor of the PULL socket: when it fires, call `receive` until it returns nothing."""
        return int(self._pull.getsockopt(zmq.FD))

    def poll(self, timeout_ms: int) -> bool:
        """Blocks until mail is there or the time is over."""
        return bool(self._pull.poll(timeout_ms))

    def send(self, peer: str, message: m.Message) -> bool:
        """Sends without blocking, stamped with both incarnations. False: no such peer lives, or its channel is full."""
        if peer == m.SUPERVISOR:
            to = ""
        elif peer in self.peers:
            to = self.peers[peer]
        else:
            return False
        message.sender = self.incarnation
        message.to = to
        try:
            self._socket(peer).send(m.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            self.dropped += 1
            return False
        return True

    def receive(self, limit: int = 1000) -> list[m.Message]:
        """All mail that is there, at most about `limit`, in order of arrival; updates `peers`. Never blocks."""
        out: list[m.Message] = []
        while len(out) < limit:
            try:
                data = self._pull.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._sort_in(m.decode(data), out)
        return out

    def close(self) -> None:
        """Gives what was sent a moment to leave."""
        for socket in self._push.values():
            socket.close(linger=200)
        self._pull.close(linger=0)
        self._context.term()

    def _sort_in(self, message: m.Message, out: list[m.Message]) -> None:
        if message.to != self.incarnation:
            self.dropped += 1
        elif isinstance(message, m.Peers):
            named = {m.HTTP: message.http, m.SCHEDULER: message.scheduler, m.DETOKENIZER: message.detokenizer}
            self._dead |= set(self.peers.values()) - set(named.values())
            self.peers = {who: incarnation for who, incarnation in named.items() if who != self.who}
            out.append(message)
            early, self._early = self._early, []
            for waiting in early:
                self._sort_in(waiting, out)
        elif isinstance(message, m.PeerDied):
            self._dead.add(message.incarnation)
            self.peers = {who: incarnation for who, incarnation in self.peers.items() if incarnation != message.incarnation}
            self._early = [e for e in self._early if e.sender != message.incarnation]
            out.append(message)
        elif isinstance(message, m.Drain) or message.sender in self.peers.values():
            out.append(message)
        elif message.sender in self._dead or len(self._early) >= _EARLY_LIMIT:
            self.dropped += 1
        else:
            self._early.append(message)

    def _socket(self, peer: str) -> zmq.Socket[bytes]:
        if peer not in self._push:
            socket = self._context.socket(zmq.PUSH)
            socket.setsockopt(zmq.SNDHWM, _SEND_LIMIT)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
            socket.connect(m.endpoint(self._run_dir, peer))
            self._push[peer] = socket
        return self._push[peer]
