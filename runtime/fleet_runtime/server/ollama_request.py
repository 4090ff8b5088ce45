"""Bodies of Ollama's API, checked and written as bodies of OpenAI's, which `requests` understands. Pure.

The same conversation is the same prompt in both. Options that say how to load a model mean nothing to one that is loaded: accepted.
Whatever else cannot be done is refused by name. Source: Ollama's published API reference and the types of its own client.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Annotated, Any, Final, Literal, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from fleet_contract.errors import ApiError
from fleet_contract.openai import MAX_EMBEDDING_INPUTS, Items, JsonObject, Logprobs, Within
from fleet_runtime.server import validate
from fleet_runtime.server.body import shown
from fleet_runtime.server.parsing.tools import tool_request

LATEST: Final = ":latest"
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
    out = _body(request, name, context)
    messages = _Messages()
    for i, message in enumerate(request.messages):
        messages.read(message, f"messages[{i}]")
    out["messages"] = messages.out
    last = messages.out[-1]
    if last["role"] == "assistant" and last["content"] and "tool_calls" not in last:
        out["continue_final_message"] = True  # as Ollama does with such a last message
    if request.tools:
        out["tools"] = request.tools
        tool_request(out)
    return out | _of_chat(request)


def prompt_body(request: OllamaGenerate, name: str, context: int) -> dict[str, Any]:
    """As a chat body: the prompt is a message, and `system` another one in front of it. Raises ApiError 400."""
    messages = [{"role": "system", "content": request.system}] if request.system else []
    out = _body(request, name, context) | {"messages": [*messages, {"role": "user", "content": request.prompt}]}
    return out | _of_chat(request)


def raw_body(request: OllamaGenerate, name: str, context: int) -> dict[str, Any]:
    """As a completion body: no template. Raises ApiError 400."""
    if request.system:
        raise ApiError(400, "raw: true sends the prompt as it is, so system is not allowed with it", param="system")
    if request.think is not None:
        raise ApiError(400, "raw: true sends the prompt as it is, so think is not allowed with it", param="think")
    out = _body(request, name, context) | {"prompt": request.prompt}
    return out | ({"logprobs": request.top_logprobs} if request.logprobs else {})


def _of_chat(request: _Generating) -> dict[str, Any]:
    out: dict[str, Any] = {}
    if request.think is not None and not isinstance(request.think, bool):
        _refuse("think", request.think, "this model knows no levels of thinking: true or false is allowed")
    if request.think is not None:
        out["chat_template_kwargs"] = {"enable_thinking": request.think}
    if request.logprobs:
        out |= {"logprobs": True, "top_logprobs": request.top_logprobs}
    return out


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


class _OpenCalls:
    """Calls that no message has answered yet, the oldest first. Each step takes the same time, however many there are."""

    def __init__(self) -> None:
        self._ids: OrderedDict[int, str] = OrderedDict()
        self._by: dict[tuple[str, str], deque[int]] = {}
        self._count = 0

    def add(self, call_id: str, name: str) -> None:
        """A call was made."""
        self._ids[self._count] = call_id
        for key in (("id", call_id), ("name", name)):
            self._by.setdefault(key, deque()).append(self._count)
        self._count += 1

    def take(self, kind: str, value: str) -> str | None:
        """The id of the oldest call with this id or name, which is answered now; None: there is none."""
        queue = self._by.get((kind, value), ())
        while queue:
            if (call_id := self._ids.pop(queue.popleft(), None)) is not None:
                return call_id
        return None

    def take_oldest(self) -> str | None:
        """The same, of all."""
        return self._ids.popitem(last=False)[1] if self._ids else None


class _Messages:
    """Messages with Ollama's fields. Calls have no ids there: they get some, and a tool's answer that of the call it answers."""

    def __init__(self) -> None:
        self.out: list[dict[str, Any]] = []
        self._unanswered = _OpenCalls()
        self._calls = 0

    def read(self, message: dict[str, Any], path: str) -> None:
        """Raises ApiError."""
        known = ("role", "content", "thinking", "tool_calls", "tool_name", "tool_call_id", "images")
        for name, value in message.items():
            if name not in known and value is not None:
                where = f"{path}.{name[:60]}"
                raise ApiError(400, f"{where} is not an option that this server supports", code="unsupported_option", param=where)
        if message.get("images"):
            raise ApiError(400, f"{path}.images is not supported; this server takes only text", code="unsupported_option", param=f"{path}.images")
        role = message.get("role")
        if role not in ("system", "user", "assistant", "tool"):
            _refuse(f"{path}.role", role, "system, user, assistant or tool is allowed")
        content = message.get("content")
        if content is not None and not isinstance(content, str):
            _refuse(f"{path}.content", content, "a text is needed")
        out: dict[str, Any] = {"role": role, "content": content or ""}
        thinking = message.get("thinking")
        if thinking is not None and not isinstance(thinking, str):
            _refuse(f"{path}.thinking", thinking, "a text is allowed")
        if thinking and role == "assistant":
            out["reasoning_content"] = thinking
        if message.get("tool_calls"):
            if role != "assistant":
                _refuse(f"{path}.tool_calls", message["tool_calls"], "it is only allowed in a message of role assistant")
            out["tool_calls"] = self._called(message["tool_calls"], f"{path}.tool_calls")
        if role == "tool":
            out |= self._answered(message, path)
        self.out.append(out)

    def _called(self, calls: Any, path: str) -> list[dict[str, Any]]:
        if not isinstance(calls, list):
            _refuse(path, calls, "a list of calls is needed")
        out: list[dict[str, Any]] = []
        for i, call in enumerate(calls):
            function = call.get("function") if isinstance(call, dict) else None
            name = function.get("name") if isinstance(function, dict) else None
            if not isinstance(name, str) or not name:
                _refuse(f"{path}[{i}].function.name", name, "the name of the tool that was called is needed")
            arguments = function.get("arguments")  # type: ignore[union-attr] # its name is a text
            if not isinstance(arguments, dict):
                _refuse(f"{path}[{i}].function.arguments", arguments, "an object is needed")
            given = call.get("id")
            made = given if isinstance(given, str) and given else f"call{self._calls:05d}"  # nine characters: some templates want that
            self._calls += 1
            self._unanswered.add(made, name)
            out.append({"id": made, "type": "function", "function": {"name": name, "arguments": arguments}})
        return out

    def _answered(self, message: dict[str, Any], path: str) -> dict[str, Any]:
        """Which call a tool's message answers: by id, else the first open one of that name, else the first open one."""
        name, call = message.get("tool_name"), message.get("tool_call_id")
        for key, value in (("tool_name", name), ("tool_call_id", call)):
            if value is not None and not isinstance(value, str):
                _refuse(f"{path}.{key}", value, "a text is allowed")
        if call:
            self._unanswered.take("id", call)
            found: str | None = call
        else:
            found = (self._unanswered.take("name", name) if name is not None else None) or self._unanswered.take_oldest()
        out: dict[str, Any] = {}
        if found is not None:
            out["tool_call_id"] = found
        if name:
            out["name"] = name
        return out


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
