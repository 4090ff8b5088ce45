"""The tool options of a request: what is refused is named, and the forced schema allows calls and nothing else."""

from typing import Any

import pytest

from fleet_contract.errors import ApiError
from fleet_runtime.server.parsing.tools import Tool, forced_schema, tool_request


def nested(depth: int) -> Any:
    schema: Any = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def tool(name: Any = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": "f"}, "tools"),
        ({"tools": [tool(f"f{i}") for i in range(300)]}, "tools"),
        ({"tools": ["f"]}, "tools[0]"),
        ({"tools": [None]}, "tools[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [tool(), tool("a b")]}, "tools[1].function.name"),
        ({"tools": [tool("")]}, "tools[0].function.name"),
        ({"tools": [tool("f\n")]}, "tools[0].function.name"),
        ({"tools": [tool("é")]}, "tools[0].function.name"),
        ({"tools": [tool("x" * 65)]}, "tools[0].function.name"),
        ({"tools": [tool(5)]}, "tools[0].function.name"),
        ({"tools": [tool(), tool()]}, "tools[1].function.name"),
        ({"tools": [tool(description=5)]}, "tools[0].function.description"),
        ({"tools": [tool(strict="yes")]}, "tools[0].function.strict"),
        ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [tool(parameters={"type": "string"})]}, "tools[0].function.parameters.type"),
        ({"tools": [tool(parameters={"properties": []})]}, "tools[0].function.parameters.properties"),
        ({"tools": [tool(parameters={"properties": {"a": 5}})]}, "tools[0].function.parameters.properties.a"),
        ({"tools": [tool(parameters={"required": "a"})]}, "tools[0].function.parameters.required"),
        ({"tools": [tool(parameters={"properties": {"a": nested(900)}})]}, "tools[0].function.parameters"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": "any", "tools": [tool()]}, "tool_choice"),
        ({"tool_choice": 5, "tools": [tool()]}, "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": [tool()]}, "tool_choice"),
        ({"tool_choice": {"type": "custom", "function": {"name": "f"}}, "tools": [tool()]}, "tool_choice"),
        ({"tool_choice": NAMED, "tools": [tool("g")]}, "tool_choice.function.name"),
        ({"tool_choice": NAMED}, "tool_choice.function.name"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ],
)
def test_a_wrong_option_is_refused_with_its_path(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as e:
        tool_request(body)
    assert e.value.status == 400 and e.value.param == param and param in e.value.message and len(e.value.message) < 400


@pytest.mark.parametrize(
    ("body", "choice", "active", "forced"),
    [
        ({}, "none", False, False),
        ({"tools": None, "tool_choice": None, "parallel_tool_calls": None}, "none", False, False),
        ({"tools": [], "tool_choice": "none"}, "none", False, False),
        ({"tools": [tool(parameters=None, description=None, strict=None)]}, "auto", True, False),
        ({"tools": [tool()], "tool_choice": "none"}, "none", False, False),
        ({"tools": [tool()], "tool_choice": "required"}, "required", True, True),
        ({"tools": [tool()], "tool_choice": NAMED}, "named", True, True),
    ],
)
def test_null_is_the_default_and_the_choice_says_what_may_come(body: dict[str, Any], choice: str, active: bool, forced: bool) -> None:
    asked = tool_request(body)
    assert (asked.choice, asked.active, asked.forced, asked.parallel) == (choice, active, forced, True)


def test_a_required_call_is_a_list_of_calls_of_the_tools() -> None:
    point = {"properties": {"p": {"$ref": "#/$defs/P"}, "$ref": {"type": "string"}, "self": {"$ref": "#"}}, "$defs": {"P": {"type": "number"}}}
    point["properties"]["d"] = {"default": {"$ref": "#/x"}, "enum": [{"$ref": "#/x"}]}
    tools = (Tool("f", point), Tool("g"))
    schema = forced_schema(tools, "required")
    assert schema["type"] == "array" and schema["minItems"] == 1 and "maxItems" not in schema
    names = [branch["properties"]["name"]["const"] for branch in schema["items"]["anyOf"]]
    assert names == ["f", "g"]
    moved = schema["$defs"]["f"]
    assert moved["type"] == "object"
    assert moved["properties"]["p"] == {"$ref": "#/$defs/f/$defs/P"} and moved["properties"]["self"] == {"$ref": "#/$defs/f"}
    assert moved["properties"]["$ref"] == {"type": "string"}
    assert moved["properties"]["d"] == {"default": {"$ref": "#/x"}, "enum": [{"$ref": "#/x"}]}
    assert schema["$defs"]["g"] == {"type": "object", "properties": {}, "additionalProperties": False}
    assert forced_schema(tools, "required", parallel=False)["maxItems"] == 1
    assert forced_schema(tools[:1], "required")["items"]["properties"]["name"] == {"const": "f"}


def test_a_named_call_is_the_functions_arguments() -> None:
    assert forced_schema((Tool("g"), Tool("f", {"properties": {"a": {}}})), "named", named="f") == {"type": "object", "properties": {"a": {}}}
