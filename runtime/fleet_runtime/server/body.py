"""A request's body: read within limits, parsed as JSON with errors that say where. Called by `app`; knows no endpoint."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, NoReturn

from fleet_contract.errors import TIMEOUT, ApiError, shown

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

_THREAD_ABOVE_BYTES: Final = 256 << 10
_SHOWN: Final = 60


class ClientGone(Exception):
    """The client closed the connection before its request was complete: nobody to answer."""


async def read_body(receive: Receive, content_length: str | None, *, limit: int, timeout_s: float) -> bytes:
    """The whole body. Raises ApiError 413 or 408, ClientGone."""
    if content_length is not None and content_length.isdigit() and int(content_length) > limit:
        raise _too_large(int(content_length), limit)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                part = message.get("body", b"")
                size += len(part)
                if size > limit:
                    raise _too_large(size, limit)
                parts.append(part)
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise ApiError(
            408,
            f"the request's body did not arrive within {timeout_s:g} s (--body-timeout): {size} bytes came; send it whole",
            type=TIMEOUT,
            code="body_timeout",
        ) from None


def _too_large(size: int, limit: int) -> ApiError:
    return ApiError(413, f"the request's body has at least {size} bytes; at most {limit} are allowed (--max-body-bytes)", code="body_too_large")


async def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object of a body; large ones are parsed in a thread. Raises ApiError 400 with the position."""
    return await asyncio.to_thread(parse_json, body) if len(body) > _THREAD_ABOVE_BYTES else parse_json(body)


def parse_json(body: bytes) -> dict[str, Any]:
    """Strict JSON: no NaN, no infinity, UTF-8, an object. Raises ApiError 400."""
    if not body.strip():
        raise ApiError(400, "the request's body is empty; send a JSON object", code="invalid_json")
    try:
        text = body.decode("utf-8-sig")
        value = json.loads(text, parse_constant=_refuse_constant)
    except UnicodeDecodeError as e:
        raise ApiError(400, f"the body is not UTF-8: byte 0x{body[e.start]:02x} at position {e.start}", code="invalid_json") from e
    except json.JSONDecodeError as e:
        raise ApiError(400, f"the body is not valid JSON: {e.msg} at line {e.lineno}, column {e.colno}", code="invalid_json") from e
    except RecursionError as e:
        raise ApiError(400, "the body is not valid JSON: nested too deeply", code="invalid_json") from e
    except ValueError as e:
        raise ApiError(400, f"the body is not valid JSON: {str(e)[:200]}", code="invalid_json") from e
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, not {shown(value)}", code="invalid_json")
    if "\\u" in text and (path := _lone_surrogate(value)) is not None:
        path = path.removeprefix(".")
        raise ApiError(400, f"{path or 'a name'} holds a lone surrogate (\\ud800 to \\udfff), which is no character", param=path or None)
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _lone_surrogate(value: Any) -> str | None:
    """Path of the first string that cannot be encoded; None when there is none. Depth is bounded by the JSON parser's.

    The path is put together on the way back: names may be as long as the body, and most have nothing to tell.
    """
    if isinstance(value, str):
        return "" if not _encodes(value) else None
    if isinstance(value, dict):
        for key, item in value.items():
            if not _encodes(key):
                return ""
            if (found := _lone_surrogate(item)) is not None:
                return f".{key[:_SHOWN]}{found}"
    elif isinstance(value, list):
        for i, item in enumerate(value):
            if (found := _lone_surrogate(item)) is not None:
                return f"[{i}]{found}"
    return None


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
