"""What routing needs of a request's JSON, and the token ids of its prompt. The rest of the body stays as the client sent it.

Top-level values are kept raw until somebody needs them. Wrong types that only the runtime cares about are the runtime's to refuse.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import msgspec

from fleet_contract.errors import ApiError
from fleet_contract.prefix import extend_chain, namespace_hash
from fleet_contract.wire import encode_ids
from fleet_router.decide.keys import STRIDE
from fleet_router.dialects import Dialect, dialect_of
from fleet_text.chains import ChatChains
from fleet_text.chat import CHAT_FIELDS, PromptError, chat_inputs
from fleet_text.prompt import PromptEncoder

INLINE_BYTES: Final = 8 << 10  # more than this is tokenised in a thread
INLINE_CHAT_BYTES: Final = 128 << 10  # of a chat's body: longer ones are rendered in a thread too
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
    ids: bytes | None = None  # little-endian u32
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


async def read_prompt(parsed: Parsed, encoder: PromptEncoder | None, model_revision: str, chains: ChatChains | None = None) -> Prompt:
    """Token ids and keys of the prompt.

    Args:
        parsed: of `parse_body`.
        encoder: of the model revision that will serve; None while it is not here yet.
        model_revision: of those workers; with the body's `cache_salt` it is the namespace of the keys.
        chains: of the encoder, where its chats can be cut: then only what is new of a chat is tokenised.
    Returns:
        Only a length estimate when the body has no single prompt that we can read: the runtime then gives the exact answer or error.
    """
    size = len(parsed.body)
    estimate = Prompt(max(1, size // 4))
    if encoder is None or parsed.path == TOKENIZE:
        return estimate
    salt = _scalar(parsed.fields, "cache_salt") if "cache_salt" in parsed.fields else None
    namespace = _namespace(model_revision, salt if isinstance(salt, str) else "")
    choices = max(_count(parsed.fields, "n"), _count(parsed.fields, "best_of"))  # the runtime computes all of best_of
    try:
        if parsed.path == CHAT and chains is not None and size <= INLINE_CHAT_BYTES:
            reading = chains.look(_rendered(parsed, encoder), namespace)
            ids, keys = await asyncio.to_thread(chains.read, reading) if reading.missing_chars > INLINE_BYTES else chains.read(reading)
            return Prompt(len(ids) // 4, ids, keys, choices) if ids else estimate
        if size > INLINE_BYTES:
            return await asyncio.to_thread(_encode, parsed, encoder, namespace, choices, chains) or estimate
        return _encode(parsed, encoder, namespace, choices, chains) or estimate
    except (KeyError, TypeError, ValueError, AttributeError, PromptError, RecursionError, msgspec.DecodeError):
        return estimate  # malformed in a way that the runtime says best


@lru_cache(maxsize=1024)
def _namespace(model_revision: str, salt: str) -> int:
    return namespace_hash(model_revision, salt=salt)


def _rendered(parsed: Parsed, encoder: PromptEncoder) -> str:
    """The text of a chat's prompt."""
    fields = parsed.fields
    return encoder.render_chat(chat_inputs({name: _any.decode(fields[name]) for name in CHAT_FIELDS if name in fields}))


def _encode(parsed: Parsed, encoder: PromptEncoder, namespace: int, choices: int, chains: ChatChains | None) -> Prompt | None:
    if parsed.path == CHAT and chains is not None:
        packed, keys = chains.read(chains.look(_rendered(parsed, encoder), namespace))
        return Prompt(len(packed) // 4, packed, keys, choices) if packed else None
    if parsed.path == CHAT:
        ids = encoder.encode(_rendered(parsed, encoder), add_special_tokens=False)
    else:
        prompt = _any.decode(parsed.fields["prompt"])
        if isinstance(prompt, str):
            ids = encoder.encode(prompt, add_special_tokens=True)
        elif _is_ids(prompt):
            ids = prompt
        elif isinstance(prompt, list) and 0 < len(prompt) <= MAX_CHOICES and all(isinstance(t, str) or _is_ids(t) for t in prompt):
            return Prompt(max(1, len(parsed.body) // 4), choices=min(MAX_CHOICES, len(prompt) * choices))
        else:
            return None
    if not ids:
        return None
    packed = encode_ids(ids)
    return Prompt(len(ids), packed, tuple(extend_chain(namespace, packed)[STRIDE - 1 :: STRIDE]), choices)


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
