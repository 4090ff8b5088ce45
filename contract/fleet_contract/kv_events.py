"""KV events: what a worker's prefix cache holds, told as it changes. Format and rules: docs/contract.md section 5.

The first half is what our runtime writes: batches as arrays of three items, events as maps with vLLM's names. The second half reads what
ours, vLLM and SGLang write, in all their encodings; each event of a batch is judged on its own. Hashes are u64 in what readers get.

    live     PUB     [topic, sequence, payload]
    replay   ROUTER  asked [b"", start]; answers [b"", topic, sequence, payload] per batch, then [b"", topic, END_SEQUENCE, b""]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from msgspec import Struct

from fleet_contract.wire import WireError

SNAPSHOT_START: Final = 2**64 - 2  # a replay from here is answered by all that is held now, under the current sequence
END_SEQUENCE: Final = 2**64 - 1
MEDIUM_DEVICE: Final = "GPU"  # the pool that a step reads, whatever the device: readers count this word as the first tier
TAGS: Final = ("BlockStored", "BlockRemoved", "AllBlocksCleared")
_U64: Final = 2**64 - 1


def kv_topic(pod_uid: str, model_revision: str) -> bytes:
    """Topic frame of a worker's KV events."""
    return f"kv@{pod_uid}@{model_revision}".encode()


def encode_sequence(sequence: int) -> bytes:
    """A sequence frame."""
    return sequence.to_bytes(8, "big")


def decode_sequence(frame: bytes) -> int:
    """Inverse of `encode_sequence`. Raises WireError."""
    if len(frame) != 8:
        raise WireError(f"a sequence has 8 bytes, not {len(frame)}")
    return int.from_bytes(frame, "big")


def epoch_of(incarnation: str) -> int:
    """The epoch of a scheduler's stream: its incarnation (16 hex) as a number."""
    return int(incarnation, 16)


# What we write. Fields without a default are on the wire always: vLLM's own types require them.


class BlockStored(Struct, tag="BlockStored", tag_field="type", omit_defaults=True, kw_only=True):
    """Blocks now held, in prefix order. vLLM's names, then ours."""

    block_hashes: list[int]
    parent_block_hash: int | None  # None: the first block begins a prompt
    token_ids: list[int]  # of all these blocks
    block_size: int
    lora_id: None = msgspec.field(default_factory=lambda: None)  # deprecated in vLLM and still required there
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None  # one per block: LoRA, and in a prompt's first block the salt
    seq_hashes: list[int]  # RFC 1527 (fleet_contract.prefix); the same numbers as block_hashes
    base_block_idx: int  # blocks before the first of these
    cache_salt: str | None = None
    epoch: int


class BlockRemoved(Struct, tag="BlockRemoved", tag_field="type", omit_defaults=True, kw_only=True):
    """Blocks no longer held in `medium`."""

    block_hashes: list[int]
    medium: str | None
    epoch: int


class AllBlocksCleared(Struct, tag="AllBlocksCleared", tag_field="type", omit_defaults=True, kw_only=True):
    """Nothing is held any more. The first batch of each stream is one."""

    epoch: int


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(Struct, array_like=True):
    """One message. Without events: a heartbeat."""

    ts: float  # seconds since 1970, information only
    events: list[Event]
    data_parallel_rank: int = 0


# What a reader gets.


@dataclass(slots=True)
class Stored:
    """A `BlockStored` of any known writer."""

    hashes: list[int]
    parent: int | None
    tokens: list[int]
    block_size: int
    medium: str | None
    lora: str = ""
    salt: str = ""  # of a run that begins a prompt; ours says it in every run, others inherit it from the parent
    group: int | None = None
    spec_kind: str | None = None
    sliding_window: int | None = None
    opaque: bool = False  # something else than tokens, LoRA and salt is in these blocks (images, embeddings): no hash of tokens names them
    seq_hashes: list[int] = field(default_factory=list)  # ours: one per block; empty: compute them from the tokens
    base: int | None = None  # ours: blocks before the first
    epoch: int | None = None

    @property
    def placeable(self) -> bool:
        """The tokens are those of the blocks, no more and no fewer (not so for tier copies, and for EAGLE's overlapping pairs)."""
        return bool(self.tokens) and len(self.tokens) == len(self.hashes) * self.block_size


@dataclass(slots=True)
class Removed:
    """A `BlockRemoved` of any known writer."""

    hashes: list[int]
    medium: str | None = None
    group: int | None = None
    epoch: int | None = None


@dataclass(slots=True)
class Cleared:
    """An `AllBlocksCleared` of any known writer."""

    epoch: int | None = None


@dataclass(slots=True)
class Batch:
    """One message, read. `faults`: a sentence for each event that could not be read."""

    ts: float
    rank: int | None
    events: list[Stored | Removed | Cleared]
    faults: list[str] = field(default_factory=list)


class _RawArray(Struct, array_like=True):
    ts: Any = None
    events: list[msgspec.Raw] = msgspec.field(default_factory=list)
    data_parallel_rank: Any = None


class _RawMap(Struct):
    ts: Any = None
    events: list[msgspec.Raw] = msgspec.field(default_factory=list)
    data_parallel_rank: Any = None


class _Stored(Struct):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None = None
    token_ids: list[int] | None = None
    block_size: int = 0
    lora_id: Any = None
    medium: Any = None
    lora_name: Any = None  # SGLang: also a map {cache_salt, session_id}
    extra_keys: Any = None
    group_idx: Any = None
    kv_cache_spec_kind: Any = None
    kv_cache_spec_sliding_window: Any = None


class _StoredArray(_Stored, tag="BlockStored", array_like=True):
    pass


class _StoredMap(_Stored, tag="BlockStored", tag_field="type"):
    seq_hashes: Any = None
    base_block_idx: Any = None
    cache_salt: Any = None
    epoch: Any = None


class _Removed(Struct):
    block_hashes: list[int | bytes]
    medium: Any = None
    group_idx: Any = None


class _RemovedArray(_Removed, tag="BlockRemoved", array_like=True):
    pass


class _RemovedMap(_Removed, tag="BlockRemoved", tag_field="type"):
    epoch: Any = None


class _ClearedArray(Struct, tag="AllBlocksCleared", array_like=True):
    pass


class _ClearedMap(Struct, tag="AllBlocksCleared", tag_field="type"):
    epoch: Any = None


_encoder = msgspec.msgpack.Encoder()
_raw_array = msgspec.msgpack.Decoder(_RawArray)
_raw_map = msgspec.msgpack.Decoder(_RawMap)
_event_array: msgspec.msgpack.Decoder[_StoredArray | _RemovedArray | _ClearedArray] = msgspec.msgpack.Decoder(
    _StoredArray | _RemovedArray | _ClearedArray
)
_event_map: msgspec.msgpack.Decoder[_StoredMap | _RemovedMap | _ClearedMap] = msgspec.msgpack.Decoder(_StoredMap | _RemovedMap | _ClearedMap)


def encode_batch(batch: EventBatch) -> bytes:
    """Payload frame of a batch."""
    return _encoder.encode(batch)


def decode_batch(payload: bytes) -> Batch:
    """Reads a payload of ours, vLLM or SGLang. Raises WireError where it is no batch; a bad event costs only itself."""
    try:
        raw = _raw_array.decode(payload) if _is_array(payload) else _raw_map.decode(payload)
    except (msgspec.DecodeError, RecursionError) as e:
        raise WireError(f"this is no batch of KV events: {e}") from e
    ts = float(raw.ts) if isinstance(raw.ts, int | float) else 0.0
    batch = Batch(ts, _number(raw.data_parallel_rank), [])
    for data in raw.events:
        try:
            batch.events.append(_judge(memoryview(data)))
        except (msgspec.DecodeError, WireError, RecursionError, UnicodeDecodeError) as e:
            batch.faults.append(f"event {len(batch.events) + len(batch.faults)}: {e}")
    return batch


def split_live(frames: Sequence[bytes]) -> tuple[bytes, int, bytes]:
    """Topic, sequence and payload of a live message. Raises WireError."""
    if len(frames) != 3:
        raise WireError(f"a KV event message has 3 frames, not {len(frames)}")
    return frames[0], decode_sequence(frames[1]), frames[2]


def split_replay(frames: Sequence[bytes]) -> tuple[int, bytes] | None:
    """Sequence and payload of one answer to a replay request, as a REQ or DEALER socket gets it; None for its end. Raises WireError.

    Older vLLM and SGLang send [sequence, payload], newer vLLM and we [topic, sequence, payload]; a DEALER sees an empty frame before.
    """
    if not 2 <= len(frames) <= 4:
        raise WireError(f"an answer to a replay has 2 or 3 frames, not {len(frames)}")
    sequence, payload = decode_sequence(frames[-2]), frames[-1]
    return None if not payload or sequence == END_SEQUENCE else (sequence, payload)


def _is_array(data: bytes | memoryview) -> bool:
    """msgpack format: fixarray, array 16, array 32."""
    return len(data) > 0 and (data[0] & 0xF0 == 0x90 or data[0] in (0xDC, 0xDD))


def _judge(data: memoryview) -> Stored | Removed | Cleared:
    event = _event_array.decode(data) if _is_array(data) else _event_map.decode(data)
    match event:
        case _StoredArray() | _StoredMap():
            return _stored(event)
        case _RemovedArray() | _RemovedMap():
            epoch = _number(event.epoch) if isinstance(event, _RemovedMap) else None
            return Removed([_hash(h) for h in event.block_hashes], _text(event.medium), _number(event.group_idx), epoch)
        case _ClearedArray():
            return Cleared()
        case _ClearedMap():
            return Cleared(_number(event.epoch))


def _stored(event: _StoredArray | _StoredMap) -> Stored:
    tokens = event.token_ids or []
    if tokens and (min(tokens) < 0 or max(tokens) >= 2**32):
        raise WireError("a token id is not in 0 .. 2**32 - 1")
    if tokens and event.block_size < 1:
        raise WireError(f"block_size is {event.block_size}")
    extra = event.extra_keys if isinstance(event.extra_keys, list) else []
    lora, salt = _text(event.lora_name) or "", ""
    if isinstance(event.lora_name, dict):
        salt = _text(event.lora_name.get("cache_salt")) or ""
    first = extra[0] if extra and event.parent_block_hash is None and isinstance(extra[0], list) else []
    salts = [key for key in first if isinstance(key, str) and key != lora]
    out = Stored(
        hashes=[_hash(h) for h in event.block_hashes],
        parent=None if event.parent_block_hash is None else _hash(event.parent_block_hash),
        tokens=tokens,
        block_size=event.block_size,
        medium=_text(event.medium),
        lora=lora,
        salt=salt or (salts[0] if salts else ""),
        group=_number(event.group_idx),
        spec_kind=_text(event.kv_cache_spec_kind),
        sliding_window=_number(event.kv_cache_spec_sliding_window),
        opaque=any(not isinstance(key, str) for keys in extra if isinstance(keys, list) for key in keys),
    )
    if isinstance(event, _StoredMap):
        out.salt = _text(event.cache_salt) or out.salt
        out.base, out.epoch = _number(event.base_block_idx), _number(event.epoch)
        ours = event.seq_hashes
        if isinstance(ours, list) and len(ours) == len(out.hashes) and all(type(h) is int for h in ours):
            out.seq_hashes = [h & _U64 for h in ours]
    return out


def _hash(value: int | bytes) -> int:
    """Signed or unsigned numbers, or bytes whose last 8 count (big-endian)."""
    if isinstance(value, int):
        return value & _U64
    if not value:
        raise WireError("a block hash has no bytes")
    return int.from_bytes(value[-8:], "big")


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _number(value: object) -> int | None:
    return value if type(value) is int else None
