"""`/api/chat` and `/api/generate`: answers and lines as Ollama's client reads them; one JSON object a line in a stream."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from fleet_contract.errors import ApiError
from fleet_runtime import messages as m
from fleet_runtime.server.answer import Answer, ChoiceResult, OutputParser, Piece
from fleet_runtime.server.logprobs import chat_logprobs
from fleet_runtime.server.parsing.events import ContentDelta, Event, ReasoningDelta, ToolCallEnd
from fleet_runtime.server.shape import Shape, Told

LINES: Final = "application/x-ndjson"


def error_body(error: ApiError, request_id: str) -> bytes:
    """An error as the API writes it; the request's id is in the header."""
    return msgspec.json.encode({"error": error.message})


class Timed:
    """A parser around another one that notes when the first token came, CLOCK_MONOTONIC ns."""

    def __init__(self, inner: OutputParser) -> None:
        self._inner = inner
        self.first_ns = 0

    def feed(self, text: str) -> list[Event]:
        self.first_ns = self.first_ns or time.monotonic_ns()
        return self._inner.feed(text)

    def finish(self) -> list[Event]:
        return self._inner.finish()

    def finish_reason(self, reason: str) -> str:
        return self._inner.finish_reason(reason)

    @property
    def reasoning_ended(self) -> bool:
        return self._inner.reasoning_ended

    @property
    def wants_end(self) -> bool:
        return self._inner.wants_end


class OllamaShape(Shape):
    """What chat and generate share: a head, lines, and a last one with counts and durations (ns)."""

    stream_type = LINES

    def __init__(self, told: Told, answer: Answer, *, model: str, started_at: float) -> None:
        """Args: model: as the client wrote it. started_at: of the request, CLOCK_MONOTONIC seconds."""
        super().__init__(told, answer)
        self._model = model
        self._started_ns = int(started_at * 1e9)
        self._untold: list[m.TokenLogprob] = []

    def _said(self, content: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        """New content, thinking and calls in the endpoint's fields."""
        raise NotImplementedError

    def plain(self) -> bytes:
        result = self.answer.results[0]
        calls = [call for i in range(len(result.calls)) if (call := _call(result, i)) is not None]
        said = self._said(result.text, "".join(result.reasoning), calls)
        return msgspec.json.encode(self._head() | said | self._end() | self._logprobs(result.logprobs))

    def chunks(self, piece: Piece) -> bytes:
        out = b""
        self._untold += piece.logprobs
        for event in piece.events:
            said = self._of(event)
            if said is not None:
                out += _line(self._head() | said | {"done": False} | self._logprobs(self._untold))
                self._untold = []
        return out

    def ending(self) -> bytes:
        return _line(self._head() | self._said("", "", []) | self._end() | self._logprobs(self._untold))

    def error(self, error: ApiError, request_id: str) -> bytes:
        return error_body(error, request_id) + b"\n"

    def _of(self, event: Event) -> dict[str, Any] | None:
        """What a line says of an event; None when it says nothing. A call is told when it is whole."""
        if isinstance(event, ContentDelta):
            return self._said(event.text, "", [])
        if isinstance(event, ReasoningDelta):
            return self._said("", event.text, [])
        if isinstance(event, ToolCallEnd) and (call := _call(self.answer.results[0], event.index)) is not None:
            return self._said("", "", [call])
        return None

    def _head(self) -> dict[str, Any]:
        return {"model": self._model, "created_at": now()}

    def _logprobs(self, items: list[m.TokenLogprob]) -> dict[str, Any]:
        top = self.told.request.logprobs
        return {"logprobs": chat_logprobs(items, top, self.told.texts)["content"]} if top >= 0 and items else {}

    def _end(self) -> dict[str, Any]:
        result, usage = self.answer.results[0], self.answer.usage()
        end_ns = time.monotonic_ns()
        first_ns = result.parser.first_ns if isinstance(result.parser, Timed) else end_ns
        return {
            "done": True,
            "done_reason": "length" if result.finish == "length" else "stop",
            "total_duration": end_ns - self._started_ns,
            "load_duration": 0,
            "prompt_eval_count": usage.prompt,
            "prompt_eval_duration": max(0, first_ns - self._started_ns),
            "eval_count": usage.completion,
            "eval_duration": end_ns - first_ns,
        }


class OllamaChatShape(OllamaShape):
    """`/api/chat`."""

    def _said(self, content: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = calls
        return {"message": message}


class OllamaGenerateShape(OllamaShape):
    """`/api/generate`."""

    def _said(self, content: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        return {"response": content} | ({"thinking": thinking} if thinking else {})


def _call(result: ChoiceResult, index: int) -> dict[str, Any] | None:
    """A call with its arguments as an object; None for one whose arguments are not whole: the answer's end says `length`."""
    call = result.calls[index]
    if not call.complete:
        return None
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):  # more digits or depth than Python reads
        return None
    return {"id": call.id, "function": {"index": index, "name": call.name, "arguments": arguments}}


def now() -> str:
    """This moment as the API writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _line(value: dict[str, Any]) -> bytes:
    return msgspec.json.encode(value) + b"\n"
