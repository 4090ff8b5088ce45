"""From the text of one choice to reasoning, content and tool calls, piece by piece. The entry of this package; the rest of it is parts.

How the http process uses it:

    at start      format = resolve(template_source, flags.tool_parser, flags.reasoning_parser)      # registry
                  `format.markup`: texts that the detokenizer must not skip though the tokenizer calls them special
    per request   asked = tool_request(body)                                                        # tools; raises ApiError 400
                  grammar, if asked.forced: forced_schema(asked.tools, asked.choice, named=..., parallel=...)
    per choice    parser = output_parser(format, asked, prompt_end=..., continued=...)
                  events = parser.feed(text) ... parser.finish();   parser.finish_reason(engine's reason)
                  for a whole answer: message = Collected(); message.add(events)
    grammar       holds once `parser.reasoning_ended`; with no reasoning format at once

What is exact: joined deltas do not depend on how the text was cut. A call is one only if its name is among the request's tools; what
else looks like a call is content, as the model wrote it. Argument deltas join to exactly the JSON text that the model wrote (Qwen-Coder's
XML has none: there it is ours). Space between calls, and between a tag and what it encloses, belongs to the markup. Nothing raises.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from fleet_runtime.server.parsing import registry
from fleet_runtime.server.parsing.base import TextParser
from fleet_runtime.server.parsing.call_list import ForcedCallParser, ForcedListParser
from fleet_runtime.server.parsing.events import ContentDelta, Event, ReasoningDelta, ToolCallArguments, ToolCallEnd, ToolCallStart
from fleet_runtime.server.parsing.hermes import HermesParser
from fleet_runtime.server.parsing.llama3 import Llama3Parser
from fleet_runtime.server.parsing.mistral import MistralParser
from fleet_runtime.server.parsing.qwen_coder import QwenCoderParser
from fleet_runtime.server.parsing.reasoning import ReasoningParser, Thinking, thinking_at_start
from fleet_runtime.server.parsing.registry import OutputFormat
from fleet_runtime.server.parsing.tools import ToolRequest

_ALPHANUMERIC: Final = string.ascii_letters + string.digits


class OutputParser:
    """Reasoning first, then tools. One per choice."""

    def __init__(self, reasoning: ReasoningParser | None, tools: TextParser, *, parallel: bool = True) -> None:
        """Args: parallel: False lets only the first call through; what follows it is dropped, see `wants_end`."""
        self._reasoning = reasoning
        self._tools = tools
        self._parallel = parallel
        self._calls = 0
        self._broken = 0
        self._ended_calls = 0

    def feed(self, text: str) -> list[Event]:
        """More text; returns what is sure by now."""
        return self._through(self._reasoning.feed(text)) if self._reasoning is not None else self._kept(self._tools.feed(text))

    def finish(self) -> list[Event]:
        """The text is over; returns what was held. Once more: nothing."""
        events = self._through(self._reasoning.finish()) if self._reasoning is not None else []
        return events + self._kept(self._tools.finish())

    @property
    def reasoning_ended(self) -> bool:
        """The end tag was passed, or there is no reasoning: what comes now is the answer."""
        return self._reasoning is None or self._reasoning.ended

    @property
    def wants_end(self) -> bool:
        """With `parallel_tool_calls: false`: the one call is over, nothing more will be let through, the caller may end the generation."""
        return not self._parallel and self._ended_calls > 0

    def finish_reason(self, reason: str) -> str:
        """The choice's finish reason for the engine's, after `finish`.

        A normal end with calls is `tool_calls`; if the arguments of one are no whole JSON, `length`: the client must not trust them.
        """
        if reason != "stop" or not self._calls:
            return reason
        return "length" if self._broken else "tool_calls"

    def _through(self, events: Iterable[Event]) -> list[Event]:
        out: list[Event] = []
        for event in events:
            out += self._kept(self._tools.feed(event.text)) if isinstance(event, ContentDelta) else [event]
        return out

    def _kept(self, events: list[Event]) -> list[Event]:
        out: list[Event] = []
        for event in events:
            if self.wants_end:
                break
            out.append(event)
            if isinstance(event, ToolCallStart):
                self._calls += 1
            elif isinstance(event, ToolCallEnd):
                self._ended_calls += 1
                self._broken += not event.complete
        return out


def output_parser(
    format: OutputFormat,
    asked: ToolRequest,
    *,
    prompt_end: str = "",
    continued: str | None = None,
    new_id: Callable[[], str] | None = None,
) -> OutputParser:
    """The parser of one choice.

    Args:
        format: of the model.
        asked: the request's tools.
        prompt_end: the last characters of the prompt's text, special tokens included (200 are enough).
        continued: the last message's text, when the answer continues it.
        new_id: makes a call's id; default: as OpenAI writes them, for Mistral the nine characters that its templates want.
    """
    reasoning = None
    if format.reasoning != registry.NONE and (start := thinking_at_start(prompt_end, continued)) is not Thinking.OVER:
        reasoning = ReasoningParser(start)
    if new_id is None:
        new_id = _short_id if format.tools == registry.MISTRAL else _long_id
    return OutputParser(reasoning, _tool_parser(format, asked, new_id), parallel=asked.parallel or not asked.active)


def _tool_parser(format: OutputFormat, asked: ToolRequest, new_id: Callable[[], str]) -> TextParser:
    if not asked.active:
        return TextParser()
    names = [t.name for t in asked.tools]
    if asked.choice == "named":
        return ForcedCallParser(asked.named, new_id)
    if asked.choice == "required":
        return ForcedListParser(names, new_id)
    match format.tools:
        case registry.HERMES:
            return HermesParser(names, new_id)
        case registry.LLAMA3:
            return Llama3Parser(names, new_id)
        case registry.MISTRAL:
            return MistralParser(names, new_id)
        case registry.QWEN_CODER:
            return QwenCoderParser({t.name: t.parameters for t in asked.tools}, new_id)
        case _:
            return TextParser()


def _long_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _short_id() -> str:
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


@dataclass(slots=True)
class CollectedCall:
    """One call of a whole answer."""

    id: str
    name: str
    arguments: str = ""
    complete: bool = False


@dataclass(slots=True)
class Collected:
    """A whole answer from its events."""

    calls: list[CollectedCall] = field(default_factory=list)
    _content: list[str] = field(default_factory=list)
    _reasoning: list[str] = field(default_factory=list)

    def add(self, events: Iterable[Event]) -> None:
        """Takes more of them, in order."""
        for event in events:
            match event:
                case ContentDelta(text):
                    self._content.append(text)
                case ReasoningDelta(text):
                    self._reasoning.append(text)
                case ToolCallStart(_, call_id, name):
                    self.calls.append(CollectedCall(call_id, name))
                case ToolCallArguments(index, delta):
                    self.calls[index].arguments += delta
                case ToolCallEnd(index, complete):
                    self.calls[index].complete = complete

    @property
    def content(self) -> str | None:
        """None when there are only calls, as in OpenAI's answers."""
        return "".join(self._content) if self._content or not self.calls else None

    @property
    def reasoning(self) -> str | None:
        """None when there is none."""
        return "".join(self._reasoning) if self._reasoning else None
