"""Bodies whose prompt the router has to read as the engine does: the tokens it counts, and the keys it looks for, are those of the engine.

Each has some hundred tokens of its own, so that a second request finds whole blocks of it in the cache.
"""

from __future__ import annotations

from typing import Any, Final

WORDS: Final = " ".join(f"alpha{n}" for n in range(120))
TOOLS: Final = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": f"the weather of a city {WORDS}",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CALL: Final = {"id": "call-1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Bergen"}'}}
CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
Bodies = dict[str, tuple[str, dict[str, Any]]]


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def texts(*parts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": part} for part in parts]


PLAIN: Final[Bodies] = {
    "chat": (CHAT, {"messages": [user(f"one {WORDS}")]}),
    "chat with another cache_salt": (CHAT, {"messages": [user(f"one {WORDS}")], "cache_salt": "pepper"}),
    "chat with a system message": (CHAT, {"messages": [{"role": "system", "content": f"two {WORDS}"}, user("x")]}),
    "chat of text parts": (CHAT, {"messages": [user(texts("three", WORDS))]}),
    "chat with special tokens as text": (CHAT, {"messages": [user(f"four <|im_end|>\n<|im_start|>system {WORDS}")]}),
    "chat that continues": (
        CHAT,
        {"messages": [user(f"five {WORDS}"), {"role": "assistant", "content": "So"}], "continue_final_message": True, "add_generation_prompt": False},
    ),
    "chat without a generation prompt": (CHAT, {"messages": [user(f"six {WORDS}")], "add_generation_prompt": False}),
    "chat with calls and no content": (
        CHAT,
        {
            "messages": [
                user(f"seven {WORDS}"),
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "call-1", "content": "rain"},
            ]
        },
    ),
    "chat with all of unicode": (CHAT, {"messages": [user(f"  \u00fcn\u00efcod\u00e9 \u6f22\u5b57 \U0001f600\n\n{WORDS}  ")]}),
    "completion": (COMPLETIONS, {"prompt": f"nine {WORDS}"}),
    "completion of ids": (COMPLETIONS, {"prompt": list(range(1000, 1300))}),
    "completion of whole blocks": (COMPLETIONS, {"prompt": list(range(2000, 2256))}),
    "completion that differs in a block": (COMPLETIONS, {"prompt": [*range(2000, 2200), *range(5000, 5100)]}),
    "completion with echo": (COMPLETIONS, {"prompt": f"ten {WORDS}", "echo": True}),
    "completion, a list of one": (COMPLETIONS, {"prompt": [f"eleven {WORDS}"]}),
    "messages": (MESSAGES, {"messages": [user(f"twelve {WORDS}")]}),
    "messages with a system of blocks": (MESSAGES, {"system": texts("thirteen", WORDS), "messages": [user("x")]}),
    "messages of blocks": (MESSAGES, {"messages": [user(texts("fourteen", WORDS, "x"))]}),
    "messages with two turns of a side": (MESSAGES, {"messages": [user(f"fifteen {WORDS}"), user("and more")]}),
    "responses": (RESPONSES, {"input": f"sixteen {WORDS}"}),
    "responses of items": (
        RESPONSES,
        {"instructions": "Be brief", "input": [{"role": "user", "content": [{"type": "input_text", "text": f"seventeen {WORDS}"}]}]},
    ),
}
# The same engine with a template that knows tools and goes through parts itself.
TOOLED: Final[Bodies] = {
    "tools": (CHAT, {"messages": [user("one")], "tools": TOOLS}),
    "tools that may not be called": (CHAT, {"messages": [user("two")], "tools": TOOLS, "tool_choice": "none"}),
    "parts": (CHAT, {"messages": [user(texts("three", WORDS, "x"))]}),
    "reasoning effort": (CHAT, {"messages": [user(f"four {WORDS}")], "reasoning_effort": "low"}),
    "messages with tools": (
        MESSAGES,
        {
            "messages": [user("five")],
            "tools": [{"name": "get_weather", "description": f"of a city {WORDS}", "input_schema": {"type": "object", "properties": {}}}],
        },
    ),
    "messages with calls": (
        MESSAGES,
        {
            "messages": [
                user(f"six {WORDS}"),
                {"role": "assistant", "content": [*texts("ok"), {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "x"}}]},
                user([{"type": "tool_result", "tool_use_id": "t1", "content": texts("rain", "and wind"), "is_error": True}]),
            ]
        },
    ),
    "responses with tools and calls": (
        RESPONSES,
        {
            "input": [
                {"role": "user", "content": f"seven {WORDS}"},
                {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "x"}'},
                {"type": "function_call_output", "call_id": "c1", "output": "rain"},
            ],
            "tools": [{"type": "function", "name": "get_weather", "description": "of a city", "parameters": {"type": "object", "properties": {}}}],
        },
    ),
}
