"""Bytes that cross rooms: what we write equals the committed golden files, and what is in them is read back, now and by older or newer ends."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from fleet_contract import handoff, worker


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("golden_examples", Path(__file__).parent / "golden_examples.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


examples = _load()


@pytest.mark.parametrize("name", sorted(examples.rendered()))
def test_written_bytes_equal_the_golden_file(name: str) -> None:
    assert (examples.GOLDEN / name).read_bytes() == examples.rendered()[name]


def test_no_golden_file_is_left_over() -> None:
    assert {p.name for p in examples.GOLDEN.iterdir()} == set(examples.rendered())


@pytest.mark.parametrize("name", sorted(examples.JSON_EXAMPLES))
def test_json_is_read_back_and_unknown_fields_are_ignored(name: str) -> None:
    example = examples.JSON_EXAMPLES[name]
    data = json.loads((examples.GOLDEN / f"{name}.json").read_bytes())
    assert msgspec.json.decode(json.dumps(data), type=type(example)) == example
    data["aFieldOfTheFuture"] = {"x": 1}
    assert msgspec.json.decode(json.dumps(data), type=type(example)) == example


@pytest.mark.parametrize("name", sorted(examples.JSON_EXAMPLES))
def test_missing_json_fields_have_defaults(name: str) -> None:
    kind = type(examples.JSON_EXAMPLES[name])
    assert msgspec.json.decode(b"{}", type=kind) == kind()


@pytest.mark.parametrize("name", sorted(examples.MSGPACK_EXAMPLES))
def test_msgpack_is_read_back(name: str) -> None:
    example = examples.MSGPACK_EXAMPLES[name]
    data = bytes.fromhex((examples.GOLDEN / f"{name}.hex").read_text())
    assert msgspec.msgpack.decode(data, type=type(example)) == example


def test_a_new_worker_state_does_not_kill_the_report() -> None:
    report = msgspec.json.decode(b'{"revisions":{"r":{"workers":[{"state":"hibernating"}]}}}', type=worker.FleetReport)
    assert report.revisions["r"].workers[0].state == "hibernating"


@pytest.mark.parametrize("name", sorted(examples.HANDOFF_EXAMPLES))
def test_handoff_frames_are_read_back(name: str) -> None:
    frame = bytes.fromhex((examples.GOLDEN / f"handoff_{name}.hex").read_text())
    message_bytes, payload_bytes = handoff.decode_header(frame[: handoff.FRAME_HEADER.size])
    assert payload_bytes == (3 if name == "pages" else 0)
    assert handoff.decode(frame[handoff.FRAME_HEADER.size :][:message_bytes]) == examples.HANDOFF_EXAMPLES[name]


def test_an_unknown_handoff_message_is_none_and_a_longer_known_one_is_read() -> None:
    assert handoff.decode(msgspec.msgpack.encode(["teleport", 1])) is None
    assert handoff.decode(msgspec.msgpack.encode(["queued", 5, 6, "a new field"])) == handoff.Queued(5, 6)
    assert handoff.decode(msgspec.msgpack.encode(["queued", 5])) == handoff.Queued(5, 0)


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x92\xa6queued"])
def test_broken_handoff_bytes_are_a_frame_error(body: bytes) -> None:
    with pytest.raises(handoff.FrameError):
        handoff.decode(body)


def test_oversized_frames_are_refused_before_they_are_read() -> None:
    with pytest.raises(handoff.FrameError, match="at most"):
        handoff.decode_header(handoff.FRAME_HEADER.pack(handoff.MAX_MESSAGE_BYTES + 1, 0))
    with pytest.raises(handoff.FrameError, match="at most"):
        handoff.decode_header(handoff.FRAME_HEADER.pack(1, handoff.MAX_PAYLOAD_BYTES + 1))
