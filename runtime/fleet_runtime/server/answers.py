"""The OpenAI shapes of answers and stream chunks, as bytes. Pure; the shapes are those that the official client parses."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import msgspec

from fleet_contract.errors import ApiError
from fleet_runtime import messages as m

DONE: Final = b"data: [DONE]\n\n"


@dataclass(slots=True)
class ChoiceResult:
    """What one choice has come to."""

    text: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    finish: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def add(self, item: m.Text) -> None:
        """Takes new text and the counts, which are cumulative."""
        self.text.append(item.text)
        self.ids += item.ids
        self.finish = item.finish
        self.prompt_tokens = item.prompt_tokens
        self.completion_tokens = item.completion_tokens
        self.cached_tokens = item.cached_tokens


def usage(choices: list[ChoiceResult]) -> dict[str, Any]:
    """Token counts over all choices."""
    prompt, completion = sum(c.prompt_tokens for c in choices), sum(c.completion_tokens for c in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(c.cached_tokens for c in choices)},
    }


def sse(data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + data + b"\n\n"


def error_event(error: ApiError, request_id: str) -> bytes:
    """An error inside a stream; nothing follows it."""
    return sse(error.body(request_id))


class Shape:
    """Answers of one request; subclasses know their endpoint."""

    object_plain = ""
    object_chunk = ""
    id_prefix = ""

    def __init__(self, *, rid: str, model: str, fingerprint: str, choices: int, include_usage: bool, token_ids: bool = False) -> None:
        """Args: token_ids: each choice also carries the ids of its text (`return_token_ids`)."""
        self._head: dict[str, Any] = {
            "id": self.id_prefix + rid,
            "object": self.object_plain,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._include_usage = include_usage
        self._token_ids = token_ids
        self.results = [ChoiceResult() for _ in range(choices)]

    def plain(self) -> bytes:
        """The whole answer, when every choice has its finish."""
        choices = [self._plain_choice(i, c) | self._ids(c.ids) for i, c in enumerate(self.results)]
        return msgspec.json.encode({**self._head, "choices": choices, "usage": usage(self.results)})

    def chunks(self, item: m.Text) -> bytes:
        """Events for new text of one choice; `item` is already in `results`."""
        raise NotImplementedError

    def ending(self) -> bytes:
        """Events after every choice's finish."""
        if not self._include_usage:
            return DONE
        last = {**self._head, "object": self.object_chunk, "choices": [], "usage": usage(self.results)}
        return sse(msgspec.json.encode(last)) + DONE

    def _plain_choice(self, index: int, choice: ChoiceResult) -> dict[str, Any]:
        raise NotImplementedError

    def _ids(self, ids: list[int]) -> dict[str, Any]:
        return {"token_ids": ids} if self._token_ids else {}

    def _event(self, choice: dict[str, Any]) -> bytes:
        chunk: dict[str, Any] = {**self._head, "object": self.object_chunk, "choices": [choice]}
        if self._include_usage:
            chunk["usage"] = None
        return sse(msgspec.json.encode(chunk))


class ChatShape(Shape):
    """`/v1/chat/completions`: a chunk with the role comes first, one with the finish reason last."""

    object_plain = "chat.completion"
    object_chunk = "chat.completion.chunk"
    id_prefix = "chatcmpl-"
    _opened = False

    def chunks(self, item: m.Text) -> bytes:
        out = b""
        if not self._opened:
            self._opened = True
            out += self._delta(item.index, {"role": "assistant", "content": "", "refusal": None}, None)
        if item.text or (item.ids and self._token_ids):
            out += self._delta(item.index, {"content": item.text}, None, self._ids(item.ids))
        if item.finish is not None:
            out += self._delta(item.index, {}, item.finish)
        return out

    def _delta(self, index: int, delta: dict[str, Any], finish: str | None, more: Mapping[str, Any] = MappingProxyType({})) -> bytes:
        return self._event({"index": index, "delta": delta, "logprobs": None, "finish_reason": finish, **more})

    def _plain_choice(self, index: int, choice: ChoiceResult) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(choice.text), "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": choice.finish}


class CompletionShape(Shape):
    """`/v1/completions`."""

    object_plain = "text_completion"
    object_chunk = "text_completion"
    id_prefix = "cmpl-"

    def chunks(self, item: m.Text) -> bytes:
        if not item.text and item.finish is None and not (item.ids and self._token_ids):
            return b""
        return self._event({"index": item.index, "text": item.text, "logprobs": None, "finish_reason": item.finish, **self._ids(item.ids)})

    def _plain_choice(self, index: int, choice: ChoiceResult) -> dict[str, Any]:
        return {"index": index, "text": "".join(choice.text), "logprobs": None, "finish_reason": choice.finish}
