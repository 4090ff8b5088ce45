"""HTTP/1.1 read by the letter of RFC 9112, slowly: what the router's own reading is compared with. Also reads what the router answers."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+) +([\x21-\x7e]+) (?:HTTP|RTSP|ICE)/1\.([01])")  # the parser reads these as HTTP
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*(.*?)[ \t]*", re.DOTALL)
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_CHUNK = re.compile(rb"([0-9A-Fa-f]+)(;[\t\x20-\x7e\x80-\xff]*)?")
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) [\x20-\x7e]*")


class Bad(Exception):
    """These bytes are no HTTP/1.1 message."""


class Unfinished(Exception):
    """The message goes on behind the last byte."""


@dataclass(slots=True)
class Message:
    """A request or an answer."""

    start: tuple[bytes, ...]
    headers: list[tuple[bytes, bytes]]  # names in lower case
    body: bytes
    ends: bool  # the connection ends with it

    def header(self, name: bytes) -> bytes | None:
        return next((v for n, v in self.headers if n == name), None)


@dataclass(slots=True)
class Reading:
    """The messages of one direction of a connection. `rest` says how it ends: clean, bad, unfinished, or after the last message."""

    messages: list[Message] = field(default_factory=list)
    rest: str = "clean"


def requests(data: bytes) -> Reading:
    """The requests that are in these bytes, up to the first that is none, or that says it is the last."""
    out, at = Reading(), 0
    while True:
        while data[at : at + 1] in (b"\r", b"\n"):  # empty lines before a request are ignored; the parser takes half of one for such
            at += 1
        if at == len(data):
            return out
        try:
            message, at = _request(data, at)
        except Bad:
            out.rest = "bad"
            return out
        except Unfinished:
            out.rest = "unfinished"
            return out
        out.messages.append(message)
        if message.ends:
            out.rest = "last"
            return out


def answers(data: bytes, *, to_head: tuple[bool, ...] = ()) -> Reading:
    """Whole answers without the interim ones. to_head: which of them answer HEAD. Raises Bad for what no server may send."""
    out, at = Reading(), 0
    while at < len(data):
        line, after = _take_line(data, at)
        found = _STATUS.fullmatch(line)
        if found is None:
            raise Bad(f"no status line: {line[:80]!r}")
        headers, after = _fields(data, after)
        status = found.group(1)
        if status == b"100":
            at = after
            continue
        number = len(out.messages)
        without = number < len(to_head) and to_head[number]
        body, ends, at = _body(data, after, headers, b"1", until_close=True, without=without)
        out.messages.append(Message((status,), headers, body, ends))
    return out


def _request(data: bytes, at: int) -> tuple[Message, int]:
    line, after = _take_line(data, at)
    found = _LINE.fullmatch(line)
    if found is None:
        raise Bad(f"no request line: {line[:80]!r}")
    headers, after = _fields(data, after)
    minor = found.group(3)
    body, ends, after = _body(data, after, headers, minor, until_close=False, without=False)
    return Message((found.group(1), found.group(2), minor), headers, body, ends or found.group(1) == b"CONNECT"), after


def _take_line(data: bytes, at: int) -> tuple[bytes, int]:
    end = data.find(b"\r\n", at)
    line = data[at:end] if end >= 0 else data[at:]
    if b"\n" in line or b"\r" in line[:-1] or (end >= 0 and b"\r" in line):
        raise Bad("a line ends without CR LF")
    if end < 0:
        raise Unfinished
    return line, end + 2


def _fields(data: bytes, at: int) -> tuple[list[tuple[bytes, bytes]], int]:
    out: list[tuple[bytes, bytes]] = []
    while True:
        line, at = _take_line(data, at)
        if not line:
            return out, at
        found = _FIELD.fullmatch(line)
        if found is None or not _VALUE.fullmatch(found.group(2)):
            raise Bad(f"no header: {line[:80]!r}")
        out.append((found.group(1).lower(), found.group(2)))


def _body(data: bytes, at: int, headers: list[tuple[bytes, bytes]], minor: bytes, *, until_close: bool, without: bool) -> tuple[bytes, bool, int]:
    """The body, whether the connection ends with this message, and where the next one begins."""
    tokens = [t.strip().lower() for n, v in headers if n == b"connection" for t in v.split(b",")]
    ends = b"close" in tokens or (minor == b"0" and b"keep-alive" not in tokens)
    codings = [v for n, v in headers if n == b"transfer-encoding"]
    lengths = [v for n, v in headers if n == b"content-length"]
    if codings:
        if lengths or minor == b"0" or len(codings) > 1 or codings[0].lower() != b"chunked":
            raise Bad("ambiguous framing")
        body, at = (b"", at) if without else _chunks(data, at)
        return body, ends, at
    if not lengths:
        return (data[at:], True, len(data)) if until_close and not without else (b"", ends, at)
    if len(lengths) > 1 or not lengths[0].isdigit():
        raise Bad("no length")
    length = 0 if without else int(lengths[0])
    if len(data) - at < length:
        raise Unfinished
    return data[at : at + length], ends, at + length


def _chunks(data: bytes, at: int) -> tuple[bytes, int]:
    body = b""
    while True:
        line, at = _take_line(data, at)
        found = _CHUNK.fullmatch(line)
        if found is None:
            raise Bad(f"no chunk size: {line[:80]!r}")
        size = int(found.group(1), 16)
        if size == 0:
            _, at = _fields(data, at)
            return body, at
        if len(data) < at + size + 2:
            if data[at + size : at + size + 2] not in (b"", b"\r"):
                raise Bad("no CR LF behind a chunk")
            raise Unfinished
        if data[at + size : at + size + 2] != b"\r\n":
            raise Bad("no CR LF behind a chunk")
        body, at = body + data[at : at + size], at + size + 2
