"""A body of OpenAI's Responses API as the chat that decides its prompt, as vLLM and SGLang make it. Pure; loads no pydantic.

Our runtime does not serve that API: the router reads it to find the worker that holds the conversation. What is kept on a server between
requests, hosted tools and items that are no messages or calls of functions are not read: then there is no prompt that we know.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

# Fields of the body that `chat_of` looks at, and those that make a prompt of more than the body.
FIELDS: Final = (
    "input",
    "instructions",
    "tools",
    "tool_choice",
    "reasoning",
    "chat_template_kwargs",
    "previous_response_id",
    "prompt",
    "conversation",
)
_ELSEWHERE: Final = ("previous_response_id", "prompt", "conversation")
_TEXTS: Final = ("input_text", "output_text", "text")


def chat_of(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """A chat body as `chat_inputs` reads it; None where the body does not hold the whole prompt, or in a way that is not read here.

    Raises KeyError, TypeError or AttributeError for what the API does not allow.
    """
    if any(body.get(name) is not None for name in _ELSEWHERE):
        return None
    messages: list[dict[str, Any]] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    given = body["input"]
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    else:
        for item in given:
            if not _add(messages, item):
                return None
        if messages[-1]["role"] == "assistant":
            return None  # whether it is continued hangs on the server
    chat: dict[str, Any] = {"messages": messages}
    if tools := body.get("tools"):
        if any(t.get("type") != "function" for t in tools):
            return None
        chat["tools"] = [{"type": "function", "function": {k: v for k, v in t.items() if k != "type"}} for t in tools]
        chat["tool_choice"] = body.get("tool_choice")
    if (reasoning := body.get("reasoning")) is not None:
        chat["reasoning_effort"] = reasoning.get("effort")
    if (variables := body.get("chat_template_kwargs")) is not None:
        chat["chat_template_kwargs"] = variables
    return chat


def _add(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> bool:
    """One item of the input; False for one that is not read here. Calls join the message of the assistant before them."""
    match item.get("type", "message"):
        case "message":
            content = item["content"]
            if not isinstance(content, str) and not all(part.get("type") in _TEXTS for part in content):
                return False
            parts = content if isinstance(content, str) else [{"type": "text", "text": part["text"]} for part in content]
            messages.append({"role": item["role"], "content": parts})
        case "function_call":
            call = {"id": item["call_id"], "type": "function", "function": {"name": item["name"], "arguments": item["arguments"]}}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(call)
        case "function_call_output" if isinstance(item["output"], str):
            messages.append({"role": "tool", "content": item["output"], "tool_call_id": item["call_id"]})
        case _:
            return False
    return True
