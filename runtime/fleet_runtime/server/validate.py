"""From a parsed body to a checked request, in words that say what is wrong: which option, what it got, what is allowed. Pure.

Called by `requests`; the models are those of `fleet_contract.openai`. `null` means the default, as in OpenAI's clients.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError

from fleet_contract.errors import NOT_FOUND, ApiError
from fleet_contract.openai import NEUTRAL_OPTIONS, NEUTRAL_VALUES, ChatRequest, CompletionRequest, GenerationOptions, TokenizeRequest
from fleet_runtime.server.body import shown

MAX_STOPS: Final = 16
MAX_STOP_CHARS: Final = 4096
MAX_PROMPTS: Final = 128
_MAX_FAULTS: Final = 5

R = TypeVar("R", bound=BaseModel)

# A union's branches each complain in their own words: these say it once.
_UNIONS: Final = {
    "prompt": "a text, a list of token ids, or a list of texts is allowed",
    "stop": "a text or a list of texts is allowed",
    "content": "a text or a list of parts {type: text, text} is allowed",
    "temperature": "a number from 0 to 2 is allowed",
    "top_p": "a number above 0 and up to 1 is allowed",
}


def chat_request(body: dict[str, Any]) -> ChatRequest:
    """Raises ApiError 400."""
    request = _checked(ChatRequest, body)
    _check_generation(request, body)
    return request


def completion_request(body: dict[str, Any]) -> CompletionRequest:
    """Raises ApiError 400."""
    request = _checked(CompletionRequest, body)
    _check_generation(request, body)
    if isinstance(request.prompt, list):
        if not request.prompt:
            raise ApiError(400, "prompt is an empty list; at least one token id or text is needed", param="prompt")
        if isinstance(request.prompt[0], str) and len(request.prompt) > MAX_PROMPTS:
            raise ApiError(400, f"prompt has {len(request.prompt)} texts; at most {MAX_PROMPTS} are allowed in one request", param="prompt")
    return request


def tokenize_request(body: dict[str, Any]) -> TokenizeRequest:
    """Raises ApiError 400."""
    request = _checked(TokenizeRequest, body)
    if (request.prompt is None) == (request.messages is None):
        raise ApiError(400, "give either prompt or messages", param="prompt")
    return request


def check_model(asked: str, served: list[str]) -> None:
    """Raises ApiError 404 that lists what there is."""
    if asked not in served:
        raise ApiError(
            404, f"the model {shown(asked)} is not served here; there is {', '.join(served)}", type=NOT_FOUND, code="model_not_found", param="model"
        )


def stop_strings(request: GenerationOptions) -> list[str]:
    """The stops of a request. Raises ApiError 400."""
    stops = [request.stop] if isinstance(request.stop, str) else list(request.stop or ())
    if len(stops) > MAX_STOPS:
        raise ApiError(400, f"stop has {len(stops)} texts; at most {MAX_STOPS} are allowed", param="stop")
    for stop in stops:
        if not 0 < len(stop) <= MAX_STOP_CHARS:
            raise ApiError(400, f"a stop has {len(stop)} characters; 1 to {MAX_STOP_CHARS} are allowed", param="stop")
    return stops


def max_new_tokens(prompt_tokens: int, asked: int | None, context: int, *, default: int | None, param: str) -> int:
    """How many tokens may be made: what was asked, else `default` or the rest of the context, whichever is less.

    Raises ApiError 400 when prompt, or prompt and asked tokens, do not fit; it never names a number that the user did not send.
    """
    room = context - prompt_tokens
    if room < 1:
        message = f"the prompt has {prompt_tokens} tokens, but the context is {context} tokens, prompt and answer together; shorten the prompt"
        raise ApiError(400, message, code="context_length_exceeded", param=param)
    if asked is None:
        return room if default is None else min(default, room)
    if asked > room:
        raise ApiError(
            400,
            f"the prompt has {prompt_tokens} tokens and {asked} more are asked for, but the context is {context} tokens; "
            f"ask for at most {room}, or shorten the prompt",
            code="context_length_exceeded",
            param=param,
        )
    return asked


def check_ids(ids: Iterable[int], vocab_size: int, param: str) -> None:
    """Raises ApiError 400 for a token id outside the vocabulary."""
    for i, token in enumerate(ids):
        if token >= vocab_size:
            message = f"{param}[{i}] is {token}; token ids of this model go from 0 to {vocab_size - 1}"
            raise ApiError(400, message, code="token_out_of_vocabulary", param=f"{param}[{i}]")


def refuse_bootstrap(body: dict[str, Any]) -> None:
    """The public port takes no hand-over. Raises ApiError 400."""
    for name in body:
        if name.startswith("bootstrap_"):
            raise ApiError(400, f"{name} is an internal option; it is not allowed on the public port", code="internal_option", param=name)


def _checked(kind: type[R], body: dict[str, Any]) -> R:
    try:
        return kind.model_validate({k: _without_nulls(v) if k == "stream_options" else v for k, v in body.items() if v is not None})
    except ValidationError as e:
        raise _refusal(e, body) from e


def _without_nulls(value: Any) -> Any:
    return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value


def _check_generation(request: GenerationOptions, body: dict[str, Any]) -> None:
    for name, value in (request.model_extra or {}).items():
        if name in NEUTRAL_OPTIONS:
            continue
        allowed = NEUTRAL_VALUES.get(name)
        if allowed is None:
            raise ApiError(400, f"{name[:60]} is not an option that this server supports", code="unsupported_option", param=name[:60])
        if not any(_same(value, a) for a in allowed):
            accepted = " or ".join(shown(a) if not isinstance(a, dict) or a else "{}" for a in allowed if a is not None) or "null"
            raise ApiError(
                400,
                f"{name} is {shown(value)}, which this server does not support; only {accepted} is accepted",
                code="unsupported_option",
                param=name,
            )
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options is only allowed with stream: true", param="stream_options")


def _same(value: Any, allowed: Any) -> bool:
    """Equal in value and type: `true` is not 1."""
    return type(value) is type(allowed) and value == allowed


def _refusal(error: ValidationError, body: dict[str, Any]) -> ApiError:
    """The first faults as sentences; param is the path of the first."""
    faults: dict[str, str] = {}
    for e in error.errors(include_url=False, include_context=False):
        path, union = _path(e["loc"])
        if path in faults:
            continue
        if union is not None:
            faults[path] = f"{path} is {shown(_at(body, e['loc'], path))}; {_UNIONS[union]}"
        elif e["type"] == "missing":
            faults[path] = f"{path} is missing"
        elif e["type"] == "extra_forbidden":
            faults[path] = f"{path} is not an option that this server supports"
        else:
            faults[path] = f"{path} is {shown(e['input'])}: {e['msg'][0].lower()}{e['msg'][1:]}"
    paths = list(faults)
    text = "; ".join(faults[p] for p in paths[:_MAX_FAULTS])
    if len(paths) > _MAX_FAULTS:
        text += f"; and {len(paths) - _MAX_FAULTS} more"
    return ApiError(400, text, param=paths[0] if paths else None)


def _path(loc: tuple[int | str, ...]) -> tuple[str, str | None]:
    """`messages[0].role`, and the union it stops at: what follows in `loc` names a branch, which means nothing to a user."""
    path = ""
    for step in loc:
        if isinstance(step, int):
            path += f"[{step}]"
        else:
            path += f".{step[:60]}" if path else step[:60]
            if step in _UNIONS:
                return path, step
    return path, None


def _at(body: dict[str, Any], loc: tuple[int | str, ...], path: str) -> Any:
    """The value at the union's place."""
    value: Any = body
    for step in loc:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            return None
        if step in _UNIONS:
            return value
    return value
