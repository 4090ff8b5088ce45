"""Server-sent events out of a byte stream, however it is cut.

Called by `client` with each piece of a body. Knows nothing of OpenAI. Format: WHATWG HTML, section 9.2.6.
"""

from __future__ import annotations


class SseParser:
    """Collects bytes and gives the data of each finished event.

    Lines may end in LF, CRLF or CR; comments and fields other than `data` are skipped; several data lines join by LF. An event that
    no blank line ends is dropped, as the standard says.
    """

    def __init__(self) -> None:
        self._line = bytearray()  # a line without its end yet
        self._data: list[bytes] = []
        self._has_cr = False  # the last byte was CR: a following LF belongs to it

    def feed(self, piece: bytes) -> list[bytes]:
        """Data of the events that `piece` ends, in order."""
        if self._has_cr and piece.startswith(b"\n"):
            piece = piece[1:]
            self._has_cr = False
        elif piece:
            self._has_cr = False
        if not piece:
            return []
        if piece.endswith(b"\r"):
            self._has_cr = True
        self._line += piece
        # splitlines() of bytes knows exactly LF, CR and CRLF.
        lines = bytes(self._line).splitlines(keepends=True)
        self._line.clear()
        if not lines[-1].endswith((b"\n", b"\r")):
            self._line += lines.pop()
        out: list[bytes] = []
        for line in lines:
            if event := self._take(line.rstrip(b"\r\n")):
                out.append(event)
        return out

    def _take(self, line: bytes) -> bytes | None:
        if not line:
            event, self._data = b"\n".join(self._data), []
            return event or None
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
        return None
