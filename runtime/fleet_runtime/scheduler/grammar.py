"""Grammars of answers, by llguidance: compiled on threads of their own, with limits of size and time; then one matcher per request.

A grammar that does not compile fails its request with the grammar's own message, and is remembered. The loop asks a request's `GrammarRun`
for the mask of its next token and tells it what was drawn. Whatever goes wrong in a matcher raises here, and ends that one request.

The tokenizer is read on first use. llguidance: https://github.com/guidance-ai/llguidance
"""

from __future__ import annotations

import json
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fleet_contract.errors import ApiError
from fleet_runtime.messages import Grammar
from fleet_runtime.scheduler.request import Request

MAX_BYTES: Final = 256 << 10  # of one grammar's text
_KEPT: Final = 256  # compiled grammars and failures that are remembered
_MOST_REASON: Final = 1000  # characters
_THREADS: Final = 2
_NOTHING_FITS: Final = "NoExtensionBias"  # llguidance's word for a place where the answer can neither go on nor end
_FORBIDDEN: Final = ("satisfy the grammar", "parser stopped")  # its words for a token that its own mask forbids
_MAX_GRAMMAR_SIZE: Final = 500_000  # llguidance's own measure of a compiled grammar
_MAX_LEXER_FUEL: Final = 5_000_000

Masks = npt.NDArray[np.uint32]
Compile = Callable[[Grammar], Any]  # -> LLMatcher; raises ValueError with the grammar's fault
Spawn = Callable[[Callable[[], None]], None]


class GrammarFault(Exception):
    """A matcher failed."""


class DeadEnd(GrammarFault):
    """The grammar allows nothing at this place, not even its end: the request's own fault."""


class TooHard(GrammarFault):
    """The library gives the grammar up at this place, by one of its limits: the request's own fault, too."""


class GrammarRun:
    """The grammar of one request, at the place where its answer is. Kept over retractions."""

    def __init__(self, matcher: Any, *, stop_ids: frozenset[int], after_ids: list[int]) -> None:
        self._matcher = matcher
        self._stop_ids = sorted(stop_ids)
        self._after = after_ids
        self._recent: list[int] = []
        self.active = not after_ids  # False: its start is not reached

    def fill(self, mask: Masks) -> None:
        """Writes the tokens allowed next; mask: [words] zeros. Stop ids are allowed exactly where the answer is complete. Raises GrammarFault."""
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._check()
        complete = self._matcher.is_accepting()
        for token in self._stop_ids:
            word, bit = divmod(token, 32)
            if word < len(mask):
                one = np.uint32(1 << bit)
                mask[word] = mask[word] | one if complete else mask[word] & ~one
        if not mask.any():
            raise DeadEnd("no token of this model can continue the answer")

    def accept(self, token: int) -> bool:
        """One more token of the answer; True if nothing can follow it. Raises GrammarFault for one that the grammar forbids."""
        if not self.active:
            self._recent = [*self._recent, token][-len(self._after) :]
            self.active = self._recent == self._after
            return False
        self._matcher.consume_token(token)
        self._check()
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = _first_line(self._matcher.get_error())
            if reason.startswith(_NOTHING_FITS):
                raise DeadEnd("nothing may follow what the answer has so far")
            raise GrammarFault(reason) if any(words in reason for words in _FORBIDDEN) else TooHard(reason)


class LlguidanceCompiler:
    """Makes matchers; runs on the compile threads. load: tokenizer.json and the ids that end an answer."""

    def __init__(self, load: Callable[[], tuple[str, list[int]]], vocab_size: int) -> None:
        self._load = load
        self._vocab_size = vocab_size
        self._tokenizer: Any = None
        self._lock = threading.Lock()

    def __call__(self, grammar: Grammar) -> Any:
        """Compiles, and computes a first mask: a grammar may pass the one and fail the other. Raises ValueError."""
        from llguidance import LLMatcher, LLParserLimits

        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._make_tokenizer()
        limits = LLParserLimits(max_grammar_size=_MAX_GRAMMAR_SIZE, initial_lexer_fuel=_MAX_LEXER_FUEL, verbose_errors=False)
        matcher = LLMatcher(self._tokenizer, _source(grammar), log_level=0, limits=limits)
        if matcher.is_error():
            raise ValueError(matcher.get_error().strip())
        first = matcher.deep_copy()
        first.compute_bitmask()
        if first.is_error():
            reason = first.get_error().strip()
            raise ValueError("no answer fits it: nothing may come first" if reason.startswith(_NOTHING_FITS) else reason)
        return matcher

    def _make_tokenizer(self) -> Any:
        from llguidance import LLTokenizer

        text, eos_ids = self._load()
        eos = [i for i in eos_ids if i < self._vocab_size]
        return LLTokenizer(_within(text, self._vocab_size), n_vocab=self._vocab_size, eos_token=eos or None)


def _within(tokenizer: str, vocab_size: int) -> str:
    """tokenizer.json without the added tokens that the model does not have: it can draw none of them."""
    parsed = json.loads(tokenizer)
    added = parsed.get("added_tokens") or []
    kept = [token for token in added if token["id"] < vocab_size]
    if len(kept) == len(added):
        return tokenizer
    return json.dumps(parsed | {"added_tokens": kept, "post_processor": None})


def _source(grammar: Grammar) -> str:
    """The grammar as llguidance takes it. Raises ValueError."""
    from llguidance import LLMatcher

    match grammar.kind:
        case "json_schema":
            json.loads(grammar.text)  # for a clear message; llguidance takes the text as it is
            return str(LLMatcher.grammar_from_json_schema(grammar.text))
        case "regex":
            return str(LLMatcher.grammar_from_regex(grammar.text))
        case "lark":
            return str(LLMatcher.grammar_from_lark(grammar.text))
        case "choice":
            words = json.loads(grammar.text)
            if not isinstance(words, list) or not words or not all(isinstance(w, str) and w for w in words):
                raise ValueError("a choice is a list of one text or more, none of them empty")
            return str(LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(w, ensure_ascii=False) for w in words)))
    raise ValueError(f"{grammar.kind!r} is no kind of grammar; json_schema, regex, lark and choice are")


@dataclass(slots=True)
class _Job:
    grammar: Grammar
    waiting: list[Request]
    deadline: float


class Grammars:
    """Compiled grammars, and the requests that wait for one. Called by the loop's thread; only `_compiled` is filled by the others."""

    def __init__(
        self, compile: Compile, *, timeout_s: float, clock: Callable[[], float], wake: Callable[[], None] | None = None, spawn: Spawn | None = None
    ) -> None:
        """spawn: runs a compilation; None: on threads. wake: called by them when one is done."""
        self._compile = compile
        self._timeout_s = timeout_s
        self._clock = clock
        self._wake = wake or (lambda: None)
        self._spawn = spawn or _Threads(_THREADS)
        self._known: OrderedDict[tuple[str, str], Any] = OrderedDict()  # LLMatcher, or ApiError
        self._jobs: dict[tuple[str, str], _Job] = {}
        self._compiled: queue.SimpleQueue[tuple[tuple[str, str], Any]] = queue.SimpleQueue()

    @property
    def waiting(self) -> int:
        """Requests that wait for their grammar."""
        return sum(len(job.waiting) for job in self._jobs.values())

    def start(self, request: Request) -> ApiError | None:
        """Takes a request with a grammar; `poll` gives it back. An error where its grammar is known to be bad, or too large."""
        grammar = request.admit.grammar
        assert grammar is not None
        key = (grammar.kind, grammar.text)
        if len(grammar.text.encode()) > MAX_BYTES:
            return _refusal(f"the grammar has {len(grammar.text.encode())} bytes; at most {MAX_BYTES} are allowed")
        if isinstance(known := self._known.get(key), ApiError):
            return known
        job = self._jobs.get(key)
        if job is None:
            job = self._jobs[key] = _Job(grammar, [], self._clock() + self._timeout_s)
            if known is not None:
                self._compiled.put((key, known))
            else:
                self._spawn(lambda: self._run(key, grammar))
        job.waiting.append(request)
        return None

    def _run(self, key: tuple[str, str], grammar: Grammar) -> None:
        try:
            result = self._compile(grammar)
        except Exception as e:  # the border of one grammar: whatever the library says of it
            result = _refusal(f"the grammar cannot be used: {str(e)[:_MOST_REASON]}")
        self._compiled.put((key, result))
        self._wake()

    def poll(self) -> list[tuple[Request, ApiError | None]]:
        """Requests whose grammar is there (`request.grammar` is set then), or cannot be used. Those that have ended meanwhile are in it, too."""
        if not self._jobs and self._compiled.empty():
            return []
        out: list[tuple[Request, ApiError | None]] = []
        while not self._compiled.empty():
            key, result = self._compiled.get()
            self._remember(key, result)
            if (job := self._jobs.pop(key, None)) is not None:
                out += [(r, self._give(r, result)) for r in job.waiting]
        now = self._clock()
        for key, job in list(self._jobs.items()):
            if now >= job.deadline:
                del self._jobs[key]
                error = _refusal(f"the grammar did not compile within {self._timeout_s:g} s (--grammar-timeout); make it simpler")
                self._remember(key, error)
                out += [(r, error) for r in job.waiting]
        return out

    def _give(self, request: Request, result: Any) -> ApiError | None:
        if isinstance(result, ApiError):
            return result
        assert request.admit.grammar is not None
        request.grammar = GrammarRun(result.deep_copy(), stop_ids=request.stop_ids, after_ids=request.admit.grammar.after_ids)
        return None

    def drop(self, request: Request) -> None:
        """The request has ended: nothing here names it any more."""
        for job in self._jobs.values():
            if request in job.waiting:
                job.waiting.remove(request)

    def _remember(self, key: tuple[str, str], result: Any) -> None:
        self._known[key] = result
        self._known.move_to_end(key)
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)


class _Threads:
    """A few daemon threads, started on first use: one that hangs in a grammar does not keep the process alive."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._started = False

    def __call__(self, job: Callable[[], None]) -> None:
        if not self._started:
            self._started = True
            for n in range(self._count):
                threading.Thread(target=self._work, name=f"grammar-{n}", daemon=True).start()
        self._jobs.put(job)

    def _work(self) -> None:
        while True:
            self._jobs.get()()


def _refusal(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_grammar")


def _first_line(text: str) -> str:
    return next((line for line in text.splitlines() if line.strip()), "the matcher failed")
