"""The head of a client's request: what it says, and what of it is refused before a byte of its body is read; how an answer's begins.

Pure; used by `http_server`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from fleet_contract import errors as contract_errors
from fleet_contract.errors import ApiError

INVALID: Final = "invalid_http"
MAX_HEADS: Final = 512  # heads that are known
MAX_KNOWN_HEAD: Final = 2 << 10  # bytes of each
_REASONS: Final = {
    200: b"OK", 204: b"No Content", 400: b"Bad Request", 401: b"Unauthorized", 403: b"Forbidden", 404: b"Not Found", 405: b"Method Not Allowed",
    408: b"Request Timeout", 409: b"Conflict", 413: b"Content Too Large", 415: b"Unsupported Media Type", 417: b"Expectation Failed",
    422: b"Unprocessable Content", 429: b"Too Many Requests", 431: b"Request Header Fields Too Large", 500: b"Internal Server Error",
    502: b"Bad Gateway", 503: b"Service Unavailable", 504: b"Gateway Timeout", 505: b"HTTP Version Not Supported",
}  # fmt: skip
_HOST_BYTES: Final = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._~%!$&'()*+;=:[]"  # RFC 3986, 3.2.2 and 3.2.3


@dataclass(slots=True, eq=False)
class Head:
    """What a request's head says. Several requests may share one, so nobody changes it once it was vetted."""

    method: str
    path: str
    headers: list[tuple[bytes, bytes]]  # names in lower case
    version: str
    keep_alive: bool
    length: int = 0  # of the body, by Content-Length
    vetted: bool = False  # the handler's: it has looked at these headers and found nothing wrong

    def header(self, name: bytes) -> bytes | None:
        """First value of a header; the name in lower case."""
        for n, v in self.headers:
            if n == name:
                return v
        return None

    def vet(self, max_body_bytes: int) -> None:
        """Sets `length`. Raises ApiError for what RFC 9112 wants refused although the parser reads it, and for a body over the limit."""
        version = self.version
        if version not in ("1.0", "1.1"):
            raise ApiError(505, f"HTTP/{version} is not spoken here; send HTTP/1.1", code=INVALID)
        if self.method == "CONNECT":
            raise ApiError(405, "CONNECT is for proxies; this is none", code="method_not_allowed")
        hosts = [v for n, v in self.headers if n == b"host"]
        if len(hosts) > 1 or (not hosts and version == "1.1"):
            raise ApiError(400, f"a request has one Host header; this one has {len(hosts)}", code=INVALID)
        if hosts and hosts[0].translate(None, _HOST_BYTES):
            raise ApiError(400, f"Host is {hosts[0][:80].decode('latin-1')!r}; a name or an address is allowed, and a port", code=INVALID)
        coding = self.header(b"transfer-encoding")
        if coding is not None and (coding.lower() != b"chunked" or version == "1.0"):
            text = f"Transfer-Encoding is {coding[:40].decode('latin-1')!r} in HTTP/{version}; chunked in HTTP/1.1 is allowed"
            raise ApiError(400, text, code=INVALID)
        if (length := self.header(b"content-length")) is not None:
            self.length = int(length)
            if self.length > max_body_bytes:
                raise body_too_large(self.length, max_body_bytes)
        if self.expects_continue and (self.header(b"expect") or b"").lower() != b"100-continue":
            raise ApiError(417, "Expect allows 100-continue only", code=INVALID)

    @property
    def expects_continue(self) -> bool:
        """The client waits for our word before it sends its body."""
        return self.version == "1.1" and self.header(b"expect") is not None


def path_of(target: bytes) -> str:
    """The path of a request's target, without query; also of one with scheme and authority, which RFC 9112 3.2.2 wants every server to take."""
    if target[:1] != b"/":
        scheme, separator, rest = target.partition(b"://")
        if separator and scheme.lower() in (b"http", b"https"):
            at = next((n for n, c in enumerate(rest) if c in b"/?"), len(rest))
            target = rest[at:] if rest[at : at + 1] == b"/" else b"/" + rest[at:]
    return target.partition(b"?")[0].decode("latin-1")


def body_too_large(length: int | None, limit: int) -> ApiError:
    """413. length: None when it came in chunks."""
    got = f"{length} bytes" if length is not None else "longer"
    return ApiError(413, f"the request body is {got}; at most {limit} bytes are allowed (--max-body-bytes of the router)", code="body_too_large")


def too_many_connections(limit: int) -> ApiError:
    """503: all files that this process may open are in use."""
    text = f"this router has {limit} connections, all that its limit of open files (ulimit -n) allows; try again, or run more routers"
    return ApiError(503, text, type=contract_errors.OVERLOADED, code="too_many_connections", retry_after_s=1)


def error_lines(error: ApiError) -> tuple[tuple[bytes, bytes], ...]:
    """Header lines of an answer that is an error."""
    lines: tuple[tuple[bytes, bytes], ...] = ()
    if error.retry_after_s is not None:
        lines = ((b"Retry-After", str(error.retry_after_s).encode()),)
    if error.status == 401:
        lines += ((b"WWW-Authenticate", b"Bearer"),)
    return lines


def know_head(heads: dict[bytes, Head], raw: bytes, head: Head) -> None:
    """Keeps a head that was parsed and passed. Not one whose lines the parser may have ended elsewhere than at CR LF."""
    if len(raw) <= MAX_KNOWN_HEAD and raw[:1].isalpha() and raw.count(b"\r\n") == raw.count(b"\n") == len(head.headers) + 2:
        if len(heads) >= MAX_HEADS:
            heads.clear()
        heads[raw] = head


def without_upgrade(begin: bytes, headers: list[tuple[bytes, bytes]]) -> bytes:
    """A head without its offer to speak another protocol. Args: begin: its first line. headers: names in lower case."""
    lines = [begin]
    for name, value in headers:
        if name == b"connection":
            value = b", ".join(t for t in map(bytes.strip, value.split(b",")) if t.lower() not in (b"upgrade", b"http2-settings"))
        if value and name not in (b"upgrade", b"http2-settings"):
            lines.append(name + b": " + value)
    return b"\r\n".join(lines) + b"\r\n\r\n"


@lru_cache(maxsize=512)  # the type is the worker's own word
def answer_begin(status: int, content_type: bytes) -> bytes:
    """An answer's head up to the request id."""
    return b"HTTP/1.1 %d %b\r\nContent-Type: %b\r\nX-Request-Id: " % (status, _REASONS.get(status, b"Status"), content_type)
