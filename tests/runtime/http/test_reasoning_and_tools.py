"""Reasoning, tool calls and continued messages through the whole http path, with a scripted model that writes `<think>` and `<tool_call>`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from fleet_testing.http_cases import CHAT, body, chunks, post, refused, worker
from fleet_testing.runtime import HTTP, Runtime, wait_for

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}]
BAD_SCHEMA = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "nosuch"}}}}}]
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    with worker(tmp_path_factory.mktemp("thinking"), "--reasoning-parser=think", fake=True) as runtime:
        yield runtime.wait_ready()


def saying(text: str, **options: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"hex:{text.encode().hex()}"}], "max_tokens": 400, **options}


def joined(streamed: list[dict[str, Any]], key: str) -> str:
    return "".join(c["choices"][0]["delta"].get(key) or "" for c in streamed if c["choices"])


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls", "thought"),
    [
        ("<think>é so</think>\n\nyes 中", "é so", "yes 中", 0, len("<think>é so</think>".encode())),
        ("no thought at all", None, "no thought at all", 0, 0),
        (f"<think>call it</think>{CALL}", "call it", None, 1, len("<think>call it</think>")),
        (f"<think>{CALL}</think>done", CALL, "done", 0, len(f"<think>{CALL}</think>")),
        ("<think>cut", "cut", "", 0, len("<think>cut")),
    ],
)
def test_reasoning_is_apart_streamed_and_not(
    runtime: Runtime, text: str, reasoning: str | None, content: str | None, calls: int, thought: int
) -> None:
    options = saying(text, tools=TOOLS)
    answer = post(runtime, CHAT, body(**options)).json()
    message = answer["choices"][0]["message"]
    assert (message.get("reasoning_content"), message["content"], len(message.get("tool_calls", []))) == (reasoning, content, calls)
    assert answer["choices"][0]["finish_reason"] == ("tool_calls" if calls else "stop")
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == thought
    streamed = chunks(runtime, CHAT, body(**options, stream=True, stream_options={"include_usage": True}))
    assert (joined(streamed, "reasoning_content") or None, joined(streamed, "content") or None) == (reasoning, content or None)
    assert streamed[-1]["usage"] == answer["usage"]


def test_an_answer_that_continues_a_thought_goes_on_thinking(runtime: Runtime) -> None:
    """And a grammar waits for the thought's end."""
    said = "two</think>four"
    messages = [{"role": "user", "content": f"hex:{said.encode().hex()}"}, {"role": "assistant", "content": "<think>one "}]
    options = {"messages": messages, "max_tokens": 99, "continue_final_message": True, "response_format": {"type": "regex", "regex": "four"}}
    message = post(runtime, CHAT, body(**options)).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("two", "four")
    sent = runtime.sent("Admit")[-1]
    assert bytes(i for i in sent["ids"] if i < 256).endswith(b"assistant<think>one ") and sent["ids"][-1] == ord(" ")
    assert sent["grammar"] == ["regex", "four", list(b"</think>")]
    post(runtime, CHAT, body(response_format={"type": "regex", "regex": "a"}))
    assert runtime.sent("Admit")[-1]["grammar"] == ["regex", "a", []], "an answer that need not think is bound from its start"


def test_forced_calls_have_a_grammar_and_no_markup(runtime: Runtime) -> None:
    named = {"type": "function", "function": {"name": "f"}}
    answer = post(runtime, CHAT, body(**saying('{"a": 7}', tools=TOOLS, tool_choice=named))).json()["choices"][0]
    assert (answer["message"]["content"], answer["finish_reason"]) == (None, "tool_calls")
    assert answer["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 7}'}
    assert json.loads(runtime.sent("Admit")[-1]["grammar"][1])["properties"] == {"a": {"type": "integer"}}
    said = '[{"name": "f", "parameters": {"a": 1}}, {"name": "f", "parameters": {}}]'
    answer = post(runtime, CHAT, body(**saying(said, tools=TOOLS, tool_choice="required"))).json()["choices"][0]
    assert [c["function"]["arguments"] for c in answer["message"]["tool_calls"]] == ['{"a": 1}', "{}"]
    one = post(runtime, CHAT, body(**saying(CALL + CALL, tools=TOOLS, parallel_tool_calls=False))).json()["choices"][0]
    assert len(one["message"]["tool_calls"]) == 1


@pytest.mark.parametrize("n", [1, 3])
def test_where_one_call_is_allowed_its_end_is_the_end_of_the_generation(runtime: Runtime, n: int) -> None:
    """And it is what the client pays for: the model, which would go on for seconds, is stopped."""
    prompt = f"slow:5 hex:{(CALL + CALL + 900 * 'x').encode().hex()}"
    options = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 1200, "tools": TOOLS, "parallel_tool_calls": False, "n": n}
    told = len(runtime.sent("Stopped"))
    answer = post(runtime, CHAT, body(**options)).json()
    for choice in answer["choices"]:
        assert [c["function"] for c in choice["message"]["tool_calls"]] == [{"name": "f", "arguments": '{"a": 1}'}]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    assert answer["usage"]["completion_tokens"] == n * len(CALL.removesuffix("</tool_call>"))
    streamed = chunks(runtime, CHAT, body(**options, stream=True, stream_options={"include_usage": True}))
    ends = [(c["choices"][0]["index"], c["choices"][0]["finish_reason"]) for c in streamed if c["choices"] and c["choices"][0]["finish_reason"]]
    assert sorted(ends) == [(i, "tool_calls") for i in range(n)]
    assert streamed[-1]["usage"] == answer["usage"]
    wait_for(lambda: runtime.metrics()["radixfleet_runtime_running_requests"] == 0, "the scheduler has ended them")
    assert sorted(e["index"] for e in runtime.sent("Stopped")[told:]) == sorted([*range(n)] * 2)
    assert not [a for a in runtime.sent("Abort") if a["reason"] == "its handler ended"], "they end well"


def test_tools_are_in_the_prompt_unless_none_may_be_called(runtime: Runtime) -> None:
    def tokens(**options: Any) -> int:
        return int(post(runtime, CHAT, body(**saying("x", **options))).json()["usage"]["prompt_tokens"])

    assert tokens(tools=TOOLS) > tokens() == tokens(tools=TOOLS, tool_choice="none")
    told = HTTP.post(runtime.data + "/tokenize", json={"messages": [{"role": "user", "content": "x"}], "tools": TOOLS}).json()
    assert told["count"] > HTTP.post(runtime.data + "/tokenize", json={"messages": [{"role": "user", "content": "x"}]}).json()["count"]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "tools"),
        ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice.function.name"),
        ({"tools": TOOLS * 2}, "tools[1].function.name"),
        ({"tools": BAD_SCHEMA, "tool_choice": "required"}, "tools"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"continue_final_message": True}, "messages[0].role"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(runtime: Runtime, options: dict[str, Any], param: str) -> None:
    refused(post(runtime, CHAT, body(**options)), param=param)
    assert refused(post(runtime, CHAT, body(**options, stream=True)))["param"] == param


def test_tools_with_a_format_are_fine_when_none_may_be_called(runtime: Runtime) -> None:
    assert post(runtime, CHAT, body(tools=TOOLS, tool_choice="none", response_format={"type": "json_object"})).status_code == 200
