"""How other engines make a prompt of the same body: what `Habits` changes, and that our own reading stays as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fleet_text import anthropic_chat
from fleet_text.chat import OURS, Habits, PromptError, chat_inputs
from fleet_text.prompt import PromptEncoder

ONE_TEXT = "{% for m in messages %}<{{ m.role }}>{{ m.content + '' }}{% endfor %}"
PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}"
)
LENIENT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"  # writes a list as Python does
VLLM = Habits(part_break="\n", joins_turns=False, result_break="\n", tells_failures=False, keeps_tools=True, fills_content=True)
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f"}}

TOKENIZER = json.dumps({"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}).encode()


def texts(*parts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": part} for part in parts]


def encoder(template: str, habits: Habits = OURS) -> PromptEncoder:
    return PromptEncoder({"tokenizer.json": TOKENIZER, "chat_template.jinja": template.encode()}, habits)


@pytest.mark.parametrize(("template", "takes"), [(ONE_TEXT, False), (PARTS, True), (LENIENT, False)])
def test_a_template_takes_a_message_s_parts_or_one_text(template: str, takes: bool) -> None:
    made = encoder(template, VLLM)
    assert made.takes_parts is takes
    chat = chat_inputs({"messages": [{"role": "user", "content": texts("x", "y")}]}, made.habits)
    assert made.render_chat(chat) == ("<user>xy" if takes else "<user>x\ny")
    assert encoder(template).render_chat(chat_inputs({"messages": [{"role": "user", "content": texts("x", "y")}]})) == "<user>xy"


def test_a_model_without_a_template_takes_no_parts() -> None:
    made = PromptEncoder({"tokenizer.json": TOKENIZER}, VLLM)
    assert not made.takes_parts and made.habits == VLLM


def test_calls_without_content_tools_that_may_not_be_called_and_effort() -> None:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}],
        "tools": [TOOL], "tool_choice": "none", "reasoning_effort": "low",
    }  # fmt: skip
    ours, its = chat_inputs(body), chat_inputs(body, Habits(keeps_tools=True, fills_content=True, effort_variables=("effort", "thinks")))
    assert "content" not in ours.messages[1] and its.messages[1]["content"] == ""
    assert (ours.tools, its.tools) == (None, [TOOL])
    assert (dict(ours.variables), dict(its.variables)) == ({}, {"effort": "low", "thinks": True})
    own = chat_inputs({**body, "chat_template_kwargs": {"thinks": False}}, Habits(effort_variables=("effort", "thinks")))
    assert own.variables == {"effort": "low", "thinks": False}
    assert chat_inputs({**body, "reasoning_effort": "none"}, Habits(effort_variables=("effort", "thinks"))).variables["thinks"] is False
    with pytest.raises(PromptError):
        chat_inputs({"messages": []}, VLLM)


def test_anthropic_s_turns_and_results() -> None:
    body = {
        "messages": [
            {"role": "user", "content": texts("a", "b")},
            {"role": "user", "content": "c"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": texts("d", "e"), "is_error": True}]},
        ]
    }
    ours, its = (anthropic_chat.chat_of(body, habits)["messages"] for habits in (OURS, VLLM))
    assert [m["content"] for m in ours] == ["ab\n\nc", "", "Error: de"]
    assert [m["content"] for m in its] == ["a\nb", "c", "", "d\ne"]


def test_a_folder_is_read_with_the_habits_of_its_server(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}})
    )
    (tmp_path / "chat_template.jinja").write_text(ONE_TEXT)
    assert PromptEncoder.from_folder(tmp_path).habits is OURS
    assert PromptEncoder.from_folder(tmp_path, VLLM).habits is VLLM
