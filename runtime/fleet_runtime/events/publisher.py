"""Publishes the KV events of one scheduler: live on a PUB socket, history and snapshots on a ROUTER socket. Format: fleet_contract.kv_events.

The scheduler's thread calls `publish` once per loop and never waits in it; a thread of its own (`sender`) does everything else.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Final

import zmq

from fleet_contract.kv_events import epoch_of, kv_topic
from fleet_runtime.cache.radix import RadixTree
from fleet_runtime.errors import StartError
from fleet_runtime.events.handover import Handover
from fleet_runtime.events.sender import Sender

PUB_HWM: Final = 100_000  # messages
ROUTER_HWM: Final = 1000
MAX_REQUEST_BYTES: Final = 4096
LINGER_MS: Final = 100  # the last messages reach those that read


@dataclass(frozen=True, slots=True)
class Stream:
    """Where a stream is published, and whose it is."""

    host: str
    events_port: int  # of rank 0; 0: any
    replay_port: int
    pod_uid: str
    model_revision: str
    incarnation: str  # of the scheduler: the epoch
    replay_batches: int
    rank: int = 0


class EventPublisher:
    """See the module. The tree must be empty when this is made."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], stream: Stream, tree: RadixTree) -> None:
        self._pub, self.events_port = _bind(context, zmq.PUB, stream, stream.events_port, "events")
        try:
            self._router, self.replay_port = _bind(context, zmq.ROUTER, stream, stream.replay_port, "replay")
        except StartError:
            self._pub.close()
            raise
        self._handover = Handover(tree, stream.model_revision)
        self.publish = self._handover.publish  # for the scheduler's thread, once per loop
        self._sender = Sender(
            self._handover,
            self._pub,
            self._router,
            topic=kv_topic(stream.pod_uid, stream.model_revision),
            epoch=epoch_of(stream.incarnation),
            rank=stream.rank,
            replay_batches=stream.replay_batches,
        )
        self._thread = threading.Thread(target=self._sender.run, name="kv-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Sends what was handed over, then ends the thread and its sockets. Blocks for a moment."""
        self._sender.ending = True
        self._handover.wake()
        self._thread.join()
        self._pub.close()
        self._router.close()
        self._handover.close()


def _bind(context: zmq.Context[zmq.Socket[bytes]], kind: int, stream: Stream, port: int, what: str) -> tuple[zmq.Socket[bytes], int]:
    """A bound socket and its port."""
    port = port and port + stream.rank
    host = stream.host
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, LINGER_MS if kind == zmq.PUB else 0)
    socket.setsockopt(zmq.SNDHWM, PUB_HWM if kind == zmq.PUB else ROUTER_HWM)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)  # what others send us
    socket.setsockopt(zmq.IPV6, int(":" in host))
    if kind == zmq.ROUTER:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    try:
        socket.bind(f"tcp://{f'[{host}]' if ':' in host else host}:{port or '*'}")
    except zmq.ZMQError as e:
        socket.close()
        raise StartError("PortInUse", f"cannot bind the KV {what} port {host}:{port}: {e.strerror}; choose another with --{what}-port") from e
    return socket, int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
