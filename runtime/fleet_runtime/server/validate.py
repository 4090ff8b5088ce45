"""From a parsed body to a checked request, in words that say what is wrong: which option, what it got, what is allowed. Pure.

Called by `requests`; the models are those of `fleet_contract.openai`. `null` means the default, as in OpenAI's clients.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, TypeVar

from pydantic import AfterValidator, BaseModel, Field, StrictBool, ValidationError
from pydantic_core import PydanticCustomError

from fleet_contract.errors import NOT_FOUND, ApiError, shown
from fleet_contract.openai import (
    MAX_EMBEDDING_INPUTS,
    MAX_PROMPTS,
    NEUTRAL_OPTIONS,
    NEUTRAL_VALUES,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    GenerationOptions,
    Message,
    TokenizeRequest,
)

MAX_STOPS: Final = 16
MAX_STOP_CHARS: Final = 4096
_MAX_FAULTS: Final = 5
_MOST_READ: Final = 10_000  # faults of one body: to read one takes a kilobyte

_NULLS_INSIDE: Final = ("stream_options", "response_format", "structured_outputs")

R = TypeVar("R", bound=BaseModel)

# A union's branches each complain in their own words: these say it once.
_UNIONS: Final = {
    "prompt": "a text, a list of token ids, a list of texts, or a list of lists of token ids is allowed",
    "input": "a text, a list of token ids, a list of texts, or a list of lists of token ids is allowed",
    "stop": "a text or a list of texts is allowed",
    "content": "a text or a list of parts {type: text, text} is allowed",
    "tool_choice": "none, auto, required, or an object that names a function is allowed",
    "schema": "a JSON schema is allowed: an object",
    "guided_json": "a JSON schema is allowed: an object, or its JSON as text",
    "json": "a JSON schema is allowed: an object, or its JSON as text",
}


def chat_request(body: dict[str, Any]) -> ChatRequest:
    """Raises ApiError 400."""
    request = checked(ChatRequest, body)
    _check_generation(request)
    check_messages(request.messages)
    if request.max_tokens is not None and request.max_completion_tokens is not None:
        raise ApiError(400, "give either max_completion_tokens or max_tokens", param="max_tokens")
    if request.top_logprobs and not request.logprobs:
        raise ApiError(400, "top_logprobs is only allowed with logprobs: true", param="top_logprobs")
    return request


def completion_request(body: dict[str, Any]) -> CompletionRequest:
    """Raises ApiError 400."""
    request = checked(CompletionRequest, body)
    _check_generation(request)
    if isinstance(request.prompt, list):
        if not request.prompt:
            raise ApiError(400, "prompt is an empty list; at least one token id or text is needed", param="prompt")
        if not isinstance(request.prompt[0], int) and len(request.prompt) > MAX_PROMPTS:
            raise ApiError(400, f"prompt has {len(request.prompt)} prompts; at most {MAX_PROMPTS} are allowed in one request", param="prompt")
    if request.max_tokens == 0 and not request.echo:
        raise ApiError(400, "max_tokens is 0; at least 1 is needed (0 only with echo: true)", param="max_tokens")
    if request.best_of is not None:
        if request.best_of < request.n:
            raise ApiError(400, f"best_of is {request.best_of}, but {request.n} choices are asked for (n); it must be at least n", param="best_of")
        if request.best_of > request.n and request.stream:
            raise ApiError(400, "best_of cannot be streamed: which choice is best is known at the end", param="best_of")
    return request


def embedding_request(body: dict[str, Any]) -> EmbeddingRequest:
    """Raises ApiError 400."""
    request = checked(EmbeddingRequest, body)
    _check_unknown(request)
    if isinstance(request.input, list) and request.input and not isinstance(request.input[0], int) and len(request.input) > MAX_EMBEDDING_INPUTS:
        raise ApiError(400, f"input has {len(request.input)} inputs; at most {MAX_EMBEDDING_INPUTS} are allowed in one request", param="input")
    return request


def tokenize_request(body: dict[str, Any]) -> TokenizeRequest:
    """Raises ApiError 400."""
    request = checked(TokenizeRequest, body)
    if (request.prompt is None) == (request.messages is None):
        raise ApiError(400, "give either prompt or messages", param="prompt")
    if request.messages is not None:
        check_messages(request.messages)
    return request


def detokenize_request(body: dict[str, Any]) -> DetokenizeRequest:
    """Raises ApiError 400."""
    return checked(DetokenizeRequest, body)


def check_messages(messages: list[Message]) -> None:
    """What a role must have and may not have. Raises ApiError 400."""
    for i, message in enumerate(messages):
        path = f"messages[{i}]"
        if message.content is None and message.role != "assistant":
            raise ApiError(400, f"{path}.content is missing", param=f"{path}.content")
        if message.tool_calls and message.role != "assistant":
            raise ApiError(400, f"{path}.tool_calls is only allowed in a message of role assistant", param=f"{path}.tool_calls")


def check_model(asked: str, served: list[str]) -> None:
    """Raises ApiError 404 that lists what there is."""
    if asked not in served:
        raise ApiError(
            404, f"the model {shown(asked)} is not served here; there is {', '.join(served)}", type=NOT_FOUND, code="model_not_found", param="model"
        )


def stop_strings(given: str | list[str]) -> list[str]:
    """The stops of a request. Raises ApiError 400."""
    stops = [given] if isinstance(given, str) else given
    if len(stops) > MAX_STOPS:
        raise ApiError(400, f"stop has {len(stops)} texts; at most {MAX_STOPS} are allowed", param="stop")
    for stop in stops:
        if not 0 < len(stop) <= MAX_STOP_CHARS:
            raise ApiError(400, f"a stop has {len(stop)} characters; 1 to {MAX_STOP_CHARS} are allowed", param="stop")
    return stops


def refuse_internal_options(body: dict[str, Any]) -> None:
    """The public port takes no hand-over and no priority. Raises ApiError 400."""
    for name, value in body.items():
        if name.startswith("bootstrap_") or (name == "priority" and value is not None):
            raise ApiError(400, f"{name} is an internal option; it is not allowed on the public port", code="internal_option", param=name)


def _is_off(value: bool) -> bool:
    if value:
        raise PydanticCustomError("off", "only false is allowed")
    return value


# An option that cannot be had: its `false` is taken, and no number that equals it, as a Literal would do.
Off = Annotated[StrictBool, AfterValidator(_is_off), Field(json_schema_extra={"const": False})]


def checked(kind: type[R], body: dict[str, Any]) -> R:
    """A body as its model. Raises ApiError 400 with the first faults."""
    try:
        return kind.model_validate({k: _without_nulls(v) if k in _NULLS_INSIDE else v for k, v in body.items() if v is not None})
    except ValidationError as e:
        raise _refusal(e, body) from e


def _without_nulls(value: Any) -> Any:
    return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value


def _check_generation(request: GenerationOptions) -> None:
    _check_unknown(request)
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options is only allowed with stream: true", param="stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise ApiError(400, "prompt_logprobs cannot be streamed", param="prompt_logprobs")


def _check_unknown(request: BaseModel) -> None:
    """Options that no model knows. Raises ApiError 400 by name."""
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


def _same(value: Any, allowed: Any) -> bool:
    """Equal in value and type: `true` is not 1."""
    return type(value) is type(allowed) and value == allowed


def _refusal(error: ValidationError, body: dict[str, Any]) -> ApiError:
    """The first faults as sentences; param is the path of the first."""
    if (count := error.error_count()) > _MOST_READ:  # lists tell only their first: these are names
        return ApiError(400, f"the body has {count} names that are not options of this server", code="unsupported_option")
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
