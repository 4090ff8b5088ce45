"""What routing needs of a request's JSON, and the token ids of its prompt. The rest of the body stays as the client sent it.

Top-level values are kept raw until somebody needs them. Wrong types that only the runtime cares about are the runtime's to refuse.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from fleet_contract.errors import ApiError
from fleet_contract.prefix import chain_hashes, namespace_hash
from fleet_router.decide.keys import STRIDE
from fleet_router.dialects import Dialect, dialect_of
from fleet_text.chat import CHAT_FIELDS, PromptError, chat_inputs
from fleet_text.prompt import PromptEncoder

INLINE_BYTES: Final = 8 << 10  # longer prompts are tokenised in a thread
DEFAULT_ANSWER_TOKENS: Final = 128  # expected length when the client names no maximum
MAX_CHOICES: Final = 128  # more is refused by the runtime
RESERVED_PREFIX: Final = "bootstrap_"

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
TOKENIZE: Final = "/tokenize"

_top = msgspec.json.Decoder(dict[str, msgspec.Raw])
_any = msgspec.json.Decoder()


@dataclass(frozen=True, slots=True)
class Parsed:
    """A request as routing sees it."""

    path: str
    model: str
    stream: bool
    answer_tokens: int
    fields: dict[str, msgspec.Raw]
    body: bytes

    @property
    def dialect(self) -> Dialect:
        return dialect_of(self.path)


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt's token ids and keys; `ids` is None when the runtime has to read the JSON itself."""

    tokens: int
    ids: list[int] | None = None
    keys: tuple[int, ...] = ()  # of the blocks of 64 tokens
    choices: int = 1  # answers asked for: prompts times n, each with a room of its own


def parse_body(path: str, body: bytes, *, model_required: bool = True) -> Parsed:
    """Reads the top level. Raises ApiError 400 for what is no JSON object, names no model or carries reserved fields."""
    try:
        body.decode()  # raw values are not looked into
        fields = _top.decode(body)
    except msgspec.ValidationError:
        raise ApiError(400, "the body has to be a JSON object", code="invalid_type") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise ApiError(400, f"the body is no valid JSON: {e}", code="invalid_json") from None
    for name in fields:
        if name.startswith(RESERVED_PREFIX):
            raise ApiError(400, f"field {name[:60]!r} is reserved between router and workers; leave it out", code="reserved_field", param=name[:60])
    model = _scalar(fields, "model")
    if model is None and not model_required:
        model = ""
    if not isinstance(model, str) or (model_required and not model):
        got = "is missing" if "model" not in fields else f"is {bytes(fields['model'])[:40].decode('utf-8', 'replace')}"
        code = "missing_required_parameter" if "model" not in fields else "invalid_type"
        raise ApiError(400, f"model {got}; a non-empty string is needed, see GET /v1/models", code=code, param="model")
    wanted = _scalar(fields, "max_completion_tokens")
    if wanted is None:
        wanted = _scalar(fields, "max_tokens")
    answer = min(wanted, 1 << 20) if isinstance(wanted, int) and wanted > 0 else DEFAULT_ANSWER_TOKENS
    return Parsed(path, model, _scalar(fields, "stream") is True, answer, fields, body)


async def read_prompt(parsed: Parsed, encoder: PromptEncoder | None, model_revision: str) -> Prompt:
    """Token ids and keys of the prompt.

    Args:
        parsed: of `parse_body`.
        encoder: of the model revision that will serve; None while it is not here yet.
        model_revision: of those workers; with the body's `cache_salt` it is the namespace of the keys.
    Returns:
        Only a length estimate when the body has no single prompt that we can read: the runtime then gives the exact answer or error.
    """
    estimate = Prompt(max(1, len(parsed.body) // 4))
    if encoder is None or parsed.path == TOKENIZE:
        return estimate
    if len(parsed.body) > INLINE_BYTES:
        return await asyncio.to_thread(_encode, parsed, encoder, model_revision) or estimate
    return _encode(parsed, encoder, model_revision) or estimate


def _encode(parsed: Parsed, encoder: PromptEncoder, model_revision: str) -> Prompt | None:
    n = max(_count(parsed.fields, "n"), _count(parsed.fields, "best_of"))  # the runtime computes all of best_of
    salt = _scalar(parsed.fields, "cache_salt")
    namespace = namespace_hash(model_revision, salt=salt if isinstance(salt, str) else "")
    try:
        if parsed.path == CHAT:
            fields = parsed.fields
            ids = encoder.encode_inputs(chat_inputs({name: _any.decode(fields[name]) for name in CHAT_FIELDS if name in fields}))
        else:
            prompt = _any.decode(parsed.fields["prompt"])
            if isinstance(prompt, str):
                ids = encoder.encode(prompt, add_special_tokens=True)
            elif _is_ids(prompt):
                ids = prompt
            elif isinstance(prompt, list) and 0 < len(prompt) <= MAX_CHOICES and all(isinstance(t, str) or _is_ids(t) for t in prompt):
                return Prompt(max(1, len(parsed.body) // 4), choices=min(MAX_CHOICES, len(prompt) * n))
            else:
                return None
    except (KeyError, TypeError, ValueError, AttributeError, PromptError, RecursionError, msgspec.DecodeError):
        return None  # malformed in a way that the runtime says best
    if not ids:
        return None
    return Prompt(len(ids), ids, tuple(chain_hashes(ids, namespace)[STRIDE - 1 :: STRIDE]), n)


def _count(fields: dict[str, msgspec.Raw], name: str) -> int:
    """A number of choices; 1 for what the runtime will refuse."""
    value = _scalar(fields, name)
    return value if type(value) is int and 1 <= value <= MAX_CHOICES else 1


def _is_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(t) is int and 0 <= t < 2**32 for t in prompt)


def _scalar(fields: dict[str, msgspec.Raw], name: str) -> Any:
    raw = fields.get(name)
    if raw is None:
        return None
    text = bytes(raw)
    return {} if text[:1] in (b"{", b"[") else _any.decode(text)  # a container is no scalar, whatever it holds
