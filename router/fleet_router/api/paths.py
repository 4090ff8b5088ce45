"""Every path of the data port in one table: method, who answers it, and how its body tells model, prompt and expected length. Pure.

Called by `body` and `service`. How a path's streams end and its errors look is its dialect's (`dialects`). Wrong types give no prompt: the
worker then says best what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import msgspec

from fleet_contract import names
from fleet_contract.errors import ApiError
from fleet_router.api.canonical import Layout
from fleet_text import anthropic_chat, ollama_chat, responses_chat
from fleet_text.chat import CHAT_FIELDS, OURS, ChatInputs, Habits, PromptError, chat_inputs

DEFAULT_ANSWER_TOKENS: Final = 128  # expected length when the client names no maximum
MAX_ANSWER_TOKENS: Final = 1 << 20
MAX_CHOICES: Final = 128  # more is refused by the runtime
Fields = Mapping[str, msgspec.Raw]
_any = msgspec.json.Decoder()


class Kind(StrEnum):
    """Who answers."""

    GENERATE = "generate"  # a unified worker, or a pair
    EMBED = "embed"  # a worker that computes prompts: prefill or unified
    ANY = "any"  # whoever is ready: nothing is computed
    LOCAL = "local"  # the router itself


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt as a text without a template."""

    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class Several:
    """A batch of prompts: the worker tokenises it."""

    count: int


What = ChatInputs | Text | list[int] | Several


@dataclass(frozen=True, slots=True)
class Path:
    """One row. `prompt` gives the prompt for its token ids, `layout` for its bytes; both are None where no prompt decides the choice of a worker."""

    path: str
    kind: Kind
    method: str = "POST"
    prompt: Callable[[Fields, Habits], What | None] | None = None
    layout: Layout | None = None
    answer: Callable[[Fields], int | None] = lambda fields: None  # most tokens of the answer
    streams: bool = False  # unless the body says no
    model_names: tuple[str, ...] = ("model",)
    model_required: bool = True
    is_asked: Callable[[Fields], bool] = lambda fields: True  # False: there is nothing to compute, whoever is ready answers
    engines: tuple[str, ...] = ()  # that have it; all when empty


def scalar(fields: Fields, name: str) -> Any:
    """A top-level value; a container is no scalar, whatever it holds."""
    raw = fields.get(name)
    if raw is None:
        return None
    text = bytes(raw)
    return {} if text[:1] in (b"{", b"[") else _any.decode(text)


def prompt_of(path: Path, fields: Fields, habits: Habits = OURS) -> What | None:
    """The prompt of a body, as a server with these habits makes it; None when it has none that can be read here."""
    if path.prompt is None or any(name in fields and bytes(fields[name]) != b"null" for name in habits.unreadable):
        return None
    try:
        return path.prompt(fields, habits)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, PromptError, ApiError, RecursionError):
        return None  # malformed in a way that the worker says best (msgspec's errors are ValueErrors)


def _decoded(fields: Fields, wanted: Sequence[str]) -> dict[str, Any]:
    return {name: _any.decode(fields[name]) for name in wanted if name in fields}


def _chat(fields: Fields, habits: Habits) -> What | None:
    return chat_inputs(_decoded(fields, CHAT_FIELDS), habits)


def _responses(fields: Fields, habits: Habits) -> What | None:
    chat = responses_chat.chat_of(_decoded(fields, responses_chat.FIELDS))
    return chat_inputs(chat, habits) if chat is not None else None


def _completion(fields: Fields, habits: Habits) -> What | None:
    return _input(fields, "prompt")


def _embedding(fields: Fields, habits: Habits) -> What | None:
    return _input(fields, "input")


def _input(fields: Fields, name: str) -> What | None:
    """A text, ids, or a batch of those."""
    special = scalar(fields, "add_special_tokens")
    return _one_or_several(_any.decode(fields[name]), special is not False)


def _one_or_several(given: Any, special: bool) -> What | None:
    if isinstance(given, str):
        return Text(given, special)
    if _is_ids(given):
        return list(given)
    if isinstance(given, list) and given and all(isinstance(t, str) or _is_ids(t) for t in given):
        return _one_or_several(given[0], special) if len(given) == 1 else Several(len(given))
    return None


def _is_ids(given: Any) -> bool:
    return isinstance(given, list) and bool(given) and all(type(t) is int and 0 <= t < 2**32 for t in given)


def _messages(fields: Fields, habits: Habits) -> What | None:
    return chat_inputs(anthropic_chat.chat_of(_decoded(fields, anthropic_chat.FIELDS), habits), habits)


def _ollama_chat(fields: Fields, habits: Habits) -> What | None:
    return chat_inputs(ollama_chat.chat_of(_decoded(fields, ollama_chat.FIELDS)))


def _ollama_generate(fields: Fields, habits: Habits) -> What | None:
    body = _decoded(fields, ollama_chat.FIELDS)
    if scalar(fields, "raw") is True:
        return Text(body["prompt"]) if isinstance(body["prompt"], str) else None
    return chat_inputs(ollama_chat.prompt_of(body))


def _ollama_embed(fields: Fields, habits: Habits) -> What | None:
    given = _any.decode(fields["input" if "input" in fields else "prompt"])
    return _one_or_several(given, True) if not _is_ids(given) else None


def _chat_answer(fields: Fields) -> int | None:
    wanted = scalar(fields, "max_completion_tokens")
    return wanted if wanted is not None else _max_tokens(fields)


def _max_tokens(fields: Fields) -> int | None:
    wanted = scalar(fields, "max_tokens")
    return wanted if isinstance(wanted, int) else None


def _responses_answer(fields: Fields) -> int | None:
    wanted = scalar(fields, "max_output_tokens")
    return wanted if isinstance(wanted, int) else None


def _ollama_answer(fields: Fields) -> int | None:
    options = _any.decode(fields["options"]) if "options" in fields else None
    wanted = options.get("num_predict") if isinstance(options, dict) else None
    return wanted if isinstance(wanted, int) else None


def _has(name: str) -> Callable[[Fields], bool]:
    """Ollama's clients load a model by a request without a prompt."""
    return lambda fields: name in fields and bytes(fields[name]) not in (b"null", b"[]", b'""')


_HEAD: Final = ("chat_template", "chat_template_kwargs", "documents", "reasoning_effort", "functions", "tools")
_MESSAGES: Final = Layout(head=("tools",), system="system")
_TOOLS: Final = Layout(head=("tools",))
_PROMPT: Final = Layout(("prompt",), is_chat=False)
_INPUT: Final = Layout(("input",), is_chat=False)
_OLLAMA_INPUT: Final = Layout(("input", "prompt"), is_chat=False)
_GENERATE: Final = Layout(("prompt",), system="system")
_RESPONSES: Final = Layout(("input",), ("previous_response_id", "reasoning", "tools"), "instructions")
CHAT: Final = Path("/v1/chat/completions", Kind.GENERATE, prompt=_chat, layout=Layout(head=_HEAD), answer=_chat_answer)
COMPLETIONS: Final = Path("/v1/completions", Kind.GENERATE, prompt=_completion, layout=_PROMPT, answer=_max_tokens)
_OURS: Final = (names.ENGINE_OURS,)
_OTHERS: Final = (names.ENGINE_VLLM, names.ENGINE_SGLANG)
_POSTS: Final = (
    CHAT,
    COMPLETIONS,
    Path("/v1/messages", Kind.GENERATE, prompt=_messages, layout=_MESSAGES, answer=_max_tokens),
    Path(
        "/api/chat", Kind.GENERATE, prompt=_ollama_chat, layout=_TOOLS, answer=_ollama_answer, streams=True, is_asked=_has("messages"), engines=_OURS
    ),
    Path(
        "/api/generate",
        Kind.GENERATE,
        prompt=_ollama_generate,
        layout=_GENERATE,
        answer=_ollama_answer,
        streams=True,
        is_asked=_has("prompt"),
        engines=_OURS,
    ),
    Path("/v1/responses", Kind.GENERATE, prompt=_responses, layout=_RESPONSES, answer=_responses_answer, engines=_OTHERS),
    Path("/v1/embeddings", Kind.EMBED, prompt=_embedding, layout=_INPUT),
    Path("/api/embed", Kind.EMBED, prompt=_ollama_embed, layout=_OLLAMA_INPUT, engines=_OURS),
    Path("/api/embeddings", Kind.EMBED, prompt=_ollama_embed, layout=_OLLAMA_INPUT, engines=_OURS),
    Path("/v1/rerank", Kind.EMBED, engines=_OTHERS),
    Path("/v1/score", Kind.EMBED, engines=_OTHERS),
    Path("/v1/messages/count_tokens", Kind.ANY),
    Path("/api/show", Kind.ANY, model_names=("model", "name"), engines=_OURS),
    Path("/tokenize", Kind.ANY, model_required=False),
    Path("/detokenize", Kind.ANY, model_required=False),
)
_GETS: Final = ("/v1/models", "/api/tags", "/api/ps", "/api/version", "/livez", "/readyz", "/health")
MODELS_PREFIX: Final = "/v1/models/"
PATHS: Final[Mapping[str, Path]] = {p.path: p for p in (*_POSTS, *(Path(path, Kind.LOCAL, "GET") for path in _GETS))}
OPEN: Final = ("/livez", "/readyz", "/health")  # without an API key: a probe has none
_ONE_MODEL: Final = Path(MODELS_PREFIX + "{id}", Kind.LOCAL, "GET")


# What tells a body's path when nothing else does: the path, a field that it must have, and fields of which one tells it from those below.
_SIGNS: Final = (
    ("/api/chat", "messages", ("options", "keep_alive", "format", "think")),
    ("/v1/messages", "messages", ("system", "stop_sequences", "thinking", "mcp_servers")),
    ("/v1/chat/completions", "messages", ()),
    ("/v1/responses", "input", ("instructions", "max_output_tokens", "previous_response_id", "reasoning", "text", "temperature", "tools", "stream")),
    ("/api/embed", "input", ("options", "keep_alive", "truncate")),
    ("/v1/embeddings", "input", ()),
    ("/api/generate", "prompt", ("options", "keep_alive", "raw", "template", "context", "system", "think")),
    ("/v1/completions", "prompt", ()),
    ("/v1/rerank", "documents", ("query",)),
    ("/v1/score", "text_1", ()),
    ("/detokenize", "tokens", ()),
)


def path_of(fields: Fields) -> Path:
    """The path of a body by its fields; chat completions for what is like no other."""
    if _has_blocks(fields):
        return PATHS["/v1/messages"]
    if "input" in fields and bytes(fields["input"]).lstrip(b" [\n\r\t")[:1] == b"{":
        return PATHS["/v1/responses"]  # embeddings have texts or ids
    for path, needed, signs in _SIGNS:
        if needed in fields and (not signs or any(name in fields for name in signs)):
            return PATHS[path]
    return CHAT


def _has_blocks(fields: Fields) -> bool:
    """Messages with blocks that only Anthropic's API has."""
    return any(mark in bytes(fields.get("messages", b"")) for mark in (b'"tool_use"', b'"tool_result"', b'"tool_use_id"', b'"cache_control"'))


def find_path(path: str) -> Path | None:
    """The row of a request's path."""
    found = PATHS.get(path)
    return _ONE_MODEL if found is None and path.startswith(MODELS_PREFIX) else found
