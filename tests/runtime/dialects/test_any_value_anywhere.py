"""Each value of a good body in turn becomes a value of each JSON type: the body is read, or refused with a sentence; nothing else is raised."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from fleet_contract.errors import ApiError
from fleet_runtime.server import ollama_request as ollama
from fleet_runtime.server import validate
from fleet_runtime.server.anthropic_request import count_request, messages_request
from fleet_runtime.server.grammars import grammar_of
from fleet_runtime.server.parsing.tools import tool_request
from fleet_runtime.server.requests import read_inputs
from fleet_testing.fuzz import SEEDS, places

VALUES: list[Any] = [None, True, 0, 0.0, -1, 1.5, "", "a", [], ["a"], [[]], [{}], {}, {"a": 1}, {"type": "a"}]


def _chat(body: dict[str, Any]) -> None:
    options = validate.chat_request(body)
    validate.stop_strings(options.stop)
    tool_request(body)
    read_inputs(body)
    grammar_of(options)


def _completion(body: dict[str, Any]) -> None:
    options = validate.completion_request(body)
    validate.stop_strings(options.stop)
    grammar_of(options)


def _tokenize(body: dict[str, Any]) -> None:
    if validate.tokenize_request(body).messages is not None:
        tool_request(body)
        read_inputs(body)


def _ollama_generate(body: dict[str, Any]) -> None:
    given = ollama.read(ollama.OllamaGenerate, body)
    (ollama.raw_body if given.raw else ollama.prompt_body)(given, "tiny", 512)


READERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completion,
    "/v1/embeddings": validate.embedding_request,
    "/tokenize": _tokenize,
    "/detokenize": validate.detokenize_request,
    "/v1/messages": lambda body: _chat(messages_request(body).chat | {"max_tokens": 1}),
    "/v1/messages/count_tokens": lambda body: read_inputs(count_request(body)),
    "/api/chat": lambda body: _chat(ollama.chat_body(given, "tiny", 512)) if (given := ollama.read(ollama.OllamaChat, body)).messages else None,
    "/api/generate": _ollama_generate,
    "/api/embed": lambda body: ollama.embedding_inputs(ollama.read(ollama.OllamaEmbed, body)),
    "/api/show": lambda body: ollama.read(ollama.OllamaShow, body),
}


@pytest.mark.parametrize(("path", "seed"), SEEDS)
def test_a_value_of_any_type_at_any_place_is_taken_or_refused(path: str, seed: dict[str, Any]) -> None:
    """Seen red with an id of a tool's result that is an object."""
    good = {"model": "tiny", **seed}
    READERS[path](copy.deepcopy(good))
    refused: list[ApiError] = []
    for n in range(len(places(good))):
        for value in VALUES:
            body = copy.deepcopy(good)
            where, key = places(body)[n]
            where[key] = copy.deepcopy(value)
            try:
                READERS[path](body)
            except ApiError as e:
                refused.append(e)
    assert refused and all(400 <= e.status < 500 and e.message and len(e.body()) < 4096 for e in refused)
