"""Every dialect through the router with its official client, in front of real runtimes: a unified one, and a prefill/decode pair.

The same conversation is the same prompt, answer and usage in all of them, streamed or not; the workers tokenize nothing (R3).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest

from fleet_testing.router_fleet import Fleet, MakeFleet
from fleet_testing.runtime import HTTP, Runtime

FLAGS = ("--served-model-name=tiny", "--served-model-name=ns/tiny", "--context-length=2048", "--simulated-step-base-ms=0")
TURNS = [("system", "Be brief."), ("user", "Ça va? 中文 😀"), ("assistant", "Oui."), ("user", "Et toi?\n" + "x" * 200)]
TOOL = {"type": "object", "properties": {"city": {"type": "string"}}}
MAX = 12


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[Runtime]]]:
    folder = tmp_path_factory.mktemp("surfaces")
    with (
        Runtime(folder / "u", *FLAGS) as unified,
        Runtime(folder / "p", *FLAGS, "--role=prefill") as prefill,
        Runtime(folder / "d", *FLAGS, "--role=decode") as decode,
    ):
        yield {"unified": [unified.wait_ready()], "pair": [prefill.wait_ready(), decode.wait_ready()]}


@pytest.fixture(params=["unified", "pair"])
async def fleet(request: pytest.FixtureRequest, workers: dict[str, list[Runtime]], make_fleet: MakeFleet) -> Fleet:
    return await behind(make_fleet, workers[request.param])


async def behind(make_fleet: MakeFleet, runtimes: list[Runtime], **settings: Any) -> Fleet:
    """A router in front of real runtimes."""
    told = [SimpleNamespace(url=r.internal, record=SimpleNamespace(model_revision=r.record()["modelRevision"])) for r in runtimes]
    return await make_fleet(*told, **settings)


def tokenized(workers: dict[str, list[Runtime]]) -> int:
    """Texts that all runtimes together have tokenized."""
    pages = [HTTP.get(r.internal + "/metrics").text for group in workers.values() for r in group]
    return sum(int(line.split()[1]) for page in pages for line in page.splitlines() if line.startswith("radixfleet_runtime_texts_tokenized_total "))


def by_openai(url: str, stream: bool) -> tuple[str, int, int]:
    client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    messages: Any = [{"role": role, "content": text} for role, text in TURNS]
    options: Any = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer: Any = client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=MAX, **options)
    if not stream:
        return answer.choices[0].message.content, answer.usage.prompt_tokens, answer.usage.completion_tokens
    chunks = list(answer)
    usage = chunks[-1].usage
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices), usage.prompt_tokens, usage.completion_tokens


def by_anthropic(url: str, stream: bool) -> tuple[str, int, int]:
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    messages: Any = [{"role": role, "content": text} for role, text in TURNS[1:]]
    options: Any = {"messages": messages, "system": TURNS[0][1], "model": "tiny", "max_tokens": MAX, "extra_body": {"temperature": 0}}
    if stream:
        with client.messages.stream(**options) as got:
            answer: Any = got.get_final_message()
    else:
        answer = client.messages.create(**options)
    usage = answer.usage
    return "".join(b.text for b in answer.content), usage.input_tokens + usage.cache_read_input_tokens, usage.output_tokens


def by_ollama(url: str, stream: bool) -> tuple[str, int, int]:
    messages = [{"role": role, "content": text} for role, text in TURNS]
    options = {"temperature": 0, "num_predict": MAX}
    answer: Any = ollama.Client(host=url).chat("tiny", messages, stream=stream, options=options)
    lines = list(answer) if stream else [answer]
    return "".join(line.message.content or "" for line in lines), lines[-1].prompt_eval_count, lines[-1].eval_count


@pytest.mark.rule("R3")
@pytest.mark.parametrize("ask", [by_openai, by_anthropic, by_ollama])
async def test_one_conversation_is_one_answer_in_every_dialect_and_no_worker_tokenizes_it(
    fleet: Fleet, workers: dict[str, list[Runtime]], ask: Callable[[str, bool], tuple[str, int, int]]
) -> None:
    direct = await asyncio.to_thread(by_openai, workers["unified"][0].data, False)
    before = await asyncio.to_thread(tokenized, workers)
    plain, streamed = [await asyncio.to_thread(ask, fleet.url, stream) for stream in (False, True)]
    assert plain == streamed == direct and direct[0] and direct[2] == MAX
    assert await asyncio.to_thread(tokenized, workers) == before
    await fleet.idle()
    assert fleet.counter("retries_total") == 0


BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "Hello", "add_special_tokens": False}),
    ("/v1/completions", {"prompt": [72, 105], "n": 2, "seed": 1}),
    ("/v1/completions", {"prompt": ["Hello"]}),
    ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": "Weather?"}]}, {"role": "assistant", "content": [
        {"type": "tool_use", "id": "t1", "name": "get", "input": {"city": "Bonn"}}]}, {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "t1", "content": "rain", "is_error": True}]}],
        "tools": [{"name": "get", "description": "d", "input_schema": TOOL}], "tool_choice": {"type": "none"}, "max_tokens": 9}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "max_tokens": 5,
                      "thinking": {"type": "disabled"}}),
    ("/api/chat", {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [
                       {"function": {"name": "get", "arguments": {"x": 1.5}}}]},
                   {"role": "tool", "tool_name": "get", "content": "2"}], "think": False, "options": {"num_predict": 5}}),
    ("/api/generate", {"prompt": "Hi", "system": "Be kind.", "options": {"num_predict": 5}}),
    ("/api/generate", {"prompt": "Hi", "raw": True, "options": {"num_predict": 5}}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_the_ids_that_the_router_makes_are_those_of_the_worker(
    workers: dict[str, list[Runtime]], make_fleet: MakeFleet, path: str, body: dict[str, Any]
) -> None:
    """The prompt's length tells the two apart; the answer of the simulated executor tells every token."""
    runtime = workers["unified"][0]
    asked = {"model": "tiny", "stream": False, **body} | ({} if path.startswith("/api") else {"temperature": 0, "stream": False})
    if path.startswith("/api"):
        asked["options"] = {**body["options"], "temperature": 0}
    direct = (await asyncio.to_thread(HTTP.post, runtime.data + path, json=asked)).json()
    fleet = await behind(make_fleet, [runtime])
    before = await asyncio.to_thread(tokenized, workers)
    routed = (await fleet.post(path, asked)).json()
    assert told(routed) == told(direct) and told(direct)[0]
    assert await asyncio.to_thread(tokenized, workers) == before


def told(answer: dict[str, Any]) -> tuple[Any, int]:
    """Text and length of the prompt, of an answer of any dialect."""
    if "choices" in answer:
        return [c["text"] for c in answer["choices"]], answer["usage"]["prompt_tokens"]
    if "content" in answer:
        return answer["content"], answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"]
    return answer.get("response") or answer["message"], answer["prompt_eval_count"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "one text"}), ("/v1/embeddings", {"input": ["two", "texts"], "encoding_format": "base64"}),
        ("/v1/embeddings", {"input": [1, 2, 3]}), ("/api/embed", {"input": "one"}), ("/api/embed", {"input": ["a", "b"]}),
        ("/api/embeddings", {"prompt": "old"}),
    ],
)  # fmt: skip
async def test_embeddings_come_from_whoever_computes_prompts(
    fleet: Fleet, workers: dict[str, list[Runtime]], path: str, body: dict[str, Any]
) -> None:
    asked = {"model": "tiny", **body}
    direct = (await asyncio.to_thread(HTTP.post, workers["unified"][0].data + path, json=asked)).json()
    before = await asyncio.to_thread(tokenized, workers)
    answer = await fleet.post(path, asked)
    got = answer.json()
    assert answer.status_code == 200, answer.text
    for name in ("data", "embeddings", "embedding"):
        assert got.get(name) == direct.get(name)
    assert isinstance(body.get("input"), list) or await asyncio.to_thread(tokenized, workers) == before
    await fleet.idle()


async def test_what_needs_no_computing_is_answered_by_any_worker(fleet: Fleet) -> None:
    counted = (await fleet.post("/v1/messages/count_tokens", {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]})).json()
    ids = (await fleet.post("/tokenize", {"messages": [{"role": "user", "content": "Hello"}]})).json()
    assert counted == {"input_tokens": ids["count"]}
    assert "Hello" in (await fleet.post("/detokenize", {"tokens": ids["tokens"]})).json()["prompt"]
    shown = await fleet.post("/api/show", {"name": "tiny:latest"})
    assert "completion" in shown.json()["capabilities"]
    for path, body in (("/api/chat", {"messages": []}), ("/api/generate", {})):
        loaded = (await fleet.post(path, {"model": "tiny", "stream": False, **body})).json()
        assert loaded["done_reason"] == "load", loaded
    await fleet.idle()


async def test_models_are_told_in_both_words(fleet: Fleet) -> None:
    names = {m["id"] for m in (await fleet.http.get(fleet.url + "/v1/models")).json()["data"]}
    assert {"tiny", "ns/tiny"} <= names
    assert (await fleet.http.get(fleet.url + "/v1/models/ns/tiny")).json()["id"] == "ns/tiny"
    listed = await asyncio.to_thread(lambda: ollama.Client(host=fleet.url).list())
    assert {m.model for m in listed.models} >= {"tiny:latest", "ns/tiny:latest"}
    running = await asyncio.to_thread(lambda: ollama.Client(host=fleet.url).ps())
    assert {m.model for m in running.models} >= {"tiny:latest"}
    assert (await fleet.http.get(fleet.url + "/api/version")).json()["version"]


async def test_errors_are_of_the_path_s_dialect_whoever_makes_them(fleet: Fleet) -> None:
    claude = anthropic.Anthropic(base_url=fleet.url, api_key="none", max_retries=0)
    user: Any = [{"role": "user", "content": "x"}]

    def of_worker() -> None:
        claude.messages.create(model="tiny", messages=user, max_tokens=5, extra_body={"temperature": 3})

    with pytest.raises(anthropic.BadRequestError, match="a number from 0 to 1") as refused:
        await asyncio.to_thread(of_worker)
    assert refused.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    assert refused.value.request_id
    with pytest.raises(anthropic.NotFoundError) as missing:
        await asyncio.to_thread(lambda: claude.messages.create(model="nosuch", messages=user, max_tokens=5))
    assert missing.value.body["type"] == "error"  # type: ignore[index]
    with pytest.raises(ollama.ResponseError, match="nosuch"):
        await asyncio.to_thread(lambda: ollama.Client(host=fleet.url).chat("nosuch", user))
    raw = {
        "/v1/messages": (await fleet.post("/v1/messages", b"{")).json()["error"]["type"] == "invalid_request_error",
        "/api/chat": isinstance((await fleet.post("/api/chat", {"model": "tiny", "messages": user, "nosuch": 1})).json()["error"], str),
        "/api/nosuch": isinstance((await fleet.post("/api/nosuch", {})).json()["error"], str),
        "/v1/rerank": "engine is radixfleet" in (await fleet.post("/v1/rerank", {"model": "tiny"})).json()["error"]["message"],
        "/v1/responses": (await fleet.post("/v1/responses", {"model": "tiny", "input": "x"})).status_code == 404,
        "/v1/score": (await fleet.post("/v1/score", {"model": "tiny"})).status_code == 404,
        "wrong method": (await fleet.http.get(fleet.url + "/v1/messages")).json()["type"] == "error",
    }
    assert all(raw.values()), raw
    await fleet.idle()


ODD: list[Any] = [
    None,
    True,
    -1,
    1e308,
    "",
    "x",
    [],
    {},
    [{}],
    [[]],
    {"type": "tool"},
    [{"role": "user"}],
    [{"role": "user", "content": [{}]}],
    "\x00",
    2**70,
]


async def test_bodies_of_any_shape_get_an_answer_that_the_worker_would_give(workers: dict[str, list[Runtime]], make_fleet: MakeFleet) -> None:
    """Status and error of routed and direct requests are the same, whatever stands in the fields that the router reads."""
    runtime = workers["unified"][0]
    fleet = await behind(make_fleet, [runtime])
    fields = {
        "/v1/messages": ("messages", "system", "tools", "tool_choice", "thinking", "max_tokens"),
        "/api/chat": ("messages", "tools", "think", "options", "stream"),
        "/api/generate": ("prompt", "system", "raw", "think"),
        "/v1/embeddings": ("input", "add_special_tokens"),
        "/api/embed": ("input",),
    }
    good: dict[str, dict[str, Any]] = {
        "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
        "/api/chat": {"messages": [{"role": "user", "content": "a"}], "options": {"num_predict": 1}},
        "/api/generate": {"prompt": "a", "options": {"num_predict": 1}},
        "/v1/embeddings": {"input": "a"},
        "/api/embed": {"input": "a"},
    }
    async with httpx.AsyncClient(timeout=20.0, trust_env=False) as client:

        async def same(path: str, field: str, odd: Any) -> None:
            body = json.dumps({"model": "tiny", **good[path], field: odd}).encode()
            headers = {"content-type": "application/json"}
            routed, direct = await asyncio.gather(fleet.post(path, body), client.post(runtime.data + path, content=body, headers=headers))
            assert routed.status_code == direct.status_code, (path, field, odd, routed.text, direct.text)
            if routed.status_code != 200:
                texts = [r.json()["error"] if path.startswith("/api") else r.json()["error"]["message"] for r in (routed, direct)]
                assert texts[0] == texts[1] or "valid JSON" in texts[0], (path, field, odd, texts)

        cases = [(path, field, odd) for path, names in fields.items() for field in names for odd in ODD]
        for start in range(0, len(cases), 8):
            await asyncio.gather(*(same(*case) for case in cases[start : start + 8]))
    await fleet.idle()
