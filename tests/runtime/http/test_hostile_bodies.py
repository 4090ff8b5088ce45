"""A body within its size limit costs what its bytes cost: no fault of it, and no order of its parts, takes many times the memory or time.

Times are compared with one another, never with a clock's face.
"""

from __future__ import annotations

import asyncio
import json
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from fleet_contract.errors import ApiError
from fleet_runtime.server import anthropic_request, grammars, ollama_request, requests, validate
from fleet_runtime.server.body import parse_json

MANY = 50_000
TALK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


def refusal(call: Callable[[], Any]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        call()
    assert caught.value.status == 400 and len(caught.value.message) < 2000
    return caught.value


def read_ollama(body: dict[str, Any]) -> Any:
    return ollama_request.read(ollama_request.OllamaChat, body)


FLOODS: list[tuple[Callable[[dict[str, Any]], Any], dict[str, Any], str | None]] = [
    (validate.completion_request, {"model": "m", "prompt": [{}] * MANY}, "prompt"),
    (validate.completion_request, {"model": "m", "prompt": [[{}] * MANY]}, "prompt"),
    (validate.embedding_request, {"model": "m", "input": [1.5] * MANY}, "input"),
    (validate.detokenize_request, {"tokens": ["a"] * MANY}, "tokens[0]"),
    (validate.chat_request, {"model": "m", "messages": [1] * MANY}, "messages[0]"),
    (validate.chat_request, {"model": "m", "messages": [{"role": "user", "content": [1] * MANY}]}, "messages[0].content"),
    (validate.chat_request, {"model": "m", "messages": [{"role": "assistant", "tool_calls": [1] * MANY}]}, "messages[0].tool_calls[0]"),
    (validate.chat_request, {**TALK, "tools": [1] * MANY}, "tools[0]"),
    (validate.chat_request, {**TALK, "stop": [1] * MANY}, "stop"),
    (validate.chat_request, {**TALK, "guided_choice": [1] * MANY}, "guided_choice[0]"),
    (validate.chat_request, {**TALK, "stream_options": {f"o{i}": 1 for i in range(MANY)}}, None),
    (validate.tokenize_request, {f"o{i}": 1 for i in range(MANY)}, None),
    (anthropic_request.messages_request, {"model": "m", "max_tokens": 1, "messages": [1] * MANY}, "messages[0]"),
    (anthropic_request.messages_request, {**TALK, "max_tokens": 1, "stop_sequences": [1] * MANY}, "stop_sequences[0]"),
    (read_ollama, {"model": "m", "messages": [1] * MANY}, "messages[0]"),
]


@pytest.mark.parametrize(("read", "body", "param"), FLOODS, ids=[f"{i}-{param}" for i, (_, _, param) in enumerate(FLOODS)])
def test_fifty_thousand_faults_take_no_memory(read: Callable[[dict[str, Any]], Any], body: dict[str, Any], param: str | None) -> None:
    """Each fault that is told apart takes a kilobyte, so 8 MiB of them would take gigabytes."""
    tracemalloc.start()
    try:
        error = refusal(lambda: read(body))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert error.param == param
    assert peak < 4 << 20


def seconds(call: Callable[[], Any]) -> float:
    """The best of three."""
    took = []
    for _ in range(3):
        start = time.perf_counter()
        call()
        took.append(time.perf_counter() - start)
    return min(took)


def of_one_side(count: int) -> Any:
    turns = [{"role": "user", "content": "x" * 400}] * count
    return lambda: anthropic_request.messages_request({"model": "m", "max_tokens": 1, "messages": turns})


def answered_calls(count: int) -> Any:
    calls = [{"function": {"name": "f", "arguments": {}}}] * count
    request = read_ollama({"model": "m", "messages": [{"role": "assistant", "tool_calls": calls}, *[{"role": "tool", "content": "x"}] * count]})
    return lambda: ollama_request.chat_body(request, "m", 100)


@pytest.mark.parametrize(("work", "count"), [(of_one_side, 5000), (answered_calls, 1000)])
def test_eight_times_the_messages_take_about_eight_times_as_long(work: Callable[[int], Any], count: int) -> None:
    """Not sixty-four times: turns of one side are joined at the end, open calls are found without a search."""
    assert seconds(work(8 * count)) < 30 * seconds(work(count))


def test_long_names_are_not_copied_for_each_value_below_them() -> None:
    body = json.dumps({"k" * 200_000: [1] * 50_000, "x": "\u00e9"}).encode()
    assert seconds(lambda: parse_json(body)) < 40 * seconds(lambda: json.loads(body))


@pytest.mark.parametrize(
    ("text", "param"),
    [
        (r'{"a":{"b":["x",{"c":"\ud800"}]}}', "a.b[1].c"),
        (r'{"a":[{"\udfff":1}]}', "a[0]"),
        (r'{"\ud800":1}', None),
        (r'{"' + "k" * 100_000 + r'":"\ud800"}', "k" * 60),
    ],
)
def test_a_lone_surrogate_is_told_with_its_place(text: str, param: str | None) -> None:
    assert refusal(lambda: parse_json(text.encode())).param == param


def test_a_schema_deeper_than_the_stack_is_refused() -> None:
    """A large body is parsed on a thread, whose stack is shallower than a handler's: what it could read, the handler may not be able to write."""
    deep: dict[str, Any] = {}
    for _ in range(2000):
        deep = {"not": deep}
    assert refusal(lambda: grammars.schema_grammar(deep, "guided_json")).param == "guided_json"


def test_a_slow_schema_does_not_stop_the_loop() -> None:
    """Its check takes a third of a second; meanwhile others are served."""
    either = [{"anyOf": [{"properties": {f"{n}{i}": {"type": "integer"}}} for n in "ab"]} for i in range(10)]
    options = validate.chat_request({**TALK, "guided_json": {"type": "object", "allOf": either}})

    async def rounds() -> int:
        checking = asyncio.create_task(requests._grammar(options))
        count = 0
        while not checking.done():
            await asyncio.sleep(0)
            count += 1
        await checking
        return count

    assert asyncio.run(rounds()) > 10
