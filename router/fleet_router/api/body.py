"""What routing needs of a request's JSON, and the token ids or the bytes of its prompt. The rest of the body stays as the client sent it.

Top-level values are kept raw until somebody needs them. Wrong types that only the runtime cares about are the runtime's to refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import msgspec

from fleet_contract.errors import ApiError
from fleet_contract.prefix import BLOCK_BYTES, bytes_chain, bytes_namespace_hash, extend_chain, namespace_hash
from fleet_contract.wire import encode_ids
from fleet_router.api.canonical import canonical
from fleet_router.api.dialects import Dialect, dialect_of
from fleet_router.api.paths import (
    CHAT,
    DEFAULT_ANSWER_TOKENS,
    MAX_ANSWER_TOKENS,
    MAX_CHOICES,
    PATHS,
    Kind,
    Path,
    Several,
    Text,
    What,
    path_of,
    prompt_of,
    scalar,
)
from fleet_router.decide.keys import STRIDE, made_of
from fleet_router.errors import UNDECODABLE
from fleet_text.chat import ChatInputs, PromptError

if TYPE_CHECKING:  # the brain imports this module without tokenizers
    from fleet_text.chains import ChatChains, Reading
    from fleet_text.prompt import PromptEncoder

_ANY: Final = Kind.ANY  # a member of an enum is looked up each time
INLINE_BYTES: Final = 8 << 10  # more than this is tokenised in a thread
INLINE_CHAT_BYTES: Final = 128 << 10  # of a chat's body: longer ones are rendered in a thread too
MAX_KEYED_BYTES: Final = 8 << 20  # of a prompt that is not tokenised here: what is behind has no keys
TOKENS_PER_BYTE: Final = 0.25  # of text, before anything is known of the model
RESERVED_PREFIX: Final = "bootstrap_"
RESERVED_FIELDS: Final = ("kv_transfer_params", "disagg_prefill_dp_rank")

_top = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Parsed:
    """A request as routing sees it."""

    def __init__(
        self, route: Path, model: str, stream: bool, answer_tokens: int, fields: dict[str, msgspec.Raw], body: bytes, kind: Kind,
        passed_on: Sequence[tuple[str, str]] = (), adapter: str = "",
    ) -> None:  # fmt: skip
        self.route = route
        self.model = model
        self.stream = stream
        self.answer_tokens = answer_tokens
        self.fields = fields
        self.body = body
        self.kind = kind  # of the route, but for a body that asks for nothing
        self.passed_on = passed_on  # headers of the client's that go to workers
        self.adapter = adapter  # a LoRA adapter that `model` names; known with the service

    @property
    def path(self) -> str:
        return self.route.path

    @property
    def dialect(self) -> Dialect:
        return dialect_of(self.route.path)


class Prompt:
    """The prompt's token ids and keys; `ids` is None when the runtime has to read the JSON itself: then `tokens` is an estimate."""

    def __init__(
        self, tokens: int, ids: bytes | None = None, keys: tuple[int, ...] = (), choices: int = 1, key_tokens: float = 0.0, text_bytes: int = 0,
    ) -> None:  # fmt: skip
        self.tokens = tokens
        self.ids = ids  # little-endian u32
        self.keys = keys  # of the blocks of 64 tokens, or of BLOCK_BYTES
        self.choices = choices  # answers asked for: prompts times n, each with a room of its own
        self.key_tokens = key_tokens  # keys of bytes: the tokens that each is believed to stand for; 0: keys of tokens
        self.text_bytes = text_bytes  # a prompt that is text alone, not tokenised here: its length, of which `tokens` is an estimate

    @property
    def made_of(self) -> str:
        """What the keys are made of."""
        return made_of(self.keys, self.key_tokens)


def parse_body(path: Path, body: bytes) -> Parsed:
    """Reads the top level. Raises ApiError 400 for what is no JSON object, names no model or carries reserved fields."""
    try:
        if not body.isascii():
            body.decode()  # raw values are not looked into
        fields = _top.decode(body)
    except msgspec.ValidationError:
        raise ApiError(400, "the body has to be a JSON object", code="invalid_type") from None
    except UNDECODABLE as e:
        raise ApiError(400, f"the body is no valid JSON: {e}", code="invalid_json") from None
    for name in fields:
        if name.startswith(RESERVED_PREFIX) or name in RESERVED_FIELDS:
            raise ApiError(400, f"field {name[:60]!r} is reserved between router and workers; leave it out", code="reserved_field", param=name[:60])
    try:
        model = _model(path, fields)
        wanted = path.answer(fields)
        stream = scalar(fields, "stream")
        kind = path.kind if path.is_asked(fields) else _ANY
    except (msgspec.DecodeError, RecursionError, ValueError) as e:
        raise ApiError(400, f"the body is no valid JSON: {e}", code="invalid_json") from None
    answer = min(wanted, MAX_ANSWER_TOKENS) if isinstance(wanted, int) and wanted > 0 else DEFAULT_ANSWER_TOKENS
    return Parsed(path, model, path.streams if stream is None else stream is True, answer, fields, body, kind)


def asked_path(path: str, body: bytes) -> Path:
    """The path that a body is for, where nobody has sent it: as named, else by its fields. Raises ApiError 400 for a path without a body."""
    if not path:
        try:
            return path_of(_top.decode(body))
        except UNDECODABLE:
            return CHAT  # reading it says what is wrong
    found = PATHS.get(path)
    if found is None or found.method != "POST":
        there = ", ".join(p.path for p in PATHS.values() if p.method == "POST")
        raise ApiError(400, f"path is {path[:200]!r}; a path that takes a body is needed: {there}", code="invalid_value", param="path")
    return found


def _model(path: Path, fields: dict[str, msgspec.Raw]) -> str:
    name = next((n for n in path.model_names if n in fields), path.model_names[0])
    model = scalar(fields, name)
    if model is None and not path.model_required:
        return ""
    if not isinstance(model, str) or (path.model_required and not model):
        got = "is missing" if name not in fields else f"is {bytes(fields[name])[:40].decode('utf-8', 'replace')}"
        code = "missing_required_parameter" if name not in fields else "invalid_type"
        raise ApiError(400, f"{name} {got}; a non-empty string is needed, see GET /v1/models", code=code, param=name)
    return model


LongPrompt = Callable[[], Prompt]  # what is left to do, for a thread
_REFUSED: Final = (PromptError, TypeError, ValueError, RecursionError)  # no JSON, or the model's template refuses it, or reads only text


def begin_prompt(
    parsed: Parsed, encoder: PromptEncoder | None, model_revision: str, chains: ChatChains | None = None, tokens_per_byte: float = TOKENS_PER_BYTE
) -> Prompt | LongPrompt:
    """Token ids and keys of the prompt; where it cannot be tokenised here, keys of its bytes. For a long one, the work that makes them.

    Args:
        parsed: of `parse_body`.
        encoder: of the model revision that will serve; None while it is not here yet.
        model_revision: of those workers; with the adapter and the body's `cache_salt` it is the namespace of the keys.
        chains: chats of before, of the same encoder: only what a chat adds is tokenised.
        tokens_per_byte: of prompts of this model, as learned.
    Returns:
        Only a length estimate when the body has no single prompt that we can read: the runtime then gives the exact answer or error.
    """
    reader = _Reader(parsed, encoder, model_revision, chains, tokens_per_byte)
    return reader.read if reader.is_long() else reader.read()


class _Reader:
    """Makes the prompt of one request."""

    def __init__(self, parsed: Parsed, encoder: PromptEncoder | None, model_revision: str, chains: ChatChains | None, tokens_per_byte: float) -> None:
        self._parsed = parsed
        self._encoder = encoder if parsed.route.prompt is not None and parsed.kind is not _ANY else None
        self._model_revision = model_revision
        self._chains = chains
        self._tokens_per_byte = tokens_per_byte
        self._what: What | None = None
        self._begun: Reading | None = None  # of a chat

    def is_long(self) -> bool:
        """Whether `read` is work for a thread. Decodes what it has to look at."""
        parsed, encoder = self._parsed, self._encoder
        size = len(parsed.body)
        if size > INLINE_CHAT_BYTES or encoder is None:
            return size > INLINE_CHAT_BYTES
        try:
            what = self._what = prompt_of(parsed.route, parsed.fields, encoder.habits)
            if isinstance(what, ChatInputs) and self._chains is not None:
                namespace = _namespace(self._model_revision, parsed.adapter, _salt(parsed.fields))
                self._begun = self._chains.look(encoder.render_chat(what), namespace)
                return self._begun.missing_chars > INLINE_BYTES
        except _REFUSED:
            self._encoder = None  # its bytes are a prompt all the same
            return False
        return size > INLINE_BYTES

    def read(self) -> Prompt:
        """All that is left to do."""
        parsed = self._parsed
        if self._encoder is not None:
            try:
                if (prompt := self._by_tokens(self._encoder)) is not None:
                    return prompt
            except _REFUSED:
                pass
        if parsed.kind is not _ANY and parsed.route.layout is not None:
            try:
                return _by_bytes(parsed, self._model_revision, self._tokens_per_byte)
            except (TypeError, ValueError, RecursionError):
                pass  # no JSON: the runtime says why
        return Prompt(_estimate(len(parsed.body), self._tokens_per_byte))

    def _by_tokens(self, encoder: PromptEncoder) -> Prompt | None:
        """None when it has no prompt that can be tokenised here. Raises what decoding and templates raise."""
        fields, chains, begun = self._parsed.fields, self._chains, self._begun
        several = 1
        if begun is not None and chains is not None:
            ids, keys = chains.read(begun)
        else:
            what = self._what if self._what is not None else prompt_of(self._parsed.route, fields, encoder.habits)
            ids, keys, several = _encode(what, encoder, _namespace(self._model_revision, self._parsed.adapter, _salt(fields)), chains)
        if not several:
            return None
        choices = min(MAX_CHOICES, _choices(fields) * several)
        return Prompt(len(ids) // 4, ids, keys, choices) if ids else Prompt(_estimate(len(self._parsed.body), self._tokens_per_byte), choices=choices)


def _by_bytes(parsed: Parsed, model_revision: str, tokens_per_byte: float) -> Prompt:
    """Keys of canonical bytes. A list of ids needs no tokenizer: its keys are of tokens. Raises what decoding raises."""
    route, fields = parsed.route, parsed.fields
    layout = route.layout
    assert layout is not None
    choices, salt = _choices(fields), _salt(fields)
    if not layout.is_chat and (name := next((n for n in layout.prompt if n in fields), "")) and bytes(fields[name])[:1] == b"[":
        what = prompt_of(route, fields)
        if isinstance(what, Several):
            return Prompt(_estimate(len(parsed.body), tokens_per_byte), choices=min(MAX_CHOICES, choices * what.count))
        if isinstance(what, list):
            packed = encode_ids(what)
            return Prompt(len(what), packed, _keys(_namespace(model_revision, parsed.adapter, salt), packed), choices)
    found = canonical(layout, fields)
    if found is None:
        return Prompt(_estimate(len(parsed.body), tokens_per_byte), choices=choices)
    keys = bytes_chain(_namespace_of_bytes(model_revision, parsed.adapter, salt), found.data[:MAX_KEYED_BYTES])
    size = len(found.data)
    return Prompt(_estimate(size, tokens_per_byte), None, keys, choices, BLOCK_BYTES * tokens_per_byte, size if found.is_text else 0)


def _estimate(size_bytes: int, tokens_per_byte: float) -> int:
    return max(1, int(size_bytes * tokens_per_byte))


def _salt(fields: dict[str, msgspec.Raw]) -> str:
    salt = scalar(fields, "cache_salt") if "cache_salt" in fields else None
    return salt if isinstance(salt, str) else ""


def _choices(fields: dict[str, msgspec.Raw]) -> int:
    """Of each prompt; the runtime computes all of best_of."""
    return max(_count(fields, "n"), _count(fields, "best_of")) if "n" in fields or "best_of" in fields else 1


@lru_cache(maxsize=1024)
def _namespace_of_bytes(model_revision: str, adapter: str, salt: str) -> int:
    return bytes_namespace_hash(model_revision, adapter, salt)


@lru_cache(maxsize=1024)
def _namespace(model_revision: str, adapter: str, salt: str) -> int:
    return namespace_hash(model_revision, adapter, salt)


def _encode(what: What | None, encoder: PromptEncoder, namespace: int, chains: ChatChains | None) -> tuple[bytes, tuple[int, ...], int]:
    """Ids (little-endian u32; empty when there is no single prompt), keys, and how many prompts there are; 0 when none can be read."""
    if what is None:
        return b"", (), 0
    if isinstance(what, Several):
        return b"", (), what.count
    if isinstance(what, ChatInputs) and chains is not None:
        return (*chains.read(chains.look(encoder.render_chat(what), namespace)), 1)
    packed = encode_ids(_ids(what, encoder))
    return packed, _keys(namespace, packed), 1


def _keys(namespace: int, packed: bytes) -> tuple[int, ...]:
    return tuple(extend_chain(namespace, packed)[STRIDE - 1 :: STRIDE])


def _ids(what: ChatInputs | Text | list[int], encoder: PromptEncoder) -> list[int]:
    if isinstance(what, ChatInputs):
        return encoder.encode_inputs(what)
    return encoder.encode(what.text, add_special_tokens=what.add_special_tokens) if isinstance(what, Text) else what


def _count(fields: dict[str, msgspec.Raw], name: str) -> int:
    """A number of choices; 1 for what the runtime will refuse."""
    value = scalar(fields, name)
    return value if type(value) is int and 1 <= value <= MAX_CHOICES else 1
