"""What the choices of one request have come to, whatever dialect will tell it. Pure; filled by `responses`, read by the shapes.

A parser stands between the text of a choice and its shape: it says what of the text is content, reasoning or a tool call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fleet_runtime import messages as m
from fleet_runtime.server.parsing.events import ContentDelta, Event, ReasoningDelta, ToolCallArguments, ToolCallEnd, ToolCallStart


class OutputParser(Protocol):
    """Text of one choice in, events out; the joined events do not depend on how the text was cut."""

    def feed(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]: ...

    def finish_reason(self, reason: str) -> str:
        """The choice's, for the engine's: an end with whole tool calls is `tool_calls`."""
        ...

    @property
    def reasoning_ended(self) -> bool:
        """What comes now is the answer."""
        ...

    @property
    def wants_end(self) -> bool:
        """Nothing more of the text will be let through: the choice is complete, though the engine goes on."""
        ...


class PlainParser:
    """All text is content."""

    reasoning_ended = True
    wants_end = False

    def feed(self, text: str) -> list[Event]:
        return [ContentDelta(text)] if text else []

    def finish(self) -> list[Event]:
        return []

    def finish_reason(self, reason: str) -> str:
        return reason


@dataclass(slots=True)
class Call:
    """One tool call; `arguments` is JSON text unless the answer was cut."""

    id: str
    name: str
    arguments: str = ""
    complete: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new of one choice."""

    index: int
    first: bool  # nothing came before
    events: list[Event]
    ids: list[int]
    logprobs: list[m.TokenLogprob]
    finish: str | None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    reasoning: int = 0


@dataclass(slots=True)
class ChoiceResult:
    """What one choice has come to."""

    parser: OutputParser
    seed: int = 0
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[m.TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[m.TokenLogprob] = field(default_factory=list)
    finish: str | None = None
    stopped_by: str | int | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    opened: bool = False

    @property
    def text(self) -> str:
        """The content."""
        return "".join(self.content)

    def mean_logprob(self) -> float:
        """Of its tokens; an empty answer is as likely as its end, which has no logprob: it counts as certain."""
        return sum(p.logprob for p in self.logprobs) / len(self.logprobs) if self.logprobs else 0.0

    def add(self, item: m.Text) -> Piece:
        """Takes new text and the counts, which are cumulative. It may be the last by the parser's word: what comes after is not added."""
        first, self.opened = not self.opened, True
        self.ids += item.ids
        self.logprobs += item.logprobs
        if item.prompt_logprobs is not None:
            self.prompt_logprobs = item.prompt_logprobs
        self.prompt_tokens = item.prompt_tokens
        self.completion_tokens = item.completion_tokens
        self.cached_tokens = item.cached_tokens
        thought = not self.parser.reasoning_ended
        events = self.parser.feed(item.text)
        finish = "stop" if item.finish is None and self.parser.wants_end else item.finish
        if finish is not None:
            events = [*events, *self.parser.finish()]
        for event in events:
            self._take(event)
        if thought and (self.reasoning or not self.parser.reasoning_ended):
            self.reasoning_tokens += len(item.ids)
        if finish is not None:
            self.stopped_by = item.stopped_by
            self.finish = self.parser.finish_reason(finish)
            self.reasoning_tokens *= bool(self.reasoning)
        return Piece(item.index, first, events, item.ids, item.logprobs, self.finish)

    def _take(self, event: Event) -> None:
        if isinstance(event, ContentDelta):
            self.content.append(event.text)
        elif isinstance(event, ReasoningDelta):
            self.reasoning.append(event.text)
        elif isinstance(event, ToolCallStart):
            self.calls.append(Call(event.id, event.name))
        elif isinstance(event, ToolCallArguments):
            self.calls[event.index].arguments += event.delta
        elif isinstance(event, ToolCallEnd):
            self.calls[event.index].complete = event.complete


class Answer:
    """All choices of a request, prompt by prompt."""

    def __init__(self, make_parser: Callable[[], OutputParser], seeds: Sequence[int], *, n: int, per_prompt: int, discard: bool = False) -> None:
        """Args: seeds: of each computed choice. discard: what is made is not shown (`max_tokens: 0`)."""
        self.results = [ChoiceResult(make_parser(), seed) for seed in seeds]
        self._n = n
        self._per_prompt = per_prompt
        self._discard = discard

    @property
    def done(self) -> bool:
        """Every choice has its finish."""
        return all(r.finish is not None for r in self.results)

    def add(self, item: m.Text) -> Piece:
        """New text of one choice."""
        if self._discard:
            item = m.Text(
                item.rid, item.index, "", [], item.prompt_tokens, 0, item.cached_tokens, item.finish and "length", [], item.prompt_logprobs, None
            )
        return self.results[item.index].add(item)

    def prompt_of(self, index: int) -> int:
        """Number of the prompt that a choice answers."""
        return index // self._n

    def chosen(self) -> list[ChoiceResult]:
        """The choices to tell, prompt by prompt: all, or the best `n` of each prompt by mean logprob, the best first."""
        if self._per_prompt == self._n:
            return self.results
        out: list[ChoiceResult] = []
        for start in range(0, len(self.results), self._per_prompt):
            group = self.results[start : start + self._per_prompt]
            out += sorted(group, key=lambda r: -r.mean_logprob())[: self._n]
        return out

    def usage(self) -> Usage:
        """A prompt counts once, however many choices it has; every token that was made counts."""
        firsts = self.results[:: self._per_prompt]
        return Usage(
            prompt=sum(r.prompt_tokens for r in firsts),
            completion=sum(r.completion_tokens for r in self.results),
            cached=sum(r.cached_tokens for r in firsts),
            reasoning=sum(r.reasoning_tokens for r in self.results),
        )
