"""The one error of every HTTP surface: `{"error": {"message", "type", "code", "param", "request_id"}}`.

Used by router and runtime; loads nothing heavy.
"""

from __future__ import annotations

import json
from typing import Any, Final

import msgspec

INVALID_REQUEST: Final = "invalid_request_error"
AUTHENTICATION: Final = "authentication_error"
PERMISSION: Final = "permission_error"
NOT_FOUND: Final = "not_found_error"
RATE_LIMIT: Final = "rate_limit_error"
OVERLOADED: Final = "overloaded_error"
TIMEOUT: Final = "timeout_error"
SERVER: Final = "server_error"
ERROR_TYPES: Final = (INVALID_REQUEST, AUTHENTICATION, PERMISSION, NOT_FOUND, RATE_LIMIT, OVERLOADED, TIMEOUT, SERVER)

# Codes that only repeat what the other leg of a pair knows better: the router waits for that leg's own cause.
CODE_PEER_FAILED: Final = "peer_failed"
CODE_ABORTED: Final = "aborted"
DERIVED_CODES: Final = (CODE_PEER_FAILED, CODE_ABORTED)
# 409: the router's table is older than the worker; it re-reads GET /worker and tries again.
CODE_STALE_WORKER: Final = "stale_worker"
_SHOWN: Final = 60


class ErrorBody(msgspec.Struct, frozen=True):
    """The inner object. Readers ignore unknown fields and default missing ones."""

    message: str = ""
    type: str = SERVER
    code: str = "internal"
    param: str | None = None
    request_id: str = ""


class ErrorEnvelope(msgspec.Struct, frozen=True):
    """What is sent, as a body or as one `data:` event of a stream."""

    error: ErrorBody = ErrorBody()


class ApiError(Exception):
    """An answer that is an error: raised anywhere in a request's path, turned into a response at its border."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = INVALID_REQUEST,
        code: str = "invalid_value",
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self, request_id: str = "") -> bytes:
        """JSON of the envelope."""
        return msgspec.json.encode(ErrorEnvelope(ErrorBody(self.message, self.type, self.code, self.param, request_id)))

    @classmethod
    def from_body(cls, status: int, body: bytes) -> ApiError:
        """Reads an error answer of a worker; a body that is not ours becomes a `server_error` that quotes its start."""
        try:
            e = msgspec.json.decode(body, type=ErrorEnvelope).error
        except msgspec.DecodeError:
            text = body[:200].decode("utf-8", "replace")
            return cls(status, f"the worker answered {status}: {text}", type=SERVER, code="bad_worker_answer")
        return cls(status, e.message, type=e.type, code=e.code, param=e.param)


def shown(value: Any) -> str:
    """A value as JSON, short enough for an error message and always encodable."""
    text = json.dumps(value) if not isinstance(value, (dict, list)) else f"{'an object' if isinstance(value, dict) else 'a list'}"
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
