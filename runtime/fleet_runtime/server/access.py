"""Who may call the data port: API keys of a file, browsers of listed origins, TLS files. All three are read again when they change.

Made by `process`, used by `app.Border`. Keys are kept as SHA-256 digests and compared in constant time; the internal port is never asked for one.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import ssl
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from fleet_contract.errors import AUTHENTICATION, ApiError
from fleet_contract.launch import RuntimeLaunch
from fleet_contract.logs import facts
from fleet_contract.names import HEADER_REQUEST_ID
from fleet_runtime.errors import StartError

log = logging.getLogger(__name__)

LOOK_AGAIN_S: Final = 2.0
OPEN_PATHS: Final = frozenset({"/livez", "/readyz", "/health"})  # a probe has no key
_DIGEST: Final = re.compile(r"sha256:([0-9a-fA-F]{64})")
_MIN_KEY: Final = 8


class WatchedFile:
    """A file that may change under us (a Secret that is mounted); `changed` looks at most once in LOOK_AGAIN_S."""

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


def parse_keys(text: str) -> frozenset[bytes]:
    """SHA-256 digests of the keys: one a line, plain or as `sha256:<64 hex>`; empty lines and lines with # in front say nothing.

    Raises ValueError that names the line.
    """
    digests: set[bytes] = set()
    for number, line in enumerate(text.splitlines(), 1):
        key = line.strip()
        if not key or key.startswith("#"):
            continue
        if (given := _DIGEST.fullmatch(key)) is not None:
            digests.add(bytes.fromhex(given[1]))
        elif key.startswith("sha256:"):
            raise ValueError(f"line {number}: sha256: needs 64 hex digits behind it")
        elif len(key) < _MIN_KEY or not key.isascii() or not key.isprintable() or " " in key:
            raise ValueError(f"line {number}: a key has at least {_MIN_KEY} visible ASCII characters")
        else:
            digests.add(hashlib.sha256(key.encode()).digest())
    if not digests:
        raise ValueError("there is no key in it; put one on a line, or leave --api-key-file away")
    return frozenset(digests)


class ApiKeys:
    """The keys of `--api-key-file`."""

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises StartError(BadFlag)."""
        self._file = WatchedFile(path, clock)
        try:
            self._digests = parse_keys(self._file.path.read_text())
        except (OSError, ValueError) as e:
            raise StartError("BadFlag", f"--api-key-file {path}: {e}") from e

    def check(self, headers: Mapping[bytes, bytes]) -> None:
        """`Authorization: Bearer KEY` or `x-api-key: KEY`. Raises ApiError 401."""
        self._reload()
        given = headers.get(b"x-api-key", b"").strip()
        scheme, _, rest = headers.get(b"authorization", b"").strip().partition(b" ")
        if not given and scheme.lower() == b"bearer":
            given = rest.strip()
        if not given:
            text = "an API key is needed: send it as 'Authorization: Bearer KEY'"
            raise ApiError(401, text, type=AUTHENTICATION, code="missing_api_key")
        digest = hashlib.sha256(given).digest()
        # No early end: the time must not tell which key is near.
        if not sum(hmac.compare_digest(digest, known) for known in self._digests):
            raise ApiError(401, "the API key is not known here; check it, or ask for one", type=AUTHENTICATION, code="invalid_api_key")

    def _reload(self) -> None:
        if not self._file.changed():
            return
        try:
            self._digests = parse_keys(self._file.path.read_text())
        except (OSError, ValueError) as e:
            log.error("the API keys could not be read again; the old ones stay", extra=facts(path=str(self._file.path), error=str(e)))
        else:
            log.info("API keys read again", extra=facts(keys=len(self._digests)))


def check_tls_flags(flags: RuntimeLaunch) -> bool:
    """True if the data port speaks TLS. Raises StartError(BadFlag) for one file without the other, or files that do not fit."""
    cert, key = flags.tls_cert_file, flags.tls_key_file
    if bool(cert) != bool(key):
        missing, given = ("--tls-key-file", "--tls-cert-file") if cert else ("--tls-cert-file", "--tls-key-file")
        raise StartError("BadFlag", f"{given} is set but {missing} is not; TLS needs both")
    if not cert:
        return False
    try:
        tls_context(cert, key)
    except OSError as e:  # ssl.SSLError is one
        raise StartError("BadFlag", f"--tls-cert-file {cert} and --tls-key-file {key}: {e}; give PEM files that belong together") from e
    return True


def tls_context(cert: str, key: str) -> ssl.SSLContext:
    """TLS 1.2 and up. Raises OSError (ssl.SSLError) when the files cannot be read or do not fit."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(cert, key)
    return context


async def renew_tls(context: ssl.SSLContext, cert: str, key: str) -> None:
    """New connections get the new certificate when the files change. Runs until cancelled."""
    files = [WatchedFile(cert), WatchedFile(key)]
    while True:
        await asyncio.sleep(LOOK_AGAIN_S)
        changed = [f.changed() for f in files]  # both are looked at
        if not any(changed):
            continue
        try:
            tls_context(cert, key)  # a half-written pair must not replace a good one
            context.load_cert_chain(cert, key)
        except OSError as e:
            log.error("the TLS files could not be read again; the old certificate stays", extra=facts(error=str(e)))
        else:
            log.info("TLS certificate read again", extra=facts(path=cert))


def parse_origins(text: str) -> list[str]:
    """`--cors-origins`. Raises StartError(BadFlag)."""
    origins = [o.strip().rstrip("/") for o in text.split(",") if o.strip()]
    for origin in origins:
        if origin != "*" and not re.fullmatch(r"https?://[^/\s]+", origin):
            raise StartError("BadFlag", f"--cors-origins has {origin!r}; an origin is scheme://host[:port], or * for all")
    return origins


def with_cors(app: ASGIApp, origins: list[str]) -> ASGIApp:
    """`app` for browsers of these origins; `app` itself without any."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST", "OPTIONS"],
        allow_headers=["*"],
        expose_headers=[HEADER_REQUEST_ID, "Retry-After"],
        max_age=600,
    )
