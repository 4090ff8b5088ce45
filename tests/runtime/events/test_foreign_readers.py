"""Readers that were written for vLLM's and SGLang's events read our stream unchanged.

Their public types are rebuilt here from the field tables of their schemas: names, order, which fields must be there. Each reader gets what our
sockets really send: live messages, a replay and a snapshot, with LoRA, salt, evictions and a clear in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from fleet_contract.kv_events import encode_sequence
from fleet_runtime.cache.radix import RadixTree, namespace_of
from fleet_runtime.events.publisher import EventPublisher, Stream
from fleet_testing.kv_reader import Reader

PAGE = 16
Model = dict[int, tuple[int | None, tuple[int, ...]]]  # block -> (block before, tokens)


class VllmStored(msgspec.Struct, tag="BlockStored", omit_defaults=True):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class VllmRemoved(msgspec.Struct, tag="BlockRemoved", omit_defaults=True):
    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None


class VllmCleared(msgspec.Struct, tag="AllBlocksCleared", omit_defaults=True):
    pass


class VllmBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """Map events in an array batch."""

    ts: float
    events: list[VllmStored | VllmRemoved | VllmCleared]
    data_parallel_rank: int | None = None


class SglangStored(msgspec.Struct, tag="BlockStored", omit_defaults=True):
    """The early five fields, and those that came later as optional ones."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    lora_name: str | dict[str, str] | None = None


class SglangRemoved(msgspec.Struct, tag="BlockRemoved", omit_defaults=True):
    block_hashes: list[int]
    medium: str | None = None


class SglangCleared(msgspec.Struct, tag="AllBlocksCleared", omit_defaults=True):
    pass


class SglangBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """A batch of two items: the rank is ignored."""

    ts: float
    events: list[SglangStored | SglangRemoved | SglangCleared]


class ArrayStored(msgspec.Struct, tag="BlockStored", array_like=True, omit_defaults=True):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None


class ArrayRemoved(msgspec.Struct, tag="BlockRemoved", array_like=True, omit_defaults=True):
    block_hashes: list[int | bytes]


class ArrayCleared(msgspec.Struct, tag="AllBlocksCleared", array_like=True, omit_defaults=True):
    pass


class EitherBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


def _apply(model: Model, event: Any) -> None:
    name = type(event).__struct_config__.tag
    if name == "BlockStored":
        parent = event.parent_block_hash
        assert parent is None or parent in model
        assert len(event.token_ids) == len(event.block_hashes) * event.block_size
        for i, h in enumerate(event.block_hashes):
            model[h] = (parent, tuple(event.token_ids[i * event.block_size : (i + 1) * event.block_size]))
            parent = h
    elif name == "BlockRemoved":
        for h in event.block_hashes:
            del model[h]
    else:
        model.clear()


def vllm(payload: bytes, model: Model) -> None:
    for event in msgspec.msgpack.decode(payload, type=VllmBatch).events:
        _apply(model, event)


def sglang(payload: bytes, model: Model) -> None:
    for event in msgspec.msgpack.decode(payload, type=SglangBatch).events:
        _apply(model, event)


def either_encoding(payload: bytes, model: Model) -> None:
    """One that knows the array form and the map form of events, and looks at each which it is."""
    for raw in msgspec.msgpack.decode(payload, type=EitherBatch).events:
        maps = VllmStored | VllmRemoved | VllmCleared
        arrays = ArrayStored | ArrayRemoved | ArrayCleared
        kind = arrays if bytes(raw)[0] & 0xF0 == 0x90 else maps
        _apply(model, msgspec.msgpack.decode(raw, type=kind))


LLMD_STORED = ("block_hashes parent_block_hash token_ids block_size lora_id medium lora_name extra_keys group_idx kv_cache_spec_kind"
               " kv_cache_spec_sliding_window").split()  # fmt: skip
LLMD_FIELDS = {"BlockStored": LLMD_STORED, "BlockRemoved": ["block_hashes", "medium", "group_idx"], "AllBlocksCleared": []}


def llmd(payload: bytes, model: Model) -> None:
    """llm-d: a batch of exactly three items; each map becomes positional fields by its table, what is absent nil; one unknown tag, or one field
    of another type, loses the batch; a parent that is nil is 0."""
    ts, events, rank = msgspec.msgpack.decode(payload)
    assert isinstance(ts, float) and (rank is None or isinstance(rank, int))
    for event in events:
        fields = [event.get(name) for name in LLMD_FIELDS[event["type"]]]
        if event["type"] == "BlockStored":
            hashes, parent, tokens, size, lora_id, medium, lora_name, extra_keys, group, kind, window = fields
            assert all(isinstance(h, int | bytes) for h in hashes) and isinstance(size, int)
            assert isinstance(tokens, list) and all(0 <= t < 2**32 for t in tokens)
            assert lora_id is None and isinstance(medium, str) and (lora_name is None or isinstance(lora_name, str))
            assert extra_keys is None or all(k is None or isinstance(k, list) for k in extra_keys)
            assert group is kind is window is None  # counted as full attention
            for i, h in enumerate(hashes):
                model[h] = (parent, tuple(tokens[i * size : (i + 1) * size]))
                parent = h
        elif event["type"] == "BlockRemoved":
            for h in fields[0]:
                del model[h]
        else:
            model.clear()


READERS: dict[str, Callable[[bytes, Model], None]] = {"vllm": vllm, "sglang": sglang, "either encoding": either_encoding, "llm-d": llmd}


def key(*letters: int) -> bytes:
    return np.repeat(np.array(letters, dtype=np.int32), PAGE).tobytes()


@pytest.fixture(scope="module")
def stream() -> Iterator[tuple[RadixTree, EventPublisher, list[list[bytes]]]]:
    """A tree with a past: its publisher, and the live messages as they came."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    tree = RadixTree()
    publisher = EventPublisher(context, Stream("127.0.0.1", 0, 0, "pod", "model", "00000000000000ff", 10_000), tree)
    with Reader(publisher.events_port, publisher.replay_port, b"") as reader:
        assert reader.sub.poll(5000), "no heartbeat"
        live = [reader.sub.recv_multipart()]
        pages = 0
        for n, names in enumerate([("", ""), ("adapter", ""), ("", "salt"), ("adapter", "salt")] * 3):
            if n == 4:
                tree.clear()
            tree.insert(tree.root, 0, key(n % 5, n, n + 1), [pages, pages + 1, pages + 2], namespace_of(*names))
            tree.insert(tree.root, 0, key(n % 5, n, n + 2), [pages + 3, pages + 4, pages + 5], namespace_of(*names))
            pages += 6
            if n % 3 == 2:
                tree.evict(4)
            publisher.publish()
        while msgspec.msgpack.decode(live[-1][2])[1] or len(live) < 12:
            assert reader.sub.poll(5000)
            live.append(reader.sub.recv_multipart())
    yield tree, publisher, live
    publisher.close()
    context.destroy(linger=0)


def _held(tree: RadixTree) -> set[int]:
    return {h for run in tree.runs() for h in run.hashes}


@pytest.mark.parametrize("name", READERS)
def test_a_foreign_reader_follows_the_live_stream(name: str, stream: tuple[RadixTree, EventPublisher, list[list[bytes]]]) -> None:
    tree, _, live = stream
    model: Model = {}
    for topic, sequence, payload in live:
        assert topic.decode().split("@") == ["kv", "pod", "model"] and len(sequence) == 8
        READERS[name](payload, model)
    assert set(model) == _held(tree) and model
    first = int.from_bytes(live[0][1], "big")
    assert [int.from_bytes(sequence, "big") for _, sequence, _ in live] == list(range(first, first + len(live)))


@pytest.mark.parametrize("name", READERS)
def test_a_foreign_reader_takes_a_replay(name: str, stream: tuple[RadixTree, EventPublisher, list[list[bytes]]]) -> None:
    """As llm-d reads it: frames behind the empty one are topic, sequence, payload; the end has an empty payload."""
    tree, publisher, _ = stream
    model: Model = {}
    with Reader(publisher.events_port, publisher.replay_port) as reader:
        reader.dealer.send_multipart([b"", encode_sequence(0)])
        expected = 0
        while True:
            assert reader.dealer.poll(5000)
            empty, topic, sequence, payload = reader.dealer.recv_multipart()
            assert empty == b"" and topic == b"kv@pod@model"
            if not payload:
                assert int.from_bytes(sequence, "big", signed=True) == -1
                break
            assert int.from_bytes(sequence, "big") == expected
            READERS[name](payload, model)
            expected += 1
    assert set(model) == _held(tree)


@pytest.mark.parametrize("name", READERS)
def test_a_foreign_reader_understands_a_snapshot(name: str, stream: tuple[RadixTree, EventPublisher, list[list[bytes]]]) -> None:
    tree, publisher, _ = stream
    with Reader(publisher.events_port, publisher.replay_port) as reader:
        reader.dealer.send_multipart([b"", encode_sequence(2**64 - 2)])
        while not reader.dealer.poll(20):
            publisher.publish()
        model: Model = {}
        while (frames := reader.dealer.recv_multipart())[-1]:
            READERS[name](frames[-1], model)
        assert set(model) == _held(tree)
