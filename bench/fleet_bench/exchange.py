"""One OpenAI request and its answer as a Record: builds the body, reads the stream, names the error.

Relies on nothing but the OpenAI API: `ignore_eos` and prompts of token ids are sent only when asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from fleet_bench.client import CannotConnect, Client, ConnectionLost
from fleet_bench.clock import Clock
from fleet_bench.record import Record
from fleet_bench.sse import SseParser

Prompt = str | list[int] | list[dict[str, str]]  # text, token ids, or chat messages


@dataclass(frozen=True, slots=True)
class Target:
    """How requests are asked; the same for a whole run."""

    model: str
    endpoint: Literal["chat", "completions"]
    ignore_eos: bool = False
    usage: bool = True  # ask for stream_options.include_usage
    temperature: float | None = 0.0
    extra: Mapping[str, Any] = field(default_factory=dict)  # merged into each body
    timeout_s: float = 600.0

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.endpoint == "chat" else "/v1/completions"

    def body(self, prompt: Prompt, max_tokens: int) -> bytes:
        """The JSON body. A chat's prompt is its messages."""
        out: dict[str, Any] = {"model": self.model, "stream": True, "max_tokens": max_tokens}
        out["messages" if self.endpoint == "chat" else "prompt"] = prompt
        if self.temperature is not None:
            out["temperature"] = self.temperature
        if self.usage:
            out["stream_options"] = {"include_usage": True}
        if self.ignore_eos:
            out["ignore_eos"] = True
        return msgspec.json.encode(out | dict(self.extra))


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class _Answer:
    """Sink of one answer: fills a Record."""

    def __init__(self, record: Record, *, keep_text: bool) -> None:
        self._record = record
        self._keep_text = keep_text
        self._parser = SseParser()
        self._refusal = b""
        self.done = False  # [DONE] has come

    def on_head(self, status: int, at_s: float) -> None:
        self._record.status = status
        self._record.first_byte_s = at_s

    def on_body(self, piece: bytes, at_s: float) -> None:
        if self._record.status != 200:
            self._refusal = (self._refusal + piece)[:2000]
            return
        for event in self._parser.feed(piece):
            if event == b"[DONE]":
                self.done = True
            elif self._record.error is None:
                self._take(event, at_s)

    def _take(self, event: bytes, at_s: float) -> None:
        r = self._record
        try:
            chunk = _decode(event)
        except msgspec.MsgspecError as e:
            r.error, r.message = "bad answer", f"{e}: {event[:200]!r}"
            return
        if chunk.error is not None:
            r.error, r.message = "error event", str(chunk.error)[:500]
            return
        if chunk.usage is not None:
            r.prompt_tokens, r.completion_tokens = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
            details = chunk.usage.prompt_tokens_details
            r.cached_tokens = details.cached_tokens if details is not None else r.cached_tokens
        text = "".join(map(_text_of, chunk.choices))
        if text:
            r.token_s.append(at_s)
            if self._keep_text:
                r.text += "".join(c.text or (c.delta.content if c.delta else "") or "" for c in chunk.choices)

    def finish(self, now_s: float) -> None:
        """The answer is whole: its end, or what was wrong with it."""
        r = self._record
        if r.status != 200:
            r.error, r.message = f"http {r.status}", self._refusal.decode(errors="replace")
        elif r.error is None and not self.done:
            r.error, r.message = "truncated", "the stream ended without [DONE]"
        else:
            r.end_s = now_s


def _text_of(choice: _Choice) -> str:
    """Text of any kind that a choice brings; of a tool call only that it is there."""
    delta = choice.delta
    if delta is None:
        return choice.text or ""
    return delta.content or delta.reasoning_content or delta.reasoning or ("tool" if delta.tool_calls else "")


async def perform(
    client: Client, target: Target, prompt: Prompt, max_tokens: int, record: Record, clock: Clock, *, keep_text: bool = False
) -> Record:
    """Sends one request and fills `record`. Never raises for what the server does: that is the record's error."""
    answer = _Answer(record, keep_text=keep_text)

    def sent(at_s: float) -> None:
        record.sent_s = at_s

    try:
        async with asyncio.timeout(target.timeout_s):
            await client.exchange("POST", target.path, target.body(prompt, max_tokens), answer, on_sent=sent)
        answer.finish(clock())
    except CannotConnect as e:
        record.error, record.message = "connect", str(e)
    except ConnectionLost as e:
        record.error, record.message = "connection lost", str(e)
    except TimeoutError:
        record.error, record.message = "timeout", f"no whole answer within {target.timeout_s:g} s"
    return record
