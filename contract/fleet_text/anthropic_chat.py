"""A body of Anthropic's Messages API as the chat that decides its prompt, read in one way by router and runtime. Pure; loads no pydantic.

Whatever has no meaning in a message is refused by name; options beside the prompt are the runtime's to check. Source: the public API
reference and the types of Anthropic's own client.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NoReturn

from fleet_contract.errors import ApiError, shown
from fleet_text.chat import OURS, Habits

# Fields of the body that `chat_of` looks at: who keeps a body raw decodes those of them that are there.
FIELDS: Final = ("messages", "system", "tools", "tool_choice", "thinking")
_TURN_BREAK: Final = "\n\n"  # between two turns of one side that stand one behind the other: they are one turn
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}


def chat_of(body: Mapping[str, Any], habits: Habits = OURS) -> dict[str, Any]:
    """Messages, tools and template variables of a chat body, as `chat_inputs` reads them. `null` means the default. Raises ApiError 400.

    Of tools and thinking the types are those that the API has: the runtime checks them before, the router takes what fails for unreadable.
    """
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        _refuse("messages", given, "a list of at least one message is needed")
    messages = _Messages(habits)
    if body.get("system") is not None and (system := _text(body["system"], "system")):
        messages.add("system", system)
    for i, message in enumerate(given):
        messages.read(message, f"messages[{i}]")
    messages.end_turn()
    chat: dict[str, Any] = {"messages": messages.out, **_tools(body)}
    last = messages.out[-1]
    if last["role"] == "assistant":
        path = f"messages[{len(given) - 1}]"
        if last.get("tool_calls"):
            raise ApiError(400, f"{path} ends with tool_use; a tool_result for each is needed behind it", param=path)
        if not last["content"]:
            raise ApiError(400, f"{path}.content has no text; the last message of the assistant is continued, so it needs some", param=path)
        chat["continue_final_message"] = True
    thinking = body.get("thinking")
    if thinking is not None and thinking["type"] != "adaptive":
        chat["chat_template_kwargs"] = {"enable_thinking": thinking["type"] == "enabled"}
    return chat


def _tools(body: Mapping[str, Any]) -> dict[str, Any]:
    """`tools`, `tool_choice` and `parallel_tool_calls`."""
    out: dict[str, Any] = {}
    if body.get("tools"):
        out["tools"] = [_tool(t) for t in body["tools"]]
    choice = body.get("tool_choice")
    if choice is not None:
        named = {"type": "function", "function": {"name": choice.get("name")}}
        out["tool_choice"] = named if choice["type"] == "tool" else _CHOICES[choice["type"]]
        out["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use", False)
    return out


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool["name"]}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    function["parameters"] = tool["input_schema"]
    if tool.get("strict") is not None:
        function["strict"] = tool["strict"]
    return {"type": "function", "function": function}


class _Messages:
    """The messages of a chat, made of turns and their blocks."""

    def __init__(self, habits: Habits) -> None:
        self.out: list[dict[str, Any]] = []
        self._habits = habits
        self._called: set[str] = set()
        self._turn: list[str] = []  # texts of the last message, while more may join it

    def add(self, role: str, text: str) -> None:
        """A message of text. Neighbours of one side are one turn."""
        last = self.out[-1] if self.out else None
        if last is None or last["role"] != role or last.get("tool_calls") or not self._habits.joins_turns:
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
                    self.add("user", self._habits.part_break.join(texts))
                    texts = []
                result = self._result(block, here)
                self.end_turn()
                self.out.append(result)
            else:
                texts.append(_block_text(block, here, "text and tool_result are allowed in a message of the user"))
        if texts:
            self.add("user", self._habits.part_break.join(texts))

    def _result(self, block: dict[str, Any], path: str) -> dict[str, Any]:
        _only(block, ("type", "tool_use_id", "content", "is_error", "cache_control"), path)
        call = _string(block.get("tool_use_id"), f"{path}.tool_use_id")
        if call not in self._called:
            _refuse(f"{path}.tool_use_id", call, "the id of a tool_use in a message before it is needed")
        failed = block.get("is_error")
        if failed is not None and not isinstance(failed, bool):
            _refuse(f"{path}.is_error", failed, "true or false is allowed")
        text = _text(block["content"], f"{path}.content", self._habits.result_break) if block.get("content") is not None else ""
        if failed and self._habits.tells_failures and not text.lower().startswith("error"):
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
        text = self._habits.part_break.join(texts)
        if not calls and not thoughts:
            self.add("assistant", text)
            return
        message: dict[str, Any] = {"role": "assistant", "content": text}
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


def _text(value: Any, path: str, part_break: str = "") -> str:
    """A text, or text blocks joined."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        _refuse(path, value, "a text or a list of text blocks is allowed")
    return part_break.join(_block_text(block, f"{path}[{i}]", "only text is allowed here") for i, block in enumerate(value))


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
