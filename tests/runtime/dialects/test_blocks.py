"""Blocks of an Anthropic answer do not depend on how its text was cut, and none is only space beside a call."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_runtime.server.anthropic_shape import Blocks
from fleet_runtime.server.parsing.events import ContentDelta, Event, ReasoningDelta, ToolCallArguments, ToolCallEnd, ToolCallStart


class Told:
    """A parser that says what it was told to, one list of events for each `feed`."""

    reasoning_ended = True

    def __init__(self, *events: Event) -> None:
        self._events = list(events)

    def feed(self, text: str) -> list[Event]:
        return [self._events.pop(0)]

    def finish(self) -> list[Event]:
        return []

    def finish_reason(self, reason: str) -> str:
        return reason


def blocks(events: list[Event]) -> list[tuple[str, str]]:
    parser = Blocks(Told(*events))
    told = [e for _ in events for e in parser.feed("")] + parser.finish()
    kept = [(b.kind, "".join(b.parts)) for b in parser.blocks]
    assert "".join(e.text for e in told if isinstance(e, ContentDelta)) == "".join(text for kind, text in kept if kind == "text")
    return kept


CALL: list[Event] = [ToolCallStart(0, "a", "f"), ToolCallArguments(0, "{}"), ToolCallEnd(0, True)]


@pytest.mark.parametrize(
    ("before", "after", "kept"),
    [
        (" ", "", [("tool_use", "{}")]),
        ("", "\n", [("tool_use", "{}")]),
        (" ", "b", [("tool_use", "{}"), ("text", "b")]),
        (" a", "\n b", [("text", " a"), ("tool_use", "{}"), ("text", "\n b")]),
        ("a ", "", [("text", "a "), ("tool_use", "{}")]),
    ],
)
def test_space_beside_a_call_is_no_block(before: str, after: str, kept: list[tuple[str, str]]) -> None:
    for cut in (False, True):
        events: list[Event] = [ContentDelta(c) for c in (before if cut else [before] if before else [])] + CALL
        events += [ContentDelta(c) for c in (after if cut else [after] if after else [])]
        assert blocks(events) == kept


@given(st.text(" ab\n", max_size=12), st.text(" ab\n", max_size=12))
def test_an_answer_without_calls_keeps_all_its_text(reasoning: str, text: str) -> None:
    whole: list[Event] = [ReasoningDelta(c) for c in reasoning] + [ContentDelta(c) for c in text]
    assert blocks(whole) == ([("thinking", reasoning)] if reasoning else []) + ([("text", text)] if text else [])
