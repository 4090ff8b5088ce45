"""Who may call the data port: API keys of a file, browsers of listed origins, TLS files. All three are read again when they change.

Made by `process`, used by `app.Border`. Keys are kept as SHA-256 digests and compared in constant time; the internal port is never asked for one.
What the files say is read by `fleet_contract.access`, as the router reads them.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Callable, Mapping
from typing import Final

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from fleet_contract import access
from fleet_contract.access import CORS_MAX_AGE_S, EXPOSED_HEADERS, WatchedFile, digest_of, given_key
from fleet_contract.errors import AUTHENTICATION, ApiError
from fleet_contract.launch import RuntimeLaunch
from fleet_contract.logs import facts
from fleet_runtime.errors import StartError

log = logging.getLogger(__name__)

OPEN_PATHS: Final = frozenset({"/livez", "/readyz", "/health"})  # a probe has no key


def parse_keys(text: str) -> frozenset[bytes]:
    """SHA-256 digests of the keys of a file. Raises ValueError that names the line, also for what only a router can keep."""
    found = access.parse_keys(text)
    if any(k.line is not None for k in found):
        raise ValueError("a line is a JSON object: models and limits of a key are kept by a router; a worker takes plain keys and sha256: lines")
    return frozenset(k.digest for k in found)


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
        given = given_key(headers.get(b"authorization"), headers.get(b"x-api-key"))
        if not given:
            text = "an API key is needed: send it as 'Authorization: Bearer KEY'"
            raise ApiError(401, text, type=AUTHENTICATION, code="missing_api_key")
        digest = digest_of(given)
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
    """True if the data port speaks TLS. Raises StartError(BadFlag)."""
    try:
        return access.check_tls_files(flags.tls_cert_file, flags.tls_key_file)
    except ValueError as e:
        raise StartError("BadFlag", str(e)) from e


def parse_origins(text: str) -> list[str]:
    """`--cors-origins`. Raises StartError(BadFlag)."""
    try:
        return access.parse_origins(text)
    except ValueError as e:
        raise StartError("BadFlag", str(e)) from e


def with_cors(app: ASGIApp, origins: list[str]) -> ASGIApp:
    """`app` for browsers of these origins; `app` itself without any."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST", "OPTIONS"],
        allow_headers=["*"],
        expose_headers=EXPOSED_HEADERS,
        max_age=CORS_MAX_AGE_S,
    )
