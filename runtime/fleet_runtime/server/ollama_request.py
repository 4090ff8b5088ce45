"""Bodies of Ollama's API, checked and written as bodies of OpenAI's, which `requests` understands. Pure.

The same conversation is the same prompt in both. Options that say how to load a model mean nothing to one that is loaded: accepted.
Whatever else cannot be done is refused by name. Source: Ollama's published API reference and the types of its own client.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from fleet_contract.errors import ApiError, shown
from fleet_contract.openai import MAX_EMBEDDING_INPUTS, Items, JsonObject, Logprobs, Within
from fleet_runtime.server import validate
from fleet_runtime.server.parsing.tools import tool_request
from fleet_text.ollama_chat import LATEST, chat_of, prompt_of

# Ollama's own defaults of sampling; what else it presets (a repeat penalty, in some versions) would change greedy answers, and does not hold here.
SAMPLING_DEFAULTS: Final = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
# How to load a model, and how long to keep it: nothing to do for one that is always there.
_LOADING: Final = frozenset(
    "numa num_batch num_gpu main_gpu low_vram f16_kv vocab_only use_mmap use_mlock embedding_only num_thread num_keep logits_all".split()
)
# Samplers that we do not have, and the values that turn them off; what belongs to one that is off says nothing.
_OFF: Final[dict[str, tuple[Any, ...]]] = {
    "tfs_z": (1, 1.0), "typical_p": (1, 1.0), "mirostat": (0,), "penalize_newline": (True,), "draft_num_predict": (0,),
}  # fmt: skip
_SAYS_NOTHING: Final = frozenset({"mirostat_tau", "mirostat_eta"})
_PENALTIES: Final = {"repeat_penalty": "repetition_penalty", "presence_penalty": "presence_penalty", "frequency_penalty": "frequency_penalty"}


class Options(BaseModel):
    """`options` that have a meaning here. Fields that are in none of the tables of this module are refused."""

    model_config = ConfigDict(extra="forbid")
    num_predict: Annotated[StrictInt, Field(ge=-2, le=2**31 - 1)] | None = None
    num_ctx: Annotated[StrictInt, Field(ge=1)] | None = None
    temperature: Annotated[float, Within(0, 2)] | None = None
    top_k: Annotated[StrictInt, Field(ge=0, le=2**31 - 1)] | None = None
    top_p: Annotated[float, Within(0, 1, open_low=True)] | None = None
    min_p: Annotated[float, Within(0, 1)] | None = None
    repeat_penalty: Annotated[float, Within(0, 10, open_low=True)] | None = None
    presence_penalty: Annotated[float, Within(-2, 2)] | None = None
    frequency_penalty: Annotated[float, Within(-2, 2)] | None = None
    repeat_last_n: Annotated[StrictInt, Field(ge=-1)] | None = None
    seed: Annotated[StrictInt, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Items[StrictStr] | StrictStr | None = None


class _Request(BaseModel):
    """What all have."""

    model_config = ConfigDict(extra="forbid")
    model: StrictStr = Field(min_length=1)
    options: JsonObject = Field(default_factory=dict)
    keep_alive: Any = None  # the model is always there


class _Generating(_Request):
    stream: StrictBool = True
    format: Any = None
    think: Any = None
    logprobs: StrictBool = False
    top_logprobs: Logprobs = 0
    truncate: validate.Off = False  # a prompt that is too long is refused, never cut
    shift: validate.Off = False


class OllamaChat(_Generating):
    """Body of `POST /api/chat`."""

    messages: Items[JsonObject] = Field(default_factory=list)
    tools: Items[JsonObject] = Field(default_factory=list)


class OllamaGenerate(_Generating):
    """Body of `POST /api/generate`."""

    prompt: StrictStr = ""
    system: StrictStr = ""
    raw: StrictBool = False
    suffix: Literal[""] | None = None
    template: Literal[""] | None = None
    images: Annotated[list[Any], Field(max_length=0)] | None = None
    context: Annotated[list[Any], Field(max_length=0)] | None = None


class OllamaEmbed(_Request):
    """Body of `POST /api/embed`."""

    input: Any = None  # needed; checked by `embedding_inputs`
    truncate: StrictBool = True
    dimensions: None = None


class OllamaEmbeddings(_Request):
    """Body of `POST /api/embeddings`, the older form."""

    prompt: StrictStr


class OllamaShow(BaseModel):
    """Body of `POST /api/show`; `name` is its older name of `model`."""

    model_config = ConfigDict(extra="forbid")
    model: StrictStr | None = None
    name: StrictStr | None = None
    verbose: StrictBool = False


R = TypeVar("R", bound=BaseModel)
_WHY: Final = {
    "context": "send the conversation to /api/chat instead",
    "template": "the model's own chat template is used; with raw: true the prompt goes as it is",
    "suffix": "this model fills no gaps",
    "images": "this server takes only text",
}


def read(kind: type[R], body: dict[str, Any]) -> R:
    """A body as its model. Raises ApiError 400."""
    for name, why in _WHY.items():
        if name in kind.model_fields and body.get(name):
            raise ApiError(400, f"{name} is not supported; {why}", code="unsupported_option", param=name)
    return validate.checked(kind, body)


def served_name(asked: str, served: list[str]) -> str:
    """The name by which the model is served: Ollama's clients write the tag `latest` or leave it out. Raises ApiError 404."""
    name = asked if asked in served else asked.removesuffix(LATEST)
    validate.check_model(name, served)
    return name


def chat_body(request: OllamaChat, name: str, context: int) -> dict[str, Any]:
    """As a chat body of OpenAI's API. Raises ApiError 400."""
    out = _body(request, name, context) | chat_of({"messages": request.messages, "tools": request.tools, "think": _think(request)})
    tool_request(out)
    return out | _logprobs(request)


def prompt_body(request: OllamaGenerate, name: str, context: int) -> dict[str, Any]:
    """As a chat body: the prompt is a message, and `system` another one in front of it. Raises ApiError 400."""
    prompt = {"prompt": request.prompt, "system": request.system, "think": _think(request)}
    return _body(request, name, context) | prompt_of(prompt) | _logprobs(request)


def raw_body(request: OllamaGenerate, name: str, context: int) -> dict[str, Any]:
    """As a completion body: no template. Raises ApiError 400."""
    if request.system:
        raise ApiError(400, "raw: true sends the prompt as it is, so system is not allowed with it", param="system")
    if request.think is not None:
        raise ApiError(400, "raw: true sends the prompt as it is, so think is not allowed with it", param="think")
    out = _body(request, name, context) | {"prompt": request.prompt}
    return out | ({"logprobs": request.top_logprobs} if request.logprobs else {})


def _think(request: _Generating) -> bool | None:
    """Raises ApiError 400."""
    if request.think is not None and not isinstance(request.think, bool):
        _refuse("think", request.think, "this model knows no levels of thinking: true or false is allowed")
    return request.think


def _logprobs(request: _Generating) -> dict[str, Any]:
    return {"logprobs": True, "top_logprobs": request.top_logprobs} if request.logprobs else {}


def _body(request: _Generating, name: str, context: int) -> dict[str, Any]:
    """What chats and raw prompts share."""
    if request.top_logprobs and not request.logprobs:
        raise ApiError(400, "top_logprobs is only allowed with logprobs: true", param="top_logprobs")
    out: dict[str, Any] = {"model": name, "stream": request.stream, **_options(request.options, context)}
    if request.format not in (None, "", "json") and not isinstance(request.format, dict):
        _refuse("format", request.format, "json, or a JSON schema as an object, is allowed")
    if request.format == "json":
        out["response_format"] = {"type": "json_object"}
    elif isinstance(request.format, dict):
        out["response_format"] = {"type": "json_schema", "json_schema": {"name": "format", "schema": request.format}}
    return out


def check_options(given: dict[str, Any], context: int) -> Options:
    """Raises ApiError 400 for what has no meaning here, by name."""
    known: dict[str, Any] = {}
    for name, value in given.items():
        if value is None or name in _LOADING or name in _SAYS_NOTHING:
            continue
        if name in _OFF:
            if not any(type(value) is type(off) and value == off for off in _OFF[name]):
                _refuse(f"options.{name}", value, f"this server does not have it; only {shown(_OFF[name][0])} is accepted")
        else:
            known[name] = value
    try:
        options = validate.checked(Options, known)
    except ApiError as e:
        raise ApiError(e.status, f"options.{e.message}", code=e.code, param=f"options.{e.param}") from e
    if options.num_predict == 0:
        _refuse("options.num_predict", 0, "at least 1 is needed; -1 or -2: up to the end of the context")
    if options.num_ctx is not None and options.num_ctx > context:
        _refuse("options.num_ctx", options.num_ctx, f"the context of this server is {context} tokens (--context-length)")
    return options


def _options(given: dict[str, Any], context: int) -> dict[str, Any]:
    """Ollama's `options` as OpenAI's. Raises ApiError 400."""
    options = check_options(given, context)
    out: dict[str, Any] = dict(SAMPLING_DEFAULTS)
    out |= {name: value for name in ("temperature", "top_k", "top_p", "min_p") if (value := getattr(options, name)) is not None}
    if options.num_predict is not None and options.num_predict > 0:
        out["max_tokens"] = options.num_predict
    if options.seed is not None and options.seed != -1:  # -1: any
        out["seed"] = options.seed
    if options.stop is not None:
        out["stop"] = options.stop
    penalties = {ours: value for theirs, ours in _PENALTIES.items() if (value := getattr(options, theirs)) is not None}
    active = any(value != (1.0 if name == "repetition_penalty" else 0.0) for name, value in penalties.items())
    if options.repeat_last_n == 0:
        penalties, active = {}, False
    if active and options.repeat_last_n not in (None, -1) and (options.repeat_last_n or 0) < context:
        _refuse("options.repeat_last_n", options.repeat_last_n, "penalties look at the whole context here: -1, or 0 for no penalties, is allowed")
    return out | penalties


def embedding_inputs(request: OllamaEmbed) -> list[str]:
    """The texts to embed. Raises ApiError 400."""
    texts = [request.input] if isinstance(request.input, str) else request.input
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        _refuse("input", texts, "a text, or a list of at least one text, is needed")
    if len(texts) > MAX_EMBEDDING_INPUTS:
        raise ApiError(400, f"input has {len(texts)} inputs; at most {MAX_EMBEDDING_INPUTS} are allowed in one request", param="input")
    return texts


def _refuse(path: str, value: Any, allowed: str) -> NoReturn:
    got = "is missing" if value is None else f"is {shown(value)}"
    raise ApiError(400, f"{path} {got}; {allowed}", param=path)
