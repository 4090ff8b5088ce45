"""What can be sent again, against a plain list."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_runtime.events.replay import ReplayBuffer


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from([b"", b"x", b"yy" * 5]), max_size=80),  # b"": a heartbeat
    st.integers(1, 8),
    st.integers(12, 40),
    st.integers(1, 6),
    st.integers(0, 90),
)
def test_it_keeps_the_newest_without_a_gap_and_within_its_bounds(
    messages: list[bytes], max_batches: int, max_bytes: int, max_beats: int, start: int
) -> None:
    buffer = ReplayBuffer(max_batches, max_bytes, max_beats)
    for sequence, payload in enumerate(messages):
        buffer.add(sequence, payload or b"b", beat=not payload)
        buffer.check_integrity()
        kept = [s for s, _ in buffer.since(0)]
        assert kept and kept[-1] == sequence
        batches = [s for s in kept if messages[s]]
        assert len(batches) <= max_batches and len(kept) - len(batches) <= max_beats
        assert sum(len(messages[s]) for s in batches) <= max_bytes
    everything = list(buffer.since(0))
    assert all(payload == (messages[s] or b"b") for s, payload in everything)
    assert list(buffer.since(start)) == [m for m in everything if m[0] >= start]


def test_a_quiet_night_does_not_drive_out_the_history() -> None:
    buffer = ReplayBuffer(16)
    for sequence in range(16):
        buffer.add(sequence, b"batch")
    for sequence in range(16, 50_000):
        buffer.add(sequence, b"beat", beat=True)
    assert [s for s, _ in buffer.since(0)] == list(range(50_000))


def test_a_replay_is_not_disturbed_by_what_comes_meanwhile() -> None:
    buffer = ReplayBuffer(4)
    for sequence in range(4):
        buffer.add(sequence, b"%d" % sequence)
    messages = buffer.since(0)
    assert next(messages) == (0, b"0")
    for sequence in range(4, 12):
        buffer.add(sequence, b"%d" % sequence)
    assert [s for s, _ in messages] == [1, 2, 3]


def test_a_sequence_left_out_is_a_bug_that_shows() -> None:
    buffer = ReplayBuffer(4)
    buffer.add(0, b"x")
    with pytest.raises(AssertionError, match="consecutive"):
        buffer.add(2, b"x")
