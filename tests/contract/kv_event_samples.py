"""Payloads as other writers make them, written by hand from the field tables of their schemas: name -> (payload, what a reader gets)."""

from __future__ import annotations

import msgspec

from fleet_contract.kv_events import Cleared, Removed, Stored

_pack = msgspec.msgpack.encode
TOKENS = list(range(100, 132))
SHA = bytes(range(32))  # a 32-byte block hash: its last 8 bytes count
SHA_U64 = int.from_bytes(SHA[-8:], "big")

SAMPLES: dict[str, tuple[bytes, float, int | None, list[Stored | Removed | Cleared]]] = {
    # Arrays, five fields: the early schema of both; signed hashes; a batch of two items.
    "sglang early": (
        _pack([12.5, [["BlockStored", [-1, 5], None, TOKENS, 16, None], ["BlockRemoved", [-1]], ["AllBlocksCleared"]]]),
        12.5,
        None,
        [Stored([2**64 - 1, 5], None, TOKENS, 16, None), Removed([2**64 - 1]), Cleared()],
    ),
    # Arrays with medium and a map where the LoRA's name was: one page an event.
    "sglang with a map for lora_name": (
        _pack([3, [["BlockStored", [7], -9, TOKENS[:16], 16, None, "CPU_TIER1", {"cache_salt": "s", "session_id": "x"}]], 3]),
        3.0,
        3,
        [Stored([7], 2**64 - 9, TOKENS[:16], 16, "CPU_TIER1", salt="s")],
    ),
    # Arrays, all eleven fields, byte hashes, extra keys of LoRA and salt, and a tail of the future.
    "vllm arrays": (
        _pack(
            [
                1.0,
                [
                    ["BlockStored", [SHA, b"\x01"], None, TOKENS, 16, 1, "GPU", "lora", [["lora", "salt"], ["lora"]], 0, "full_attention",
                     None, "x", 1],
                    ["BlockRemoved", [SHA], "GPU", 0, "later"],
                ],
                0,
            ]
        ),
        1.0,
        0,
        [
            Stored([SHA_U64, 1], None, TOKENS, 16, "GPU", "lora", "salt", 0, "full_attention"),
            Removed([SHA_U64], "GPU", 0),
        ],
    ),
    # Maps in an array batch, defaults left out, unknown keys; a sliding-window group; a tier copy without tokens.
    "vllm maps": (
        _pack(
            [
                1.0,
                [
                    {"type": "BlockStored", "block_hashes": [2**64 - 1], "parent_block_hash": SHA, "token_ids": [], "block_size": 16,
                     "lora_id": None, "medium": "CPU", "lora_name": None, "group_idx": 1, "kv_cache_spec_kind": "sliding_window",
                     "kv_cache_spec_sliding_window": 512, "invented_later": {"a": [1]}},
                    {"type": "BlockRemoved", "block_hashes": [3], "medium": None},
                    {"type": "AllBlocksCleared"},
                ],
                1,
            ]
        ),
        1.0,
        1,
        [
            Stored([2**64 - 1], SHA_U64, [], 16, "CPU", group=1, spec_kind="sliding_window", sliding_window=512),
            Removed([3]),
            Cleared(),
        ],
    ),
    # The batch is a map too, the rank left out.
    "vllm map of maps": (
        _pack({"ts": 2.0, "events": [{"type": "BlockRemoved", "block_hashes": [4], "medium": "GPU"}], "invented_later": 1}),
        2.0,
        None,
        [Removed([4], "GPU")],
    ),
    # An image in the first block: tokens do not name it.
    "vllm with an image": (
        _pack([0.0, [["BlockStored", [1, 2], None, TOKENS, 16, None, "GPU", None, [[["image-hash", 3]], None]]], None]),
        0.0,
        None,
        [Stored([1, 2], None, TOKENS, 16, "GPU", opaque=True)],
    ),
    # EAGLE: one token more than the blocks hold.
    "overlapping pairs": (
        _pack([0.0, [["BlockStored", [1], None, TOKENS[:17], 16, None]]]),
        0.0,
        None,
        [Stored([1], None, TOKENS[:17], 16, None)],
    ),
}  # fmt: skip

# One bad event each, that must cost only itself.
BAD_EVENTS: dict[str, object] = {
    "unknown tag, array": ["BlockMoved", [1], "GPU"],
    "unknown tag, map": {"type": "BlockMoved", "block_hashes": [1]},
    "no tag, map": {"block_hashes": [1]},
    "no tag, array": [],
    "a tag that is a number": [7, [1]],
    "a text for an event": "BlockStored",
    "a number for an event": 5,
    "nil for an event": None,
    "hashes that are texts": ["BlockRemoved", ["abc"]],
    "hashes that are floats": ["BlockRemoved", [1.5]],
    "a hash without bytes": ["BlockRemoved", [b""]],
    "hashes that are no list": {"type": "BlockRemoved", "block_hashes": 5},
    "no hashes": ["BlockRemoved"],
    "negative tokens": ["BlockStored", [1], None, [-5] * 16, 16, None],
    "tokens of 64 bits": ["BlockStored", [1], None, [2**40] * 16, 16, None],
    "tokens that are texts": ["BlockStored", [1], None, ["a"] * 16, 16, None],
    "no block size": ["BlockStored", [1], None, TOKENS[:16]],
    "a parent that is a list": ["BlockStored", [1], [2], TOKENS[:16], 16],
}
