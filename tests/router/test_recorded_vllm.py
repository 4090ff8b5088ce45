"""What a real vLLM 0.32 for CPUs said, byte for byte (tests/router/recorded), read by the router's adapter. `make other-engines` asks a live one."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from fleet_router.api.dialects import ANTHROPIC, OPENAI, RESPONSES, Dialect
from fleet_router.api.sse import UsageFilter
from fleet_router.engines.base import PolledLoad
from fleet_router.engines.openai_worker import error
from fleet_router.engines.vllm import Vllm
from fleet_router.target import parse_target

RECORDED = Path(__file__).parent / "recorded" / "vllm-0.32"
PAGES = {"/v1/models": "models.json", "/version": "version.json", "/metrics": "metrics.txt"}


def recorded(name: str) -> bytes:
    return (RECORDED / name).read_bytes()


async def fetch(path: str, *, port: int = 0) -> tuple[int, bytes]:
    return 200, recorded(PAGES[path]) if path in PAGES else b""


async def test_the_record_and_the_load_of_a_real_vllm() -> None:
    engine = Vllm()
    record = await engine.record(fetch, parse_target("vllm+http://127.0.0.1:8000?events=5557"), None, "0")
    assert record is not None and await engine.trouble(fetch) == ""
    assert (record.served_names, record.page_size, record.kv_capacity_tokens, record.context_length) == (["bench"], 128, 364 * 128, 4096)
    assert await engine.load(fetch, record) == PolledLoad(0, 0, 0)


@pytest.mark.rule("R22")
@pytest.mark.parametrize(("name", "dialect"), [("chat.sse", OPENAI), ("messages.sse", ANTHROPIC), ("responses.sse", RESPONSES)])
def test_r22_the_end_and_the_usage_of_real_streams_are_found(name: str, dialect: Dialect) -> None:
    stream = recorded(name)
    assert dialect.event_end(stream) == len(stream)
    assert dialect.last_words(stream) == (True, False)
    assert (dialect.made_tokens(stream), dialect.cached_tokens(stream)) == (4, 0 if name != "chat.sse" else dialect.cached_tokens(stream))
    assert not dialect.last_words(stream[: stream.rindex(b"event: message_stop" if dialect is ANTHROPIC else b"data: ")])[0] or dialect is RESPONSES


def test_the_usage_event_of_a_real_stream_is_taken_out_whole() -> None:
    stream = recorded("chat.sse")
    take = UsageFilter()
    kept = take(stream)
    assert b'"usage":{' not in kept and kept.endswith(b"data: [DONE]\n\n")
    assert OPENAI.made_tokens(take.event) == 4
    assert stream.replace(take.event, b"") == kept


@pytest.mark.parametrize(("status", "name", "code"), [(400, "error-400.json", "worker_400"), (404, "error-404.json", "worker_error_shape")])
def test_real_errors_are_read(status: int, name: str, code: str) -> None:
    said = error(status, recorded(name))
    assert (said.status, said.code) == (status, code)
    assert ("99999" if status == 400 else "does not serve this path") in said.message


@pytest.mark.case("C41")
@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/v1/messages"])
async def test_an_error_that_is_none_of_the_api_reaches_no_client_as_it_is(
    path: str, start_engine: Callable[..., Awaitable[Any]], front: Callable[..., Awaitable[Any]]
) -> None:
    """Red without NOT_TO_SHOW: the client read `{"detail":"Not Found"}`, in which its library finds no message."""
    from fleet_testing.engines.vllm import FakeVllm

    engine = await start_engine(FakeVllm())  # it answers other paths than its own as vLLM's web framework does
    fleet = await front(engine.url())
    answer = await fleet.post(path, {"model": "org/tiny", "input": "x", "query": "x", "documents": ["x"], "messages": []})
    told = answer.json()
    assert answer.status_code == 404
    assert told["error"]["type"] == "not_found_error" and "does not serve this path" in told["error"]["message"]
    assert json.dumps(told).count("detail") == 0
    assert fleet.brain.workers[0].breaker.state == "closed"
