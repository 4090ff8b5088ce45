"""Formats are seen in the chat template or named."""

import pytest

from fleet_runtime.server.parsing.registry import OutputFormat, resolve


@pytest.mark.parametrize(
    ("template", "format"),
    [
        (None, OutputFormat()),
        ("{{ messages }}", OutputFormat()),
        ("...within <tool_call></tool_call> XML tags", OutputFormat("hermes")),
        ("<tool_call> ... {% if '</think>' in content %}", OutputFormat("hermes", "think")),
        ("<tool_call>\n<function=x>\n<parameter=y>", OutputFormat("qwen_coder")),
        ("{{ '<|python_tag|>' }}", OutputFormat("llama3")),
        ('{{- "Environment: ipython\\n" }}', OutputFormat("llama3")),
        ("{% if message.role == 'ipython' %}", OutputFormat("llama3")),
        ("I like ipython", OutputFormat()),
        ("{{ '[TOOL_CALLS]' }}", OutputFormat("mistral")),
        ("{{ '<think>\\n' }}", OutputFormat("none", "think")),
    ],
)
def test_auto_is_told_by_the_template(template: str | None, format: OutputFormat) -> None:
    assert resolve(template) == format


def test_a_named_format_wins_and_an_unknown_one_is_refused_with_those_that_exist() -> None:
    assert resolve("<tool_call><think>", "llama3", "none") == OutputFormat("llama3", "none")
    assert resolve(None, "none", "think") == OutputFormat("none", "think")
    for tools, reasoning in (("nosuch", "auto"), ("auto", "hermes")):
        with pytest.raises(ValueError, match=r"is no format; there is auto, .*none"):
            resolve("", tools, reasoning)


def test_the_markup_that_the_detokenizer_must_keep_is_named() -> None:
    assert "[TOOL_CALLS]" in OutputFormat("mistral").markup
    assert {"<tool_call>", "</think>"} <= set(OutputFormat("hermes", "think").markup)
    assert OutputFormat().markup == ()
