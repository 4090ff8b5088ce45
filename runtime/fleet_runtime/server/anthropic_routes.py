"""The endpoints of Anthropic's Messages API, on both ports. Requests become chats, see `anthropic_request`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from fleet_contract.errors import ApiError
from fleet_runtime.server import validate
from fleet_runtime.server.anthropic_request import count_request, messages_request
from fleet_runtime.server.anthropic_shape import Blocks, MessagesShape
from fleet_runtime.server.generate import GenerateRequest, bounded
from fleet_runtime.server.intake import Intake, json_response
from fleet_runtime.server.manager import ReqState
from fleet_runtime.server.parsing.registry import NONE
from fleet_runtime.server.requests import encode_chat, generation, read_chat, read_inputs
from fleet_runtime.server.responses import GenerationResponse


def add_anthropic_routes(app: FastAPI, intake: Intake) -> None:
    """Registers the endpoints. The headers `anthropic-version` and `anthropic-beta` are accepted as they come."""
    state = intake.state

    @app.post("/v1/messages")
    async def messages(http: Request) -> Response:
        async def build(request: ReqState, body: dict[str, Any], ids: list[int] | None) -> Response:
            asked = messages_request(body)
            if asked.must_think and state.ready_text().format.reasoning == NONE:
                raise ApiError(400, "thinking.type is 'enabled', but this model does not reason; leave thinking out", param="thinking.type")
            made, capped = bounded(await read_chat(state, asked.chat, ids), asked.max_tokens, state.flags.context_length)
            made = replace(made, make_parser=partial(_blocks, made))
            shape = partial(MessagesShape, capped=capped, hide_thinking=asked.hide_thinking)
            return GenerationResponse(state, request, generation(state, request, made, shape))

        return await intake.open(http, build)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(http: Request) -> Response:
        chat = count_request(await intake.object(http))
        validate.check_model(chat["model"], state.config.served_names)
        ids = await encode_chat(state.ready_text(), read_inputs(chat))
        return json_response({"input_tokens": len(ids)})


def _blocks(made: GenerateRequest) -> Blocks:
    return Blocks(made.make_parser())
