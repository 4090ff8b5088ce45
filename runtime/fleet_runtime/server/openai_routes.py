"""The endpoints of the OpenAI API and its neighbours: chat, completions, embeddings, models, tokenize, detokenize. On both ports."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.responses import Response

from fleet_contract.errors import ApiError
from fleet_runtime.server import validate
from fleet_runtime.server.embeddings import read_embedding
from fleet_runtime.server.generate import check_ids
from fleet_runtime.server.intake import Intake, json_response
from fleet_runtime.server.manager import ReqState
from fleet_runtime.server.parsing.tools import tool_request
from fleet_runtime.server.requests import chat_generation, completion_generation, encode_chat, encode_text, read_inputs, stale
from fleet_runtime.server.responses import EmbeddingResponse, GenerationResponse

_THREAD_ABOVE_TOKENS: Final = 4096


def add_openai_routes(app: FastAPI, intake: Intake) -> None:
    """Registers the endpoints."""
    _add_generation(app, intake)
    _add_models(app, intake)
    _add_tokenizing(app, intake)


def _add_generation(app: FastAPI, intake: Intake) -> None:
    state = intake.state

    @app.post("/v1/chat/completions")
    async def chat(http: Request) -> Response:
        async def build(request: ReqState, body: dict[str, Any], ids: list[int] | None) -> Response:
            return GenerationResponse(state, request, await chat_generation(state, request, body, ids))

        return await intake.open(http, build)

    @app.post("/v1/completions")
    async def completions(http: Request) -> Response:
        async def build(request: ReqState, body: dict[str, Any], ids: list[int] | None) -> Response:
            return GenerationResponse(state, request, await completion_generation(state, request, body, ids))

        return await intake.open(http, build)

    @app.post("/v1/embeddings")
    async def embeddings(http: Request) -> Response:
        async def build(request: ReqState, body: dict[str, Any], ids: list[int] | None) -> Response:
            if request.routed.leg is not None:
                raise ApiError(400, "embeddings have no legs: one worker computes them", code="bad_wire")
            if state.flags.role == "decode":
                raise stale("this is a decode worker; it computes no prompts, so no embeddings")
            return EmbeddingResponse(state, request, await read_embedding(state, body, ids))

        return await intake.open(http, build)


def _add_models(app: FastAPI, intake: Intake) -> None:
    state = intake.state

    def model(name: str) -> dict[str, Any]:
        told = {"id": name, "object": "model", "created": 0, "owned_by": "radixfleet"}
        return told | {"root": state.config.served_names[0], "max_model_len": state.flags.context_length}

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [model(name) for name in state.config.served_names]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        validate.check_model(name, state.config.served_names)
        return json_response(model(name))


def _add_tokenizing(app: FastAPI, intake: Intake) -> None:
    state = intake.state

    @app.post("/tokenize")
    async def tokenize(http: Request) -> Response:
        body = await intake.object(http)
        options = validate.tokenize_request(body)
        if options.model is not None:
            validate.check_model(options.model, state.config.served_names)
        text = state.ready_text()
        if options.messages is not None:
            tool_request(body)
            ids = await encode_chat(text, read_inputs(body))
        else:
            ids = await encode_text(text, options.prompt or "", add_special_tokens=options.add_special_tokens)
        strings = {"token_strs": [text.texts.text_of(i) for i in ids]} if options.return_token_strs else {}
        return json_response({"tokens": ids, "count": len(ids), "max_model_len": state.flags.context_length, **strings})

    @app.post("/detokenize")
    async def detokenize(http: Request) -> Response:
        options = validate.detokenize_request(await intake.object(http))
        if options.model is not None:
            validate.check_model(options.model, state.config.served_names)
        text = state.ready_text()
        check_ids(options.tokens, text.vocab_size, "tokens")
        decode = partial(text.texts.decode, options.tokens, skip_special=options.skip_special_tokens)
        return json_response({"prompt": await asyncio.to_thread(decode) if len(options.tokens) > _THREAD_ABOVE_TOKENS else decode()})
