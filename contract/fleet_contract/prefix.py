"""Prefix keys: the chain hash of the 16-token pages of a prompt (RFC 1527: XXH3-64, seed 1337).

The one implementation; the router's index and the runtime's KV events both use it. A key names a whole prefix: equal keys,
equal prefixes (up to collisions, which cost one bad route and never a wrong answer). Where a prompt has no token ids, the router makes
keys of its bytes instead, in a namespace of their own: a key of bytes is never one of tokens.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import Final

import msgspec
import xxhash

from fleet_contract.names import PAGE_SIZE
from fleet_contract.wire import encode_ids

SEED: Final = 1337
BLOCK_BYTES: Final = 256  # of a key of bytes: about as much text as four pages
_pair = struct.Struct("<QQ")
_xxh3 = xxhash.xxh3_64_intdigest


def namespace_hash(model_revision: str, lora: str = "", salt: str = "") -> int:
    """H(msgpack [modelRevision, lora, salt]): mixed into the first link, so that no two namespaces share a key."""
    return _xxh3(msgspec.msgpack.encode([model_revision, lora, salt]), seed=SEED)


def chain_hashes(ids: Sequence[int], namespace: int, *, page_size: int = PAGE_SIZE) -> list[int]:
    """Keys of all whole pages of a prompt.

    Args:
        ids: token ids, each below 2**32.
        namespace: of `namespace_hash`.
        page_size: tokens per page.
    Returns:
        One u64 per whole page; a partial last page has no key.
    """
    return extend_chain(namespace, encode_ids(ids), page_size=page_size).tolist()


def extend_chain(previous: int, data: bytes, *, page_size: int = PAGE_SIZE) -> array[int]:
    """Keys of the whole pages of `data` (little-endian u32 ids) behind a prefix whose key is `previous`, or a namespace's hash."""
    out = array("Q")
    width = 4 * page_size
    for start in range(0, len(data) // width * width, width):
        previous = _xxh3(_pair.pack(previous, _xxh3(data[start : start + width], seed=SEED)), seed=SEED)
        out.append(previous)
    return out


def bytes_namespace_hash(model_revision: str, lora: str = "", salt: str = "") -> int:
    """The same as `namespace_hash`, for keys of bytes."""
    return _xxh3(msgspec.msgpack.encode([model_revision, lora, salt, "bytes"]), seed=SEED)


def bytes_chain(namespace: int, data: bytes) -> tuple[int, ...]:
    """Keys of the whole blocks of BLOCK_BYTES of a prompt; a partial last block has none. Each block is hashed with the key before it as the seed."""
    keys: list[int] = []
    key = namespace
    for end in range(BLOCK_BYTES, len(data) + 1, BLOCK_BYTES):
        key = _xxh3(data[end - BLOCK_BYTES : end], key)
        keys.append(key)
    return tuple(keys)
