"""One choice of one request, as the scheduler keeps it from `Admit` to its terminal message. Data only."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from fleet_contract.names import PAGE_SIZE
from fleet_runtime.cache.memory import Lease, pages_for
from fleet_runtime.messages import Admit

Key = tuple[str, int]  # rid, index


class State(Enum):
    """Where a request is. A request is in exactly one place; `Book` and the legs' own maps follow this."""

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
    """See the module. `ids[:length]` are prompt and answer; KV is in pages for `ids[:computed]`."""

    admit: Admit
    kind: Kind
    arrived: float  # seconds of the scheduler's clock
    ids: npt.NDArray[np.int32]
    prompt_tokens: int
    seed: int
    stop_ids: frozenset[int]
    state: State = State.WAITING
    length: int = 0
    computed: int = 0
    cached_tokens: int = 0
    uncached_guess: int = 0  # prompt tokens to compute, guessed at arrival from the tree
    lease: Lease | None = None
    last_step: int = 0
    opened: bool = False  # the detokenizer knows it
    generation: int = 0  # decode leg: names this attempt on the wire
    room_open: bool = False  # a transfer may still touch its pages
    sent_pages: int = 0  # prefill leg: pages given to the transfer
    decode_prefix: int = field(default=0)  # prefill leg: pages that decode has itself

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
            length=len(prompt),
            uncached_guess=len(prompt),
        )

    @property
    def key(self) -> Key:
        return (self.admit.rid, self.admit.index)

    @property
    def completion_tokens(self) -> int:
        return self.length - self.prompt_tokens

    @property
    def prompt_left(self) -> int:
        """Prompt tokens that are not computed yet."""
        return max(0, self.prompt_tokens - self.computed)

    @property
    def total_pages(self) -> int:
        """Pages it may ever need: a prefill leg those of its prompt; else also those of its answer, whose last token needs no KV."""
        if self.kind is Kind.PREFILL:
            return pages_for(self.prompt_tokens)
        return pages_for(self.prompt_tokens + self.admit.max_new - 1)

    @property
    def prefix_limit(self) -> int:
        """Most pages it may take from the prefix cache: at least one token of the prompt is left to compute."""
        return (self.prompt_tokens - 1) // PAGE_SIZE

    def page_key(self, tokens: int) -> bytes:
        """The tree's key of its first `tokens` tokens, whole pages only."""
        return self.ids[: tokens // PAGE_SIZE * PAGE_SIZE].tobytes()
