"""One chunk of HTTP's chunked coding, where it came alone and whole: the parser need not see it. Pure. Source: RFC 9112, 7.1."""

from __future__ import annotations

from typing import Final

MAX_SIZE_DIGITS: Final = 7
_DIGITS: Final = {digit: n for n in range(16) for digit in (b"%x" % n + b"%X" % n)}


def whole_chunk(data: bytes) -> bytes | None:
    """What a chunk holds; None when `data` is anything else than one chunk that holds something, without extensions."""
    size, at = 0, 0
    while at < MAX_SIZE_DIGITS and at < len(data) and (digit := _DIGITS.get(data[at])) is not None:
        size = size * 16 + digit
        at += 1
    if not size or len(data) != at + size + 4 or not data.startswith(b"\r\n", at) or not data.endswith(b"\r\n"):
        return None
    return data[at + 2 : -2]
