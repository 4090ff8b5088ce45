"""What vLLM and SGLang share: an OpenAI-compatible server that knows nothing of us. Bodies, error answers, identity."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import msgspec

from fleet_contract import errors as contract_errors
from fleet_contract import names
from fleet_contract.errors import ApiError
from fleet_contract.wire import decode_ids
from fleet_router import errors
from fleet_router.api.body import Parsed
from fleet_router.api.paths import CHAT, COMPLETIONS, MAX_CHOICES
from fleet_router.desk import Leg
from fleet_router.engines.base import Sending, asks_usage
from fleet_router.engines.splice import splice
from fleet_router.errors import UNDECODABLE
from fleet_text.files import TOKENIZER_FILES

DEFAULT_CAPACITY_TOKENS: Final = 100_000  # of an engine that does not tell
_TYPES: Final = {
    401: contract_errors.AUTHENTICATION, 403: contract_errors.PERMISSION, 404: contract_errors.NOT_FOUND, 429: contract_errors.RATE_LIMIT,
    503: contract_errors.OVERLOADED, 504: contract_errors.TIMEOUT,
}  # fmt: skip
# Fields of a completion whose meaning hangs on the prompt being text.
_TEXT_ONLY: Final = ("echo", "suffix", "prompt_logprobs", "truncate_prompt_tokens", "add_special_tokens", "return_token_ids", "session_params")
# Fields that change a prompt in ways that we do not follow.
UNREADABLE: Final = ("truncate_prompt_tokens", "chat_template", "documents")
_json: Final = msgspec.json.Decoder()

Changes = dict[str, bytes | None]


def body(sending: Sending, leg: Leg, changes: Mapping[str, bytes | None] | None = None) -> bytes:
    """The client's JSON for one leg: its bytes as they came where nothing has to be changed."""
    parsed = sending.parsed
    all_changes: Changes = {}
    record = leg.worker.record
    if parsed.model not in record.served_names and record.served_names:
        all_changes["model"] = msgspec.json.encode(record.served_names[0])  # the client used a name that only the router knows
    if parsed.stream and parsed.route in (CHAT, COMPLETIONS) and not asks_usage(parsed.fields):
        all_changes |= _with_usage(parsed.fields)
    if (ids := sending.prompt.ids) is not None and _takes_ids(parsed):
        all_changes["prompt"] = msgspec.json.encode(decode_ids(ids))
    if changes is not None:
        all_changes |= changes
    return splice(parsed.fields, all_changes) if all_changes else parsed.body


def _with_usage(fields: Mapping[str, msgspec.Raw]) -> Changes:
    """`stream_options` with the usage asked for; what is no object is the engine's to refuse."""
    options = value(fields, "stream_options")
    if options is None:
        return {"stream_options": b'{"include_usage":true}'}
    if not isinstance(options, dict):
        return {}
    kept = {name: v for name, v in options.items() if name != "continuous_usage_stats"}  # it would put usage into every event
    return {"stream_options": msgspec.json.encode({**kept, "include_usage": True})}


def _takes_ids(parsed: Parsed) -> bool:
    """A plain prompt of a completion means the same as its ids; a chat has no such form."""
    if parsed.route is not COMPLETIONS or any(name in parsed.fields for name in _TEXT_ONLY):
        return False
    return bytes(parsed.fields["prompt"])[:1] == b'"'


def choices(parsed: Parsed) -> int:
    """How many answers the request asks for; 1 for what the engine will refuse."""
    counts = [v for name in ("n", "best_of") if type(v := value(parsed.fields, name)) is int and 1 <= v <= MAX_CHOICES]
    prompt = value(parsed.fields, "prompt")
    prompts = len(prompt) if isinstance(prompt, list) and prompt and not all(type(t) is int for t in prompt) else 1
    return max([1, *counts]) * prompts


def check_pair_path(parsed: Parsed) -> None:
    """Raises ApiError for what prefill and decode servers do not share."""
    if parsed.route not in (CHAT, COMPLETIONS):
        text = f"{parsed.path} needs a worker of this engine that serves alone; its prefill/decode pairs take {CHAT.path} and {COMPLETIONS.path}"
        raise ApiError(400, text, code="unsupported_by_pair")


def value(fields: Mapping[str, msgspec.Raw], name: str) -> Any:
    """One decoded field; None when it is missing."""
    raw = fields.get(name)
    return None if raw is None else _json.decode(raw)


def error(status: int, said: bytes) -> ApiError:
    """An error answer: `{"error": {...}}` or, older, `{"object": "error", ...}` with a number as code. Never a fault of the worker
    by its shape alone; one of another shape (its web framework's, a proxy's) has a code that says so, and no client is shown it as it is."""
    type_ = _TYPES.get(status, contract_errors.INVALID_REQUEST if status < 500 else contract_errors.SERVER)
    try:
        parsed = _json.decode(said)
    except UNDECODABLE:
        parsed = None
    inner = parsed.get("error", parsed) if isinstance(parsed, dict) else None
    message = inner.get("message") if isinstance(inner, dict) else None
    if isinstance(message, str) and message:
        return ApiError(status, message, type=type_, code=f"worker_{status}")
    if status == 404 and isinstance(inner, dict) and inner.get("detail") == "Not Found":  # of its web framework: it has no such path
        text = "the worker does not serve this path; its model or its options do not allow it"
        return ApiError(status, text, type=type_, code=errors.CODE_WORKER_SHAPE)
    told = inner if isinstance(inner, str) and inner else f"the worker answered {status}: {said[:200].decode('utf-8', 'replace')}"
    return ApiError(status, told, type=type_, code=errors.CODE_WORKER_SHAPE)


def error_event(said: Any) -> ApiError | None:
    """The error that the JSON of a stream's event holds, as an answer with the status it names."""
    inner = said.get("error") if isinstance(said, dict) else None
    if inner is None:
        return None
    code = inner.get("code") if isinstance(inner, dict) else None
    status = code if type(code) is int and 400 <= code <= 599 else 500
    return error(status, msgspec.json.encode({"error": inner}))


def digest(*words: object, digits: int = 16) -> str:
    """Hex digits that stand for some facts."""
    return hashlib.sha256("\0".join(map(str, words)).encode()).hexdigest()[:digits]


def revisions(kind: str, model: str, version: str, role: str, tokenizer: str) -> tuple[str, str]:
    """Revision and model revision of a worker: equal for workers that can replace one another. The legs of a pair have one version."""
    revision = digest(model, "" if role == names.ROLE_UNIFIED else f"{kind} {version}", digits=8)
    return revision, digest(kind, model, _files_digest(tokenizer) if tokenizer else "")


def _files_digest(folder: str) -> str:
    """Of a tokenizer's files. Raises ApiError when there is none."""
    found = sorted(p for p in Path(folder).glob("*") if p.name in TOKENIZER_FILES)
    if not any(p.name == TOKENIZER_FILES[0] for p in found):
        raise ApiError(502, f"tokenizer={folder}: there is no {TOKENIZER_FILES[0]} in that folder of the router's machine")
    stats = [p.stat() for p in found]
    return _digest_of_files(tuple((p, s.st_size, s.st_mtime_ns) for p, s in zip(found, stats, strict=True)))


@lru_cache(maxsize=16)
def _digest_of_files(files: tuple[tuple[Path, int, int], ...]) -> str:
    """Read once for each state of the files."""
    return digest(*((p.name, hashlib.sha256(p.read_bytes()).hexdigest()) for p, _, _ in files))


def count(said: Any, *path: str) -> int:
    """A whole number at a path of an answer; 0 when there is none."""
    for name in path:
        said = said.get(name) if isinstance(said, dict) else None
    return said if type(said) is int and said >= 0 else 0
