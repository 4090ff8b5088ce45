"""Server-sent events, cut anywhere."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_bench.sse import SseParser

STREAM = b': ping\r\n\r\ndata: {"a":1}\n\ndata:two\r\n\r\nevent: x\ndata: three\ndata:  four\n\nid: 7\n\ndata: \xc3\xa9\r\rdata: [DONE]\n\n'
EVENTS = [b'{"a":1}', b"two", b"three\n four", "é".encode(), b"[DONE]"]


def parse(pieces: list[bytes]) -> list[bytes]:
    parser = SseParser()
    return [event for piece in pieces for event in parser.feed(piece)]


@pytest.mark.parametrize("cut", range(len(STREAM) + 1))
def test_a_stream_cut_in_two_anywhere_gives_the_same_events(cut: int) -> None:
    assert parse([STREAM[:cut], STREAM[cut:]]) == EVENTS


def test_a_stream_that_comes_byte_by_byte_gives_the_same_events() -> None:
    assert parse([bytes([b]) for b in STREAM]) == EVENTS


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_a_stream_cut_in_many_pieces_gives_the_same_events(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    assert parse([STREAM[a:b] for a, b in pairwise(edges)]) == EVENTS


def test_an_event_without_its_blank_line_is_not_given() -> None:
    assert parse([b"data: one\n\ndata: two\n"]) == [b"one"]
