"""Ollama's API as its own client uses it, over a scheduler whose text the prompt scripts."""

from __future__ import annotations

import json
from typing import Any

import httpx
import numpy as np
import ollama
import pytest

from fleet_testing.dialects import KEY
from fleet_testing.runtime import HTTP, Runtime

FUNCTION = {"name": "get", "description": "Gets.", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TOOL: dict[str, Any] = {"type": "function", "function": FUNCTION}
CALL = '<tool_call>{"name":"get","arguments":{"city":"Rome"}}</tool_call>'


def post(runtime: Runtime, path: str = "/api/chat", **body: Any) -> httpx.Response:
    return httpx.post(runtime.data + path, json={"model": "tiny", **body}, timeout=20)


def user(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def said(text: str) -> str:
    """A prompt whose answer is this text."""
    return "hex:" + text.encode().hex()


def text_of(ids: list[int]) -> str:
    """A prompt's bytes, special ids as line ends."""
    return bytes(i if i < 256 else 10 for i in ids).decode()


def test_the_official_client_reads_plain_answers(llama: ollama.Client) -> None:
    answer = llama.chat(model="tiny", messages=user(said("Hello there")))
    assert (answer.message.role, answer.message.content, answer.done, answer.done_reason) == ("assistant", "Hello there", True, "stop")
    assert answer.model == "tiny" and answer.created_at and answer.eval_count == len("Hello there")
    assert answer.total_duration and answer.total_duration >= (answer.prompt_eval_duration or 0) + (answer.eval_duration or 0) > 0
    assert answer.load_duration == 0
    generated = llama.generate(model="tiny:latest", prompt=said("Hello there"))
    assert (generated.model, generated.response, generated.done_reason) == ("tiny:latest", "Hello there", "stop")
    assert generated.prompt_eval_count == answer.prompt_eval_count


@pytest.mark.parametrize("burst", [1, 7])
@pytest.mark.parametrize(
    ("text", "content", "thinking", "calls"),
    [
        ("Plain 中😀.", "Plain 中😀.", None, 0),
        ("<think>So it is.</think>Yes.", "Yes.", "So it is.", 0),
        (CALL, "", None, 1),
        (f"<think>Hm.</think>See:\n{CALL}\n{CALL}", "See:\n", "Hm.", 2),
    ],
)
def test_the_lines_of_a_stream_join_to_the_plain_answer(
    llama: ollama.Client, text: str, content: str, thinking: str | None, calls: int, burst: int
) -> None:
    options: dict[str, Any] = {"model": "tiny", "messages": user(f"{said(text)} burst:{burst}"), "tools": [TOOL]}
    plain = llama.chat(**options)
    lines = list(llama.chat(**options, stream=True))
    assert (plain.message.content, plain.message.thinking, len(plain.message.tool_calls or [])) == (content, thinking, calls)
    assert "".join(line.message.content or "" for line in lines) == content
    assert "".join(line.message.thinking or "" for line in lines) == (thinking or "")
    streamed_calls = [call for line in lines for call in line.message.tool_calls or []]
    assert streamed_calls == list(plain.message.tool_calls or [])
    assert all(call.function.name == "get" and call.function.arguments == {"city": "Rome"} for call in streamed_calls)
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
    last = lines[-1]
    assert (last.done_reason, last.eval_count, last.prompt_eval_count) == ("stop", plain.eval_count, plain.prompt_eval_count)


def test_generate_streams_by_default_as_one_object_a_line(scripted: Runtime, llama: ollama.Client) -> None:
    answer = post(scripted, "/api/generate", prompt=said("one two"))
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert "".join(line["response"] for line in lines) == "one two" and lines[-1]["done"] is True
    assert "".join(part.response or "" for part in llama.generate(model="tiny", prompt=said("one two"), stream=True)) == "one two"


def test_a_prompt_is_a_chat_and_raw_is_not(scripted: Runtime) -> None:
    post(scripted, "/api/generate", prompt="say:x", system="Be brief.")
    assert text_of(scripted.sent("Admit")[-1]["ids"]) == "\n\nsystem\nBe brief.\n\nuser\nsay:x\n\nassistant\n"
    post(scripted, "/api/generate", prompt="say:x", raw=True)
    assert text_of(scripted.sent("Admit")[-1]["ids"]) == "say:x" and scripted.sent("Admit")[-1]["max_new"] == 2048 - len("say:x")


def test_options_reach_the_scheduler(scripted: Runtime) -> None:
    options = {
        "num_predict": 5, "temperature": 0.5, "top_k": 3, "top_p": 0.25, "min_p": 0.125, "repeat_penalty": 1.5, "presence_penalty": 0.5,
        "frequency_penalty": 0.25, "seed": 9, "stop": ["q"], "num_ctx": 512, "num_gpu": 99, "mirostat": 0, "repeat_last_n": -1,
    }  # fmt: skip
    post(scripted, messages=user("count:2"), options=options, keep_alive="5m")
    sent = scripted.sent("Admit")[-1]
    assert (sent["max_new"], sent["temperature"], sent["top_k"], sent["top_p"], sent["min_p"]) == (5, 0.5, 3, 0.25, 0.125)
    assert (sent["repetition_penalty"], sent["presence_penalty"], sent["frequency_penalty"]) == (1.5, 0.5, 0.25)
    assert (sent["seed"], sent["stop"]) == (9, ["q"])
    post(scripted, messages=user("count:2"), options={"num_predict": -1, "seed": -1, "repeat_penalty": 1.5, "repeat_last_n": 0})
    sent = scripted.sent("Admit")[-1]
    assert sent["max_new"] == 2048 - len(sent["ids"]) and sent["repetition_penalty"] == 1.0
    assert (sent["temperature"], sent["top_k"], sent["top_p"]) == (0.8, 40, 0.9), "Ollama's defaults"
    answer = post(scripted, messages=user("count:2"), options={"num_predict": 100_000}, stream=False)
    sent = scripted.sent("Admit")[-1]
    assert answer.status_code == 200 and sent["max_new"] == 2048 - len(sent["ids"]), "num_predict is a bound, not a promise"


def test_formats_are_grammars(scripted: Runtime) -> None:
    post(scripted, messages=user("say:{}"), format="json")
    assert scripted.sent("Admit")[-1]["grammar"][0] == "json_schema"
    post(scripted, messages=user('say:{"a":1}'), format={"type": "object", "properties": {"a": {"type": "integer"}}})
    assert '"a"' in scripted.sent("Admit")[-1]["grammar"][1]
    post(scripted, messages=user("say:x"), format="")
    assert scripted.sent("Admit")[-1]["grammar"] is None


def test_logprobs_come_once_for_each_token(llama: ollama.Client) -> None:
    options: dict[str, Any] = {
        "model": "tiny",
        "messages": user(said(f"<think>a</think>{CALL}")),
        "tools": [TOOL],
        "logprobs": True,
        "top_logprobs": 2,
    }
    plain = llama.chat(**options)
    assert plain.logprobs is not None and len(plain.logprobs) == plain.eval_count and len(plain.logprobs[0].top_logprobs or []) == 2
    assert [p for line in llama.chat(**options, stream=True) for p in line.logprobs or []] == list(plain.logprobs)


def test_a_tool_answers_the_call_of_its_name(llama: ollama.Client, scripted: Runtime) -> None:
    calls = [{"function": {"name": "get", "arguments": {"city": "Rome"}}}, {"function": {"name": "put", "arguments": {}}}]
    turns: list[Any] = [
        *user("go"),
        {"role": "assistant", "content": "", "thinking": "t", "tool_calls": calls},
        {"role": "tool", "content": "done", "tool_name": "put"},
        {"role": "tool", "content": "21", "tool_name": "get"},
        *user("say:Warm."),
    ]
    assert llama.chat(model="tiny", messages=turns, tools=[TOOL]).message.content == "Warm."
    prompt = text_of(scripted.sent("Admit")[-1]["ids"])
    assert '{"name": "get", "arguments": {"city": "Rome"}}' in prompt and "tool\ndone\n\ntool\n21" in prompt.replace("\n\n\n", "\n\n")


def test_a_last_message_of_the_assistant_is_continued(scripted: Runtime) -> None:
    answer = post(scripted, messages=[*user("say:on"), {"role": "assistant", "content": "It goes "}], stream=False)
    assert answer.json()["message"]["content"] == "on" and text_of(scripted.sent("Admit")[-1]["ids"]).endswith("It goes ")


def test_a_request_without_a_prompt_finds_the_model_loaded(llama: ollama.Client, scripted: Runtime) -> None:
    assert (llama.generate(model="tiny").done_reason, llama.chat(model="tiny", messages=[]).done_reason) == ("load", "load")
    assert scripted.metrics()["radixfleet_runtime_http_open_requests"] == 0


def test_embeddings_are_told_in_both_forms(llama: ollama.Client) -> None:
    raw = np.array([*b"ab", 2.0])
    answer = llama.embed(model="tiny", input=["ab", "c"])
    np.testing.assert_allclose(answer.embeddings[0], raw / np.linalg.norm(raw), rtol=1e-6)
    assert len(answer.embeddings) == 2 and answer.prompt_eval_count == 3 and answer.total_duration
    assert llama.embeddings(model="tiny", prompt="ab").embedding == [97.0, 98.0, 2.0]
    assert llama.embed(model="tiny", input="x" * 3000).prompt_eval_count == 2048, "what is too long is cut, as Ollama does"
    with pytest.raises(ollama.ResponseError, match="the context is 2048 tokens"):
        llama.embed(model="tiny", input="x" * 3000, truncate=False)


def test_models_are_listed_shown_and_loaded(llama: ollama.Client, scripted: Runtime) -> None:
    assert [model.model for model in llama.list().models] == ["tiny:latest", "ns/tiny:latest"]
    assert [(model.name, model.context_length) for model in llama.ps().models] == [("tiny:latest", 2048), ("ns/tiny:latest", 2048)]
    shown = llama.show("ns/tiny:latest")
    assert shown.capabilities == ["completion", "tools", "thinking"] and shown.template and "message" in shown.template
    assert shown.modelinfo is not None and shown.modelinfo["simulated.context_length"] == 2048
    assert HTTP.get(scripted.data + "/api/version").json()["version"]
    with pytest.raises(ollama.ResponseError) as error:
        llama.show("nosuch")
    assert error.value.status_code == 404 and "tiny" in error.value.error


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("chat", {"options": {"num_predict": 0}}, "options.num_predict is 0"),
    ("chat", {"options": {"num_ctx": 4096}}, "options.num_ctx is 4096; the context of this server is 2048 tokens"),
    ("chat", {"options": {"temperature": 3}}, "options.temperature is 3: a number from 0 to 2"),
    ("chat", {"options": {"mirostat": 2}}, "options.mirostat is 2; this server does not have it; only 0"),
    ("chat", {"options": {"tfs_z": 0.5}}, "options.tfs_z is 0.5"),
    ("chat", {"options": {"nosuch": 1}}, "options.nosuch is not an option"),
    ("chat", {"options": {"repeat_penalty": 1.5, "repeat_last_n": 8}}, "options.repeat_last_n is 8; penalties look at the whole context"),
    ("chat", {"think": "high"}, 'think is "high"; this model knows no levels'),
    ("chat", {"top_logprobs": 2}, "top_logprobs is only allowed with logprobs: true"),
    ("chat", {"truncate": True}, "truncate is true"),
    ("chat", {"truncate": 0}, "truncate is 0"),
    ("chat", {"shift": 0.0}, "shift is 0.0"),
    ("chat", {"think": 1}, "think is 1"),
    ("chat", {"format": "xml"}, 'format is "xml"; json, or a JSON schema'),
    ("embed", {"input": [1], "messages": None}, "input is a list; a text"),
    ("embed", {"messages": None}, "input is missing"),
    (
        "chat",
        {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]},
        "messages[0].images is not supported; this server takes only text",
    ),
    ("chat", {"messages": [{"role": "developer", "content": "x"}]}, "messages[0].role"),
    ("chat", {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}, "messages[0].content is a list; a text is needed"),
    ("chat", {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]}, 'arguments is "{}"; an object'),
    ("chat", {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ("chat", {"nosuch": 1}, "nosuch is not an option"),
    ("generate", {"template": "{{ .Prompt }}"}, "template is not supported"),
    ("generate", {"context": [1, 2]}, "context is not supported; send the conversation to /api/chat"),
    ("generate", {"suffix": "x"}, "suffix is not supported"),
    ("generate", {"images": ["aGk="]}, "images is not supported"),
    ("generate", {"raw": True, "system": "x"}, "raw: true sends the prompt as it is"),
    ("embed", {"input": [], "messages": None}, "input is a list; a text, or a list of at least one text, is needed"),
    ("embed", {"input": "x", "dimensions": 3, "messages": None}, "dimensions is 3"),
]


@pytest.mark.parametrize(("path", "change", "words"), BAD)
def test_what_cannot_be_done_is_refused_by_name(scripted: Runtime, path: str, change: dict[str, Any], words: str) -> None:
    base: dict[str, Any] = {"chat": {"messages": user("say:x")}, "generate": {"prompt": "say:x"}, "embed": {}}[path]
    answer = post(scripted, f"/api/{path}", **(base | change))
    assert answer.status_code == 400 and list(answer.json()) == ["error"] and words in answer.json()["error"], answer.text


def test_errors_have_the_apis_shape_wherever_they_come_from(llama: ollama.Client, scripted: Runtime, computing: Runtime) -> None:
    with pytest.raises(ollama.ResponseError, match="nosuch") as missing:
        llama.chat(model="nosuch", messages=user("x"))
    assert missing.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="the queue is full") as full:
        llama.chat(model="tiny", messages=user("fail:queue_full"))
    assert full.value.status_code == 429
    with pytest.raises(ollama.ResponseError, match="the device failed"):
        list(llama.chat(model="tiny", messages=user("break:2"), stream=True))
    with pytest.raises(ollama.ResponseError, match="does not reason"):
        ollama.Client(host=computing.data, headers={"Authorization": f"Bearer {KEY}"}).chat(model="tiny", messages=user("x"), think=True)
    with pytest.raises(ollama.ResponseError, match="API key") as keyless:
        ollama.Client(host=computing.data).chat(model="tiny", messages=user("x"))
    assert keyless.value.status_code == 401
    for answer in (HTTP.post(scripted.data + "/api/pull", json={}), HTTP.get(scripted.data + "/api/chat"), HTTP.post(scripted.data + "/api/chat")):
        assert list(answer.json()) == ["error"] and isinstance(answer.json()["error"], str)
