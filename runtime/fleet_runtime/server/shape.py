"""How an answer is told: the base of all dialects' shapes. `responses` calls it; a shape turns an `Answer` and its pieces into bytes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from fleet_contract.errors import ApiError
from fleet_runtime.server.answer import Answer, Piece, Usage
from fleet_runtime.server.generate import GenerateRequest
from fleet_runtime.server.token_texts import TokenTexts

EVENT_STREAM: Final = "text/event-stream; charset=utf-8"
DONE: Final = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Told:
    """What a shape tells of beside the answer."""

    request: GenerateRequest
    rid: str
    fingerprint: str  # the model revision
    texts: TokenTexts


class Shape:
    """Answers of one request; subclasses know their endpoint."""

    stream_type = EVENT_STREAM

    def __init__(self, told: Told, answer: Answer) -> None:
        self.told = told
        self.answer = answer

    def plain(self) -> bytes:
        """The whole answer, when every choice has its finish."""
        raise NotImplementedError

    def chunks(self, piece: Piece) -> bytes:
        """What is sent of a piece in a stream; the piece is in `answer` already."""
        raise NotImplementedError

    def ending(self) -> bytes:
        """What is sent after every choice's finish."""
        raise NotImplementedError

    def error(self, error: ApiError, request_id: str) -> bytes:
        """An error inside a stream; nothing follows it."""
        return sse(error.body(request_id))


class OpenAiShape(Shape):
    """What chat and completions share: head, usage, end."""

    object_plain = ""
    object_chunk = ""
    id_prefix = ""

    def __init__(self, told: Told, answer: Answer) -> None:
        super().__init__(told, answer)
        self._head: dict[str, Any] = {
            "id": self.id_prefix + told.rid,
            "object": self.object_plain,
            "created": int(time.time()),
            "model": told.request.model,
            "system_fingerprint": told.fingerprint,
        }

    def ending(self) -> bytes:
        if not self.told.request.include_usage:
            return DONE
        last = {**self._head, "object": self.object_chunk, "choices": [], "usage": self._usage()}
        return sse(msgspec.json.encode(last)) + DONE

    def _event(self, choice: dict[str, Any], more: dict[str, Any] | None = None) -> bytes:
        chunk: dict[str, Any] = {**self._head, "object": self.object_chunk, "choices": [choice], **(more or {})}
        if self.told.request.continuous_usage:
            chunk["usage"] = self._usage()
        elif self.told.request.include_usage:
            chunk["usage"] = None
        return sse(msgspec.json.encode(chunk))

    def _usage(self) -> dict[str, Any]:
        return openai_usage(self.answer.usage())


def sse(data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + data + b"\n\n"


def openai_usage(usage: Usage) -> dict[str, Any]:
    """`usage` of the OpenAI API."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }
