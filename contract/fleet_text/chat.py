"""What of a chat request decides its prompt, read in one way by router and runtime: both call `chat_inputs` with the body's JSON.

Loads no pydantic. Reads leniently what OpenAI's clients send; the runtime checks a request's options before, in words of its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

# Fields of the body that `chat_inputs` looks at: who keeps a body raw decodes those of them that are there.
CHAT_FIELDS: Final = (
    "messages", "tools", "tool_choice", "add_generation_prompt", "continue_final_message", "chat_template_kwargs", "reasoning_effort",
)  # fmt: skip
# What a template sees of a message; more that a client sends is left out. `reasoning` is another name of `reasoning_content`.
_MESSAGE_FIELDS: Final = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
# Variables of a template that `chat_template_kwargs` may not set: they are ours, or have options of their own.
RESERVED_VARIABLES: Final = frozenset((
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize",
    "bos_token", "eos_token", "unk_token", "pad_token", "raise_exception", "strftime_now",
))  # fmt: skip


_NO_VARIABLES: Final[Mapping[str, Any]] = {}


class PromptError(ValueError):
    """The messages cannot be rendered by this model's template: the user's fault, with the reason. `param` is the path of the fault."""

    def __init__(self, message: str, param: str = "messages") -> None:
        super().__init__(message)
        self.param = param


class ChatInputs:
    """Everything that a chat's prompt depends on, besides the model's files and the date."""

    def __init__(
        self, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None = None, continue_final: bool = False, add_generation_prompt: bool = True,
        variables: Mapping[str, Any] = _NO_VARIABLES,
    ) -> None:  # fmt: skip
        self.messages = messages
        self.tools = tools
        self.continue_final = continue_final  # the last message is left open; then there is no generation prompt
        self.add_generation_prompt = add_generation_prompt
        self.variables = variables  # `chat_template_kwargs`

    @property
    def continued(self) -> str | None:
        """The text that the answer continues."""
        return str(self.messages[-1]["content"]) if self.continue_final else None


@dataclass(frozen=True, slots=True)
class Habits:
    """What servers make differently of the same body. The default is how our runtime reads it."""

    part_break: str = ""  # between the text parts of a message, where the template takes one text
    joins_turns: bool = True  # Anthropic's: neighbours of one side are one turn
    result_break: str = ""  # Anthropic's: between the text parts of a tool's result
    tells_failures: bool = True  # Anthropic's: a failed tool's result says so
    keeps_tools: bool = False  # in the prompt, with `tool_choice: none`
    fills_content: bool = False  # a message of calls alone has an empty text; else it has none
    effort_variables: tuple[str, ...] = ()  # of the template, that `reasoning_effort` sets: the effort, then whether there is any
    unreadable: tuple[str, ...] = ()  # fields that change the prompt in ways that are not known here


OURS: Final = Habits()


def chat_inputs(body: Mapping[str, Any], habits: Habits = OURS) -> ChatInputs:
    """The inputs of a chat body, or of those of its CHAT_FIELDS that are there. `null` means the default.

    Raises PromptError with the path of what cannot be rendered. `tool_choice: none` leaves the tools out of the prompt.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise PromptError("messages is missing; a list of at least one message is needed")
    plain = [_message(m, i, habits) for i, m in enumerate(messages)]
    if len(body) == 1:
        return ChatInputs(plain)
    continue_final = _flag(body, "continue_final_message", default=False)
    generation = _flag(body, "add_generation_prompt", default=not continue_final)
    if continue_final:
        _check_continued(plain, generation)
    variables = {**_effort(body, habits), **_variables(body.get("chat_template_kwargs"))}
    return ChatInputs(plain, _tools(body, habits), continue_final, generation, variables)


def normalised(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Messages as templates see them. Raises PromptError."""
    return [_message(m, i) for i, m in enumerate(messages)]


def _message(message: Any, index: int, habits: Habits = OURS) -> Mapping[str, Any]:
    """Text content, no nulls, calls' arguments as objects."""
    if type(message) is dict and len(message) == 2 and type(message.get("role")) is str and type(message.get("content")) is str:
        return message  # most are so
    path = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise PromptError(f"{path} is no object", path)
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise PromptError(f"{path}.role is no text", f"{path}.role")
    out = {k: v for k in _MESSAGE_FIELDS if (v := message.get(k)) is not None}
    if "reasoning_content" not in out and isinstance(reasoning := message.get("reasoning"), str):
        out["reasoning_content"] = reasoning
    if isinstance(content, list):
        out["content"] = habits.part_break.join([_part(p, f"{path}.content[{i}]") for i, p in enumerate(content)])
    elif content is not None and not isinstance(content, str):
        raise PromptError(f"{path}.content is neither a text nor a list of parts", f"{path}.content")
    calls = out.pop("tool_calls", None)
    if calls is not None and not isinstance(calls, list):
        raise PromptError(f"{path}.tool_calls is no list", f"{path}.tool_calls")
    if calls:
        out["tool_calls"] = [_call(c, f"{path}.tool_calls[{i}]") for i, c in enumerate(calls)]
        if habits.fills_content:
            out.setdefault("content", "")
    elif content is None:
        if role != "assistant":
            raise PromptError(f"{path}.content is missing", f"{path}.content")
        out["content"] = ""
    return out


def _part(part: Any, path: str) -> str:
    if not isinstance(part, Mapping):
        raise PromptError(f"{path} is no object", path)
    if part.get("type", "text") != "text":
        raise PromptError(f"{path}.type is {str(part['type'])[:40]!r}; this model takes only text", f"{path}.type")
    text = part.get("text")
    if not isinstance(text, str):
        raise PromptError(f"{path}.text is no text", f"{path}.text")
    return text


def _call(call: Any, path: str) -> dict[str, Any]:
    """A call of an earlier answer. Clients send arguments as JSON text, templates want the object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise PromptError(f"{path}.function.name is missing", f"{path}.function.name")
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        arguments = {}
    elif isinstance(arguments, str):
        arguments = _object(arguments)
    return {**call, "type": call.get("type") or "function", "function": {**function, "arguments": arguments}}


def _object(text: str) -> Any:
    """The object of a JSON text; the text itself when it holds none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _flag(body: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise PromptError(f"{name} is neither true nor false", name)
    return value


def _check_continued(messages: Sequence[Mapping[str, Any]], generation: bool) -> None:
    if generation:
        raise PromptError(
            "continue_final_message and add_generation_prompt exclude each other: an answer continues the last message or begins a new one",
            "add_generation_prompt",
        )
    last, path = messages[-1], f"messages[{len(messages) - 1}]"
    if last["role"] != "assistant":
        raise PromptError(f"{path}.role is {last['role'][:40]!r}; continue_final_message continues a message of the assistant", f"{path}.role")
    if not last.get("content") or "tool_calls" in last:
        raise PromptError(f"{path} has no text that ends it; continue_final_message needs one to continue", f"{path}.content")


def _tools(body: Mapping[str, Any], habits: Habits) -> list[Any] | None:
    tools = body.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(t, Mapping) for t in tools)):
        raise PromptError("tools is no list of objects", "tools")
    return tools if tools and (habits.keeps_tools or body.get("tool_choice") != "none") else None


def _effort(body: Mapping[str, Any], habits: Habits) -> Mapping[str, Any]:
    """Variables of a template that a chat's `reasoning_effort` sets."""
    effort = body.get("reasoning_effort")
    if effort is None or not habits.effort_variables:
        return {}
    return dict(zip(habits.effort_variables, (effort, effort != "none"), strict=False))


def _variables(value: Any) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise PromptError("chat_template_kwargs is no object", "chat_template_kwargs")
    for name in value:
        if name in RESERVED_VARIABLES:
            path = f"chat_template_kwargs.{name}"
            raise PromptError(f"{path} cannot be set: the server sets it", path)
    return value
