"""`/v1/messages`: how answers, stream events and errors look; the shapes are those that Anthropic's client parses."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from fleet_contract.errors import (
    AUTHENTICATION,
    INVALID_REQUEST,
    NOT_FOUND,
    OVERLOADED,
    PERMISSION,
    RATE_LIMIT,
    TIMEOUT,
    ApiError,
)
from fleet_runtime.server.answer import Answer, OutputParser, Piece
from fleet_runtime.server.parsing.events import ContentDelta, Event, ReasoningDelta, ToolCallArguments, ToolCallEnd, ToolCallStart
from fleet_runtime.server.shape import Shape, Told

SIGNATURE: Final = "unsigned"  # nothing is encrypted here; clients want a text that they send back
_TYPES: Final = {
    413: "request_too_large",
    AUTHENTICATION: AUTHENTICATION,
    PERMISSION: PERMISSION,
    NOT_FOUND: NOT_FOUND,
    RATE_LIMIT: RATE_LIMIT,
    OVERLOADED: OVERLOADED,
    TIMEOUT: TIMEOUT,
    INVALID_REQUEST: INVALID_REQUEST,
}


def error_body(error: ApiError, request_id: str) -> bytes:
    """An error as the API writes it. The HTTP status stays ours: routers read it."""
    kind = _TYPES.get(error.status) or _TYPES.get(error.type) or "api_error"
    if error.status == 429:
        kind = RATE_LIMIT
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id})


@dataclass(slots=True)
class Block:
    """One block of an answer: text, thinking or tool_use."""

    kind: str
    id: str = ""
    name: str = ""
    parts: list[str] = field(default_factory=list)
    complete: bool = False  # of a tool_use: its input is whole

    def told(self, *, hide_thinking: bool) -> dict[str, Any]:
        """As an answer's content has it."""
        text = "".join(self.parts)
        if self.kind == "tool_use":
            return {"type": "tool_use", "id": self.id, "name": self.name, "input": _input(text) if self.complete else {}}
        if self.kind == "thinking":
            return {"type": "thinking", "thinking": "" if hide_thinking else text, "signature": SIGNATURE}
        return {"type": "text", "text": text}


def _input(arguments: str) -> dict[str, Any]:
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):  # more digits or depth than Python reads
        return {}
    return value if isinstance(value, dict) else {}


class Blocks:
    """A parser around another one that keeps the blocks in the order in which they came; a stream and a plain answer have the same.

    A text block of nothing but space is none if calls stand beside it: the API refuses such a block when it is sent back.
    """

    def __init__(self, inner: OutputParser) -> None:
        self._inner = inner
        self._space: list[str] = []  # space that becomes text only if more text follows, or no call
        self._called = False
        self.blocks: list[Block] = []

    def feed(self, text: str) -> list[Event]:
        return self._keep(self._inner.feed(text))

    def finish(self) -> list[Event]:
        events = self._keep(self._inner.finish())
        if self._space and not self._called:
            events += self._keep([ContentDelta("")], force=True)
        return events

    def finish_reason(self, reason: str) -> str:
        return self._inner.finish_reason(reason)

    @property
    def reasoning_ended(self) -> bool:
        return self._inner.reasoning_ended

    @property
    def wants_end(self) -> bool:
        return self._inner.wants_end

    def _keep(self, events: list[Event], *, force: bool = False) -> list[Event]:
        out: list[Event] = []
        for event in events:
            if isinstance(event, ContentDelta):
                opens = not self.blocks or self.blocks[-1].kind != "text"
                if opens and not event.text.strip() and not force:
                    self._space.append(event.text)
                    continue
                event = ContentDelta("".join(self._space) + event.text)
                self._space = []
            elif isinstance(event, ToolCallStart):
                self._space, self._called = [], True
            self._take(event)
            out.append(event)
        return out

    def _take(self, event: Event) -> None:
        if isinstance(event, ContentDelta):
            self._of("text").parts.append(event.text)
        elif isinstance(event, ReasoningDelta):
            self._of("thinking").parts.append(event.text)
        elif isinstance(event, ToolCallStart):
            self.blocks.append(Block("tool_use", event.id, event.name))
        elif isinstance(event, ToolCallArguments):
            self.blocks[-1].parts.append(event.delta)
        elif isinstance(event, ToolCallEnd):
            self.blocks[-1].complete = event.complete

    def _of(self, kind: str) -> Block:
        if not self.blocks or self.blocks[-1].kind != kind:
            self.blocks.append(Block(kind))
        return self.blocks[-1]


class MessagesShape(Shape):
    """One message. Its stream: message_start, ping, the blocks one after the other, message_delta, message_stop."""

    def __init__(self, told: Told, answer: Answer, *, capped: bool, hide_thinking: bool) -> None:
        """Args: capped: fewer tokens may be made than `max_tokens` says, because the context ends."""
        super().__init__(told, answer)
        self._capped = capped
        self._hide_thinking = hide_thinking
        self._open: str | None = None  # kind of the block under way
        self._index = -1

    def plain(self) -> bytes:
        parser = self.answer.results[0].parser
        assert isinstance(parser, Blocks)
        content = [block.told(hide_thinking=self._hide_thinking) for block in parser.blocks]
        return msgspec.json.encode(self._message(content) | self._stop() | {"usage": self._usage()})

    def chunks(self, piece: Piece) -> bytes:
        out = b""
        if piece.first:
            start = self._message([]) | {"stop_reason": None, "stop_sequence": None, "usage": self._usage()}
            out += event("message_start", {"message": start}) + event("ping", {})
        for parsed in piece.events:
            out += self._told(parsed)
        return out

    def ending(self) -> bytes:
        return self._close() + event("message_delta", {"delta": self._stop(), "usage": self._usage()}) + event("message_stop", {})

    def error(self, error: ApiError, request_id: str) -> bytes:
        return b"event: error\ndata: " + error_body(error, request_id) + b"\n\n"

    def _told(self, parsed: Event) -> bytes:
        if isinstance(parsed, ContentDelta):
            return self._begin("text", {"type": "text", "text": ""}) + self._delta({"type": "text_delta", "text": parsed.text})
        if isinstance(parsed, ReasoningDelta):
            begun = self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            return begun if self._hide_thinking else begun + self._delta({"type": "thinking_delta", "thinking": parsed.text})
        if isinstance(parsed, ToolCallStart):
            return self._close() + self._begin("tool_use", {"type": "tool_use", "id": parsed.id, "name": parsed.name, "input": {}})
        if isinstance(parsed, ToolCallArguments):
            return self._delta({"type": "input_json_delta", "partial_json": parsed.delta})
        return b""

    def _begin(self, kind: str, block: dict[str, Any]) -> bytes:
        if self._open == kind:
            return b""
        closed = self._close()
        self._open = kind
        self._index += 1
        return closed + event("content_block_start", {"index": self._index, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return event("content_block_delta", {"index": self._index, "delta": delta})

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        signed = self._delta({"type": "signature_delta", "signature": SIGNATURE}) if self._open == "thinking" else b""
        self._open = None
        return signed + event("content_block_stop", {"index": self._index})

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": "msg_" + self.told.rid, "type": "message", "role": "assistant", "model": self.told.request.model}
        return head | {"content": content}

    def _stop(self) -> dict[str, Any]:
        """Why the message ended, and the stop sequence if it was one."""
        result = self.answer.results[0]
        if isinstance(result.stopped_by, str) and result.finish == "stop":
            return {"stop_reason": "stop_sequence", "stop_sequence": result.stopped_by}
        reasons = {"length": "model_context_window_exceeded" if self._capped else "max_tokens", "tool_calls": "tool_use"}
        return {"stop_reason": reasons.get(result.finish or "", "end_turn"), "stop_sequence": None}

    def _usage(self) -> dict[str, Any]:
        """As the API counts: `input_tokens` are those that had to be computed; cached ones are told beside them."""
        usage = self.answer.usage()
        return {
            "input_tokens": usage.prompt - usage.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached,
            "output_tokens": usage.completion,
            "output_tokens_details": {"thinking_tokens": usage.reasoning},
            "service_tier": "standard",
        }


def event(kind: str, data: dict[str, Any]) -> bytes:
    """One server-sent event with its name."""
    return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode({"type": kind, **data}) + b"\n\n"
