"""A body of Anthropic's Messages API, checked and written as a chat body, which `requests.read_chat` understands. Pure.

What decides the prompt becomes messages and tools as OpenAI's API has them, so the same conversation is the same prompt in both. Whatever
has no meaning here is refused by name. Source: the public API reference and the types of Anthropic's own client.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from fleet_contract.errors import ApiError
from fleet_contract.openai import Items, JsonObject, Tokens, Within
from fleet_runtime.server import validate
from fleet_runtime.server.body import shown
from fleet_runtime.server.parsing.tools import MAX_TOOLS, tool_request

# They say how to bill, cache or label a request, not what to answer: accepted and without effect.
NEUTRAL: Final = frozenset({"metadata", "service_tier", "cache_control"})
MAX_MESSAGES: Final = 100_000
_LEAST_BUDGET: Final = 1024
_TURN_BREAK: Final = "\n\n"  # between two turns of one side that stand one behind the other: they are one turn
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}


class Thinking(BaseModel):
    """`thinking`. The budget is a target in the API; here it is checked, and `max_tokens` is the bound."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: StrictInt | None = None
    display: Literal["summarized", "omitted"] | None = None


class ToolChoice(BaseModel):
    """`tool_choice`."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["auto", "any", "tool", "none"]
    name: StrictStr | None = None
    disable_parallel_tool_use: StrictBool = False


class AnthropicTool(BaseModel):
    """A tool of the client's own. Tools that a server runs have other types: refused."""

    model_config = ConfigDict(extra="forbid")
    name: StrictStr
    input_schema: JsonObject
    description: StrictStr | None = None
    type: Literal["custom"] | None = None
    strict: StrictBool | None = None
    cache_control: JsonObject | None = None
    eager_input_streaming: StrictBool | None = None  # inputs are always streamed as they come
    defer_loading: validate.Off | None = None
    allowed_callers: Items[Literal["direct"]] | None = None


class OutputFormat(BaseModel):
    """`output_config.format`."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)
    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputConfig(BaseModel):
    """`output_config`. An effort other than the default would promise what no model here can do."""

    model_config = ConfigDict(extra="forbid")
    format: OutputFormat | None = None
    effort: Literal["high"] | None = None


class CountRequest(BaseModel):
    """Body of `POST /v1/messages/count_tokens`: what decides the prompt."""

    model_config = ConfigDict(extra="forbid")
    model: StrictStr = Field(min_length=1)
    messages: Items[JsonObject] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: Any = None
    tools: Items[AnthropicTool] = Field(default_factory=list, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    speed: Literal["standard"] | None = None


class MessagesRequest(CountRequest):
    """Body of `POST /v1/messages`."""

    max_tokens: Tokens
    stream: StrictBool = False
    temperature: Annotated[float, Within(0, 1)] | None = None
    top_p: Annotated[float, Within(0, 1, open_low=True)] | None = None
    top_k: Annotated[StrictInt, Field(ge=0, le=2**31 - 1)] | None = None
    stop_sequences: Items[StrictStr] = Field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Asked:
    """A checked body. `chat`: without `max_tokens`, which may be more than the context leaves."""

    chat: dict[str, Any]
    max_tokens: int
    must_think: bool  # the model has to be one that reasons
    hide_thinking: bool  # reasoning is announced but not shown


def messages_request(body: dict[str, Any]) -> Asked:
    """Raises ApiError 400 with the path of the fault, in the API's own names."""
    options = validate.checked(MessagesRequest, _without_neutral(body))
    for i, stop in enumerate(options.stop_sequences):
        if not stop:
            _refuse(f"stop_sequences[{i}]", stop, "a text of at least one character is needed")
    if len(options.stop_sequences) > validate.MAX_STOPS:
        message = f"stop_sequences has {len(options.stop_sequences)} texts; at most {validate.MAX_STOPS} are allowed"
        raise ApiError(400, message, param="stop_sequences")
    thinking = options.thinking
    if thinking is not None and thinking.type == "enabled":
        _check_budget(thinking, options.max_tokens)
    chat = _chat(options)
    chat |= {k: v for k in ("temperature", "top_p", "top_k") if (v := getattr(options, k)) is not None}
    chat |= {"stop": options.stop_sequences, "stream": options.stream}
    if options.output_config is not None and options.output_config.format is not None:
        schema = {"name": "output", "schema": options.output_config.format.schema_}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    enabled = thinking is not None and thinking.type == "enabled"
    return Asked(chat, options.max_tokens, enabled, thinking is not None and thinking.display == "omitted")


def count_request(body: dict[str, Any]) -> dict[str, Any]:
    """The chat body whose prompt is to be counted. Raises ApiError 400. Options that do not touch the prompt are checked all the same."""
    return _chat(validate.checked(CountRequest, _without_neutral(body)))


def _without_neutral(body: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in body.items() if k not in NEUTRAL}


def _check_budget(thinking: Thinking, max_tokens: int) -> None:
    budget = thinking.budget_tokens
    if budget is None or not _LEAST_BUDGET <= budget < max_tokens:
        _refuse("thinking.budget_tokens", budget, f"at least {_LEAST_BUDGET} and less than max_tokens ({max_tokens}) is needed")


def _chat(options: CountRequest) -> dict[str, Any]:
    """Model, messages, tools and template variables of a chat body."""
    messages = _Messages()
    if options.system is not None and (system := _text(options.system, "system")):
        messages.add("system", system)
    for i, message in enumerate(options.messages):
        messages.read(message, f"messages[{i}]")
    messages.end_turn()
    last = messages.out[-1]
    chat: dict[str, Any] = {"model": options.model, "messages": messages.out, **_tools(options)}
    if last["role"] == "assistant":
        path = f"messages[{len(options.messages) - 1}]"
        if last.get("tool_calls"):
            raise ApiError(400, f"{path} ends with tool_use; a tool_result for each is needed behind it", param=path)
        if not last["content"]:
            raise ApiError(400, f"{path}.content has no text; the last message of the assistant is continued, so it needs some", param=path)
        chat["continue_final_message"] = True
    if options.thinking is not None and options.thinking.type != "adaptive":
        chat["chat_template_kwargs"] = {"enable_thinking": options.thinking.type == "enabled"}
    return chat


def _tools(options: CountRequest) -> dict[str, Any]:
    """`tools`, `tool_choice` and `parallel_tool_calls`. Raises ApiError in this API's names for what the other would refuse."""
    out: dict[str, Any] = {}
    if options.tools:
        out["tools"] = [_tool(t) for t in options.tools]
    choice = options.tool_choice
    if choice is not None:
        if (choice.name is not None) != (choice.type == "tool"):
            _refuse("tool_choice.name", choice.name, "the name of a tool is needed with type tool, and with no other")
        if choice.type != "none" and not options.tools:
            raise ApiError(400, f"tool_choice is {choice.type!r}, but there are no tools; give tools, or leave tool_choice out", param="tool_choice")
        out["tool_choice"] = {"type": "function", "function": {"name": choice.name}} if choice.type == "tool" else _CHOICES[choice.type]
        out["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    try:
        tool_request(out)
    except ApiError as e:
        raise ApiError(e.status, _own_names(e.message), code=e.code, param=_own_names(e.param or "tools")) from e
    return out


def _tool(tool: AnthropicTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.input_schema
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _own_names(text: str) -> str:
    return text.replace(".function.parameters", ".input_schema").replace(".function.", ".")


class _Messages:
    """The messages of a chat, made of turns and their blocks."""

    def __init__(self) -> None:
        self.out: list[dict[str, Any]] = []
        self._called: set[str] = set()
        self._turn: list[str] = []  # texts of the last message, while more may join it

    def add(self, role: str, text: str) -> None:
        """A message of text. Neighbours of one side are one turn."""
        last = self.out[-1] if self.out else None
        if last is None or last["role"] != role or last.get("tool_calls"):
            self.end_turn()
            last = {"role": role, "content": ""}
            self.out.append(last)
        elif not self._turn:  # a message that was not made here
            self._turn.append(last["content"])
        self._turn.append(text)

    def end_turn(self) -> None:
        """The last message is whole: its texts are joined once, not at each of them."""
        if self._turn:
            self.out[-1]["content"] = _TURN_BREAK.join(self._turn)
            self._turn = []

    def read(self, message: dict[str, Any], path: str) -> None:
        """Raises ApiError."""
        _only(message, ("role", "content"), path)
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            _refuse(f"{path}.role", role, "user, assistant or system is allowed")
        if isinstance(content, str):
            self.add(role, content)
        elif not isinstance(content, list) or not content:
            _refuse(f"{path}.content", content, "a text, or a list of at least one block, is needed")
        elif role == "assistant":
            self._assistant(content, f"{path}.content")
        elif role == "system":
            self.add("system", _text(content, f"{path}.content"))
        else:
            self._user(content, f"{path}.content")

    def _user(self, blocks: list[Any], path: str) -> None:
        texts: list[str] = []
        for i, block in enumerate(blocks):
            here = f"{path}[{i}]"
            if _kind(block, here) == "tool_result":
                if texts:
                    self.add("user", "".join(texts))
                    texts = []
                result = self._result(block, here)
                self.end_turn()
                self.out.append(result)
            else:
                texts.append(_block_text(block, here, "text and tool_result are allowed in a message of the user"))
        if texts:
            self.add("user", "".join(texts))

    def _result(self, block: dict[str, Any], path: str) -> dict[str, Any]:
        _only(block, ("type", "tool_use_id", "content", "is_error", "cache_control"), path)
        call = _string(block.get("tool_use_id"), f"{path}.tool_use_id")
        if call not in self._called:
            _refuse(f"{path}.tool_use_id", call, "the id of a tool_use in a message before it is needed")
        failed = block.get("is_error")
        if failed is not None and not isinstance(failed, bool):
            _refuse(f"{path}.is_error", failed, "true or false is allowed")
        text = _text(block["content"], f"{path}.content") if block.get("content") is not None else ""
        if failed and not text.lower().startswith("error"):
            text = f"Error: {text}"  # templates know no other way to tell it
        return {"role": "tool", "tool_call_id": call, "content": text}

    def _assistant(self, blocks: list[Any], path: str) -> None:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        for i, block in enumerate(blocks):
            here = f"{path}[{i}]"
            kind = _kind(block, here)
            if kind == "tool_use":
                calls.append(self._call(block, here))
            elif kind == "thinking":
                _only(block, ("type", "thinking", "signature"), here)
                thoughts.append(_string(block.get("thinking"), f"{here}.thinking"))
            else:
                texts.append(_block_text(block, here, "text, thinking and tool_use are allowed in a message of the assistant"))
        if not calls and not thoughts:
            self.add("assistant", "".join(texts))
            return
        message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
        if thoughts:
            message["reasoning_content"] = "".join(thoughts)
        if calls:
            message["tool_calls"] = calls
        self.end_turn()
        self.out.append(message)

    def _call(self, block: dict[str, Any], path: str) -> dict[str, Any]:
        _only(block, ("type", "id", "name", "input", "cache_control", "caller"), path)
        call = _string(block.get("id"), f"{path}.id")
        name = _string(block.get("name"), f"{path}.name")
        if not call or not name:
            _refuse(f"{path}.name" if call else f"{path}.id", "", "a text of at least one character is needed")
        if not isinstance(block.get("input"), dict):
            _refuse(f"{path}.input", block.get("input"), "an object is needed")
        if block.get("caller") not in (None, {"type": "direct"}):
            _refuse(f"{path}.caller", block["caller"], 'only {"type": "direct"} is supported')
        if call in self._called:
            _refuse(f"{path}.id", call, "an earlier tool_use has that id; ids must differ")
        self._called.add(call)
        return {"id": call, "type": "function", "function": {"name": name, "arguments": block["input"]}}


def _text(value: Any, path: str) -> str:
    """A text, or text blocks joined."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        _refuse(path, value, "a text or a list of text blocks is allowed")
    return "".join(_block_text(block, f"{path}[{i}]", "only text is allowed here") for i, block in enumerate(value))


def _kind(block: Any, path: str) -> str:
    if not isinstance(block, dict):
        _refuse(path, block, 'an object {"type": ...} is needed')
    return _string(block.get("type"), f"{path}.type")


def _block_text(block: Any, path: str, allowed: str) -> str:
    kind = _kind(block, path)
    if kind != "text":
        what = "this server takes only text" if kind in ("image", "document") else allowed
        _refuse(f"{path}.type", kind, what)
    _only(block, ("type", "text", "cache_control", "citations"), path)
    if block.get("citations"):
        raise ApiError(400, f"{path}.citations is not an option that this server supports", code="unsupported_option", param=f"{path}.citations")
    return _string(block.get("text"), f"{path}.text")


def _string(value: Any, path: str) -> str:
    if not isinstance(value, str):
        _refuse(path, value, "a text is needed")
    return value


def _only(value: dict[str, Any], allowed: tuple[str, ...], path: str) -> None:
    """Fields that mean nothing here must not be there; clients that send back what a server gave them write some of them as null."""
    for name, given in value.items():
        if name not in allowed and given is not None:
            where = f"{path}.{name[:60]}"
            raise ApiError(400, f"{where} is not an option that this server supports", code="unsupported_option", param=where)


def _refuse(path: str, value: Any, allowed: str) -> NoReturn:
    got = "is missing" if value is None else f"is {shown(value)}"
    raise ApiError(400, f"{path} {got}; {allowed}", param=path)
