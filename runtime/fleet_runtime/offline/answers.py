"""What an `Engine` gives back, and how it is read from the server's JSON. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request; `cached` of the prompt's came from the prefix cache."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer to a prompt. `finish_reason`: stop, length or tool_calls."""

    index: int
    text: str
    ids: list[int]
    finish_reason: str
    stop_reason: str | int | None = None  # the request's own stop that ended it
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: dict[str, Any] | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """All choices of one prompt; the properties are those of the first."""

    id: str
    choices: list[Choice]
    usage: Usage
    raw: dict[str, Any] = field(repr=False)  # the server's answer as it came

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.choices[0].text

    @property
    def ids(self) -> list[int]:
        """The first choice's token ids."""
        return self.choices[0].ids

    @property
    def finish_reason(self) -> str:
        """The first choice's."""
        return self.choices[0].finish_reason


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new in a stream. A choice's last one has its `finish_reason`."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    index: int = 0
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


def read_usage(told: Mapping[str, Any]) -> Usage:
    """`usage` of an answer or chunk."""
    return Usage(
        told.get("prompt_tokens", 0),
        told.get("completion_tokens", 0),
        (told.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
        (told.get("completion_tokens_details") or {}).get("reasoning_tokens", 0),
    )


def read_answer(id: str, told: dict[str, Any]) -> Answer:
    """An answer of chat or completions."""
    choices = []
    for choice in told["choices"]:
        message = choice.get("message") or {}
        choices.append(
            Choice(
                index=choice["index"],
                text=choice["text"] if "text" in choice else message.get("content") or "",
                ids=choice.get("token_ids", []),
                finish_reason=choice["finish_reason"],
                stop_reason=choice.get("stop_reason"),
                reasoning=message.get("reasoning_content") or "",
                tool_calls=message.get("tool_calls") or [],
                logprobs=choice.get("logprobs"),
                seed=choice.get("seed"),
            )
        )
    return Answer(id, choices, read_usage(told["usage"]), told)


def read_delta(choice: Mapping[str, Any]) -> Delta | None:
    """One choice of a chunk of chat or completions; None when it says nothing."""
    delta = choice.get("delta") or {}
    read = Delta(
        text=choice.get("text") or delta.get("content") or "",
        ids=choice.get("token_ids") or [],
        index=choice["index"],
        reasoning=delta.get("reasoning_content") or "",
        tool_calls=delta.get("tool_calls") or [],
        finish_reason=choice.get("finish_reason"),
        stop_reason=choice.get("stop_reason"),
    )
    said = read.text or read.ids or read.reasoning or read.tool_calls or read.finish_reason
    return read if said else None
