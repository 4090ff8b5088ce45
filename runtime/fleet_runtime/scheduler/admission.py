"""Who may enter: pure decisions over counts. The queue limit, requests that can never fit, deadlines, and the shares of the legs.

Shares (contract.md 9.8): a decode leg holds pages while it waits for another worker's prefill. If two unified workers did that for each
other with all their pages, both would wait for ever. So on a unified worker half of the rows and pages is a share that decode legs never
take; prefill legs use nothing else, and plain requests stay out of it while a prefill leg is here. Plain requests end by themselves, and
so does a prefill leg that has its pages, so the share always comes free again.

Age: a plain request that has waited for `patience` is the elder, and may use the share. Younger decode legs wait behind it. Younger prefill
legs do only when the decode legs that are here leave it enough: what it waits for then ends by itself. Else two workers could wait for each
other: each one's elder for its decode legs, and these for the prefill legs that the other one's elder holds back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fleet_contract import errors
from fleet_contract.errors import ApiError
from fleet_contract.names import PAGE_SIZE, ROLE_UNIFIED
from fleet_runtime.scheduler.request import Kind

PATIENCE_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a worker has, and what of it only prefill legs may use. `share_*` is 0 where no share is kept."""

    rows: int
    pages: int
    share_rows: int = 0
    share_pages: int = 0

    @classmethod
    def of(cls, role: str, *, rows: int, pages: int) -> Capacity:
        """The capacity of a worker of this role."""
        if role != ROLE_UNIFIED:
            return cls(rows, pages)
        return cls(rows, pages, share_rows=(rows + 1) // 2, share_pages=pages // 2)

    def most_pages(self, kind: Kind) -> int:
        """Most pages that requests of this kind may hold together."""
        if not self.share_pages:
            return self.pages
        return {Kind.PLAIN: self.pages, Kind.PREFILL: self.share_pages, Kind.DECODE: self.pages - self.share_pages}[kind]

    def most_rows(self, kind: Kind) -> int:
        """Most rows that requests of this kind may hold together."""
        if not self.share_rows:
            return self.rows
        return {Kind.PLAIN: self.rows, Kind.PREFILL: self.share_rows, Kind.DECODE: self.rows - self.share_rows}[kind]


@dataclass(slots=True)
class Held:
    """Rows and pages that admitted requests hold or were promised, by kind; a shared prefix counts for each of its users."""

    rows: dict[Kind, int]
    pages: dict[Kind, int]
    prefill_legs: int = 0  # here in any state

    @classmethod
    def nothing(cls) -> Held:
        return cls(dict.fromkeys(Kind, 0), dict.fromkeys(Kind, 0))


def patience(queue_timeout: float, limit: float) -> float:
    """Seconds after which a waiting plain request is not passed any more. Args: limit: most seconds that it may wait, by its deadline."""
    return min(PATIENCE_S, queue_timeout / 4, limit / 4)


def lets_pass(capacity: Capacity, held: Held, kind: Kind, elder_pages: int) -> bool:
    """Whether a leg that is younger than the elder, which needs so many pages, waits behind it."""
    if kind is Kind.DECODE:
        return True
    return kind is Kind.PREFILL and held.pages[Kind.DECODE] + elder_pages <= capacity.pages and held.rows[Kind.DECODE] < capacity.rows


def may_enter(capacity: Capacity, held: Held, kind: Kind, pages: int, *, elder: bool = False) -> bool:
    """True if one more request of this kind, with so many pages, keeps rows and shares. Free pages are the memory's own question."""
    if sum(held.rows.values()) >= capacity.rows or held.rows[kind] >= capacity.most_rows(kind):
        return False
    if not capacity.share_pages:
        return True
    if kind is not Kind.PLAIN:
        return held.pages[kind] + pages <= capacity.most_pages(kind)
    if elder or not held.prefill_legs:
        return True
    outside_pages = held.pages[Kind.PLAIN] + held.pages[Kind.DECODE] + pages
    outside_rows = held.rows[Kind.PLAIN] + held.rows[Kind.DECODE] + 1
    # With one row in all there is no row outside the share: the plain request waits for the leg.
    return outside_pages <= capacity.pages - capacity.share_pages and outside_rows <= capacity.rows - capacity.share_rows


def refusal(
    capacity: Capacity,
    kind: Kind,
    *,
    prompt_tokens: int,
    max_new: int,
    pages: int,
    waiting: int,
    max_queue: int,
    waiting_tokens: int = 0,
    max_queue_tokens: int = 1 << 62,
) -> ApiError | None:
    """Why a request is refused at entry, or None: it could never fit, or the queue is full. An empty queue takes a prompt of any length.

    waiting, waiting_tokens: of other requests.
    """
    most = capacity.most_pages(kind)
    if pages > most:
        answer = "" if kind is Kind.PREFILL else f" and up to {max_new} of the answer"
        return ApiError(
            400,
            f"the request needs KV memory for {pages * PAGE_SIZE} tokens ({prompt_tokens} of the prompt{answer}), "
            f"but this worker has {most * PAGE_SIZE} tokens for such requests; shorten the prompt or lower max_tokens",
            code="kv_capacity_exceeded",
        )
    if capacity.most_rows(kind) == 0:
        return ApiError(400, f"this worker keeps no row for a {kind.value} leg; raise --max-rows above {capacity.rows}", code="no_rows_for_leg")
    if waiting >= max_queue:
        return ApiError(
            429,
            f"{waiting} requests are waiting and --max-queue is {max_queue}; try again later",
            type=errors.RATE_LIMIT,
            code="queue_full",
            retry_after_s=1,
        )
    if waiting and waiting_tokens + prompt_tokens > max_queue_tokens:
        return ApiError(
            429,
            f"{waiting_tokens} prompt tokens are waiting, this request brings {prompt_tokens}, and --max-queue-tokens is {max_queue_tokens}; "
            "try again later",
            type=errors.RATE_LIMIT,
            code="queue_full",
            retry_after_s=1,
        )
    return None


def overdue(
    now: float,
    *,
    deadline: float,
    arrived: float,
    queue_timeout: float,
    running: bool,
    state: str,
    first_token: bool = False,
    started: float = 0.0,
    running_timeout: float = 0,
) -> ApiError | None:
    """The timeout that has ended a request, or None.

    Args:
        first_token: it is there; then only `running_timeout` (0: none) counts, from when it got a row (`started`).
        deadline: for the first token, in the clock of `now`; 0 if the request brought none, and then `queue_timeout` bounds its wait.
        running: it has left the queue; only a deadline still bounds it.
        state: where it is, in a word for the message.
    """
    if running_timeout and started and now - started >= running_timeout:
        text = f"the request ran {now - started:.1f} s; --running-timeout is {running_timeout:g} s"
        return ApiError(504, text, type=errors.TIMEOUT, code="running_timeout")
    if first_token:
        return None
    waited = now - arrived
    if deadline:
        if now < deadline:
            return None
        return ApiError(
            504, f"no first token before the request's deadline: {state} after {waited:.1f} s", type=errors.TIMEOUT, code="deadline_exceeded"
        )
    if running or waited < queue_timeout:
        return None
    return ApiError(
        503,
        f"the request waited {waited:.1f} s to run ({state}); --queue-timeout is {queue_timeout:g} s",
        type=errors.TIMEOUT,
        code="queue_timeout",
    )
