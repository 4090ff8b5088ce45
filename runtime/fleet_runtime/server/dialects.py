"""Which paths speak another dialect's errors than OpenAI's. Called by `app` for every request, also for those that reach no endpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from fleet_contract.errors import ApiError
from fleet_runtime.server import anthropic_shape, ollama_shape

ErrorBody = Callable[[ApiError, str], bytes]
_PREFIXES: Final[tuple[tuple[str, ErrorBody], ...]] = (("/v1/messages", anthropic_shape.error_body), ("/api/", ollama_shape.error_body))


def id_headers(path: str) -> tuple[bytes, ...]:
    """Names of the headers that tell the request's id on this path: Anthropic's clients read one of their own beside ours."""
    return (b"x-request-id", b"request-id") if path.startswith("/v1/messages") else (b"x-request-id",)


def error_dialect(path: str) -> ErrorBody | None:
    """What writes an error's body for this path, as (error, request id) -> JSON; None: OpenAI's shape."""
    return next((write for prefix, write in _PREFIXES if path.startswith(prefix)), None)
