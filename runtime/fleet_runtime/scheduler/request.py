"""One choice of one request, as the scheduler keeps it from `Admit` to its terminal message. Data only."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fleet_contract.names import PAGE_SIZE
from fleet_runtime.cache.memory import Lease, pages_for
from fleet_runtime.cache.radix import namespace_of
from fleet_runtime.messages import Admit, TokenLogprob

if TYPE_CHECKING:
    from fleet_runtime.scheduler.grammar import GrammarRun
    from fleet_runtime.scheduler.sampling import TokenCounts

Key = tuple[str, int]  # rid, index


class State(Enum):
    """Where a request is. A request is in exactly one place; `Book` and the legs' own maps follow this."""

    COMPILING = "compiling its grammar"
    WAITING = "waiting"  # for rows and pages to compute its prompt
    PREFILLING = "prefilling"  # holds a lease; part of the prompt is computed
    DECODING = "decoding"
    BOOTSTRAPPING = "bootstrapping"  # prefill leg: decode has not yet said where the pages go
    TRANSFERRING = "transferring"  # prefill leg: all computed, decode has not yet confirmed
    CONNECTING = "connecting"  # decode leg: the connection to the prefill worker is not up
    PREALLOC = "prealloc"  # decode leg: waits for a row and pages
    RECEIVING = "receiving"  # decode leg: pages are promised to the prefill worker
    ENDED = "ended"


class Kind(Enum):
    """What a request takes from its worker; the two legs have shares of their own on a unified worker (contract.md 9.8)."""

    PLAIN = "plain"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(slots=True, eq=False)
class Request:
    """See the module. `ids[:length]` are prompt and answer; KV is in pages for `ids[:computed]`.

    Both say what is known: steps that have not landed yet are in `launched` and `drawing`. A request that was retracted has lost its pages
    and computes `ids[:target]` once more; nothing else of it changes.
    """

    admit: Admit
    kind: Kind
    arrived: float  # seconds of the scheduler's clock
    ids: npt.NDArray[np.int32]
    prompt_tokens: int
    seed: int
    stop_ids: frozenset[int]
    total_pages: int  # that it may ever need: a prefill leg those of its prompt; else also those of its answer, whose last token needs no KV
    namespace: bytes = b""  # of the prefix cache
    serial: int = 0  # no other request of this process has it
    state: State = State.WAITING
    length: int = 0
    computed: int = 0
    target: int = 0  # tokens to compute before it decodes: those of its prompt; after a retraction all that it had
    launched: int = 0  # tokens that launched steps compute
    drawing: int = 0  # tokens that launched steps draw and that are not known yet
    slot: int = -1  # its row's number; -1: none
    started: float = 0.0  # when it first got a row
    cached_tokens: int = 0
    uncached_guess: int = 0  # tokens to compute, guessed from the tree when it began to wait
    retractions: int = 0
    lease: Lease | None = None
    last_step: int = 0
    opened: bool = False  # the detokenizer knows it
    generation: int = 0  # decode leg: names this attempt on the wire
    room_open: bool = False  # a transfer may still touch its pages
    sent_pages: int = 0  # prefill leg: pages given to the transfer
    decode_prefix: int = field(default=0)  # prefill leg: pages that decode has itself
    counts: TokenCounts | None = None  # what penalties look at; None: it has none
    grammar: GrammarRun | None = None
    prompt_logprobs: list[TokenLogprob] | None = None  # of the prompt's places computed so far; None: not wanted, or sent
    pooled: npt.NDArray[np.float64] | None = None  # sum of an embedding's hidden states so far

    @classmethod
    def from_admit(cls, admit: Admit, now: float) -> Request:
        """A new request; raises nothing: http has checked the numbers."""
        prompt = np.frombuffer(admit.ids, dtype="<u4").astype(np.int32)
        ids = np.zeros(len(prompt) + admit.max_new, dtype=np.int32)
        ids[: len(prompt)] = prompt
        kind = {"prefill": Kind.PREFILL, "decode": Kind.DECODE}.get(admit.leg, Kind.PLAIN)
        return cls(
            admit=admit,
            kind=kind,
            arrived=now,
            ids=ids,
            prompt_tokens=len(prompt),
            seed=admit.seed,
            stop_ids=frozenset(admit.stop_ids),
            total_pages=pages_for(len(prompt) + (max(0, admit.max_new - 1) if kind is not Kind.PREFILL else 0)),
            namespace=namespace_of(admit.lora, admit.salt),
            length=len(prompt),
            target=len(prompt),
            uncached_guess=len(prompt),
            prompt_logprobs=[] if admit.prompt_logprobs >= 0 and kind is not Kind.DECODE else None,
        )

    @property
    def key(self) -> Key:
        return (self.admit.rid, self.admit.index)

    @property
    def completion_tokens(self) -> int:
        return self.length - self.prompt_tokens

    @property
    def prefill_left(self) -> int:
        """Tokens that no launched step computes yet and that it needs before it decodes."""
        return max(0, self.target - self.launched)

    @property
    def wants_token(self) -> bool:
        """A step may draw one more token, whatever those under way turn out to be but for stop ids."""
        return self.length + self.drawing - self.prompt_tokens < self.admit.max_new

    @property
    def needs_last_token(self) -> bool:
        """How it draws depends on the token before: penalties, a grammar."""
        return self.counts is not None or self.grammar is not None

    @property
    def prefix_limit(self) -> int:
        """Most pages it may take from the prefix cache: at least one token is left to compute, and all whose results are wanted."""
        if self.prompt_logprobs is not None or self.admit.embed == "mean":
            return 0
        return (self.target - 1) // PAGE_SIZE

    def page_key(self, tokens: int) -> bytes:
        """The tree's key of its first `tokens` tokens, whole pages only."""
        return self.ids[: tokens // PAGE_SIZE * PAGE_SIZE].tobytes()
