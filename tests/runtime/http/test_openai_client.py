"""The official `openai` client against a whole worker: the real scheduler over the simulated executor, and a few with the bundled model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from fleet_testing.http_cases import alive, worker
from fleet_testing.runtime import HTTP, Runtime

MESSAGES: Any = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather of a city", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "get_time"}},
]


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    with worker(tmp_path_factory.mktemp("client"), "--context-length=2048", "--served-model-name=ns/tiny") as runtime:
        runtime.wait_ready()
        with alive(runtime):
            yield runtime


@pytest.fixture
def client(runtime: Runtime) -> openai.OpenAI:
    return openai.OpenAI(base_url=runtime.data + "/v1", api_key="none", max_retries=0, timeout=60)


def test_plain_and_streamed_answers_are_the_same(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 40, "seed": 5, "temperature": 0.7, "n": 2}
    plain = client.chat.completions.create(**options)
    texts, usage = {0: "", 1: ""}, None
    for chunk in client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert [c.message.content for c in plain.choices] == [texts[0], texts[1]] and texts[0] != texts[1]
    assert plain.usage is not None and usage is not None
    assert (plain.usage.prompt_tokens, plain.usage.completion_tokens) == (usage.prompt_tokens, usage.completion_tokens)


def test_a_choice_can_be_had_again_by_its_seed(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=20, n=3).choices[2]
    again = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=20, seed=first.model_extra["seed"]).choices[0]
    assert again.message.content == first.message.content


@pytest.mark.parametrize("stream", [False, True])
def test_a_json_schema_is_followed(client: openai.OpenAI, stream: bool) -> None:
    format: Any = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}  # noqa: A001
    options: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "response_format": format, "max_tokens": 300, "temperature": 1, "seed": 3}
    if stream:
        text = "".join(c.choices[0].delta.content or "" for c in client.chat.completions.create(**options, stream=True))
    else:
        text = client.chat.completions.create(**options).choices[0].message.content or ""
    made = json.loads(text)
    assert made.keys() == {"name", "age"} and 0 <= made["age"] <= 99


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"response_format": {"type": "regex", "regex": "[ab]{3}c"}}, "[ab]{3}c"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"guided_grammar": 'start: "x" | "yy"'}, "x|yy"),
    ],
)
def test_other_grammars_are_followed(client: openai.OpenAI, options: dict[str, Any], pattern: str) -> None:
    for seed in range(4):
        choice = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=20, seed=seed, extra_body=options).choices[0]
        assert re.fullmatch(pattern, choice.message.content or "") and choice.finish_reason == "stop"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_that_must_be_called_is_called(client: openai.OpenAI, choice: Any, stream: bool) -> None:
    options: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "max_tokens": 400, "seed": 11}
    options |= {"parallel_tool_calls": False}
    names, arguments, reason = [], "", None
    if stream:
        for chunk in client.chat.completions.create(**options, stream=True):
            reason = chunk.choices[0].finish_reason or reason
            for call in chunk.choices[0].delta.tool_calls or ():
                names += [call.function.name] if call.function and call.function.name else []
                arguments += (call.function.arguments or "") if call.function else ""
    else:
        answer = client.chat.completions.create(**options).choices[0]
        assert answer.message.tool_calls is not None and answer.message.content is None
        calls = answer.message.tool_calls
        names, arguments, reason = [c.function.name for c in calls], calls[0].function.arguments, answer.finish_reason
    assert len(names) == 1 and reason == "tool_calls"
    made = json.loads(arguments)
    assert made.keys() == ({"name", "age"} if names[0] == "get_weather" else set())


def test_the_clients_stream_helper_accumulates_a_call(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "max_tokens": 400, "seed": 2}
    with client.chat.completions.stream(**options) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.tool_calls
    for call in final.choices[0].message.tool_calls:
        json.loads(call.function.arguments)


def test_logprobs_are_those_of_the_tokens(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3)
    told = answer.choices[0].logprobs
    assert told is not None and told.content is not None and len(told.content) == 5
    assert "".join(t.token for t in told.content) == answer.choices[0].message.content
    for t in told.content:
        assert t.logprob <= 0 and len(t.top_logprobs) == 3 and t.top_logprobs[0].logprob >= t.top_logprobs[2].logprob


def test_completions_with_echo_best_of_and_lists(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="ns/tiny", prompt=["ab", "cd"], max_tokens=3, echo=True, logprobs=1, n=1, best_of=2, temperature=1)
    assert [c.text[:2] for c in answer.choices] == ["ab", "cd"]
    told = answer.choices[0].logprobs
    assert told is not None and told.token_logprobs is not None and len(told.token_logprobs) == 5 and told.token_logprobs[0] is None
    assert answer.usage is not None and answer.usage.completion_tokens == 12, "two were made of each"


def test_cached_tokens_are_told(client: openai.OpenAI) -> None:
    prompt = "c" * 100
    first, second = (client.completions.create(model="tiny", prompt=prompt, max_tokens=1) for _ in range(2))
    salted = client.completions.create(model="tiny", prompt=prompt, max_tokens=1, extra_body={"cache_salt": "other"})
    cached = [a.usage.prompt_tokens_details.cached_tokens for a in (first, second, salted) if a.usage and a.usage.prompt_tokens_details]
    assert cached == [0, 96, 0]


def test_embeddings_are_of_length_one_and_of_their_input(client: openai.OpenAI) -> None:
    one = client.embeddings.create(model="tiny", input=["same", "same", "other"])
    a, b, c = (np.array(d.embedding) for d in one.data)
    np.testing.assert_allclose(a, b, rtol=1e-5)
    assert abs(np.linalg.norm(a) - 1) < 1e-5 and not np.allclose(a, c)
    assert one.usage.prompt_tokens == len("samesameother")


def test_models_with_slashes(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "ns/tiny"]
    assert client.models.retrieve("ns/tiny").id == "ns/tiny"


def test_control_calls_of_a_whole_worker(runtime: Runtime) -> None:
    """Pause holds what comes, continue lets it go; the scheduler tells of both."""
    assert HTTP.post(runtime.internal + "/pause").json() == {"paused": True}
    assert HTTP.get(runtime.internal + "/internals").json()["scheduler"]["paused"] is True
    assert HTTP.post(runtime.internal + "/continue").json() == {"paused": False}
    assert HTTP.post(runtime.internal + "/log_level", json={"level": "info"}).json() == {"level": "info"}
    assert HTTP.post(runtime.internal + "/flush_cache", json={"wait_s": 5}).json()["flushed_tokens"] >= 0


@pytest.fixture(scope="module")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    folder: Path = tmp_path_factory.mktemp("bundled")
    flags = ("--model=bundled://smollm2-135m-instruct", "--executor=torch", "--served-model-name=smollm2", "--context-length=512")
    with Runtime(folder, *flags, "--kv-cache-memory=134217728") as runtime:
        yield runtime.wait_ready(180)


@pytest.mark.model
def test_the_bundled_model_answers_streams_and_follows_a_grammar(bundled: Runtime) -> None:
    client = openai.OpenAI(base_url=bundled.data + "/v1", api_key="none", max_retries=0, timeout=120)
    options: dict[str, Any] = {"model": "smollm2", "messages": [{"role": "user", "content": "Name three emoji."}], "temperature": 0, "max_tokens": 24}
    plain = client.chat.completions.create(**options, logprobs=True, top_logprobs=2).choices[0]
    streamed = "".join(c.choices[0].delta.content or "" for c in client.chat.completions.create(**options, stream=True))
    assert plain.message.content == streamed and plain.logprobs is not None and plain.logprobs.content is not None
    assert bytes(b for t in plain.logprobs.content for b in t.bytes or ()).decode(errors="replace").startswith(streamed[:10])
    forced = client.chat.completions.create(**options | {"max_tokens": 60}, extra_body={"guided_regex": "(yes|no), because [a-z ]{3,12}\\."})
    assert re.fullmatch(r"(yes|no), because [a-z ]{3,12}\.", forced.choices[0].message.content or "")
    vectors = client.embeddings.create(model="smollm2", input=["a cat", "a cat", "the stock market"], extra_body={"pooling": "mean"})
    a, b, c = (np.array(d.embedding) for d in vectors.data)
    assert a @ b > 0.999 > a @ c
