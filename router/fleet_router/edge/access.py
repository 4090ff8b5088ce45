"""The data port's door: callers and their keys, browsers of other origins, TLS. Made by `edge`.

TLS handshakes are made by the event loop's own protocol: one that hangs holds up nobody and ends by its limit.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import Final

from fleet_contract.access import CORS_MAX_AGE_S, EXPOSED_HEADERS, TlsFiles, allowed_origin, check_tls_files, parse_origins, renew_tls
from fleet_contract.names import HEADER_TOLD_HITS, HEADER_TOLD_KEYS, HEADER_TOLD_QUEUE, HEADER_TOLD_WORKER
from fleet_router.edge.callers import Callers
from fleet_router.http.head import Head
from fleet_router.http.request import Request
from fleet_router.settings import BadFlag, Settings

log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S: Final = 10.0
_EXPOSED: Final = ", ".join((*EXPOSED_HEADERS, HEADER_TOLD_WORKER, HEADER_TOLD_HITS, HEADER_TOLD_KEYS, HEADER_TOLD_QUEUE, "Request-Id")).encode()


class Access:
    """See the module."""

    def __init__(self, settings: Settings, clock: Callable[[], float], share: float = 1.0) -> None:
        """Args: share: of every caller's limits, what this process may give. Raises BadFlag."""
        self.callers = Callers(settings.api_key_file, clock, share)
        try:
            self._origins = parse_origins(settings.cors_origins)
            is_tls = check_tls_files(settings.tls_cert_file, settings.tls_key_file)
        except ValueError as e:
            raise BadFlag(str(e)) from e
        self._tls = TlsFiles(settings.tls_cert_file, settings.tls_key_file) if is_tls else None
        self._task: asyncio.Task[None] | None = None

    @property
    def tls(self) -> ssl.SSLContext | None:
        """Of the data port."""
        return self._tls.context if self._tls is not None else None

    def start(self) -> None:
        """Looks after the TLS files from now on."""
        if self._tls is not None:
            self._task = asyncio.get_running_loop().create_task(renew_tls(self._tls, log))

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def cors_lines(self, request: Request) -> bytes:
        """Header lines of every answer, for the browser that asked."""
        if not self._origins:
            return b""
        allowed = self._allowed(request.head)
        if not allowed:
            return b"Vary: Origin\r\n"
        return b"Access-Control-Allow-Origin: %b\r\nAccess-Control-Expose-Headers: %b\r\nVary: Origin\r\n" % (allowed, _EXPOSED)

    def preflight(self, head: Head) -> tuple[tuple[bytes, bytes], ...] | None:
        """A browser's question before a request: further lines of the answer. None when it is none of these, or its origin may not ask."""
        if head.header(b"access-control-request-method") is None or not self._allowed(head):
            return None
        wanted = head.header(b"access-control-request-headers") or b"*"
        return (
            (b"Access-Control-Allow-Methods", b"GET, POST, OPTIONS"),
            (b"Access-Control-Allow-Headers", wanted),
            (b"Access-Control-Max-Age", str(CORS_MAX_AGE_S).encode()),
        )

    def _allowed(self, head: Head) -> bytes:
        origin = head.header(b"origin")
        return allowed_origin(origin.decode("latin-1"), self._origins).encode("latin-1") if origin is not None else b""
