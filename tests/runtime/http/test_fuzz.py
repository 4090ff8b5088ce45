"""Any body gets an answer of the 2xx or 4xx kind: nothing that a client sends is a fault of ours."""

from __future__ import annotations

import inspect
import json
import re
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleet_contract.errors import ApiError
from fleet_contract.openai import NEUTRAL_OPTIONS, NEUTRAL_VALUES
from fleet_runtime.server import anthropic_routes, ollama_routes, openai_routes, probe_routes
from fleet_runtime.server.body import parse_json
from fleet_runtime.server.generate import max_new_tokens
from fleet_runtime.server.validate import chat_request, completion_request, embedding_request, stop_strings, tokenize_request
from fleet_testing.fuzz import storm
from fleet_testing.runtime import HTTP, Runtime

NAMES = (
    "model messages prompt stream stream_options max_tokens max_completion_tokens temperature top_p seed stop ignore_eos".split()
    + list(NEUTRAL_OPTIONS)
    + list(NEUTRAL_VALUES)
)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["tiny", "user", "text"])
keys = st.sampled_from(["role", "content", "type", "text", "name", "include_usage"]) | st.text(max_size=4)
values = st.recursive(scalars, lambda v: st.lists(v, max_size=4) | st.dictionaries(keys, v, max_size=4), max_leaves=12)
bodies = st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=6), values, max_size=8)
likely = bodies.map(lambda b: {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "prompt": "x", **b})


@settings(max_examples=120, suppress_health_check=[HealthCheck.too_slow])
@given(body=bodies | likely)
@pytest.mark.parametrize("check", [chat_request, completion_request, embedding_request, tokenize_request])
def test_checks_accept_or_refuse_in_few_words(check: Any, body: dict[str, Any]) -> None:
    error = None
    try:
        request = check(body)
        if hasattr(request, "stop"):
            stop_strings(request.stop)
    except ApiError as e:
        error = e
    assert error is None or (error.status == 400 and error.message and len(error.body().decode()) < 4096)


@given(st.binary(max_size=200) | st.text(max_size=100).map(str.encode) | bodies.map(lambda b: json.dumps(b).encode()))
def test_any_bytes_are_json_or_refused(body: bytes) -> None:
    value: Any = None
    try:
        value = parse_json(body)
    except ApiError as e:
        value = e
    assert isinstance(value, dict) or (value.status == 400 and value.body())


@given(prompt=st.integers(1, 600), asked=st.none() | st.integers(1, 600), default=st.none() | st.integers(1, 20))
def test_what_may_be_made_always_fits(prompt: int, asked: int | None, default: int | None) -> None:
    if prompt + (asked or 1) > 512:
        with pytest.raises(ApiError) as e:
            max_new_tokens(prompt, asked, 512, default=default, param="prompt")
        assert str(prompt) in e.value.message and "512" in e.value.message
    else:
        made = max_new_tokens(prompt, asked, 512, default=default, param="prompt")
        assert made >= 1 and prompt + made <= 512
        assert asked is None or made == asked


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=likely, path=st.sampled_from(["/v1/chat/completions", "/v1/completions", "/tokenize"]))
def test_the_server_answers_2xx_or_4xx(runtime: Runtime, body: dict[str, Any], path: str) -> None:
    options = {"max_tokens": 1} | body
    answer = HTTP.post(runtime.data + path, content=json.dumps(options).encode(), timeout=20)
    assert answer.status_code < 500, answer.text
    assert answer.headers["x-request-id"]


def test_a_storm_of_broken_bodies_leaves_the_same_processes(runtime: Runtime) -> None:
    """The long form is `make fuzz`."""
    before = runtime.children()
    statuses = storm(runtime, bodies=320, seed=4)
    assert statuses[200] > 20 and statuses[400] > 100
    assert all(child.is_running() for child in before)


def routes_of(part: ModuleType) -> set[str]:
    """The paths that a module of routes registers."""
    return set(re.findall(r'@app\.(?:get|post)\("([^"]+)"\)', inspect.getsource(part)))


def test_the_published_document_names_every_option_and_no_other(runtime: Runtime) -> None:
    document = HTTP.get(runtime.data + "/openapi.json").json()
    assert document["openapi"] == "3.1.0" and "/worker" not in document["paths"]
    assert "/worker" in HTTP.get(runtime.internal + "/openapi.json").json()["paths"]
    served = {route for part in (openai_routes, anthropic_routes, ollama_routes, probe_routes) for route in routes_of(part)}
    assert served == {path.replace("{name}", "{name:path}") for path in document["paths"]} - {"/openapi.json"}
    for path, operations in document["paths"].items():
        method = next(iter(operations))
        answer = HTTP.request(method.upper(), runtime.data + path.replace("{name}", "ns/tiny"), content=b"{}" if method == "post" else None)
        assert answer.status_code in (200, 400), (path, answer.text)
    for name, path in (("ChatRequest", "/v1/chat/completions"), ("CompletionRequest", "/v1/completions"), ("EmbeddingRequest", "/v1/embeddings")):
        schema = document["components"]["schemas"][name]
        assert schema["additionalProperties"] is False and schema["properties"]["model"]["enum"] == ["tiny", "ns/tiny"]
        good: dict[str, Any] = {"model": "tiny", "prompt": "x", "messages": [{"role": "user", "content": "x"}], "input": "x"}
        body = {k: v for k, v in good.items() if k in schema["properties"]} | ({"max_tokens": 1} if name != "EmbeddingRequest" else {})
        answer = HTTP.post(runtime.data + path, json={option: None for option in schema["properties"] if option != "priority"} | body)
        assert answer.status_code == 200, answer.text
