"""What the answer must be: from `response_format`, `structured_outputs` and `guided_*` to one checked grammar, or a refusal in words. Pure.

The scheduler compiles it again with the model's tokenizer; what passes here can still fail there (its size), and then fails that request only.
"""

from __future__ import annotations

import json
from typing import Any, Final

from llguidance import LLMatcher

from fleet_contract.errors import ApiError
from fleet_contract.openai import GenerationOptions, ResponseFormat
from fleet_runtime.messages import Grammar

MAX_GRAMMAR_CHARS: Final = 128 << 10
MAX_GRAMMAR_CHOICES: Final = 1024
_SHOWN_FAULT: Final = 600


def grammar_of(options: GenerationOptions) -> Grammar | None:
    """Raises ApiError 400, also when two are asked for."""
    found: dict[str, Grammar] = {}
    if options.response_format is not None and options.response_format.type != "text":
        found["response_format"] = _of_response_format(options.response_format)
    if options.guided_json is not None:
        found["guided_json"] = _json_schema(options.guided_json, "guided_json")
    for kind in ("regex", "grammar", "choice"):
        if (value := getattr(options, f"guided_{kind}")) is not None:
            found[f"guided_{kind}"] = _of(kind, value, f"guided_{kind}")
    if (structured := options.structured_outputs) is not None:
        path = "structured_outputs"
        if structured.json_ is not None:
            found[f"{path}.json"] = _json_schema(structured.json_, f"{path}.json")
        if structured.json_object:
            found[f"{path}.json_object"] = _json_schema({"type": "object"}, path)
        for kind in ("regex", "grammar", "choice"):
            if (value := getattr(structured, kind)) is not None:
                found[f"{path}.{kind}"] = _of(kind, value, f"{path}.{kind}")
        if not any(name.startswith(path) for name in found):
            raise ApiError(400, f"{path} asks for nothing; give one of json, json_object, regex, choice, grammar", param=path)
    if len(found) > 1:
        raise ApiError(400, f"give only one of {', '.join(found)}: an answer follows one grammar", param=list(found)[1])
    return next(iter(found.values()), None)


def schema_grammar(schema: Any, path: str) -> Grammar:
    """A JSON schema as grammar. Raises ApiError 400 that names `path`."""
    try:
        text = json.dumps(schema, separators=(",", ":"))
    except RecursionError as e:  # a large body was parsed on a thread, whose stack has more room
        raise ApiError(400, f"{path} cannot be used: it is nested too deeply", code="invalid_grammar", param=path) from e
    _check_size(text, path)
    return _checked(Grammar("json_schema", text), path)


def _of_response_format(format: ResponseFormat) -> Grammar:
    path = "response_format"
    given = {"json_schema": format.json_schema, "regex": format.regex, "grammar": format.grammar, "choice": format.choice}
    for kind, value in given.items():
        if value is not None and kind != format.type:
            raise ApiError(400, f"{path}.{kind} does not go with type {format.type}", param=f"{path}.{kind}")
    if format.type == "json_object":
        return schema_grammar({"type": "object"}, path)
    if given[format.type] is None:
        raise ApiError(400, f"{path}.{format.type} is missing; type {format.type} needs it", param=f"{path}.{format.type}")
    if format.json_schema is not None:
        if format.json_schema.schema_ is None:
            raise ApiError(400, f"{path}.json_schema.schema is missing", param=f"{path}.json_schema.schema")
        return schema_grammar(format.json_schema.schema_, f"{path}.json_schema.schema")
    return _of(format.type, given[format.type], f"{path}.{format.type}")


def _json_schema(value: dict[str, Any] | str | bool, path: str) -> Grammar:
    """A schema as an object or as its JSON text."""
    if isinstance(value, str):
        _check_size(value, path)
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as e:
            raise ApiError(400, f"{path} is not the JSON of a schema: {str(e)[:200]}", param=path) from e
        if not isinstance(value, (dict, bool)):
            raise ApiError(400, f"{path} is not the JSON of a schema: an object is needed", param=path)
    return schema_grammar(value, path)


def _of(kind: str, value: Any, path: str) -> Grammar:
    if kind == "choice":
        if not 0 < len(value) <= MAX_GRAMMAR_CHOICES or not all(value):
            raise ApiError(400, f"{path} must have 1 to {MAX_GRAMMAR_CHOICES} texts, none of them empty", param=path)
        text = json.dumps(value, ensure_ascii=False)
        _check_size(text, path)
        return Grammar("choice", text)
    if not value:
        raise ApiError(400, f"{path} is empty", param=path)
    _check_size(value, path)
    return _checked(Grammar("lark" if kind == "grammar" else kind, value), path)


def _check_size(text: str, path: str) -> None:
    if len(text) > MAX_GRAMMAR_CHARS:
        raise ApiError(400, f"{path} has {len(text)} characters; at most {MAX_GRAMMAR_CHARS} are allowed", code="grammar_too_large", param=path)


def _checked(grammar: Grammar, path: str) -> Grammar:
    """Raises ApiError 400 with the library's own words."""
    try:
        if grammar.kind == "json_schema":
            source = LLMatcher.grammar_from_json_schema(grammar.text)
        elif grammar.kind == "regex":
            source = LLMatcher.grammar_from_regex(grammar.text)
        else:
            source = LLMatcher.grammar_from_lark(grammar.text)
        fault = LLMatcher.validate_grammar(source)
    except (ValueError, TypeError, RuntimeError) as e:
        fault = str(e)
    if fault:
        raise ApiError(400, f"{path} cannot be used: {fault.strip()[:_SHOWN_FAULT]}", code="invalid_grammar", param=path)
    return grammar
