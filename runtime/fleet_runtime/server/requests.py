"""From a body to what the scheduler gets: validate -> tokenize -> bound -> Admit. Called by `app` for every generating endpoint."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from typing import Any, Final

from fleet_contract.errors import CODE_STALE_WORKER, INVALID_REQUEST, ApiError
from fleet_contract.openai import ChatRequest, CompletionRequest, GenerationOptions, Message
from fleet_contract.wire import encode_ids
from fleet_runtime import messages as m
from fleet_runtime.server import validate
from fleet_runtime.server.answers import ChatShape, CompletionShape, Shape
from fleet_runtime.server.manager import ReqState
from fleet_runtime.server.state import HttpState, TextModel
from fleet_text.prompt import PromptError

COMPLETION_DEFAULT_TOKENS: Final = 16  # OpenAI's default of /v1/completions
_THREAD_ABOVE_CHARS: Final = 4096  # about a millisecond of tokenizing
_SEED_RANGE: Final = 1 << 64


@dataclass(frozen=True, slots=True)
class Generation:
    """A checked request: its choices, and how to answer."""

    choices: list[m.Admit]
    shape: Shape
    stream: bool


async def chat_generation(state: HttpState, request: ReqState, body: dict[str, Any], ids: list[int] | None) -> Generation:
    """Args: ids: the prompt as the router tokenized it. Raises ApiError."""
    options = validate.chat_request(body)
    validate.check_model(options.model, state.config.served_names)
    if options.max_tokens is not None and options.max_completion_tokens is not None:
        raise ApiError(400, "give either max_completion_tokens or max_tokens", param="max_tokens")
    text = state.ready_text()
    if ids is None:
        ids = await encode_chat(text, options.messages)
    asked = options.max_completion_tokens if options.max_completion_tokens is not None else options.max_tokens
    return _generation(state, request, options, [ids], asked=asked, default=None, shape=ChatShape, param="messages")


async def completion_generation(state: HttpState, request: ReqState, body: dict[str, Any], ids: list[int] | None) -> Generation:
    """Args: ids: as in `chat_generation`. Raises ApiError."""
    options = validate.completion_request(body)
    validate.check_model(options.model, state.config.served_names)
    text = state.ready_text()
    prompts = [ids] if ids is not None else await _encode_prompt(text, options)
    return _generation(
        state, request, options, prompts, asked=options.max_tokens, default=COMPLETION_DEFAULT_TOKENS, shape=CompletionShape, param="prompt"
    )


async def encode_chat(text: TextModel, messages: list[Message]) -> list[int]:
    """Template and tokenizer, in a thread when it may take long. Raises ApiError 400."""
    plain = [message.model_dump(exclude_none=True) for message in messages]
    size = sum(len(str(p["content"])) for p in plain)
    try:
        if size > _THREAD_ABOVE_CHARS or len(plain) > 100:
            return await asyncio.to_thread(text.encoder.encode_chat, plain)
        return text.encoder.encode_chat(plain)
    except PromptError as e:
        raise ApiError(400, str(e)[:1000], param="messages") from e


async def encode_text(text: TextModel, prompt: str, *, add_special_tokens: bool) -> list[int]:
    """Token ids of a text, in a thread when it is long."""
    if len(prompt) > _THREAD_ABOVE_CHARS:
        return await asyncio.to_thread(text.encoder.encode, prompt, add_special_tokens=add_special_tokens)
    return text.encoder.encode(prompt, add_special_tokens=add_special_tokens)


async def _encode_prompt(text: TextModel, options: CompletionRequest) -> list[list[int]]:
    prompt = options.prompt
    if isinstance(prompt, str):
        return [await encode_text(text, prompt, add_special_tokens=True)]
    ids = [p for p in prompt if isinstance(p, int)]
    if ids:
        return [ids]
    return [await encode_text(text, p, add_special_tokens=True) for p in prompt if isinstance(p, str)]


def _generation(
    state: HttpState,
    request: ReqState,
    options: ChatRequest | CompletionRequest,
    prompts: list[list[int]],
    *,
    asked: int | None,
    default: int | None,
    shape: type[Shape],
    param: str,
) -> Generation:
    """The pure end: lengths, vocabulary, sampling, hand-over."""
    text = state.ready_text()
    context = state.flags.context_length
    if request.routed.leg is not None and len(request.routed.rooms) != len(prompts):
        raise ApiError(400, f"the request has {len(prompts)} choices but {len(request.routed.rooms)} rooms; one room a choice", code="bad_rooms")
    choices = []
    seed = options.seed if options.seed is not None else secrets.randbits(64)
    for index, ids in enumerate(prompts):
        name = param if len(prompts) == 1 else f"{param}[{index}]"
        if not ids:
            raise ApiError(400, f"{name} has no tokens; at least one is needed", param=name)
        max_new = validate.max_new_tokens(len(ids), asked, context, default=default, param=name)
        validate.check_ids(ids, text.vocab_size, name)
        choices.append(_admit(state, request, options, index=index, ids=ids, max_new=max_new, seed=(seed + index) % _SEED_RANGE))
    include_usage = options.stream_options is not None and options.stream_options.include_usage
    made = shape(
        rid=request.rid,
        model=options.model,
        fingerprint=state.config.model_revision,
        choices=len(choices),
        include_usage=include_usage,
        token_ids=options.return_token_ids,
    )
    return Generation(choices, made, bool(options.stream))


def _admit(state: HttpState, request: ReqState, options: GenerationOptions, *, index: int, ids: list[int], max_new: int, seed: int) -> m.Admit:
    routed = request.routed
    router_id, pick = routed.pick if routed.pick is not None else ("", -1)
    return m.Admit(
        rid=request.rid,
        index=index,
        ids=encode_ids(ids),
        max_new=max_new,
        temperature=1.0 if options.temperature is None else float(options.temperature),
        top_p=1.0 if options.top_p is None else float(options.top_p),
        seed=seed,
        stop_ids=[] if options.ignore_eos else list(state.ready_text().encoder.eos_ids),
        stop=validate.stop_strings(options),
        leg=routed.leg or "",
        room=routed.rooms[index] if routed.leg is not None else 0,
        bootstrap=routed.bootstrap or "",
        prefill_incarnation=routed.prefill_incarnation or "",
        deadline=0.0 if routed.deadline_ms is None else request.started_at + routed.deadline_ms / 1000,
        router_id=router_id,
        pick=pick,
    )


def check_leg(state: HttpState, request: ReqState) -> None:
    """A leg must reach a worker that can serve it, of the incarnation that the router meant. Raises ApiError 409 or 400."""
    routed = request.routed
    if routed.leg is None:
        return
    if state.flags.role not in (routed.leg, "unified"):
        raise stale(f"this is a {state.flags.role} worker; it serves no {routed.leg} legs")
    mine = state.mailbox.peers.get(m.SCHEDULER, "")
    if routed.leg == "prefill" and routed.prefill_incarnation is not None and routed.prefill_incarnation != mine:
        raise stale(f"the request is for incarnation {routed.prefill_incarnation}; this worker's is {mine}")


def stale(message: str) -> ApiError:
    """The router's table is older than this worker."""
    return ApiError(409, f"{message}; read GET /worker again", type=INVALID_REQUEST, code=CODE_STALE_WORKER)
