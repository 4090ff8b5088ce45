"""The tool options of a request: checked, and the JSON schema that forces calls. Called by `requests` and the adapters. Pure.

Types are those of OpenAI's chat API. `null` means the default, as everywhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from fleet_contract.errors import ApiError

NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")
MAX_TOOLS: Final = 256
MAX_SCHEMA_DEPTH: Final = 100
CHOICES: Final = ("none", "auto", "required")
_NO_PARAMETERS: Final[dict[str, Any]] = {"type": "object", "properties": {}, "additionalProperties": False}
# Keywords whose value holds subschemas by name; whose value is data, not a schema. (JSON Schema 2020-12, and draft 7's `definitions`.)
_NAMED: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_DATA: Final = ("const", "enum", "default", "examples")


@dataclass(frozen=True, slots=True)
class Tool:
    """One function. `parameters` is None when it takes none."""

    name: str
    parameters: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """The tools of one request."""

    tools: tuple[Tool, ...] = ()
    choice: str = "none"  # none, auto, required or named
    named: str = ""  # the function that has to be called
    parallel: bool = True

    @property
    def active(self) -> bool:
        """The answer may hold calls."""
        return bool(self.tools) and self.choice != "none"

    @property
    def forced(self) -> bool:
        """The answer is nothing but calls: `forced_schema` is its grammar."""
        return self.choice in ("required", "named")


def tool_request(body: Mapping[str, Any]) -> ToolRequest:
    """The checked `tools`, `tool_choice` and `parallel_tool_calls` of a body. Raises ApiError 400 with the path."""
    tools = _tools(body.get("tools"))
    choice, named = _choice(body.get("tool_choice"), tools)
    parallel = body.get("parallel_tool_calls")
    if parallel is not None and not isinstance(parallel, bool):
        raise _bad("parallel_tool_calls", parallel, "true or false is allowed")
    return ToolRequest(tools, choice, named, parallel is not False)


def forced_schema(tools: tuple[Tool, ...], choice: str, *, named: str = "", parallel: bool = True) -> dict[str, Any]:
    """The JSON schema of an answer that has to be calls; its parser is `ForcedListParser` or `ForcedCallParser`.

    For `named` it is the function's parameters. For `required` a list of `{"name": ..., "parameters": {...}}`, at least one, without
    `parallel` exactly one. Parameter schemas keep their own `$defs`: references are turned to where they now are.
    """
    if choice == "named":
        return next(_parameters(t) for t in tools if t.name == named)
    assert choice == "required" and tools
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": t.name}, "parameters": {"$ref": f"#/$defs/{t.name}"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for t in tools
    ]
    schema: dict[str, Any] = {"type": "array", "items": calls[0] if len(calls) == 1 else {"anyOf": calls}, "minItems": 1}
    if not parallel:
        schema["maxItems"] = 1
    schema["$defs"] = {t.name: _moved(_parameters(t), f"#/$defs/{t.name}") for t in tools}
    return schema


def _parameters(tool: Tool) -> dict[str, Any]:
    return dict(_NO_PARAMETERS) if tool.parameters is None else {"type": "object", **tool.parameters}


def _moved(schema: Any, root: str) -> Any:
    """A schema whose references to its own root (`#`, `#/...`) point to where it stands now."""
    if isinstance(schema, list):
        return [_moved(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    out: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            out[key] = root + value[1:]
        elif key in _NAMED and isinstance(value, dict):
            out[key] = {name: _moved(item, root) for name, item in value.items()}
        elif key in _DATA:
            out[key] = value
        else:
            out[key] = _moved(value, root)
    return out


def _tools(value: Any) -> tuple[Tool, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise _bad("tools", value, "a list of tools is allowed")
    if len(value) > MAX_TOOLS:
        raise ApiError(400, f"tools has {len(value)} entries; at most {MAX_TOOLS} are allowed", param="tools")
    found: dict[str, Tool] = {}
    for i, entry in enumerate(value):
        tool = _tool(entry, f"tools[{i}]")
        if tool.name in found:
            path = f"tools[{i}].function.name"
            raise ApiError(400, f"{path} is {tool.name!r}, which an earlier tool has; names must differ", param=path)
        found[tool.name] = tool
    return tuple(found.values())


def _tool(entry: Any, path: str) -> Tool:
    if not isinstance(entry, dict):
        raise _bad(path, entry, 'an object {"type": "function", "function": {"name": ...}} is needed')
    if entry.get("type", "function") != "function":
        raise _bad(f"{path}.type", entry["type"], "only 'function' is supported")
    path += ".function"
    function = entry.get("function")
    if not isinstance(function, dict):
        raise _bad(path, function, "an object with a name is needed")
    name = function.get("name")
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        raise _bad(f"{path}.name", name, "1 to 64 of the characters a-z, A-Z, 0-9, _ and - are needed")
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise _bad(f"{path}.description", description, "a text is allowed")
    if function.get("strict") not in (None, True, False):
        raise _bad(f"{path}.strict", function["strict"], "true or false is allowed")
    parameters = function.get("parameters")
    if parameters is not None:
        _check_parameters(parameters, f"{path}.parameters")
    return Tool(name, parameters)


def _check_parameters(schema: Any, path: str) -> None:
    """A call's arguments are an object, so their schema has to be one of an object."""
    if not isinstance(schema, dict):
        raise _bad(path, schema, 'a JSON schema object is needed, such as {"type": "object", "properties": {...}}')
    if schema.get("type", "object") != "object":
        raise _bad(f"{path}.type", schema["type"], "only 'object' is allowed: arguments are an object")
    if not _is_shallow(schema):
        raise ApiError(400, f"{path} is nested deeper than {MAX_SCHEMA_DEPTH} levels; that is too deep", param=path)
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):
        raise _bad(f"{path}.properties", properties, "an object of schemas by name is needed")
    for name, item in properties.items():
        if not isinstance(item, (dict, bool)):
            raise _bad(f"{path}.properties.{name[:60]}", item, "a JSON schema is needed")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(r, str) for r in required):
        raise _bad(f"{path}.required", required, "a list of names is needed")


def _is_shallow(schema: Any) -> bool:
    """Level by level, not by recursion."""
    level = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        level = [child for item in level for child in (item.values() if isinstance(item, dict) else item) if isinstance(child, (dict, list))]
        if not level:
            return True
    return False


def _choice(value: Any, tools: tuple[Tool, ...]) -> tuple[str, str]:
    """The kind of choice, and the named function."""
    if value is None:
        return ("auto" if tools else "none"), ""
    if isinstance(value, str) and value in CHOICES:
        if value != "none" and not tools:
            raise ApiError(400, f"tool_choice is {value!r}, but there are no tools; give tools, or leave tool_choice out", param="tool_choice")
        return value, ""
    function = value.get("function") if isinstance(value, dict) and value.get("type", "function") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        allowed = 'none, auto, required or {"type": "function", "function": {"name": ...}} is allowed'
        raise _bad("tool_choice", value, allowed)
    if name not in {t.name for t in tools}:
        there = ", ".join(t.name for t in tools[:20]) or "none"
        raise ApiError(
            400, f"tool_choice.function.name is {name[:64]!r}, which is not among the tools; there is: {there}", param="tool_choice.function.name"
        )
    return "named", name


def _bad(path: str, value: Any, allowed: str) -> ApiError:
    if value is None:
        got = "is missing"
    elif isinstance(value, (dict, list)):
        got = "is an object" if isinstance(value, dict) else "is a list"
    else:
        text = json.dumps(value)
        got = f"is {text if len(text) <= 80 else text[:79] + '…'}"
    return ApiError(400, f"{path} {got}; {allowed}", param=path)
