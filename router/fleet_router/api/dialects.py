"""How each API writes errors and ends its streams: OpenAI's, Anthropic's and Ollama's, and OpenAI's Responses. Pure.

Called by `relay` (is a stream whole, what does its end tell) and by the data port's answers. A worker's stream is never changed; what the
router itself has to say goes out in the words of the path's dialect.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from fleet_contract import errors
from fleet_contract.errors import ApiError
from fleet_router.errors import UNDECODABLE

EVENT_STREAM: Final = b"text/event-stream"
JSON_LINES: Final = b"application/x-ndjson"
MAX_DIGITS: Final = 11  # of a number of tokens
_SPACES: Final = b" \t\r\n"
_ZERO: Final = ord("0")
_NINE: Final = ord("9")
_BEHIND: Final = b",}] \t\r\n"  # what may follow a number
_ANTHROPIC_TYPES: Final = (
    errors.AUTHENTICATION, errors.PERMISSION, errors.NOT_FOUND, errors.RATE_LIMIT, errors.OVERLOADED, errors.TIMEOUT, errors.INVALID_REQUEST,
)  # fmt: skip


class _Said(msgspec.Struct):
    """What the last event of a stream may say about its end."""

    type: str = ""
    done: bool = False
    error: Any = None


_said = msgspec.json.Decoder(_Said)


class Dialect:
    """OpenAI's chat, completions and what is like them; the base of all."""

    name = "openai"
    stream_type = EVENT_STREAM
    end_name = "[DONE]"  # of a stream, for messages
    more_id_header = b""  # that its clients read for the request's id, beside X-Request-Id
    cached_key = b'"cached_tokens":'
    made_key = b'"completion_tokens":'
    prompt_key = b'"prompt_tokens":'

    def is_stream(self, content_type: bytes) -> bool:
        """An answer that is passed on event by event."""
        return content_type.startswith(self.stream_type)

    def event_end(self, data: bytes) -> int:
        """Where the last whole event of `data` ends; 0 without one."""
        if data.endswith(b"\n\n"):
            return len(data)
        end = data.rfind(b"\n\n") + 2
        other = data.rfind(b"\n\r\n") + 3
        return max(end if end > 1 else 0, other if other > 2 else 0)

    def events(self, data: bytes) -> int:
        """How many events these whole ones are."""
        if data.endswith(b"\n\n") and data.find(b"\n") == len(data) - 2:  # one event of one line: nearly always
            return 1
        return data.count(b"\n\n") or data.count(b"\n\r\n")

    def last_words(self, data: bytes) -> tuple[bool, bool]:
        """Does the stream's last event say that it is complete; does it say that it failed. Args: data: ends with the last event."""
        last = _last_event(data)
        return last.endswith(b"[DONE]"), last.startswith(b'data: {"error"')

    def cached_tokens(self, text: bytes) -> int | None:
        """Tokens of the prompt that were cached, as an answer's end tells them; None without."""
        return last_number(text, self.cached_key) if self.cached_key else None

    def made_tokens(self, text: bytes) -> int | None:
        """Tokens of the answer, as its end tells them; None without."""
        return last_number(text, self.made_key)

    def prompt_tokens(self, text: bytes) -> int | None:
        """Tokens of the prompt, as an answer's end tells them; None without."""
        return last_number(text, self.prompt_key)

    def error_body(self, error: ApiError, request_id: str) -> bytes:
        """An error as an answer's JSON."""
        return error.body(request_id)

    def error_event(self, error: ApiError, request_id: str) -> bytes:
        """An error as the last event of a stream."""
        return b"data: " + self.error_body(error, request_id) + b"\n\n"


class Anthropic(Dialect):
    """`/v1/messages`: named events, the last one is message_stop."""

    name = "anthropic"
    end_name = "message_stop"
    more_id_header = b"Request-Id"
    cached_key = b'"cache_read_input_tokens":'
    made_key = b'"output_tokens":'
    prompt_key = b'"input_tokens":'  # those that had to be computed

    def last_words(self, data: bytes) -> tuple[bool, bool]:
        kind = _decoded(_data_of(_last_event(data))).type
        return kind == "message_stop", kind == "error"

    def prompt_tokens(self, text: bytes) -> int | None:
        computed = last_number(text, self.prompt_key)
        kept = [last_number(text, key) or 0 for key in (self.cached_key, b'"cache_creation_input_tokens":')]
        return None if computed is None else computed + sum(kept)

    def error_body(self, error: ApiError, request_id: str) -> bytes:
        kind = error.type if error.type in _ANTHROPIC_TYPES else "api_error"
        kind = {413: "request_too_large", 429: errors.RATE_LIMIT}.get(error.status, kind)
        return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id})

    def error_event(self, error: ApiError, request_id: str) -> bytes:
        return b"event: error\ndata: " + self.error_body(error, request_id) + b"\n\n"


class Ollama(Dialect):
    """`/api/…`: one JSON object a line, the last one has `done: true`. It tells no cached tokens."""

    name = "ollama"
    stream_type = JSON_LINES
    end_name = "a line that says done"
    cached_key = b""
    made_key = b'"eval_count":'
    prompt_key = b'"prompt_eval_count":'

    def event_end(self, data: bytes) -> int:
        return data.rfind(b"\n") + 1

    def events(self, data: bytes) -> int:
        return data.count(b"\n")

    def last_words(self, data: bytes) -> tuple[bool, bool]:
        said = _decoded(data.rstrip(b"\r\n").rsplit(b"\n", 1)[-1])
        return said.done, said.error is not None

    def error_body(self, error: ApiError, request_id: str) -> bytes:
        return msgspec.json.encode({"error": error.message})

    def error_event(self, error: ApiError, request_id: str) -> bytes:
        return self.error_body(error, request_id) + b"\n"


class Responses(Dialect):
    """`/v1/responses` of other engines. Its last event holds the whole answer and may be larger than what is held back: a stream that ends
    as HTTP says, behind a whole event, is complete."""

    name = "responses"
    end_name = "a whole event"
    made_key = b'"output_tokens":'
    prompt_key = b'"input_tokens":'

    def last_words(self, data: bytes) -> tuple[bool, bool]:
        failed = _decoded(_data_of(_last_event(data))).type == "error"
        return not failed and data.endswith((b"\n\n", b"\n\r\n")), failed

    def error_event(self, error: ApiError, request_id: str) -> bytes:
        told = {"type": "error", "code": error.code, "message": error.message, "param": error.param, "sequence_number": 0}
        return b"event: error\ndata: " + msgspec.json.encode(told) + b"\n\n"


OPENAI: Final = Dialect()
ANTHROPIC: Final = Anthropic()
OLLAMA: Final = Ollama()
RESPONSES: Final = Responses()


def dialect_of(path: str) -> Dialect:
    """Of any path, also one that nobody serves: its error has to be readable for the client that asked."""
    if path.startswith("/api/"):
        return OLLAMA
    if path.startswith("/v1/messages"):
        return ANTHROPIC
    return RESPONSES if path.startswith("/v1/responses") else OPENAI


def _last_event(data: bytes) -> bytes:
    return data.replace(b"\r\n", b"\n").rstrip(b"\n").rsplit(b"\n\n", 1)[-1]


def _data_of(event: bytes) -> bytes:
    at = event.rfind(b"data:")
    return event[at + 5 :].strip() if at >= 0 else b""


def _decoded(data: bytes) -> _Said:
    try:
        return _said.decode(data)
    except UNDECODABLE:
        return _Said()


def last_number(text: bytes, name: bytes) -> int | None:
    """The number behind the last `name` of a text; None without one."""
    at = text.rfind(name)
    if at < 0:
        return None
    at += len(name)
    end = len(text)
    while at < end and text[at] in _SPACES:
        at += 1
    value, first = 0, at
    while at < end and at < first + MAX_DIGITS and _ZERO <= text[at] <= _NINE:
        value = value * 10 + text[at] - _ZERO
        at += 1
    return value if at > first and (at == end or text[at] in _BEHIND) else None
