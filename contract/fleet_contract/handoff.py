"""Prefill -> decode hand-over: the messages of the transfer connection and their frames. Flow: docs/contract.md section 9.

Decode dials the prefill's transfer port. A frame is two little-endian u32 (message bytes, payload bytes), the msgpack message,
then the payload. Only `Pages` has a payload: `count` pages, each `Hello.page_bytes` long.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec
from msgspec import Struct, field

FRAME_HEADER: Final = struct.Struct("<II")
MAX_MESSAGE_BYTES: Final = 1 << 20
MAX_PAYLOAD_BYTES: Final = 1 << 30


class Route(Struct, rename="camel", frozen=True):
    """Answer of the bootstrap server's `GET /route`: where to dial, and what the layout is. 503 until registered."""

    incarnation: str = ""
    pod_uid: str = ""
    rank: int = 0
    ranks: int = 1
    transfer_host: str = ""  # empty: the host that answered
    transfer_port: int = 0
    backends: list[str] = field(default_factory=list)


class _Message(Struct, tag_field="m", array_like=True):
    pass


class Hello(_Message, tag="hello"):
    """First message both ways. Every field but the first three must be equal on both sides, else `Failed`."""

    incarnation: str = ""
    pod_uid: str = ""
    rank: int = 0
    ranks: int = 1
    model_revision: str = ""
    page_size: int = 16
    page_bytes: int = 0
    dtype: str = ""
    layers: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    layout: str = ""
    backend: str = "tcp"


class Alloc(_Message, tag="alloc"):
    """Decode -> prefill: pages are reserved. `pages` are decode's page numbers beyond its own `prefix_pages`."""

    room: int = 0
    generation: int = 0
    prefill_incarnation: str = ""
    prefix_pages: int = 0
    pages: list[int] = field(default_factory=list)
    slot: int = 0


class Queued(_Message, tag="queued"):
    """Both ways, each second: alive and still waiting. Timers run on silence."""

    room: int = 0
    generation: int = 0


class Pages(_Message, tag="pages"):
    """Prefill -> decode: pages [first, first + count) of `Alloc.pages`, checksums (crc32 of each page), payload follows."""

    room: int = 0
    generation: int = 0
    first: int = 0
    count: int = 0
    crc: list[int] = field(default_factory=list)


class Done(_Message, tag="done"):
    """Prefill -> decode: the prompt is computed; the first token and what decode needs to go on."""

    room: int = 0
    generation: int = 0
    first_token: int = 0
    seed: int = 0
    cached_tokens: int = 0
    prompt_tokens: int = 0
    logprobs: bytes = b""
    state: bytes = b""


class Received(_Message, tag="received"):
    """Decode -> prefill: all pages and `Done` are here."""

    room: int = 0
    generation: int = 0


class Abort(_Message, tag="abort"):
    """Either way: the request is gone. Answered by `Drained`."""

    room: int = 0
    generation: int = 0
    reason: str = ""


class Drained(_Message, tag="drained"):
    """No write for this room is under way or will come."""

    room: int = 0
    generation: int = 0


class Failed(_Message, tag="failed"):
    """The room ended with an error. Room 0: the connection as a whole (a Hello mismatch)."""

    room: int = 0
    generation: int = 0
    status: int = 500
    type: str = "server_error"
    code: str = "transfer_failed"
    message: str = ""


class Ping(_Message, tag="ping"):
    """Each second, both ways; `steps` is the scheduler loop's own progress."""

    incarnation: str = ""
    n: int = 0
    steps: int = 0


Handoff = Hello | Alloc | Queued | Pages | Done | Received | Abort | Drained | Failed | Ping

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Handoff] = msgspec.msgpack.Decoder(Handoff)


class FrameError(ValueError):
    """A frame that breaks the format; the connection ends."""


def encode(message: Handoff, payload_bytes: int = 0) -> bytes:
    """Header and message of one frame; the caller sends `payload_bytes` of payload after it."""
    body = _encoder.encode(message)
    return FRAME_HEADER.pack(len(body), payload_bytes) + body


def decode_header(header: bytes) -> tuple[int, int]:
    """Lengths of message and payload. Raises FrameError above the limits."""
    message_bytes, payload_bytes = FRAME_HEADER.unpack(header)
    if message_bytes > MAX_MESSAGE_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        raise FrameError(f"frame of {message_bytes} + {payload_bytes} bytes; at most {MAX_MESSAGE_BYTES} + {MAX_PAYLOAD_BYTES}")
    return message_bytes, payload_bytes


def decode(body: bytes) -> Handoff | None:
    """One message; None for a message of a newer writer that we do not know. Raises FrameError on broken bytes."""
    try:
        return _decoder.decode(body)
    except msgspec.ValidationError:
        return None
    except msgspec.DecodeError as e:
        raise FrameError(f"not msgpack: {e}") from e
