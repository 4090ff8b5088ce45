"""The reader of KV events: samples of every known writer, bad events, broken batches, frames, and fuzz."""

from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_contract import kv_events
from fleet_contract.kv_events import END_SEQUENCE, Cleared, Removed, Stored, decode_batch, encode_sequence, split_live, split_replay
from fleet_contract.wire import WireError


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


samples = _load("kv_event_samples")
GOOD = ["BlockRemoved", [77]]


@pytest.mark.parametrize("name", samples.SAMPLES)
def test_each_known_writer_is_read(name: str) -> None:
    payload, ts, rank, events = samples.SAMPLES[name]
    batch = decode_batch(payload)
    assert (batch.ts, batch.rank, batch.faults) == (ts, rank, [])
    assert batch.events == events


def test_our_own_batch_is_read_with_what_we_add() -> None:
    batch = decode_batch(bytes.fromhex((Path(__file__).parent / "golden" / "kv_batch.hex").read_text()))
    hashes = [2**64 - 5, 6]
    stored = Stored(hashes, None, list(range(32)), 16, "GPU", salt="s", seq_hashes=hashes, base=0, epoch=9)
    assert batch.events == [stored, Cleared(9)] and batch.rank == 0 and stored.placeable


def test_only_tokens_that_are_those_of_the_blocks_can_be_hashed() -> None:
    eagle = decode_batch(samples.SAMPLES["overlapping pairs"][0]).events[0]
    copy = decode_batch(samples.SAMPLES["vllm maps"][0]).events[0]
    assert isinstance(eagle, Stored) and isinstance(copy, Stored) and not eagle.placeable and not copy.placeable


@pytest.mark.parametrize("name", samples.BAD_EVENTS)
def test_a_bad_event_costs_only_itself(name: str) -> None:
    batch = decode_batch(msgspec.msgpack.encode([1.0, [GOOD, samples.BAD_EVENTS[name], GOOD], 0]))
    assert batch.events == [Removed([77]), Removed([77])]
    assert len(batch.faults) == 1 and batch.faults[0].startswith("event 1: ")


@pytest.mark.parametrize(
    "fields",
    [
        {"lora_id": "text"},
        {"medium": 5},
        {"lora_name": [1]},
        {"extra_keys": 3},
        {"extra_keys": [1, "a"]},
        {"extra_keys": [[], None]},
        {"group_idx": "a"},
        {"seq_hashes": [1, 2, 3]},
        {"seq_hashes": ["a"]},
        {"base_block_idx": 1.5},
        {"epoch": []},
        {"token_ids": None},
    ],
)
def test_a_field_that_is_not_needed_costs_nothing(fields: dict[str, Any]) -> None:
    event = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [], "block_size": 16, **fields}
    batch = decode_batch(msgspec.msgpack.encode([1.0, [event]]))
    assert batch.events == [Stored([1], None, [], 16, None)] and not batch.faults


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x90\x90", b"\xa3abc", b"\x05", msgspec.msgpack.encode([1.0, 5]), b"\x93\x01\x92\x91", b"\xc0"])
def test_what_is_no_batch_is_said(payload: bytes) -> None:
    with pytest.raises(WireError, match="batch"):
        decode_batch(payload)


def test_a_batch_without_anything_is_a_heartbeat() -> None:
    assert decode_batch(msgspec.msgpack.encode([1.0, [], None])).events == []
    assert decode_batch(msgspec.msgpack.encode({})).events == []


def test_deep_nesting_is_a_fault_and_no_crash() -> None:
    deep = b"\x91" * 100_000 + b"\xc0"
    for payload in (deep, b"\x92\x01\x91" + deep, b"\x92\x01\x91\x82\xa4type\xacBlockRemoved\xacblock_hashes" + deep):
        with contextlib.suppress(WireError):
            assert decode_batch(payload).faults


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=6) | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
tags = st.sampled_from(kv_events.TAGS) | st.text(max_size=8)
fields = st.sampled_from([f for kind in (kv_events.BlockStored, kv_events.BlockRemoved) for f in kind.__struct_fields__])
events = (
    values
    | st.tuples(tags, st.lists(values, max_size=13)).map(lambda t: [t[0], *t[1]])
    | st.tuples(tags, st.dictionaries(fields, values, max_size=8)).map(lambda t: {"type": t[0], **t[1]})
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(events, max_size=5))
def test_random_events_are_each_read_or_counted(wild: list[Any]) -> None:
    batch = decode_batch(msgspec.msgpack.encode([1.0, [*wild, GOOD], 0]))
    assert len(batch.events) + len(batch.faults) == len(wild) + 1
    assert batch.events[-1] == Removed([77])
    for event in batch.events:
        if not isinstance(event, Cleared):
            assert all(0 <= h < 2**64 for h in event.hashes)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(samples.SAMPLES)), st.data())
def test_bytes_that_were_changed_on_the_way_never_raise_anything_but_a_wire_error(name: str, data: st.DataObject) -> None:
    payload = bytearray(samples.SAMPLES[name][0])
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(payload)))
    for damaged in (bytes(payload), bytes(payload[:cut])):
        with contextlib.suppress(WireError):
            decode_batch(damaged)


@pytest.mark.parametrize("delimiter", [[], [b""]])
@pytest.mark.parametrize("topic", [[], [b""], [b"kv@pod@model"], [b"8 bytes!"]])
def test_answers_to_replays_are_read_in_both_forms_by_req_and_dealer(delimiter: list[bytes], topic: list[bytes]) -> None:
    assert split_replay([*delimiter, *topic, encode_sequence(5), b"payload"]) == (5, b"payload")
    assert split_replay([*delimiter, *topic, encode_sequence(END_SEQUENCE), b""]) is None


@pytest.mark.parametrize("frames", [[], [b""], [b"1234567", b"p"], [b""] * 5])
def test_frames_that_are_no_answer_are_said(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        split_replay(frames)


def test_live_frames_are_read() -> None:
    assert split_live([b"t", encode_sequence(2**40), b"p"]) == (b"t", 2**40, b"p")
    for frames in ([b"t", b"p"], [b"t", b"short", b"p"]):
        with pytest.raises(WireError):
            split_live(frames)
