"""What every child process of the router does first: what the supervisor handed over, signals, a heartbeat, memory, room for many connections."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import resource
import signal
import socket
from typing import Final

import msgspec
from msgspec import Struct

from fleet_router.hang import beat_for_ever
from fleet_router.settings import Settings

M_MMAP_THRESHOLD: Final = -3  # of mallopt(3)
LARGE_BYTES: Final = 128 << 10
SHOW_STACKS: Final = signal.SIGUSR2  # a process that gets it writes to stderr where each of its threads is


class Handover(Struct, frozen=True):
    """Argument of a child process, as JSON: settings, inherited sockets by number, the link's name, the parent to die with."""

    settings: Settings
    parent_pid: int
    link_name: str
    listen_fd: int = -1
    link_fd: int = -1
    index: int = 0  # of an edge
    peer_fd: int = -1
    beat_fd: int = -1

    def peer_socket(self) -> socket.socket | None:
        """The port for other routers; None without."""
        return socket.socket(fileno=self.peer_fd) if self.peer_fd >= 0 else None


def raise_file_limit() -> int:
    """Lets this process open as many files as its hard limit says: each stream takes up to three. Returns that number."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def give_back_large_blocks() -> None:
    """The C library returns what is freed in blocks of 128 KiB or more to the system. Left alone it raises that bound to what it has seen, and
    a table that was large once would be memory of this process for good. Source: mallopt(3). A C library without it: nothing."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)


def read_handover(argv: list[str]) -> Handover:
    """The child's one argument."""
    return msgspec.json.decode(argv[1], type=Handover)


def on_stop(handover: Handover) -> asyncio.Event:
    """Set by SIGTERM. A terminal's Ctrl-C is ignored: the supervisor says what happens. From now on the loop shows that it goes round,
    SIGUSR2 shows the stacks, and large blocks go back to the system when they are freed."""
    faulthandler.register(SHOW_STACKS)
    give_back_large_blocks()
    beat_for_ever(handover.beat_fd)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGINT, lambda: None)
    return stop
