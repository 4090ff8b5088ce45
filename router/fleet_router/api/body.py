"""What routing needs of a request's JSON, and the token ids of its prompt. The rest of the body stays as the client sent it.

Top-level values are kept raw until somebody needs them. Wrong types that only the runtime cares about are the runtime's to refuse.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import msgspec

from fleet_contract.errors import ApiError
from fleet_contract.prefix import extend_chain, namespace_hash
from fleet_contract.wire import encode_ids
from fleet_router.api.dialects import Dialect, dialect_of
from fleet_router.api.paths import DEFAULT_ANSWER_TOKENS, MAX_ANSWER_TOKENS, MAX_CHOICES, Kind, Path, Several, Text, What, prompt_of, scalar
from fleet_router.decide.keys import STRIDE
from fleet_text.chat import ChatInputs, PromptError

if TYPE_CHECKING:  # the brain imports this module without tokenizers
    from fleet_text.chains import ChatChains, Reading
    from fleet_text.prompt import PromptEncoder

INLINE_BYTES: Final = 8 << 10  # more than this is tokenised in a thread
INLINE_CHAT_BYTES: Final = 128 << 10  # of a chat's body: longer ones are rendered in a thread too
RESERVED_PREFIX: Final = "bootstrap_"
RESERVED_FIELDS: Final = ("kv_transfer_params", "disagg_prefill_dp_rank")

_top = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(slots=True)
class Parsed:
    """A request as routing sees it."""

    route: Path
    model: str
    stream: bool
    answer_tokens: int
    fields: dict[str, msgspec.Raw]
    body: bytes
    kind: Kind  # of the route, but for a body that asks for nothing
    passed_on: Sequence[tuple[str, str]] = ()  # headers of the client's that go to workers

    @property
    def path(self) -> str:
        return self.route.path

    @property
    def dialect(self) -> Dialect:
        return dialect_of(self.route.path)


@dataclass(slots=True)
class Prompt:
    """The prompt's token ids and keys; `ids` is None when the runtime has to read the JSON itself."""

    tokens: int
    ids: bytes | None = None  # little-endian u32
    keys: tuple[int, ...] = ()  # of the blocks of 64 tokens
    choices: int = 1  # answers asked for: prompts times n, each with a room of its own


def parse_body(path: Path, body: bytes) -> Parsed:
    """Reads the top level. Raises ApiError 400 for what is no JSON object, names no model or carries reserved fields."""
    try:
        body.decode()  # raw values are not looked into
        fields = _top.decode(body)
    except msgspec.ValidationError:
        raise ApiError(400, "the body has to be a JSON object", code="invalid_type") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise ApiError(400, f"the body is no valid JSON: {e}", code="invalid_json") from None
    for name in fields:
        if name.startswith(RESERVED_PREFIX) or name in RESERVED_FIELDS:
            raise ApiError(400, f"field {name[:60]!r} is reserved between router and workers; leave it out", code="reserved_field", param=name[:60])
    try:
        model = _model(path, fields)
        wanted = path.answer(fields)
        stream = scalar(fields, "stream")
        kind = path.kind if path.is_asked(fields) else Kind.ANY
    except (msgspec.DecodeError, RecursionError, ValueError) as e:
        raise ApiError(400, f"the body is no valid JSON: {e}", code="invalid_json") from None
    answer = min(wanted, MAX_ANSWER_TOKENS) if isinstance(wanted, int) and wanted > 0 else DEFAULT_ANSWER_TOKENS
    return Parsed(path, model, path.streams if stream is None else stream is True, answer, fields, body, kind)


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


def begin_prompt(parsed: Parsed, encoder: PromptEncoder | None, model_revision: str, chains: ChatChains | None = None) -> Prompt | LongPrompt:
    """Token ids and keys of the prompt; for a long one, the work that makes them.

    Args:
        parsed: of `parse_body`.
        encoder: of the model revision that will serve; None while it is not here yet.
        model_revision: of those workers; with the body's `cache_salt` it is the namespace of the keys.
        chains: chats of before, of the same encoder: only what a chat adds is tokenised.
    Returns:
        Only a length estimate when the body has no single prompt that we can read: the runtime then gives the exact answer or error.
    """
    size, fields = len(parsed.body), parsed.fields
    estimate = Prompt(max(1, size // 4))
    if encoder is None or parsed.route.prompt is None or parsed.kind is Kind.ANY:
        return estimate
    try:
        salt = scalar(fields, "cache_salt") if "cache_salt" in fields else None
        namespace = _namespace(model_revision, salt if isinstance(salt, str) else "")
        choices = max(_count(fields, "n"), _count(fields, "best_of"))  # the runtime computes all of best_of
        encode = _Encode(estimate, encoder, namespace, chains, choices)
        if size > INLINE_CHAT_BYTES:
            return lambda: encode.fields(parsed.route, fields)
        what = prompt_of(parsed.route, fields)
        if isinstance(what, ChatInputs) and chains is not None:
            reading = chains.look(encoder.render_chat(what), namespace)
            if reading.missing_chars > INLINE_BYTES:
                return lambda: encode.reading(chains, reading)
            return encode.reading(chains, reading)
        if size > INLINE_BYTES:
            return lambda: encode.what(what)
        return encode.what(what)
    except _REFUSED:
        return estimate


async def read_prompt(parsed: Parsed, encoder: PromptEncoder | None, model_revision: str, chains: ChatChains | None = None) -> Prompt:
    """`begin_prompt`, to its end."""
    begun = begin_prompt(parsed, encoder, model_revision, chains)
    return begun if isinstance(begun, Prompt) else await asyncio.to_thread(begun)


_REFUSED: Final = (PromptError, TypeError, ValueError, RecursionError)  # no JSON, or the model's template refuses it: the runtime says why


class _Encode:
    """Makes a prompt of what a request says."""

    def __init__(self, estimate: Prompt, encoder: PromptEncoder, namespace: int, chains: ChatChains | None, choices: int) -> None:
        self._estimate = estimate
        self._encoder = encoder
        self._namespace = namespace
        self._chains = chains
        self._choices = choices

    def fields(self, route: Path, fields: dict[str, msgspec.Raw]) -> Prompt:
        """Of a body's top level."""
        try:
            return self.what(prompt_of(route, fields))
        except _REFUSED:
            return self._estimate

    def what(self, what: What | None) -> Prompt:
        """Of a prompt in whatever form."""
        try:
            return self.prompt(*_encode(what, self._encoder, self._namespace, self._chains))
        except _REFUSED:
            return self._estimate

    def reading(self, chains: ChatChains, reading: Reading) -> Prompt:
        """Of a chat that was looked for."""
        try:
            return self.prompt(*chains.read(reading), 1)
        except _REFUSED:
            return self._estimate

    def prompt(self, ids: bytes, keys: tuple[int, ...], several: int) -> Prompt:
        """Args: several: prompts in one body; 0: none could be read."""
        if not several:
            return self._estimate
        choices = min(MAX_CHOICES, self._choices * several)
        return Prompt(len(ids) // 4, ids, keys, choices) if ids else Prompt(self._estimate.tokens, choices=choices)


@lru_cache(maxsize=1024)
def _namespace(model_revision: str, salt: str) -> int:
    return namespace_hash(model_revision, salt=salt)


def _encode(what: What | None, encoder: PromptEncoder, namespace: int, chains: ChatChains | None) -> tuple[bytes, tuple[int, ...], int]:
    """Ids (little-endian u32; empty when there is no single prompt), keys, and how many prompts there are; 0 when none can be read."""
    if what is None:
        return b"", (), 0
    if isinstance(what, Several):
        return b"", (), what.count
    if isinstance(what, ChatInputs) and chains is not None:
        return (*chains.read(chains.look(encoder.render_chat(what), namespace)), 1)
    packed = encode_ids(_ids(what, encoder))
    return packed, tuple(extend_chain(namespace, packed)[STRIDE - 1 :: STRIDE]), 1


def _ids(what: ChatInputs | Text | list[int], encoder: PromptEncoder) -> list[int]:
    if isinstance(what, ChatInputs):
        return encoder.encode_inputs(what)
    return encoder.encode(what.text, add_special_tokens=what.add_special_tokens) if isinstance(what, Text) else what


def _count(fields: dict[str, msgspec.Raw], name: str) -> int:
    """A number of choices; 1 for what the runtime will refuse."""
    value = scalar(fields, name)
    return value if type(value) is int and 1 <= value <= MAX_CHOICES else 1
