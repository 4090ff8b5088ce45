"""Who may call a data port, as router and runtime read it: files of API keys, browsers' origins, TLS. Loads nothing heavy.

A key is kept as its SHA-256 digest. All files may change under us (a Secret that is mounted); `WatchedFile` tells.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from fleet_contract.logs import facts
from fleet_contract.names import HEADER_REQUEST_ID, PRIORITY_CLASSES

LOOK_AGAIN_S: Final = 2.0
CORS_MAX_AGE_S: Final = 600
EXPOSED_HEADERS: Final = (HEADER_REQUEST_ID, "Retry-After")
_DIGEST: Final = re.compile(r"sha256:([0-9a-fA-F]{64})")
_MIN_KEY: Final = 8


class WatchedFile:
    """A file that may change under us; `changed` looks at most once in LOOK_AGAIN_S."""

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = Path(path)
        self._clock = clock
        self._looked = clock()
        self._stamp = self._now()

    def _now(self) -> tuple[int, int, int] | None:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def changed(self) -> bool:
        """True once for each change. A file that is gone has not changed: what it said stays."""
        if self._clock() - self._looked < LOOK_AGAIN_S:
            return False
        self._looked = self._clock()
        stamp = self._now()
        if stamp is None or stamp == self._stamp:
            return False
        self._stamp = stamp
        return True


class KeyLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """A line of a key file that says more than the key: a JSON object. 0: no limit; None: as its neighbour says."""

    key: str
    name: str = ""  # of its owner; the tenant whose share of the workers it has
    models: list[str] | None = None  # names as requests have them, and `<namespace>/*`; None: all
    priority_class: str = "default"  # of requests that name none
    priority_classes: list[str] | None = None  # that requests may name; None: the one above and batch
    requests_per_minute: int = 0
    tokens_per_minute: int = 0


@dataclass(frozen=True, slots=True)
class KeyFacts:
    """One key: its digest, and what its line says."""

    digest: bytes
    line: KeyLine | None = None


def digest_of(key: bytes) -> bytes:
    """SHA-256 of a key as a client sends it."""
    return hashlib.sha256(key).digest()


def parse_keys(text: str) -> list[KeyFacts]:
    """One key a line: plain, as `sha256:<64 hex>`, or as a JSON object with that as its `key`; empty lines and lines with # in front say nothing.

    Raises ValueError that names the line.
    """
    found: dict[bytes, KeyFacts] = {}
    for number, line in enumerate(text.splitlines(), 1):
        given = line.strip()
        if not given or given.startswith("#"):
            continue
        try:
            said = _checked(msgspec.json.decode(given, type=KeyLine)) if given.startswith("{") else None
            digest = _digest(given if said is None else said.key)
        except (msgspec.DecodeError, ValueError) as e:
            raise ValueError(f"line {number}: {e}") from None
        if digest in found and (said is not None or found[digest].line is not None):
            raise ValueError(f"line {number}: an earlier line has that key")
        found[digest] = KeyFacts(digest, said)
    if not found:
        raise ValueError("there is no key in it; put one on a line, or leave --api-key-file away")
    return list(found.values())


def _checked(line: KeyLine) -> KeyLine:
    for name in (line.priority_class, *(line.priority_classes or ())):
        if name not in PRIORITY_CLASSES:
            raise ValueError(f"priority class {name[:40]!r} does not exist; {', '.join(PRIORITY_CLASSES)} do")
    if min(line.requests_per_minute, line.tokens_per_minute) < 0:
        raise ValueError("a limit is below 0; 0 is no limit")
    return line


def _digest(key: str) -> bytes:
    if (given := _DIGEST.fullmatch(key)) is not None:
        return bytes.fromhex(given[1])
    if key.startswith("sha256:"):
        raise ValueError("sha256: needs 64 hex digits behind it")
    if len(key) < _MIN_KEY or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(f"a key has at least {_MIN_KEY} visible ASCII characters")
    return digest_of(key.encode())


def given_key(authorization: bytes | None, x_api_key: bytes | None) -> bytes:
    """The key that a request shows: `x-api-key: KEY` or `Authorization: Bearer KEY`; empty without one."""
    given = (x_api_key or b"").strip()
    scheme, _, rest = (authorization or b"").strip().partition(b" ")
    return rest.strip() if not given and scheme.lower() == b"bearer" else given


def tls_context(cert: str, key: str) -> ssl.SSLContext:
    """TLS 1.2 and up. Raises OSError (ssl.SSLError) when the files cannot be read or do not fit."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(cert, key)
    return context


def check_tls_files(cert: str, key: str) -> bool:
    """True if the data port speaks TLS. Raises ValueError for one file without the other, or files that do not fit."""
    if bool(cert) != bool(key):
        missing, given = ("--tls-key-file", "--tls-cert-file") if cert else ("--tls-cert-file", "--tls-key-file")
        raise ValueError(f"{given} is set but {missing} is not; TLS needs both")
    if not cert:
        return False
    try:
        tls_context(cert, key)
    except OSError as e:  # ssl.SSLError is one
        raise ValueError(f"--tls-cert-file {cert} and --tls-key-file {key}: {e}; give PEM files that belong together") from e
    return True


class TlsFiles:
    """The context of a port, renewed when its files change: new connections then get the new certificate."""

    def __init__(self, cert: str, key: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises OSError."""
        self._cert, self._key = cert, key
        self._files = [WatchedFile(cert, clock), WatchedFile(key, clock)]
        self.context = tls_context(cert, key)

    def renew(self) -> bool:
        """True if the files changed and are good. Raises OSError for files that are not: the old certificate stays."""
        changed = [f.changed() for f in self._files]  # both are looked at
        if not any(changed):
            return False
        tls_context(self._cert, self._key)  # a half-written pair must not replace a good one
        self.context.load_cert_chain(self._cert, self._key)
        return True


async def renew_tls(files: TlsFiles, log: logging.Logger) -> None:
    """New connections get the new certificate when the files change. Runs until cancelled."""
    while True:
        await asyncio.sleep(LOOK_AGAIN_S)
        try:
            if files.renew():
                log.info("TLS certificate read again")
        except OSError as e:
            log.error("the TLS files could not be read again; the old certificate stays", extra=facts(error=str(e)))


def parse_origins(text: str) -> list[str]:
    """`--cors-origins`. Raises ValueError."""
    origins = [o.strip().rstrip("/") for o in text.split(",") if o.strip()]
    for origin in origins:
        if origin != "*" and not re.fullmatch(r"https?://[^/\s]+", origin):
            raise ValueError(f"--cors-origins has {origin!r}; an origin is scheme://host[:port], or * for all")
    return origins


def allowed_origin(origin: str, allowed: Sequence[str]) -> str:
    """What `Access-Control-Allow-Origin` says to a browser of this origin; empty: nothing."""
    return "*" if "*" in allowed else origin if origin in allowed else ""
