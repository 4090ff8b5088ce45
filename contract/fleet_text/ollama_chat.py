"""Bodies of Ollama's API as the chat that decides their prompt, read in one way by router and runtime. Pure; loads no pydantic.

Whatever has no meaning in a message is refused by name; options beside the prompt are the runtime's to check. Source: Ollama's published
API reference and the types of its own client.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from fleet_contract.errors import ApiError, shown

LATEST: Final = ":latest"  # the tag that clients write or leave out
# Fields of the bodies that the functions below look at: who keeps a body raw decodes those of them that are there.
FIELDS: Final = ("messages", "tools", "think", "prompt", "system")


def chat_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Messages, tools and template variables of a body of `/api/chat`, as `chat_inputs` reads them. `null` means the default. Raises ApiError 400."""
    messages = _Messages()
    for i, message in enumerate(body["messages"]):
        messages.read(message, f"messages[{i}]")
    out: dict[str, Any] = {"messages": messages.out}
    last = messages.out[-1]
    if last["role"] == "assistant" and last["content"] and "tool_calls" not in last:
        out["continue_final_message"] = True  # as Ollama does with such a last message
    if body.get("tools"):
        out["tools"] = body["tools"]
    return out | _variables(body)


def prompt_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """The same of `/api/generate` without `raw`: the prompt is a message, and `system` another one in front of it."""
    system = body.get("system")
    messages = [{"role": "system", "content": system}] if system else []
    return {"messages": [*messages, {"role": "user", "content": body["prompt"]}], **_variables(body)}


def _variables(body: Mapping[str, Any]) -> dict[str, Any]:
    think = body.get("think")
    return {} if think is None else {"chat_template_kwargs": {"enable_thinking": think}}


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


def _refuse(path: str, value: Any, allowed: str) -> NoReturn:
    got = "is missing" if value is None else f"is {shown(value)}"
    raise ApiError(400, f"{path} {got}; {allowed}", param=path)
