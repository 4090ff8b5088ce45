"""A body of Anthropic's Messages API, checked and written as a chat body, which `requests.read_chat` understands. Pure.

What decides the prompt becomes messages and tools as OpenAI's API has them (`fleet_text.anthropic_chat`), so the same conversation is the same
prompt in both. Whatever has no meaning here is refused by name. Source: the public API reference and the types of Anthropic's own client.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from fleet_contract.errors import ApiError, shown
from fleet_contract.openai import Items, JsonObject, Tokens, Within
from fleet_runtime.server import validate
from fleet_runtime.server.parsing.tools import MAX_TOOLS, tool_request
from fleet_text.anthropic_chat import chat_of

# They say how to bill, cache or label a request, not what to answer: accepted and without effect.
NEUTRAL: Final = frozenset({"metadata", "service_tier", "cache_control"})
MAX_MESSAGES: Final = 100_000
_LEAST_BUDGET: Final = 1024


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
    chat = _chat(options, body)
    chat |= {k: v for k in ("temperature", "top_p", "top_k") if (v := getattr(options, k)) is not None}
    chat |= {"stop": options.stop_sequences, "stream": options.stream}
    if options.output_config is not None and options.output_config.format is not None:
        schema = {"name": "output", "schema": options.output_config.format.schema_}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    enabled = thinking is not None and thinking.type == "enabled"
    return Asked(chat, options.max_tokens, enabled, thinking is not None and thinking.display == "omitted")


def count_request(body: dict[str, Any]) -> dict[str, Any]:
    """The chat body whose prompt is to be counted. Raises ApiError 400. Options that do not touch the prompt are checked all the same."""
    return _chat(validate.checked(CountRequest, _without_neutral(body)), body)


def _without_neutral(body: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in body.items() if k not in NEUTRAL}


def _check_budget(thinking: Thinking, max_tokens: int) -> None:
    budget = thinking.budget_tokens
    if budget is None or not _LEAST_BUDGET <= budget < max_tokens:
        _refuse("thinking.budget_tokens", budget, f"at least {_LEAST_BUDGET} and less than max_tokens ({max_tokens}) is needed")


def _chat(options: CountRequest, body: dict[str, Any]) -> dict[str, Any]:
    """Model, messages, tools and template variables of a chat body. Raises ApiError."""
    choice = options.tool_choice
    if choice is not None:
        if (choice.name is not None) != (choice.type == "tool"):
            _refuse("tool_choice.name", choice.name, "the name of a tool is needed with type tool, and with no other")
        if choice.type != "none" and not options.tools:
            raise ApiError(400, f"tool_choice is {choice.type!r}, but there are no tools; give tools, or leave tool_choice out", param="tool_choice")
    chat = {"model": options.model, **chat_of(body)}
    try:
        tool_request(chat)
    except ApiError as e:  # in this API's names
        raise ApiError(e.status, _own_names(e.message), code=e.code, param=_own_names(e.param or "tools")) from e
    return chat


def _own_names(text: str) -> str:
    return text.replace(".function.parameters", ".input_schema").replace(".function.", ".")


def _refuse(path: str, value: Any, allowed: str) -> NoReturn:
    got = "is missing" if value is None else f"is {shown(value)}"
    raise ApiError(400, f"{path} {got}; {allowed}", param=path)
