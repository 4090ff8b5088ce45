"""An answer in chunks means the same however the network cuts it, although single chunks do not go through the parser."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, cast

import httptools
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fleet_contract.errors import ApiError
from fleet_router.http.chunk import whole_chunk
from fleet_router.http.client import Connection, Pool, Sink

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class Heard(Sink):
    """What an answer was."""

    def __init__(self) -> None:
        self.body = b""
        self.end = ""

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        assert status == 200 and not self.end

    def on_body(self, data: bytes) -> None:
        assert not self.end
        self.body += data

    def on_end(self) -> None:
        assert not self.end
        self.end = "whole"

    def on_lost(self, error: ApiError) -> None:
        assert not self.end
        self.end = "lost"


class Transport:
    """A socket that takes everything."""

    def writelines(self, parts: Any) -> None: ...

    def abort(self) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return False


def hear(pieces: list[bytes]) -> Heard:
    """What a request's sink hears when its answer comes in these pieces and then the connection ends."""

    async def run() -> Heard:
        connection, heard = Connection(Pool(), ("127.0.0.1", 1)), Heard()
        connection.connection_made(cast(asyncio.Transport, Transport()))
        connection.send((b"x",), heard)
        for piece in pieces:
            connection.data_received(piece)
        connection.connection_lost(None)
        return heard

    return asyncio.run(run())


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """Pieces of it; none is empty."""
    at = sorted({p % len(data) for p in places} - {0})
    return [data[a:b] for a, b in zip([0, *at], [*at, len(data)], strict=True)]


def coded(payloads: list[bytes], style: str) -> list[bytes]:
    """Their chunks, and the last one."""
    sizes = {"plain": b"%x", "upper": b"%X", "zeros": b"00%x", "extension": b"%x;a=1"}[style]
    return [*[(sizes % len(p)) + b"\r\n" + p + b"\r\n" for p in payloads], b"0\r\n\r\n"]


@given(
    st.lists(st.one_of(st.binary(min_size=1, max_size=40), st.sampled_from([b"5\r\nhello\r\n", b"\r\n", b"0\r\n\r\n", b"a" * 300])), max_size=6),
    st.sampled_from(["plain", "upper", "zeros", "extension"]),
    st.lists(st.integers(0, 5000), max_size=12),
    st.booleans(),
)
@example([b"x" * 0x15], "plain", [1, 9], False)
def test_a_body_in_chunks_is_the_same_in_any_pieces(payloads: list[bytes], style: str, places: list[int], by_chunk: bool) -> None:
    chunks = coded(payloads, style)
    pieces = [HEAD, *(chunks if by_chunk else cut(b"".join(chunks), places))]
    heard = hear(pieces)
    assert (heard.end, heard.body) == ("whole", b"".join(payloads))


def test_a_size_that_comes_in_two_pieces_is_one_size() -> None:
    payload = b"hello\r\n" + b"w" * (0x15 - 7)
    heard = hear([HEAD, b"3\r\nabc\r\n", b"1", b"5\r\nhello\r\n", payload[7:] + b"\r\n", b"0\r\n\r\n"])
    assert (heard.end, heard.body) == ("whole", b"abc" + payload)


def reference(data: bytes) -> str:
    """How httptools alone sees a whole answer."""
    told: list[str] = []

    class Told:
        def on_message_complete(self) -> None:
            told.append("whole")

    with contextlib.suppress(httptools.HttpParserError):
        httptools.HttpResponseParser(Told()).feed_data(data)
    return "whole" if told else "lost"


@given(
    st.lists(
        st.sampled_from([b"5\r\nhello\r\n", b"5\r\nhell\r\n", b"1", b"\r\n", b"0\r\n\r\n", b"x", b"A\r\n", b"-1\r\n", b" 1\r\na\r\n"]), max_size=7
    )
)
def test_broken_chunks_end_as_the_parser_says(pieces: list[bytes]) -> None:
    assert hear([HEAD, *pieces]).end == reference(b"".join([HEAD, *pieces]))


@pytest.mark.parametrize(
    ("data", "payload"),
    [
        (b"5\r\nhello\r\n", b"hello"), (b"00A\r\n0123456789\r\n", b"0123456789"), (b"0\r\n\r\n", None), (b"5\r\nhello\r\n5", None),
        (b"5\r\nhell\r\n", None), (b"5;a\r\nhello\r\n", None), (b"g\r\n\r\n", None), (b"", None), (b"5", None), (b"\r\n\r\n", None),
        (b"00000005\r\nhello\r\n", None), (b"5\n\nhello\r\n", None), (b"5\r\nhello\n\n", None),
    ],
)  # fmt: skip
def test_whole_chunk(data: bytes, payload: bytes | None) -> None:
    assert whole_chunk(data) == payload
