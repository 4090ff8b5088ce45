"""Answers of the public API: shapes as the official client reads them, streams, stops, ends, errors, departures."""

from __future__ import annotations

import json
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from fleet_runtime.server import metrics_page
from fleet_testing.runtime import HTTP, Runtime, wait_for

CHAT = "/v1/chat/completions"
COMP = "/v1/completions"


def chat(prompt: str, **options: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": prompt}], **options}


def events(text: str) -> list[Any]:
    """Data of each event; `[DONE]` as text."""
    out = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [e if e == "[DONE]" else json.loads(e) for e in out]


def stream(runtime: Runtime, path: str, body: dict[str, Any]) -> list[Any]:
    return events(HTTP.post(runtime.data + path, json={**body, "stream": True}, timeout=20).text)


@pytest.fixture
def client(runtime: Runtime) -> openai.OpenAI:
    return openai.OpenAI(base_url=runtime.data + "/v1", api_key="none", max_retries=0)


def test_the_official_client_reads_plain_and_streamed_answers(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "say:Hello_there"}]
    plain = client.chat.completions.create(model="tiny", messages=messages)
    assert plain.id.startswith("chatcmpl-") and plain.object == "chat.completion" and plain.model == "tiny" and plain.created > 0
    assert (plain.choices[0].message.role, plain.choices[0].message.content) == ("assistant", "Hello there")
    assert plain.choices[0].finish_reason == "stop"
    assert plain.usage is not None and plain.usage.prompt_tokens_details is not None
    assert plain.usage.prompt_tokens_details.cached_tokens == 16
    assert plain.usage.total_tokens == plain.usage.prompt_tokens + plain.usage.completion_tokens

    chunks = list(client.chat.completions.create(model="tiny", messages=messages, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello there"
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]
    assert chunks[-1].choices == [] and chunks[-1].usage == plain.usage
    assert all(c.usage is None for c in chunks[:-1])
    assert len({c.id for c in chunks}) == 1

    completion = client.completions.create(model="ns/tiny", prompt="say:Hello", max_tokens=9)
    assert completion.object == "text_completion" and completion.model == "ns/tiny" and completion.choices[0].text == "Hello"
    assert "".join(c.choices[0].text for c in client.completions.create(model="tiny", prompt="say:Hello", stream=True)) == "Hello"

    assert [model.id for model in client.models.list()] == ["tiny", "ns/tiny"]
    assert client.models.retrieve("ns/tiny").id == "ns/tiny"
    with pytest.raises(openai.NotFoundError, match="tiny, ns/tiny"):
        client.models.retrieve("nosuch")
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="tiny", messages=messages, n=129)
    assert (error.value.code, error.value.param) == ("invalid_value", "n")


@pytest.mark.parametrize("path", [CHAT, COMP])
@pytest.mark.parametrize("usage", [True, False, None])
def test_a_stream_ends_with_one_finish_then_usage_if_asked_then_done(runtime: Runtime, path: str, usage: bool | None) -> None:
    body = chat("count:3") if path == CHAT else {"model": "tiny", "prompt": "count:3"}
    if usage is not None:
        body["stream_options"] = {"include_usage": usage}
    got = stream(runtime, path, body)
    assert got[-1] == "[DONE]" and got.count("[DONE]") == 1
    chunks = got[:-1]
    last = [c for c in chunks if c["choices"] == []]
    assert len(last) == (1 if usage else 0)
    if usage:
        assert chunks[-1] is last[0] and last[0]["usage"]["completion_tokens"] == 3
    finishes = [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]]
    assert finishes.count("length") == 1 and finishes[-1] == "length"


def test_an_answer_without_max_tokens_may_fill_the_context(runtime: Runtime) -> None:
    answer = HTTP.post(runtime.data + CHAT, json=chat("fill")).json()
    assert answer["usage"]["total_tokens"] == 512
    assert answer["choices"][0]["finish_reason"] == "length"


def test_completions_make_16_tokens_unless_asked(runtime: Runtime) -> None:
    assert HTTP.post(runtime.data + COMP, json={"model": "tiny", "prompt": "x"}).json()["usage"]["completion_tokens"] == 16


def test_several_prompts_make_several_choices(runtime: Runtime) -> None:
    prompts = ["say:one", "say:two", "count:3"]
    answer = HTTP.post(runtime.data + COMP, json={"model": "tiny", "prompt": prompts}).json()
    assert [(c["index"], c["text"], c["finish_reason"]) for c in answer["choices"]] == [(0, "one", "stop"), (1, "two", "stop"), (2, "abc", "length")]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts)) and answer["usage"]["completion_tokens"] == 9
    joined = {0: "", 1: "", 2: ""}
    for chunk in stream(runtime, COMP, {"model": "tiny", "prompt": prompts})[:-1]:
        joined[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert joined == {0: "one", 1: "two", 2: "abc"}


def test_a_prompt_may_be_token_ids(runtime: Runtime) -> None:
    answer = HTTP.post(runtime.data + COMP, json={"model": "tiny", "prompt": list(b"say:ids")}).json()
    assert answer["choices"][0]["text"] == "ids"


def test_characters_of_several_tokens_come_whole(runtime: Runtime) -> None:
    text = "中é😀ok"
    got = stream(runtime, CHAT, chat(f"say:{text}"))
    pieces = [c["choices"][0]["delta"].get("content", "") for c in got[:-1]]
    assert "".join(pieces) == text and not any("\ufffd" in p for p in pieces)


def test_nothing_of_a_stop_string_is_sent(runtime: Runtime) -> None:
    body = chat("say:Hello_wonderful_world", stop=["wonder"])
    got = stream(runtime, CHAT, body)
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in got[:-1]) == "Hello "
    plain = HTTP.post(runtime.data + CHAT, json=body).json()
    assert plain["choices"][0]["message"]["content"] == "Hello " and plain["choices"][0]["finish_reason"] == "stop"
    assert plain["usage"]["completion_tokens"] == len("Hello wonder")
    wait_for(lambda: len(runtime.sent("Stopped")) >= 2, "the scheduler hears of both stops")


def test_held_text_is_sent_at_the_end(runtime: Runtime) -> None:
    got = stream(runtime, CHAT, chat("say:Hello_wond", stop=["wonder"]))
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in got[:-1]) == "Hello wond"


def test_the_scheduler_gets_what_was_asked(runtime: Runtime) -> None:
    options = {"temperature": 0, "top_p": 0.5, "seed": -1, "stop": "q", "max_tokens": 3}
    HTTP.post(runtime.data + COMP, json={"model": "tiny", "prompt": "count:1", **options})
    sent = runtime.sent("Admit")[-1]
    assert sent["ids"] == list(b"count:1") and sent["max_new"] == 3
    assert (sent["temperature"], sent["top_p"], sent["seed"], sent["stop"]) == (0.0, 0.5, 2**64 - 1, ["q"])
    assert sent["stop_ids"] == [257] and sent["deadline"] == 0.0 and sent["pick"] == -1
    HTTP.post(runtime.data + COMP, json={"model": "tiny", "prompt": "count:1", "ignore_eos": True})
    second = runtime.sent("Admit")[-1]
    assert second["stop_ids"] == [] and second["seed"] != 0, "a seed is minted"


def test_tokenize_tells_ids_and_context(runtime: Runtime) -> None:
    assert HTTP.post(runtime.data + "/tokenize", json={"prompt": "hi"}).json() == {"tokens": [104, 105], "count": 2, "max_model_len": 512}
    answer = HTTP.post(runtime.data + "/tokenize", json={"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}).json()
    assert answer["tokens"][0] == 256 and answer["count"] == len(answer["tokens"])


def test_a_failure_before_the_first_token_has_its_own_status(runtime: Runtime) -> None:
    for more in ({}, {"stream": True}):
        answer = HTTP.post(runtime.data + CHAT, json=chat("fail:queue_full", **more))
        assert answer.status_code == 429 and answer.headers["content-type"] == "application/json"
        assert answer.json()["error"]["code"] == "queue_full"


@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_a_failure_in_a_stream_is_one_error_event_and_the_end_of_the_body(runtime: Runtime, version: str) -> None:
    """The connection ends as its head has said: not at all, or with the body for a client that knows no chunks."""
    body = json.dumps(chat("slow:100 break:2", stream=True)).encode()  # slow: the first token has left before the failure comes
    head = f"POST {CHAT} HTTP/{version}\r\nHost: x\r\nX-Request-Id: abc\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(runtime.data_address) as s:
        s.settimeout(10)
        for _ in range(2 if version == "1.1" else 1):
            s.sendall(head + body)
            got = b""
            while not got.endswith(b"0\r\n\r\n") and (data := s.recv(65536)):
                got += data
            assert b"[DONE]" not in got and got.startswith(b"HTTP/1.1 200"), "also the second time on this connection"
            assert (b"connection: close" in got.lower()) == (version == "1.0")
            error = json.loads(got.rpartition(b"data: ")[2].partition(b"\n\n")[0])["error"]
            assert (error["code"], error["request_id"], error["message"]) == ("device_error", "abc", "the device failed")
        if version == "1.0":
            assert s.recv(1) == b""


def test_a_failed_choice_ends_the_others(runtime: Runtime) -> None:
    answer = HTTP.post(runtime.data + COMP, json={"model": "tiny", "prompt": ["hang", "fail:queue_full"]})
    assert answer.status_code == 429
    wait_for(lambda: runtime.metrics()["radixfleet_runtime_running_requests"] == 0, "the other choice is aborted")


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("prompt", ["hang", "slow:50 count:400"])
def test_a_client_that_leaves_frees_its_request(runtime: Runtime, streamed: bool, prompt: str) -> None:
    before = runtime.metrics()
    body = json.dumps(chat(prompt, stream=streamed)).encode()
    with socket.create_connection(runtime.data_address) as s:
        s.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_for(lambda: runtime.metrics()["radixfleet_runtime_running_requests"] == 1, "it runs")
    wait_for(lambda: runtime.metrics()["radixfleet_runtime_running_requests"] == 0, "the scheduler freed it", 2)
    wait_for(lambda: runtime.metrics()["radixfleet_runtime_http_open_requests"] == 0, "http forgot it", 2)
    name = "radixfleet_runtime_client_disconnects_total"
    assert runtime.metrics()[name] == before[name] + 1


def test_32_streams_at_once_are_all_right(runtime: Runtime) -> None:
    def one(n: int) -> str:
        got = stream(runtime, CHAT, chat(f"say:answer_number_{n} slow:2"))
        return "".join(c["choices"][0]["delta"].get("content", "") for c in got[:-1])

    with ThreadPoolExecutor(32) as pool:
        assert list(pool.map(one, range(32))) == [f"answer number {n}" for n in range(32)]


def test_a_long_prompt_does_not_hold_up_probes(runtime: Runtime) -> None:
    big = httpx.Client(timeout=30)
    body = json.dumps(chat("é" * 20_000)).encode()
    thread = threading.Thread(target=lambda: [big.post(runtime.data + CHAT, content=body) for _ in range(5)])
    thread.start()
    while thread.is_alive():
        assert HTTP.get(runtime.data + "/livez", timeout=15).status_code == 200  # the time that a liveness probe gives
    thread.join()


def test_all_metrics_have_help_and_are_fewer_than_60(runtime: Runtime) -> None:
    text = HTTP.get(runtime.data + "/metrics").text
    helped = [line.split()[2] for line in text.splitlines() if line.startswith("# HELP")]
    assert len(helped) == len(set(helped)) < 60
    names = {line.split("{")[0].split()[0] for line in text.splitlines() if not line.startswith("#")}
    assert {n for n in names if not any(n == h or n.startswith(h) for h in helped)} == set()


def test_the_page_of_metrics_is_what_the_worker_says(runtime: Runtime) -> None:
    assert metrics_page.PAGE.read_text() == metrics_page.page(), "run: python -m fleet_runtime.server.metrics_page"
    said = {line.split()[2] for line in HTTP.get(runtime.data + "/metrics").text.splitlines() if line.startswith("# HELP")}
    assert said == {line.split("`")[1] for line in metrics_page.page().splitlines() if line.startswith("| `")}


def test_http_and_detokenizer_load_no_torch_and_no_transformers(runtime: Runtime) -> None:
    for who in ("http", "detokenizer"):
        maps = Path(f"/proc/{runtime.child(who).pid}/maps").read_text()
        assert "libtorch" not in maps and "tokenizers" in maps
        threads = [t.name for t in Path(f"/proc/{runtime.child(who).pid}/task").iterdir()]
        assert {os.getpriority(os.PRIO_PROCESS, int(t)) for t in threads} == {10}
        group = Path(f"/proc/{runtime.child(who).pid}/autogroup")
        if group.exists() and (said := group.read_text()).startswith("/autogroup"):  # else this kernel does not group by session
            assert said.split()[-2:] == ["nice", "10"]
    maps = Path(f"/proc/{runtime.process.pid}/maps").read_text()
    assert "libtorch" not in maps and "uvloop" not in maps and "httptools" not in maps


@pytest.mark.parametrize("path", [CHAT, COMP])
def test_token_ids_come_on_request_streamed_and_not(runtime: Runtime, path: str) -> None:
    text = "中é😀ok"
    body = (chat(f"say:{text}") if path == CHAT else {"model": "tiny", "prompt": f"say:{text}", "max_tokens": 50}) | {"return_token_ids": True}
    assert HTTP.post(runtime.data + path, json=body).json()["choices"][0]["token_ids"] == list(text.encode())
    streamed = [i for c in stream(runtime, path, body)[:-1] for i in c["choices"][0].get("token_ids", [])]
    assert streamed == list(text.encode())
