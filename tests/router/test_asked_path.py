"""Which path a body is for when nobody has sent it: `/debug/route` and `radixfleet route explain` take the bodies of every API."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from fleet_cli import route
from fleet_contract.errors import ApiError
from fleet_router.api.body import asked_path, parse_body
from fleet_router.engines.vllm import Vllm
from fleet_testing.engines.vllm import FakeVllm
from fleet_testing.fake_worker import FakeWorker
from fleet_testing.prompts import read_prompt
from fleet_testing.router_process import RouterProcess
from fleet_text.prompt import PromptEncoder

USER = {"role": "user", "content": "hi"}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [USER]}),
    ("/v1/chat/completions", {"messages": [USER], "max_tokens": 5, "tools": []}),
    ("/v1/messages", {"messages": [USER], "max_tokens": 5, "system": "Be brief."}),
    ("/v1/messages", {"messages": [USER, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}], "max_tokens": 5}),
    ("/api/chat", {"messages": [USER], "options": {"num_predict": 5}}),
    ("/api/chat", {"messages": [USER], "keep_alive": "5m"}),
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/completions", {"prompt": [1, 2], "max_tokens": 5}),
    ("/api/generate", {"prompt": "hi", "options": {}}),
    ("/api/generate", {"prompt": "hi", "raw": True}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 5}),
    ("/v1/responses", {"input": "hi", "instructions": "Be brief."}),
    ("/v1/responses", {"input": [USER]}),
    ("/v1/embeddings", {"input": "hi"}),
    ("/v1/embeddings", {"input": ["hi", "ho"], "encoding_format": "float"}),
    ("/v1/embeddings", {"input": [[1, 2]]}),
    ("/api/embed", {"input": "hi", "truncate": True}),
    ("/v1/rerank", {"query": "hi", "documents": ["a"]}),
    ("/v1/score", {"text_1": "a", "text_2": "b"}),
    ("/detokenize", {"tokens": [1]}),
    ("/v1/chat/completions", {}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_body_is_known_by_its_fields(path: str, body: dict[str, Any]) -> None:
    assert asked_path("", json.dumps({"model": "m", **body}).encode()).path == path
    assert asked_path(path, b"{}").path == path


@pytest.mark.parametrize("path", ["/v1/models", "/v1/nothing", "v1/messages"])
def test_a_path_without_a_body_is_refused(path: str) -> None:
    with pytest.raises(ApiError, match="a path that takes a body is needed: /v1/chat/completions, "):
        asked_path(path, b"{}")


@pytest.mark.rule("R39")
async def test_r39_a_body_of_any_api_is_explained_as_its_path_would_route_it(
    make_worker: Callable[..., Awaitable[FakeWorker]], make_router: Callable[..., Awaitable[RouterProcess]], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    router = await make_router("--static", (await make_worker()).url)
    await router.until_workers(1)
    await router.until_reads_prompts()

    async def explained(body: dict[str, Any], path: str = "") -> Any:
        answer = await router.http.post(f"{router.control}/debug/route", params={"path": path} if path else {}, json={"model": "tiny", **body})
        return answer.json()

    system, chat = "Be brief.", [{"role": "system", "content": "Be brief."}, USER]
    same = [
        await explained({"messages": chat}),
        await explained({"messages": [USER], "system": system, "max_tokens": 5}),
        await explained({"messages": chat, "options": {}}),
        await explained({"messages": chat}, "/api/chat"),
    ]
    assert [told["path"] for told in same] == ["/v1/chat/completions", "/v1/messages", "/api/chat", "/api/chat"]
    assert len({told["promptTokens"] for told in same}) == 1 and all(told["tokenized"] for told in same)
    assert (await explained({"messages": [USER]}, "/v1/messages"))["path"] == "/v1/messages"
    assert (await explained({"input": "hi"}, "/v1/responses"))["error"]["code"] == "path_not_served"  # our runtime does not have it
    assert (await explained({"input": "hi"}))["path"] == "/v1/embeddings"
    assert (await explained({}, "/v1/models"))["error"]["param"] == "path"
    file = tmp_path / "body.json"
    file.write_text(json.dumps({"model": "tiny", "messages": [USER], "system": system, "max_tokens": 5}))

    def cli(*more: str) -> tuple[int, Any]:
        code = route.main(["explain", str(file), "--url", router.control, "--json", *more])
        out = capsys.readouterr().out
        return code, json.loads(out) if out else None

    import asyncio

    code, told = await asyncio.to_thread(cli)
    assert (code, told["path"], told["promptTokens"]) == (0, "/v1/messages", same[0]["promptTokens"])
    code, told = await asyncio.to_thread(cli, "--path", "/v1/chat/completions")
    assert (code, told["path"]) == (0, "/v1/chat/completions")
    assert (await asyncio.to_thread(cli, "--path", "/nowhere"))[0] == 1


# -- the Responses API, which only other engines serve

CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("body", "chat"),
    [
        ({"input": "hi"}, {"messages": [USER]}),
        ({"input": "hi", "instructions": "x"}, {"messages": [{"role": "system", "content": "x"}, USER]}),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "h"}, {"type": "input_text", "text": "i"}]}]},
         {"messages": [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]}),
        ({"input": [USER, {"role": "assistant", "content": "a"}, USER]}, {"messages": [USER, {"role": "assistant", "content": "a"}, USER]}),
        ({"input": "hi", "previous_response_id": "resp_1"}, None),
        ({"input": [USER, {"role": "assistant", "content": "a"}]}, None),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:x"}]}]}, None),
        ({"input": [USER, {"type": "web_search_call", "id": "w"}]}, None),
        ({"input": "hi", "tools": [{"type": "web_search"}]}, None),
        ({"input": 5}, None),
        ({}, None),
    ],
)  # fmt: skip
async def test_a_body_of_responses_is_the_chat_that_its_engine_makes_of_it(body: dict[str, Any], chat: Any, tokenizer_folder: Path) -> None:
    encoder = PromptEncoder.from_folder(tokenizer_folder, Vllm.habits)

    async def ids(path: str, asked: dict[str, Any]) -> bytes | None:
        return (await read_prompt(parse_body(asked_path(path, b"{}"), json.dumps({"model": "m", **asked}).encode()), encoder, "r")).ids

    assert await ids("/v1/responses", body) == (None if chat is None else await ids("/v1/chat/completions", chat))


async def test_responses_go_where_their_conversation_is(
    start_engine: Callable[..., Awaitable[Any]], front: Callable[..., Awaitable[Any]], tokenizer_folder: Path
) -> None:
    class Answering(FakeVllm):
        def simple(self, request: Any) -> Any:
            if request.path == "/v1/responses":
                return 200, b'{"usage":{"input_tokens":1,"output_tokens":1}}', "application/json"
            return super().simple(request)

    engines = [await start_engine(Answering()) for _ in range(3)]
    fleet = await front(*(e.url(tokenizer=tokenizer_folder) for e in engines))
    fleet.keep_speeds()
    for chat in range(6):
        said: list[dict[str, str]] = []
        workers = set()
        for turn in range(3):
            said.append({"role": "user", "content": f"{chat} {turn} " + "some words of a conversation " * 20})
            answer = await fleet.post("/v1/responses", {"model": "org/tiny", "input": said})
            workers.add(answer.headers["x-router-worker"])
            said.append({"role": "assistant", "content": "yes"})
        assert len(workers) == 1
