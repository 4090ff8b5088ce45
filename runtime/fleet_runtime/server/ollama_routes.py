"""The endpoints of Ollama's API, on both ports: chat, generate, embeddings, and what is served. Requests become those of `ollama_request`."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from importlib import metadata
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response

from fleet_contract.errors import ApiError
from fleet_runtime import messages as m
from fleet_runtime.server import ollama_models, validate
from fleet_runtime.server import ollama_request as asked
from fleet_runtime.server.embeddings import EmbeddingJob, read_embedding, written_vector
from fleet_runtime.server.generate import GenerateRequest, bounded
from fleet_runtime.server.intake import Intake, json_response
from fleet_runtime.server.manager import ReqState
from fleet_runtime.server.ollama_shape import LINES, OllamaChatShape, OllamaGenerateShape, OllamaShape, Timed, now
from fleet_runtime.server.parsing.registry import NONE
from fleet_runtime.server.requests import encode_inputs, generation, read_chat, read_completion, stale
from fleet_runtime.server.responses import JSON_TYPE, EmbeddingResponse, GenerationResponse
from fleet_runtime.server.state import HttpState


def add_ollama_routes(app: FastAPI, intake: Intake) -> None:
    """Registers the endpoints."""
    _add_generating(app, intake)
    _add_embedding(app, intake)
    _add_models(app, intake)


def _add_generating(app: FastAPI, intake: Intake) -> None:
    state = intake.state
    context = state.flags.context_length

    @app.post("/api/chat")
    async def chat(http: Request) -> Response:
        async def build(request: ReqState, body: dict[str, Any], ids: list[int] | None) -> Response:
            given = asked.read(asked.OllamaChat, body)
            name = asked.served_name(given.model, state.config.served_names)
            if not given.messages:
                return _loaded(state, request, given, {"message": {"role": "assistant", "content": ""}})
            _check_thinking(state, given.think)
            made = await read_chat(state, asked.chat_body(given, name, context), ids)
            return _answer(state, request, made, given.model, OllamaChatShape)

        return await intake.open(http, build)

    @app.post("/api/generate")
    async def generate(http: Request) -> Response:
        async def build(request: ReqState, body: dict[str, Any], ids: list[int] | None) -> Response:
            given = asked.read(asked.OllamaGenerate, body)
            name = asked.served_name(given.model, state.config.served_names)
            if not given.prompt:
                return _loaded(state, request, given, {"response": ""})
            if given.raw:
                options = validate.completion_request(asked.raw_body(given, name, context))
                made = replace(await read_completion(state, options, ids), default_max_new=None)
            else:
                _check_thinking(state, given.think)
                made = await read_chat(state, asked.prompt_body(given, name, context), ids)
            return _answer(state, request, made, given.model, OllamaGenerateShape)

        return await intake.open(http, build)


def _check_thinking(state: HttpState, think: Any) -> None:
    if think is True and state.ready_text().format.reasoning == NONE:
        raise ApiError(400, "think is set, but this model does not reason; leave it out", param="think")


def _answer(state: HttpState, request: ReqState, made: GenerateRequest, model: str, shape: type[OllamaShape]) -> Response:
    if made.max_new is not None:
        made, _ = bounded(made, made.max_new, state.flags.context_length)
    made = replace(made, make_parser=partial(_timed, made))
    return GenerationResponse(state, request, generation(state, request, made, partial(shape, model=model, started_at=request.started_at)))


def _timed(made: GenerateRequest) -> Timed:
    return Timed(made.make_parser())


def _loaded(state: HttpState, request: ReqState, given: asked.OllamaChat | asked.OllamaGenerate, said: dict[str, Any]) -> Response:
    """Answer to a request without a prompt, which in Ollama loads the model: it is there. Nothing is admitted. Raises ApiError for a leg."""
    if request.routed.leg is not None:
        raise ApiError(400, "a leg needs a prompt", code="bad_wire")
    state.manager.release(request)
    told = {"model": given.model, "created_at": now(), **said, "done": True, "done_reason": "load"}
    return Response(msgspec.json.encode(told) + b"\n", media_type=LINES if given.stream else JSON_TYPE)


def _add_embedding(app: FastAPI, intake: Intake) -> None:
    state = intake.state

    @app.post("/api/embed")
    async def embed(http: Request) -> Response:
        async def build(request: ReqState, body: dict[str, Any], ids: list[int] | None) -> Response:
            given = asked.read(asked.OllamaEmbed, body)
            job = await _embedding(state, request, given, asked.embedding_inputs(given), ids, truncate=given.truncate)
            return EmbeddingResponse(state, request, job, partial(_embedded, given.model, request.started_at))

        return await intake.open(http, build)

    @app.post("/api/embeddings")
    async def embeddings(http: Request) -> Response:
        async def build(request: ReqState, body: dict[str, Any], ids: list[int] | None) -> Response:
            given = asked.read(asked.OllamaEmbeddings, body)
            job = await _embedding(state, request, given, [given.prompt], ids, truncate=True)
            return EmbeddingResponse(state, request, job, _bare_vector)

        return await intake.open(http, build)


async def _embedding(
    state: HttpState,
    request: ReqState,
    given: asked.OllamaEmbed | asked.OllamaEmbeddings,
    texts: list[str],
    ids: list[int] | None,
    *,
    truncate: bool,
) -> EmbeddingJob:
    """Args: truncate: what is longer than the context is cut at its end, as Ollama does. Raises ApiError."""
    context = state.flags.context_length
    if request.routed.leg is not None:
        raise ApiError(400, "embeddings have no legs: one worker computes them", code="bad_wire")
    if state.flags.role == "decode":
        raise stale("this is a decode worker; it computes no prompts, so no embeddings")
    asked.check_options(given.options, context)
    name = asked.served_name(given.model, state.config.served_names)
    if ids is not None and len(texts) == 1:
        lists = [ids]
    elif ids is not None:
        raise ApiError(400, "token ids beside the JSON are those of a single input; this request has several", code="bad_wire")
    else:
        lists = [p.ids for p in await encode_inputs(state.ready_text(), texts, "input", add_special_tokens=True)]
    return await read_embedding(state, {"model": name, "input": [i[:context] if truncate else i for i in lists]})


def _embedded(model: str, started_at: float, job: EmbeddingJob, vectors: list[m.Embedded]) -> bytes:
    told: dict[str, Any] = {"model": model, "embeddings": [written_vector(e.vector, "float", normalize=True) for e in vectors]}
    took = {"total_duration": int((time.monotonic() - started_at) * 1e9), "load_duration": 0}
    return msgspec.json.encode(told | took | {"prompt_eval_count": sum(e.prompt_tokens for e in vectors)})


def _bare_vector(job: EmbeddingJob, vectors: list[m.Embedded]) -> bytes:
    """The older endpoint tells vectors as the model made them, not brought to length one."""
    return msgspec.json.encode({"embedding": written_vector(vectors[0].vector, "float", normalize=False)})


def _add_models(app: FastAPI, intake: Intake) -> None:
    state = intake.state

    @app.get("/api/version")
    async def version() -> Response:
        return json_response({"version": metadata.version("radixfleet")})

    @app.get("/api/tags")
    async def tags() -> Response:
        return json_response({"models": ollama_models.listed(state)})

    @app.get("/api/ps")
    async def ps() -> Response:
        return json_response({"models": ollama_models.loaded(state) if state.cannot_take() is None else []})

    @app.post("/api/show")
    async def show(http: Request) -> Response:
        given = asked.read(asked.OllamaShow, await intake.object(http))
        name = given.model or given.name
        if not name:
            raise ApiError(400, "model is missing", param="model")
        asked.served_name(name, state.config.served_names)
        return json_response(ollama_models.shown(state))
