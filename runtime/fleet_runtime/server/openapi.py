"""`GET /openapi.json`: what the server takes, made of the models that check it. Pure.

Where it says more than the models: `null` is the default of every option, options without effect are named, an unknown option is refused.
"""

from __future__ import annotations

from typing import Any, Final

from pydantic import BaseModel

from fleet_contract.openai import (
    NEUTRAL_OPTIONS,
    NEUTRAL_VALUES,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    GenerationOptions,
    TokenizeRequest,
)
from fleet_runtime.server.anthropic_request import NEUTRAL, CountRequest, MessagesRequest
from fleet_runtime.server.control import CONTROL_CALLS
from fleet_runtime.server.ollama_request import OllamaChat, OllamaEmbed, OllamaEmbeddings, OllamaGenerate, OllamaShow
from fleet_runtime.server.ollama_shape import LINES
from fleet_text.ollama_chat import LATEST

EVENTS: Final = "text/event-stream"

_BODIES: Final[dict[str, tuple[type[BaseModel], str]]] = {
    "/v1/chat/completions": (ChatRequest, "Answer a chat"),
    "/v1/completions": (CompletionRequest, "Continue prompts"),
    "/v1/embeddings": (EmbeddingRequest, "Vectors of inputs"),
    "/tokenize": (TokenizeRequest, "Token ids of a prompt or chat"),
    "/detokenize": (DetokenizeRequest, "Text of token ids"),
}
_DIALECTS: Final[dict[str, tuple[type[BaseModel], str, str, str]]] = {  # body, summary, schema of an error, content type of a stream
    "/v1/messages": (MessagesRequest, "Answer a chat, as Anthropic's API", "AnthropicError", EVENTS),
    "/v1/messages/count_tokens": (CountRequest, "Tokens of such a chat", "AnthropicError", ""),
    "/api/chat": (OllamaChat, "Answer a chat, as Ollama's API", "OllamaError", LINES),
    "/api/generate": (OllamaGenerate, "Answer a prompt, as Ollama's API", "OllamaError", LINES),
    "/api/embed": (OllamaEmbed, "Vectors of inputs, as Ollama's API", "OllamaError", ""),
    "/api/embeddings": (OllamaEmbeddings, "The vector of a prompt, as Ollama's older API", "OllamaError", ""),
    "/api/show": (OllamaShow, "What the model is, as Ollama's API", "OllamaError", ""),
}
_GETS: Final = {
    "/v1/models": "The served names",
    "/api/version": "The version, as Ollama's API",
    "/api/tags": "The served names, as Ollama's API",
    "/api/ps": "What is loaded, as Ollama's API",
    "/livez": "Whether the worker lives",
    "/readyz": "Whether it takes requests",
    "/health": "The same as /readyz",
    "/metrics": "Counts, in Prometheus text format",
    "/openapi.json": "This document",
}
_INTERNAL_GETS: Final = {
    "/worker": "The worker's record",
    "/tokenizer": "Zip of its tokenizer files",
    "/get_load": "What it carries now",
    "/internals": "State of the scheduler",
}
_ERROR: Final = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "code", "param", "request_id"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "code": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "request_id": {"type": "string"},
            },
        }
    },
}


_TEXT: Final = {"type": "string"}
_ERRORS: Final[dict[str, Any]] = {
    "Error": _ERROR,
    "AnthropicError": {
        "type": "object",
        "required": ["type", "error", "request_id"],
        "properties": {
            "type": {"const": "error"},
            "error": {"type": "object", "required": ["type", "message"], "properties": {"type": _TEXT, "message": _TEXT}},
            "request_id": _TEXT,
        },
    },
    "OllamaError": {"type": "object", "required": ["error"], "properties": {"error": _TEXT}},
}


def openapi(served_names: list[str], *, internal: bool) -> dict[str, Any]:
    """The document of one port."""
    schemas: dict[str, Any] = dict(_ERRORS)
    paths: dict[str, Any] = {}
    for path, (kind, summary) in _BODIES.items():
        paths[path] = {"post": _operation(summary, _schema(kind, schemas), stream=EVENTS if issubclass(kind, GenerationOptions) else "")}
    for path, (kind, summary, error, stream) in _DIALECTS.items():
        paths[path] = {"post": _operation(summary, _schema(kind, schemas), stream=stream, error=error)}
    for path, summary in (_GETS | _INTERNAL_GETS if internal else _GETS).items():
        paths[path] = {"get": _operation(summary)}
    paths["/v1/models/{name}"] = {
        "get": _operation("One served name; it may hold slashes") | {"parameters": [_parameter("name")]},
    }
    if internal:
        for path, (op, kind) in CONTROL_CALLS.items():
            paths[path] = {"post": _operation(op.replace("_", " "), _schema(kind, schemas), needs_body=False)}
        rid = {"type": "object", "required": ["rid"], "properties": {"rid": {"type": "string", "minLength": 1}}}
        paths["/abort_request"] = {"post": _operation("End the request of exactly this id", rid)}
    for title, schema in schemas.items():
        if "model" in schema.get("properties", {}):
            names = [*served_names, *(name + LATEST for name in served_names)] if title.startswith("Ollama") else served_names
            schema["properties"]["model"] = {"enum": names if "model" in schema.get("required", ()) else [*names, None]}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Radixfleet runtime", "version": "1"},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _schema(kind: type[BaseModel], schemas: dict[str, Any]) -> dict[str, Any]:
    """A reference to the model's schema, which is put into `schemas` with those that it needs."""
    made = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(made.pop("$defs", {}))
    properties, required = made.get("properties", {}), made.get("required", [])
    if kind.model_config.get("extra") == "allow":
        properties |= {name: {"description": "without effect"} for name in NEUTRAL_OPTIONS}
        properties |= {name: {"enum": list(values)} for name, values in NEUTRAL_VALUES.items() if name not in properties}
        made["additionalProperties"] = False
    elif issubclass(kind, CountRequest):
        properties |= {name: {"description": "without effect"} for name in NEUTRAL}
    made["properties"] = {name: _nullable(schema) if name not in required else schema for name, schema in properties.items()}
    schemas[kind.__name__] = made
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    """`null` is the default."""
    if {"type": "null"} in schema.get("anyOf", ()) or schema.keys() <= {"description"} or None in schema.get("enum", ()):
        return schema
    default = {"default": schema["default"]} if "default" in schema else {}
    return {"anyOf": [{k: v for k, v in schema.items() if k not in ("default", "title")}, {"type": "null"}], **default}


def _operation(
    summary: str, body: dict[str, Any] | None = None, *, stream: str = "", error: str = "Error", needs_body: bool = True
) -> dict[str, Any]:
    """Args: stream: content type of a streamed answer. error: name of an error's schema."""
    content: dict[str, Any] = {"application/json": {}} | ({stream: {}} if stream else {})
    failed = {"description": "Refused, or failed", "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{error}"}}}}
    out: dict[str, Any] = {"summary": summary, "responses": {"200": {"description": "Done", "content": content}, "4XX": failed, "5XX": failed}}
    if body is not None:
        out["requestBody"] = {"required": needs_body, "content": {"application/json": {"schema": body}}}
    return out


def _parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
