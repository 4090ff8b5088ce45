"""One conversation is one prompt, one answer and one usage, whichever API asks (rule 13), streamed or not."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import ollama
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleet_runtime.server.anthropic_request import messages_request
from fleet_runtime.server.ollama_request import OllamaChat, chat_body, read
from fleet_runtime.server.parsing.tools import tool_request
from fleet_testing.dialects import KEY
from fleet_testing.runtime import HTTP, Runtime
from fleet_text.chat import chat_inputs

TURNS: list[list[tuple[str, str]]] = [
    [("user", "Hello!")],
    [("user", "Ça va? 中文 😀"), ("assistant", "Oui."), ("user", "Et toi?\n")],
    [("system", "Be brief."), ("user", "x" * 300)],
]
MAX = 24
HEADERS = {"Authorization": f"Bearer {KEY}"}


def by_openai(runtime: Runtime, turns: list[tuple[str, str]], *, stream: bool) -> tuple[str, int, int]:
    client = openai.OpenAI(base_url=runtime.data + "/v1", api_key=KEY, max_retries=0)
    messages: Any = [{"role": role, "content": text} for role, text in turns]
    if not stream:
        answer = client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=MAX)
        assert answer.usage is not None
        return answer.choices[0].message.content or "", answer.usage.prompt_tokens, answer.usage.completion_tokens
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=MAX, **options))
    usage = chunks[-1].usage
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices), usage.prompt_tokens, usage.completion_tokens


def by_anthropic(runtime: Runtime, turns: list[tuple[str, str]], *, stream: bool) -> tuple[str, int, int]:
    client = anthropic.Anthropic(base_url=runtime.data, api_key=KEY, max_retries=0)
    options: Any = {"messages": [{"role": role, "content": text} for role, text in turns if role != "system"], "model": "tiny", "max_tokens": MAX}
    options |= {"extra_body": {"temperature": 0}} | ({"system": turns[0][1]} if turns[0][0] == "system" else {})
    if stream:
        with client.messages.stream(**options) as got:
            answer: Any = got.get_final_message()
    else:
        answer = client.messages.create(**options)
    counted = client.messages.count_tokens(**{k: v for k, v in options.items() if k not in ("max_tokens", "extra_body")}).input_tokens
    usage = answer.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == counted and usage.input_tokens > 0
    return "".join(b.text for b in answer.content), counted, usage.output_tokens


def by_ollama(runtime: Runtime, turns: list[tuple[str, str]], *, stream: bool) -> tuple[str, int, int]:
    client = ollama.Client(host=runtime.data, headers=HEADERS)
    messages = [{"role": role, "content": text} for role, text in turns]
    lines: Any = client.chat(model="tiny", messages=messages, options={"temperature": 0, "num_predict": MAX}, stream=stream)
    lines = list(lines) if stream else [lines]
    return "".join(line.message.content for line in lines), lines[-1].prompt_eval_count, lines[-1].eval_count


@pytest.mark.parametrize("turns", TURNS)
def test_text_and_usage_are_equal_in_all_dialects_streamed_or_not(computing: Runtime, turns: list[tuple[str, str]]) -> None:
    answers = [ask(computing, turns, stream=stream) for ask in (by_openai, by_anthropic, by_ollama) for stream in (False, True)]
    assert len(set(answers)) == 1, answers
    assert answers[0][2] > 0


def test_cached_tokens_are_told_where_a_dialect_has_a_word_for_them(computing: Runtime) -> None:
    text = "a long prompt that fills some pages " * 4
    body = {"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": text}]}
    for _ in range(2):
        native = HTTP.post(computing.data + "/v1/chat/completions", json=body, headers=HEADERS).json()["usage"]
    told = HTTP.post(computing.data + "/v1/messages", json=body, headers=HEADERS).json()["usage"]
    cached = native["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0 and told["cache_read_input_tokens"] == cached and told["input_tokens"] == native["prompt_tokens"] - cached


CALLS = st.lists(st.dictionaries(st.text("abc", min_size=1, max_size=3), st.integers() | st.text(max_size=5), max_size=3), max_size=3)
TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(system=st.none() | TEXTS, rounds=st.lists(st.tuples(TEXTS, TEXTS, CALLS), max_size=3), last=TEXTS)
def test_any_conversation_with_tools_decides_the_same_prompt_in_all_dialects(
    system: str | None, rounds: list[tuple[str, str, list[dict[str, Any]]]], last: str
) -> None:
    ours: list[dict[str, Any]] = [{"role": "system", "content": system}] if system is not None else []
    theirs: list[dict[str, Any]] = []
    local: list[dict[str, Any]] = list(ours)
    n = 0
    for asked, said, calls in rounds:
        ids = [f"call{n + i:05d}" for i in range(len(calls))]
        n += len(calls)
        ours.append({"role": "user", "content": asked})
        local.append({"role": "user", "content": asked})
        _ask(theirs, {"type": "text", "text": asked})
        written = [{"id": i, "type": "function", "function": {"name": "get", "arguments": json.dumps(c)}} for i, c in zip(ids, calls, strict=True)]
        ours.append({"role": "assistant", "content": said} | ({"tool_calls": written} if calls else {}))
        local.append({"role": "assistant", "content": said} | ({"tool_calls": [{"function": {"name": "get", "arguments": c}} for c in calls]}))
        used = [{"type": "tool_use", "id": i, "name": "get", "input": c} for i, c in zip(ids, calls, strict=True)]
        theirs.append({"role": "assistant", "content": [{"type": "text", "text": said}, *used]})
        for i in ids:
            ours.append({"role": "tool", "tool_call_id": i, "content": "done"})
            local.append({"role": "tool", "content": "done"})
            _ask(theirs, {"type": "tool_result", "tool_use_id": i, "content": "done"})
    ours.append({"role": "user", "content": last})
    local.append({"role": "user", "content": last})
    _ask(theirs, {"type": "text", "text": last})
    schema = {"type": "object", "properties": {}}
    tools = [{"type": "function", "function": {"name": "get", "parameters": schema}}]
    one = {"model": "m", "messages": ours, "tools": tools}
    other = messages_request(
        {"model": "m", "max_tokens": 5, "messages": theirs, "tools": [{"name": "get", "input_schema": schema}]}
        | ({"system": system} if system is not None else {})
    ).chat
    third = chat_body(read(OllamaChat, {"model": "m", "messages": local, "tools": tools}), "m", 100)
    assert vars(chat_inputs(one)) == vars(chat_inputs(other)) == vars(chat_inputs(third))
    assert tool_request(one) == tool_request(other) == tool_request(third)


def _ask(turns: list[dict[str, Any]], block: dict[str, Any]) -> None:
    """Puts a block into the user's turn; Anthropic's API has one turn of each side at a time."""
    if turns and turns[-1]["role"] == "user":
        turns[-1]["content"].append(block)
    else:
        turns.append({"role": "user", "content": [block]})
