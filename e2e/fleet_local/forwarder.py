"""Publishes one address of a cluster on the host's loopback: `python forwarder.py FD TARGET`.

Started by `fleet_local.cluster` with a listening socket of the host and inside the cluster's network namespace; TARGET is `ip:port`, or a
service's DNS name with port, which is looked up for each connection, so that a service may come and go. Standard library only.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import sys

DNS_SERVER = "10.123.0.10"
DNS_TIMEOUT_S = 3.0
CONNECT_TIMEOUT_S = 5.0
_CHUNK = 256 * 1024


def dns_query(name: str, query_id: int) -> bytes:
    """An A query of RFC 1035, section 4."""
    labels = b"".join(bytes([len(p)]) + p.encode() for p in name.split("."))
    return struct.pack(">HHHHHH", query_id, 0x0100, 1, 0, 0, 0) + labels + b"\0" + struct.pack(">HH", 1, 1)


def dns_answer(packet: bytes, query_id: int) -> str | None:
    """The first IPv4 address of an answer; None when there is none or the packet is not the answer. Raises nothing on garbage."""
    try:
        got, flags, questions, answers, _, _ = struct.unpack(">HHHHHH", packet[:12])
        if got != query_id or not flags & 0x8000:
            return None
        at = 12
        for _ in range(questions):
            at = _skip_name(packet, at) + 4
        for _ in range(answers):
            at = _skip_name(packet, at)
            kind, _, _, length = struct.unpack(">HHIH", packet[at : at + 10])
            at += 10
            if kind == 1 and length == 4:
                return socket.inet_ntoa(packet[at : at + 4])
            at += length
    except (struct.error, IndexError, OSError):
        pass
    return None


def _skip_name(packet: bytes, at: int) -> int:
    while packet[at]:
        if packet[at] >= 0xC0:
            return at + 2
        at += packet[at] + 1
    return at + 1


async def resolve(host: str) -> str:
    """The IPv4 address of a host name of the cluster. Raises OSError."""
    if host.replace(".", "").isdigit():
        return host
    loop = asyncio.get_running_loop()
    query_id = int.from_bytes(os.urandom(2))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.setblocking(False)
        s.connect((DNS_SERVER, 53))
        await loop.sock_sendall(s, dns_query(host, query_id))
        async with asyncio.timeout(DNS_TIMEOUT_S):
            address = dns_answer(await loop.sock_recv(s, 4096), query_id)
    if address is None:
        raise OSError(f"there is no service {host}")
    return address


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copies one direction and passes the end on as a half-close, so that a finished sender can still read."""
    while data := await reader.read(_CHUNK):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


def _refusal(target: str, cause: object) -> bytes:
    message = f"nothing answers at {target} in the cluster: {cause}"
    error = {"message": message, "type": "overloaded_error", "code": "router_unreachable", "param": None, "request_id": None}
    body = json.dumps({"error": error}).encode()
    head = f"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body


async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: str) -> None:
    """One connection. An HTTP service that is not there is answered with 503; the API server's connection (TLS) is just closed."""
    host, _, port = target.rpartition(":")
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            far_reader, far_writer = await asyncio.open_connection(await resolve(host), int(port))
    except (OSError, TimeoutError) as e:
        if not host.replace(".", "").isdigit():
            writer.write(_refusal(target, e or "timeout"))
        writer.close()
        return
    pumps = [asyncio.create_task(_pump(reader, far_writer)), asyncio.create_task(_pump(far_reader, writer))]
    try:
        await asyncio.gather(*pumps)
    except OSError:  # a reset on one side ends both
        pass
    finally:
        for pump in pumps:
            pump.cancel()
        for w in (writer, far_writer):
            if w.transport.get_write_buffer_size():
                w.transport.abort()
            w.close()


async def serve(listener: socket.socket, target: str) -> None:
    """Accepts until it is ended. The set keeps the relays alive: the event loop itself holds tasks only weakly."""
    relays: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(relay(reader, writer, target))
        relays.add(task)
        task.add_done_callback(relays.discard)

    async with await asyncio.start_server(accept, sock=listener, backlog=1024) as server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2]))
