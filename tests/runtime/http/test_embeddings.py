"""`/v1/embeddings` against the scripted scheduler, whose vector of a prompt is its bytes and their number."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from fleet_testing.runtime import HTTP, Runtime

PATH = "/v1/embeddings"


def vector(text: bytes) -> np.ndarray:
    raw = np.array([*text, len(text)], dtype=np.float64)
    return raw / np.linalg.norm(raw)


def post(runtime: Runtime, **body: Any) -> httpx.Response:
    return HTTP.post(runtime.data + PATH, json={"model": "tiny", **body}, timeout=30)


@pytest.mark.parametrize("given", ["ab", [97, 98], ["ab"], [[97, 98]]])
def test_an_input_may_be_text_or_ids_alone_or_in_a_list(runtime: Runtime, given: Any) -> None:
    answer = post(runtime, input=given).json()
    assert answer["object"] == "list" and answer["model"] == "tiny"
    assert [(d["index"], d["object"]) for d in answer["data"]] == [(0, "embedding")]
    np.testing.assert_allclose(answer["data"][0]["embedding"], vector(b"ab"), rtol=1e-6)
    assert answer["usage"] == {"prompt_tokens": 2, "total_tokens": 2, "prompt_tokens_details": {"cached_tokens": 0}}


def test_vectors_are_of_length_one_unless_asked(runtime: Runtime) -> None:
    assert post(runtime, input="ab", normalize=False).json()["data"][0]["embedding"] == [97.0, 98.0, 2.0]


def test_pooling_reaches_the_scheduler(runtime: Runtime) -> None:
    post(runtime, input="ab")
    assert (runtime.sent("Admit")[-1]["embed"], runtime.sent("Admit")[-1]["max_new"]) == ("last", 0)
    post(runtime, input="ab", pooling="mean", cache_salt="s")
    assert (runtime.sent("Admit")[-1]["embed"], runtime.sent("Admit")[-1]["salt"]) == ("mean", "s")


def test_more_inputs_than_one_wave_come_back_in_their_order(runtime: Runtime) -> None:
    texts = [f"number {i}" for i in range(200)]
    answer = post(runtime, input=texts).json()
    assert [d["index"] for d in answer["data"]] == list(range(200))
    for text, told in zip(texts, answer["data"], strict=True):
        np.testing.assert_allclose(told["embedding"], vector(text.encode()), rtol=1e-6)
    assert runtime.metrics()["radixfleet_runtime_http_open_requests"] == 0


def test_the_official_client_reads_both_encodings(runtime: Runtime) -> None:
    client = openai.OpenAI(base_url=runtime.data + "/v1", api_key="none", max_retries=0)
    floats = client.embeddings.create(model="tiny", input=["ab", "c"], encoding_format="float")
    default = client.embeddings.create(model="tiny", input=["ab", "c"])  # the client asks for base64
    for one, other in zip(floats.data, default.data, strict=True):
        np.testing.assert_allclose(one.embedding, other.embedding, rtol=1e-6)
    raw = post(runtime, input="ab", encoding_format="base64").json()["data"][0]["embedding"]
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(raw), "<f4"), vector(b"ab"), rtol=1e-6)


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ({"input": ""}, 400, "invalid_value", "input"),
        ({"input": []}, 400, "invalid_value", "input"),
        ({"input": ["a", ""]}, 400, "invalid_value", "input[1]"),
        ({"input": None}, 400, "invalid_value", "input"),
        ({"input": {"a": 1}}, 400, "invalid_value", "input"),
        ({"input": ["a"] * 2049}, 400, "invalid_value", "input"),
        ({"input": [999]}, 400, "token_out_of_vocabulary", "input[0]"),
        ({"input": [[1], [999]]}, 400, "token_out_of_vocabulary", "input[1][0]"),
        ({"input": "x" * 513}, 400, "context_length_exceeded", "input"),
        ({"input": "a", "dimensions": 2}, 400, "unsupported_option", "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, 400, "invalid_value", "encoding_format"),
        ({"input": "a", "pooling": "max"}, 400, "invalid_value", "pooling"),
        ({"input": "a", "nosuch": 1}, 400, "unsupported_option", "nosuch"),
        ({"input": "a", "priority": 1}, 400, "internal_option", "priority"),
        ({"input": "a", "model": "nosuch"}, 404, "model_not_found", "model"),
        ({"input": "compile:fail"}, 400, "invalid_grammar", None),
    ],
)
def test_what_cannot_be_embedded_is_refused(runtime: Runtime, body: dict[str, Any], status: int, code: str, param: str | None) -> None:
    answer = post(runtime, **body)
    assert (answer.status_code, answer.json()["error"]["code"], answer.json()["error"]["param"]) == (status, code, param), answer.text
    assert len(answer.content) < 4096


def test_an_input_may_fill_the_context(runtime: Runtime) -> None:
    assert post(runtime, input="x" * 512).status_code == 200
