"""Reasoning is parted from the answer, however the tags are cut, and stands in front of tool calls."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_runtime.server.parsing.events import ReasoningDelta
from fleet_runtime.server.parsing.output import Collected, OutputParser, output_parser
from fleet_runtime.server.parsing.reasoning import Thinking, thinking_at_start
from fleet_runtime.server.parsing.registry import OutputFormat
from fleet_runtime.server.parsing.tools import ToolRequest, tool_request

TOOLS = [{"type": "function", "function": {"name": "f"}}]
FORMAT = OutputFormat("hermes", "think")


def parser(prompt_end: str = "assistant\n", asked: ToolRequest | None = None, continued: str | None = None) -> OutputParser:
    return output_parser(FORMAT, asked or ToolRequest(), prompt_end=prompt_end, continued=continued)


def said(p: OutputParser, pieces: list[str]) -> tuple[str | None, str | None]:
    c = Collected()
    for piece in pieces:
        c.add(p.feed(piece))
    c.add(p.finish())
    return c.reasoning, c.content


CASES = [
    ("", "<think>\nSo, a < b.\n\n</think>\n\nYes.", "So, a < b.", "Yes."),
    ("", "\n <think>a</think>b", "a", "b"),
    ("<think>\n", "So </thin\n k>\n</think>\n\n Yes. ", "So </thin\n k>", "Yes. "),
    ("<think>\n", "<think>\nSo</think>x", "So", "x"),
    ("<think>", "cut in the middle </thi", "cut in the middle </thi", ""),
    ("", "<think>\n\n</think>\n\nYes", None, "Yes"),
    ("", "Plain <think>x</think>", None, "Plain <think>x</think>"),
    ("", "  <thinking", None, "  <thinking"),
    ("", "  ", None, "  "),
    ("<think>\n\n</think>\n\n", "<think> is a tag", None, "<think> is a tag"),
    ("", "<think>a</think>x<think>b</think>", "a", "x<think>b</think>"),
]


@pytest.mark.parametrize(("prompt_end", "text", "reasoning", "content"), CASES)
def test_reasoning_and_content_are_parted_for_every_split(prompt_end: str, text: str, reasoning: str | None, content: str) -> None:
    assert said(parser(prompt_end), [text]) == (reasoning, content)
    assert said(parser(prompt_end), list(text)) == (reasoning, content)
    for at in range(1, len(text)):
        assert said(parser(prompt_end), [text[:at], text[at:]]) == (reasoning, content)


@given(
    st.sampled_from(["", "<think>\n", "<think></think>"]),
    st.lists(
        st.sampled_from(["<think>", "</think>", "<", "</", "think", ">", " ", "\n", "a", "<tool_call>", '{"name":"f"}', "</tool_call>"]), max_size=12
    ),
)
@settings(max_examples=600, deadline=None)
def test_no_split_of_any_text_changes_reasoning_content_or_calls(prompt_end: str, pieces: list[str]) -> None:
    asked = tool_request({"tools": TOOLS})
    text = "".join(pieces)
    whole = said(parser(prompt_end, asked), [text])
    assert said(parser(prompt_end, asked), pieces) == whole
    assert said(parser(prompt_end, asked), list(text)) == whole


def test_reasoning_streams_and_its_end_is_told_at_once() -> None:
    p = parser("<think>\n")
    assert not p.reasoning_ended
    assert p.feed("So") == [ReasoningDelta("So")]
    assert p.feed(" a\n") == [ReasoningDelta(" a")]
    assert p.feed("b</think") == [ReasoningDelta("\nb")]
    assert not p.reasoning_ended
    assert p.feed(">") == []
    assert p.reasoning_ended


def test_without_reasoning_the_answer_has_begun_with_its_first_sign() -> None:
    p = parser()
    p.feed("\n<thi")
    assert not p.reasoning_ended
    p.feed("s")
    assert p.reasoning_ended
    assert output_parser(OutputFormat(), ToolRequest()).reasoning_ended
    assert parser("<think>\n\n</think>\n\n").reasoning_ended


def test_calls_follow_reasoning_and_markup_in_reasoning_is_no_call() -> None:
    asked = tool_request({"tools": TOOLS})
    c, p = Collected(), parser("<think>", asked)
    c.add(p.feed('I use <tool_call>{"name": "f"}</tool_call>.\n</think>\n\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'))
    c.add(p.finish())
    assert c.reasoning == 'I use <tool_call>{"name": "f"}</tool_call>.' and c.content is None
    assert [(x.name, x.arguments) for x in c.calls] == [("f", '{"a": 1}')]
    assert p.finish_reason("stop") == "tool_calls"


@pytest.mark.parametrize(
    ("prompt_end", "continued", "start"),
    [
        ("<|im_start|>assistant\n", None, Thinking.MAY_BEGIN),
        ("<|im_start|>assistant\n<think>\n", None, Thinking.OPEN),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", None, Thinking.OVER),
        ("say <think> now<|im_end|>\n", None, Thinking.MAY_BEGIN),
        ("<think>\nI was", "<think>\nI was", Thinking.OPEN),
        ("<think>a</think>Yes", "<think>a</think>Yes", Thinking.OVER),
        ("Yes", "Yes", Thinking.OVER),
    ],
)
def test_where_an_answer_begins_is_seen_at_the_prompts_end(prompt_end: str, continued: str | None, start: Thinking) -> None:
    assert thinking_at_start(prompt_end, continued) is start
