"""Accepting clients as fast as they come. Called by the edge; knows nothing of what they say.

libuv takes one connection of a listening socket in each turn of the loop. A busy turn lasts milliseconds, so a burst of new clients would
fill the kernel's queue, and what does not fit there is lost: a client tries again after 1, 3, 7 s. The same socket under several
descriptors is taken from once for each of them.

The kernel keeps little of what clients do not read: left alone it takes 4 MB for each, which are the pod's too, and when all sockets of the
machine together have a twentieth of its memory it takes nothing more of anybody.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import Final

BACKLOG: Final = 4096  # connections that wait in the kernel; it allows net.core.somaxconn at most
UNSENT_BYTES: Final = 64 << 10  # that the kernel keeps for a client beside what is on its way
PER_TURN: Final = 16  # connections accepted in one turn of the loop at most


async def listen_on(
    listener: socket.socket, factory: Callable[[], asyncio.BaseProtocol], *, tls: ssl.SSLContext | None = None, handshake_s: float | None = None
) -> list[asyncio.Server]:
    """Accepts on a bound socket until each of the servers is closed. The socket stays the caller's: it closes it, or shuts it down.

    Args: handshake_s: limit of a TLS handshake.
    """
    loop = asyncio.get_running_loop()
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)  # accepted sockets inherit it
    return [
        await loop.create_server(factory, sock=listener.dup(), backlog=BACKLOG, ssl=tls, ssl_handshake_timeout=handshake_s) for _ in range(PER_TURN)
    ]
