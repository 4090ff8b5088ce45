"""What parsers say about an answer's text, piece by piece. Deltas of one kind (and one call) join to the whole."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the content."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins: its name is complete. `index` counts from 0 in each choice."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of a call's arguments, which are JSON text."""

    index: int
    delta: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """A call is over. `complete`: its arguments are a whole JSON object; else the answer was cut or the model wrote broken JSON."""

    index: int
    complete: bool


Event = ReasoningDelta | ContentDelta | ToolCallStart | ToolCallArguments | ToolCallEnd
