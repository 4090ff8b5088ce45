"""Every kind of bad input gets a clear error in the one shape, and no process ends."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from fleet_testing.runtime import HTTP, Runtime, wait_for

CHAT = "/v1/chat/completions"
COMP = "/v1/completions"
TYPES = "invalid_request_error not_found_error overloaded_error timeout_error server_error".split()


@pytest.fixture(autouse=True)
def same_processes(runtime: Runtime) -> Iterator[None]:
    before = sorted(c.pid for c in runtime.children())
    yield
    assert sorted(c.pid for c in runtime.children()) == before


def chat(**options: Any) -> bytes:
    return json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi count:2"}], **options}).encode()


def comp(**options: Any) -> bytes:
    return json.dumps({"model": "tiny", "prompt": "hi count:2", **options}).encode()


def raw(text: str) -> bytes:
    """A chat whose options are literal JSON, for what `json.dumps` would not write."""
    return ('{"model":"tiny","messages":[{"role":"user","content":"hi"}],' + text + "}").encode()


LONG = "x" * 600

BAD = [
    # path, body, status, code, param, words of the message
    (CHAT, b'{"model":', 400, "invalid_json", None, ["line 1, column 10"]),
    (CHAT, b"", 400, "invalid_json", None, ["empty"]),
    (CHAT, b"[]", 400, "invalid_json", None, ["object", "a list"]),
    (CHAT, b"null", 400, "invalid_json", None, ["object"]),
    (CHAT, b'{"model":"\xff"}', 400, "invalid_json", None, ["UTF-8", "0xff"]),
    (CHAT, b"[" * 100_0 + b"]" * 100_0, 400, "invalid_json", None, []),
    (CHAT, b'{"a":' * 10_000 + b"1" + b"}" * 10_000, 400, "invalid_json", None, ["deep"]),
    (CHAT, raw('"temperature":NaN'), 400, "invalid_json", None, ["NaN"]),
    (CHAT, raw('"temperature":-Infinity'), 400, "invalid_json", None, ["Infinity"]),
    (CHAT, raw('"temperature":1e999'), 400, "invalid_value", "temperature", ["0 to 2"]),
    (CHAT, raw('"seed":' + "9" * 5000), 400, "invalid_json", None, []),
    (CHAT, raw('"user":"\\ud800"'), 400, "invalid_value", "user", ["surrogate"]),
    (CHAT, chat(model="nosuch"), 404, "model_not_found", "model", ["nosuch", "tiny, ns/tiny"]),
    (CHAT, chat(model=7), 400, "invalid_value", "model", ["7"]),
    (CHAT, b'{"messages":[{"role":"user","content":"x"}]}', 400, "invalid_value", "model", ["missing"]),
    (CHAT, chat(messages=[]), 400, "invalid_value", "messages", []),
    (CHAT, chat(messages=None), 400, "invalid_value", "messages", ["missing"]),
    (CHAT, chat(messages={}), 400, "invalid_value", "messages", []),
    (CHAT, chat(messages="hi"), 400, "invalid_value", "messages", []),
    (CHAT, chat(messages=[{}]), 400, "invalid_value", "messages[0].role", ["missing"]),
    (CHAT, chat(messages=[{"role": "nosuch", "content": "x"}]), 400, "invalid_value", "messages[0].role", ["nosuch"]),
    (CHAT, chat(messages=[{"role": "user", "content": 5}]), 400, "invalid_value", "messages[0].content", ["5", "text"]),
    (CHAT, chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), 400, "invalid_value", "messages[0].content", ["parts"]),
    (CHAT, chat(messages=[{"role": "user", "content": 5}] * 500), 400, "invalid_value", "messages[0].content", ["5", "text"]),
    (CHAT, chat(messages=[{"role": "user"}]), 400, "invalid_value", "messages[0].content", ["missing"]),
    (
        CHAT,
        chat(messages=[{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}]),
        400,
        "invalid_value",
        "messages[0].tool_calls",
        ["assistant"],
    ),
    (CHAT, chat(messages=[{"role": "user", "content": LONG}]), 400, "context_length_exceeded", "messages", ["619", "512"]),
    (CHAT, chat(messages=[{"role": "user", "content": LONG}], stream=True), 400, "context_length_exceeded", "messages", ["619", "512"]),
    (CHAT, chat(max_tokens=0), 400, "invalid_value", "max_tokens", ["0", "1"]),
    (CHAT, chat(max_tokens=-1), 400, "invalid_value", "max_tokens", ["-1"]),
    (CHAT, chat(max_tokens=2.5), 400, "invalid_value", "max_tokens", ["2.5"]),
    (CHAT, chat(max_tokens="8"), 400, "invalid_value", "max_tokens", ['"8"']),
    (CHAT, chat(max_tokens=10**9), 400, "context_length_exceeded", "messages", ["1000000000", "512"]),
    (CHAT, chat(max_tokens=10**12), 400, "invalid_value", "max_tokens", []),
    (CHAT, chat(max_completion_tokens=0), 400, "invalid_value", "max_completion_tokens", []),
    (CHAT, chat(max_tokens=1, max_completion_tokens=1), 400, "invalid_value", "max_tokens", []),
    (CHAT, chat(temperature=-0.1), 400, "invalid_value", "temperature", ["-0.1", "0 to 2"]),
    (CHAT, chat(temperature=2.01), 400, "invalid_value", "temperature", []),
    (CHAT, chat(temperature="0.5"), 400, "invalid_value", "temperature", ['"0.5"']),
    (CHAT, chat(temperature=True), 400, "invalid_value", "temperature", ["true"]),
    (CHAT, chat(top_p=0), 400, "invalid_value", "top_p", []),
    (CHAT, chat(top_p=1.5), 400, "invalid_value", "top_p", ["1.5", "up to 1"]),
    (CHAT, chat(seed=2**63), 400, "invalid_value", "seed", []),
    (CHAT, chat(seed=1.5), 400, "invalid_value", "seed", []),
    (CHAT, chat(stop=""), 400, "invalid_value", "stop", ["0 characters"]),
    (CHAT, chat(stop=["a"] * 17), 400, "invalid_value", "stop", ["17"]),
    (CHAT, chat(stop=[1]), 400, "invalid_value", "stop", ["list of texts"]),
    (CHAT, chat(stream="yes"), 400, "invalid_value", "stream", ['"yes"']),
    (CHAT, chat(stream_options={"include_usage": True}), 400, "invalid_value", "stream_options", ["stream: true"]),
    (CHAT, chat(stream=True, stream_options={"nosuch": 1}), 400, "invalid_value", "stream_options.nosuch", []),
    (CHAT, chat(n=0), 400, "invalid_value", "n", ["1"]),
    (CHAT, chat(n=129), 400, "invalid_value", "n", ["129", "128"]),
    (CHAT, chat(n=100_000), 400, "invalid_value", "n", ["128"]),
    (CHAT, chat(n=True), 400, "invalid_value", "n", []),
    (CHAT, chat(n=2.0), 400, "invalid_value", "n", []),
    (CHAT, chat(logprobs=1), 400, "invalid_value", "logprobs", []),
    (CHAT, chat(top_logprobs=3), 400, "invalid_value", "top_logprobs", ["logprobs: true"]),
    (CHAT, chat(logprobs=True, top_logprobs=21), 400, "invalid_value", "top_logprobs", ["20"]),
    (CHAT, chat(prompt_logprobs=21), 400, "invalid_value", "prompt_logprobs", ["20"]),
    (CHAT, chat(prompt_logprobs=1, stream=True), 400, "invalid_value", "prompt_logprobs", ["streamed"]),
    (CHAT, chat(logit_bias={"99999999": 5}), 400, "token_out_of_vocabulary", "logit_bias", ["99999999", "259"]),
    (CHAT, chat(logit_bias={"-1": 5}), 400, "invalid_value", "logit_bias", ["-1"]),
    (CHAT, chat(logit_bias={"abc": 5}), 400, "invalid_value", "logit_bias", ["abc"]),
    (CHAT, chat(logit_bias={"5": 1000}), 400, "invalid_value", "logit_bias", ["-100 to 100"]),
    (CHAT, chat(logit_bias={"5": "1"}), 400, "invalid_value", "logit_bias", ["5"]),
    (CHAT, chat(logit_bias=[5]), 400, "invalid_value", "logit_bias", ["object"]),
    (CHAT, chat(logit_bias={str(i): 1 for i in range(1025)}), 400, "invalid_value", "logit_bias", ["1024"]),
    (CHAT, chat(presence_penalty=2.1), 400, "invalid_value", "presence_penalty", ["-2 to 2"]),
    (CHAT, chat(frequency_penalty=-2.1), 400, "invalid_value", "frequency_penalty", ["-2 to 2"]),
    (CHAT, chat(repetition_penalty=0), 400, "invalid_value", "repetition_penalty", ["above 0"]),
    (CHAT, chat(min_p=1.1), 400, "invalid_value", "min_p", ["0 to 1"]),
    (CHAT, chat(top_k=-2), 400, "invalid_value", "top_k", ["-2"]),
    (CHAT, chat(top_k=1.5), 400, "invalid_value", "top_k", []),
    (CHAT, chat(min_tokens=-1), 400, "invalid_value", "min_tokens", []),
    (CHAT, chat(min_tokens=9, max_tokens=8), 400, "invalid_value", "min_tokens", ["9", "8"]),
    (CHAT, chat(stop_token_ids=[99_999_999], min_tokens=1), 400, "token_out_of_vocabulary", "stop_token_ids[0]", ["259"]),
    (CHAT, chat(stop_token_ids=[1] * 65), 400, "invalid_value", "stop_token_ids", ["64"]),
    (CHAT, chat(stop_token_ids=["a"]), 400, "invalid_value", "stop_token_ids[0]", []),
    (CHAT, chat(cache_salt=""), 400, "invalid_value", "cache_salt", []),
    (CHAT, chat(user=5), 400, "invalid_value", "user", []),
    (CHAT, chat(priority=1), 400, "internal_option", "priority", ["public port"]),
    (CHAT, chat(best_of=2), 400, "unsupported_option", "best_of", []),
    (CHAT, chat(echo=True), 400, "unsupported_option", "echo", []),
    (CHAT, chat(temprature=1), 400, "unsupported_option", "temprature", []),
    (CHAT, chat(continue_final_message=True), 400, "invalid_value", "messages[0].role", ["user"]),
    (CHAT, chat(continue_final_message=True, add_generation_prompt=True), 400, "invalid_value", "add_generation_prompt", []),
    (CHAT, chat(response_format="json"), 400, "invalid_value", "response_format", []),
    (CHAT, chat(response_format={"type": "xml"}), 400, "invalid_value", "response_format.type", ["xml"]),
    (CHAT, chat(response_format={"type": "json_schema"}), 400, "invalid_value", "response_format.json_schema", ["missing"]),
    (
        CHAT,
        chat(response_format={"type": "json_schema", "json_schema": {"name": "x"}}),
        400,
        "invalid_value",
        "response_format.json_schema.schema",
        [],
    ),
    (CHAT, chat(response_format={"type": "json_object", "regex": "a"}), 400, "invalid_value", "response_format.regex", []),
    (CHAT, chat(guided_regex="("), 400, "invalid_grammar", "guided_regex", ["unclosed group"]),
    (CHAT, chat(guided_regex=""), 400, "invalid_value", "guided_regex", ["empty"]),
    (CHAT, chat(guided_choice=[]), 400, "invalid_value", "guided_choice", []),
    (CHAT, chat(guided_choice=["a", ""]), 400, "invalid_value", "guided_choice", ["empty"]),
    (CHAT, chat(guided_grammar="nostart: 'a'"), 400, "invalid_grammar", "guided_grammar", ["start"]),
    (CHAT, chat(guided_json="{"), 400, "invalid_value", "guided_json", ["JSON"]),
    (CHAT, chat(guided_json="5"), 400, "invalid_value", "guided_json", ["object"]),
    (CHAT, chat(guided_json={"type": "nosuch"}), 400, "invalid_grammar", "guided_json", ["nosuch"]),
    (CHAT, chat(guided_json={}, guided_regex="a"), 400, "invalid_value", "guided_regex", ["only one of"]),
    (CHAT, chat(structured_outputs={}), 400, "invalid_value", "structured_outputs", ["nothing"]),
    (CHAT, chat(structured_outputs={"nosuch": 1}), 400, "invalid_value", "structured_outputs.nosuch", []),
    (CHAT, chat(structured_outputs={"regex": "a", "choice": ["b"]}), 400, "invalid_value", "structured_outputs.choice", ["only one"]),
    (CHAT, chat(bootstrap_room=5), 400, "internal_option", "bootstrap_room", ["public port"]),
    (COMP, comp(prompt=""), 400, "invalid_value", "prompt", ["no tokens"]),
    (COMP, comp(prompt=[]), 400, "invalid_value", "prompt", ["empty"]),
    (COMP, comp(prompt=[1, "a"]), 400, "invalid_value", "prompt", ["token ids"]),
    (COMP, comp(prompt=[-1]), 400, "invalid_value", "prompt", []),
    (COMP, comp(prompt=[5, 99_999_999]), 400, "token_out_of_vocabulary", "prompt[1]", ["99999999", "259"]),
    (COMP, comp(prompt={"a": 1}), 400, "invalid_value", "prompt", ["object"]),
    (COMP, comp(prompt=["a"] * 10_000), 400, "invalid_value", "prompt", ["10000", "128"]),
    (COMP, comp(prompt=["a"] * 129), 400, "invalid_value", "prompt", ["129", "128"]),
    (COMP, comp(prompt=["ok", LONG]), 400, "context_length_exceeded", "prompt[1]", ["600", "512"]),
    (COMP, comp(prompt="x" * 512), 400, "context_length_exceeded", "prompt", ["512 tokens"]),
    (COMP, comp(prompt="x" * 511, max_tokens=10), 400, "context_length_exceeded", "prompt", ["511", "10", "512"]),
    (COMP, comp(max_completion_tokens=5), 400, "unsupported_option", "max_completion_tokens", []),
    (COMP, comp(prompt=[[1], "a"]), 400, "invalid_value", "prompt", ["lists of token ids"]),
    (COMP, comp(prompt=[[1], []]), 400, "invalid_value", "prompt[1]", ["no tokens"]),
    (COMP, comp(prompt=[[1], [300]]), 400, "token_out_of_vocabulary", "prompt[1][0]", []),
    (COMP, comp(prompt=["a"] * 100, n=6), 400, "invalid_value", "n", ["600", "512"]),
    (COMP, comp(max_tokens=0), 400, "invalid_value", "max_tokens", ["echo"]),
    (COMP, comp(best_of=21), 400, "invalid_value", "best_of", ["20"]),
    (COMP, comp(best_of=2, n=3), 400, "invalid_value", "best_of", ["2", "3"]),
    (COMP, comp(best_of=2, stream=True), 400, "invalid_value", "best_of", ["streamed"]),
    (COMP, comp(logprobs=True), 400, "invalid_value", "logprobs", []),
    (COMP, comp(logprobs=21), 400, "invalid_value", "logprobs", ["20"]),
    (COMP, comp(suffix="x"), 400, "unsupported_option", "suffix", ["suffix"]),
    (COMP, comp(tools=[]), 400, "unsupported_option", "tools", []),
    (COMP, comp(top_logprobs=1), 400, "unsupported_option", "top_logprobs", []),
    ("/detokenize", b'{"tokens":[260]}', 400, "token_out_of_vocabulary", "tokens[0]", ["260"]),
    ("/detokenize", b'{"tokens":"a"}', 400, "invalid_value", "tokens", []),
    ("/tokenize", b'{"prompt":"a","messages":[{"role":"user","content":"x"}]}', 400, "invalid_value", "prompt", ["either"]),
    ("/tokenize", b"{}", 400, "invalid_value", "prompt", []),
    (CHAT, chat(user="x" * 70_000), 413, "body_too_large", None, ["65536", "--max-body-bytes"]),
    ("/nosuch", b"{}", 404, "not_found", None, ["/nosuch"]),
    ("/v1/models", b"{}", 405, "method_not_allowed", None, ["GET"]),
]


@pytest.mark.parametrize(("path", "body", "status", "code", "param", "words"), BAD, ids=lambda v: v[:40] if isinstance(v, (str, bytes)) else None)
def test_bad_input_is_refused_in_words(runtime: Runtime, path: str, body: bytes, status: int, code: str, param: str | None, words: list[str]) -> None:
    answer = HTTP.post(runtime.data + path, content=body, headers={"X-Request-Id": "my-id-1"}, timeout=10)
    assert answer.status_code == status, answer.text
    assert len(answer.content) < 4096
    assert answer.headers["x-request-id"] == "my-id-1"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "code", "param", "request_id"}
    assert (error["code"], error["param"], error["request_id"]) == (code, param, "my-id-1"), error
    assert error["type"] in TYPES
    assert not [w for w in words if w not in error["message"]], error["message"]


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"X-Radixfleet-Rid": "a" * 32}, "internal_header"),
        ({"x-radixfleet-anything": "1"}, "internal_header"),
        ({"Content-Type": "application/vnd.radixfleet.ids"}, "internal_content_type"),
    ],
)
def test_internal_names_are_refused_on_the_public_port(runtime: Runtime, headers: dict[str, str], code: str) -> None:
    answer = HTTP.post(runtime.data + CHAT, content=chat(), headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)


@pytest.mark.parametrize("path", ["/worker", "/tokenizer", "/abort_request"])
def test_control_calls_are_not_on_the_public_port(runtime: Runtime, path: str) -> None:
    assert HTTP.get(runtime.data + path).status_code == 404


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_json_is_json_whatever_the_content_type(runtime: Runtime, content_type: str) -> None:
    assert HTTP.post(runtime.data + CHAT, content=chat(), headers={"Content-Type": content_type}).status_code == 200


@pytest.mark.parametrize(
    "options",
    [
        {"store": False, "metadata": {"a": "b"}, "user": "u", "parallel_tool_calls": True, "service_tier": "auto"},
        {"n": 1, "logprobs": False, "top_logprobs": 0, "presence_penalty": 0, "tools": [], "response_format": {"type": "text"}},
        dict.fromkeys(
            "n logprobs stop stream stream_options max_tokens max_completion_tokens temperature top_p seed user ignore_eos tools logit_bias".split()
        ),
        {"temperature": 0, "top_p": 1, "seed": -1, "stop": ["zz"], "max_tokens": 5},
        {"messages": [{"role": "user", "name": "bob", "content": [{"type": "text", "text": "hi count:2"}]}]},
        {"messages": [{"role": "assistant", "content": "count:2"}]},
    ],
)
def test_what_asks_for_nothing_unusual_is_served(runtime: Runtime, options: dict[str, Any]) -> None:
    answer = HTTP.post(runtime.data + CHAT, content=chat(**options))
    assert answer.status_code == 200, answer.text


def test_duplicate_keys_take_the_last(runtime: Runtime) -> None:
    assert HTTP.post(runtime.data + CHAT, content=raw('"max_tokens":0,"max_tokens":2')).json()["usage"]["completion_tokens"] == 2


def test_a_prompt_of_all_but_one_token_gives_one_token(runtime: Runtime) -> None:
    answer = HTTP.post(runtime.data + COMP, content=comp(prompt="x" * 511)).json()
    assert answer["usage"]["completion_tokens"] == 1
    assert answer["choices"][0]["finish_reason"] == "length"


def test_a_strange_request_id_is_replaced(runtime: Runtime) -> None:
    answer = HTTP.get(runtime.data + "/v1/models", headers={"X-Request-Id": "a" * 500})
    assert len(answer.headers["x-request-id"]) == 32


def read_all(s: socket.socket, timeout_s: float = 15.0) -> bytes:
    """Until the server closes."""
    s.settimeout(timeout_s)
    out = b""
    while True:
        try:
            data = s.recv(65536)
        except ConnectionResetError:
            return out
        if not data:
            return out
        out += data


def request(body: bytes, length: int | None = None, path: str = CHAT) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body


def test_a_half_sent_body_is_ended_by_our_limit(runtime: Runtime) -> None:
    with socket.create_connection(runtime.data_address) as s:
        s.sendall(request(b'{"model":', 1000))
        answer = read_all(s)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"body_timeout" in answer and b"--body-timeout" in answer


def test_half_sent_headers_are_ended_by_our_limit(runtime: Runtime) -> None:
    with socket.create_connection(runtime.data_address) as s:
        s.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: ")
        answer = read_all(s)
    assert answer.startswith(b"HTTP/1.1 408") and b"header_timeout" in answer


def test_huge_headers_are_refused(runtime: Runtime) -> None:
    with socket.create_connection(runtime.data_address) as s:
        s.sendall(b"GET /livez HTTP/1.1\r\n" + b"X-Big: " + b"a" * 70_000 + b"\r\n\r\n")
        answer = read_all(s)
    assert answer.startswith(b"HTTP/1.1 431") and b"headers_too_large" in answer


def test_what_is_not_http_gets_our_error_shape(runtime: Runtime) -> None:
    with socket.create_connection(runtime.data_address) as s:
        s.sendall(b"\x16\x03\x01 nonsense\r\n\r\n")
        answer = read_all(s)
    assert answer.startswith(b"HTTP/1.1 400")
    assert json.loads(answer.split(b"\r\n\r\n")[1])["error"]["code"] == "invalid_http"


def test_a_body_over_the_limit_is_refused_before_it_is_sent(runtime: Runtime) -> None:
    with socket.create_connection(runtime.data_address) as s:
        s.sendall(request(b"x" * 1000, 10_000_000))
        answer = read_all(s)
    assert answer.startswith(b"HTTP/1.1 413") and b"--max-body-bytes" in answer


def test_a_chunked_body_over_the_limit_is_refused(runtime: Runtime) -> None:
    answer = HTTP.post(runtime.data + CHAT, content=iter([b"x" * 40_000, b"y" * 40_000]))
    assert answer.status_code == 413


def test_a_client_that_never_reads_is_ended_by_our_limit(runtime: Runtime) -> None:
    before = runtime.metrics().get('radixfleet_runtime_connections_ended_total{limit="write_timeout"}', 0)
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        s.connect(runtime.data_address)
        # 128 streams of 400 tokens, each token an event of some 300 bytes: far more than the kernel keeps for us.
        body = comp(prompt=["a count:400"] * 128, max_tokens=400, stream=True)
        s.sendall(request(body, path=COMP))
        wait_for(
            lambda: runtime.metrics().get('radixfleet_runtime_connections_ended_total{limit="write_timeout"}', 0) > before,
            "the connection is ended",
        )
    wait_for(lambda: runtime.metrics()["radixfleet_runtime_http_open_requests"] == 0, "the request is over")
    wait_for(lambda: runtime.metrics()["radixfleet_runtime_running_requests"] == 0, "the scheduler has forgotten it")


def test_a_slow_reader_that_goes_on_reading_is_served(runtime: Runtime) -> None:
    """Longer than --write-timeout in all, but never that long without reading."""
    with socket.create_connection(runtime.data_address) as s:
        s.sendall(request(comp(prompt="a count:200 slow:10", max_tokens=200, stream=True), path=COMP))
        got, started = b"", time.monotonic()
        while b"[DONE]" not in got:
            data = s.recv(2048)
            assert data, got[-300:]
            got += data
        assert time.monotonic() - started > 1.0


def test_pipelined_requests_are_answered_in_order(runtime: Runtime) -> None:
    with socket.create_connection(runtime.data_address) as s:
        s.sendall(request(comp(max_tokens=1), path=COMP) + b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = read_all(s)
    assert answer.count(b"HTTP/1.1 200") == 2
    assert answer.index(b"text_completion") < answer.index(b'"list"')
