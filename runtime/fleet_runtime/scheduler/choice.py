"""Chooses the rows of the next step, and gives them their pages: running rows first, then waiting prompts as far as rows, pages and tokens go.

Called by the loop before each launch. Where a running row gets no page, nothing is chosen while a step is out: it may free some. Else
requests are retracted until the others have theirs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import islice
from typing import Final

from fleet_contract import errors
from fleet_contract.errors import ApiError
from fleet_contract.launch import RuntimeLaunch
from fleet_contract.names import PAGE_SIZE
from fleet_runtime.cache.memory import pages_for
from fleet_runtime.scheduler.admission import patience
from fleet_runtime.scheduler.book import Book
from fleet_runtime.scheduler.order import MOST_LOOKUPS, ORDERS
from fleet_runtime.scheduler.policy import Limits, PrefillAdder, decode_ride, plan_step, prefill_budget
from fleet_runtime.scheduler.ratio import victims
from fleet_runtime.scheduler.request import Kind, Request, State

log = logging.getLogger(__name__)

_LOOK_AGAIN_STEPS: Final = 8


class Chooser:
    """See the module. Keeps how many steps went without decode."""

    def __init__(self, book: Book, flags: RuntimeLaunch) -> None:
        self._book = book
        self._limits = Limits(flags.max_step_tokens, flags.max_prefill_steps, flags.mixed_chunk)
        self._order = ORDERS[flags.schedule_policy]
        self._by_priority = flags.schedule_policy == "priority"
        self._queue_timeout = flags.queue_timeout
        self._patience = patience(self._queue_timeout, self._queue_timeout)
        self._in_vain: tuple[object, ...] | None = None  # as things were when nobody got pages
        self._prefill_steps = 0  # since the last step with decode rows

    def elder(self) -> Request | None:
        """The first plain request of the queue, if it has waited too long to be passed: by a younger leg, or under `lpm` and `dfs-weight` by
        prompts that the cache knows better. Under `priority` the first is one of the highest."""
        book = self._book
        if not book.plain_queue:
            return None
        first = book.plain_queue[0]
        if self._by_priority:
            first = min(book.plain_queue, key=lambda r: (-r.admit.priority, r.arrived))
        most = self._patience
        if first.admit.deadline:
            most = patience(self._queue_timeout, first.admit.deadline - first.arrived)
        return first if book.clock() - first.arrived >= most else None

    def choose(self, *, after_launch: bool, after_prefill: bool) -> list[tuple[Request, int]]:
        """Requests and their new tokens, pages taken; nothing if no step can or should be launched now.

        Args: after_launch: a step is out. after_prefill: with prompts in it; then no other such step is chosen.
        """
        book = self._book
        if after_prefill and (book.plain_queue or book.prefill_queue or any(r.prefill_left for r in book.prefilling)):
            return []
        decoding = self._decodable()
        if not self._grow(decoding):
            if after_launch:
                return []
            self._retract()
            decoding = self._decodable()
        else:
            ride = decode_ride(self._limits, decode_rows=len(decoding), prefill_steps=self._prefill_steps)
            self._admit_waiting(prefill_budget(self._limits, ride))
        prefilling = [r for r in book.prefilling if r.prefill_left]
        if not prefilling and len(decoding) <= self._limits.step_tokens:  # what most steps are; their pages are taken
            self._prefill_steps = 0
            return [(request, 1) for request in decoding]
        plan = plan_step(self._limits, [r.prefill_left for r in prefilling], [r.last_step for r in decoding], prefill_steps=self._prefill_steps)
        rows = [(prefilling[i], n) for i, n in plan.chunks] + [(decoding[i], 1) for i in plan.decode]
        for request, n in rows:
            assert request.lease is not None
            if not book.memory.grow(request.lease, pages_for(request.launched + n)):
                assert after_launch, "pages that were promised are there when nothing is set aside"
                return []
        if rows:
            self._prefill_steps = 0 if plan.decode or not decoding else self._prefill_steps + 1
        return rows

    def _decodable(self) -> list[Request]:
        """Rows that want one token more, whatever steps under way bring: those that end by length with them are left out."""
        begun = [r for r in self._book.prefilling if not r.prefill_left and r.kind is not Kind.PREFILL and r.drawing and r.wants_token]
        return begun + [r for r in self._book.decoding if r.wants_token]

    def _grow(self, decoding: list[Request]) -> bool:
        """Pages for one token more of each row. Who asks for more than its promise does not get what others were promised."""
        memory = self._book.memory
        for request in decoding:
            lease = request.lease
            assert lease is not None
            if request.launched >= lease.count * PAGE_SIZE and not memory.grow(lease, pages_for(request.launched + 1)):
                return False
        return True

    def _retract(self) -> None:
        """Nothing is out, and a running row gets no page: takes requests' pages back until all others have theirs."""
        book = self._book
        while not self._grow(self._decodable()):
            holders = [r for r in (*book.prefilling, *book.decoding) if r.kind is Kind.PLAIN]
            if given := victims(holders):
                book.retract(given[0])
                log.debug("out of KV pages: request %s/%d is retracted after %d tokens", *given[0].key, given[0].completion_tokens)
            elif (len(book.requests) > 1 and book.running > 1) or book.limbo:  # legs hold the rest: it waits for them
                book.retract(holders[0])
            else:
                text = f"this worker's KV memory of {book.memory.num_pages * PAGE_SIZE} tokens cannot hold the request any longer"
                book.fail(holders[0], ApiError(503, text, type=errors.OVERLOADED, code="kv_exhausted"))
        book.ratio.retracted([r for r in book.decoding if r.kind is Kind.PLAIN])

    def _admit_waiting(self, budget: int) -> None:
        """Lets waiting prompts in while the step has tokens left for them. Within a queue nobody overtakes, but a prompt that would be cut while
        another is lets those pass that fit whole. Of the two queues the older head goes first, and where it does not fit, the other may."""
        book = self._book
        adder = PrefillAdder(budget)
        for request in book.prefilling:
            if request.prefill_left and adder.takes(request.prefill_left):
                adder.add(request.prefill_left)
        if adder.full or not (book.plain_queue or book.prefill_queue):
            return
        if book.running >= book.capacity.rows or book.memory.headroom < 1:  # everybody needs a page: at least one token is computed
            return
        # Where nobody got pages, nobody will while nothing has changed but what the running are expected to take: that is looked at again later.
        now = (book.moved, book.memory.headroom, book.elder, adder, book.totals.steps // _LOOK_AGAIN_STEPS)
        if now != self._in_vain:
            self._in_vain = None if self._offer(adder) else now

    def _offer(self, adder: PrefillAdder) -> bool:
        """Offers the step's room to the queues. False: all who could be computed in it found no pages."""
        book, entered, refused = self._book, False, 0
        plain = self._order(book.plain_queue, book.memory)
        if (elder := book.elder) is not None and plain[0] is not elder:
            plain.remove(elder)
            plain.insert(0, elder)
        queues: list[Iterator[Request]] = [iter(plain), iter(list(book.prefill_queue))]
        heads = [self._next_that_fits(queue, adder) for queue in queues]
        while any(heads) and not adder.full:
            i = min((i for i, head in enumerate(heads) if head is not None), key=lambda i: _age(heads[i]))
            head = heads[i]
            assert head is not None
            if not adder.takes(head.uncached_guess):
                heads[i] = self._next_that_fits(queues[i], adder)
            elif book.try_lease(head):
                self._enter(head, adder)
                entered = True
                heads[i] = self._next_that_fits(queues[i], adder)
            else:
                heads[i] = None
                refused += 1
        return entered or refused < bool(book.plain_queue) + bool(book.prefill_queue)

    def _enter(self, request: Request, adder: PrefillAdder) -> None:
        book = self._book
        if not request.retractions:
            request.cached_tokens = request.computed
            book.totals.cached_tokens += request.computed
        book.place(request, State.PREFILLING)
        if adder.takes(request.prefill_left):  # its guess of what is cached may be too good by now; then it waits with its row
            adder.add(request.prefill_left)

    def _next_that_fits(self, queue: Iterator[Request], adder: PrefillAdder) -> Request | None:
        """The next request of a queue whose prompt the step can take."""
        for request in islice(queue, MOST_LOOKUPS):
            if not adder.takes(request.uncached_guess):
                self._book.guess(request)  # more of it may be cached by now
            if adder.takes(request.uncached_guess):
                return request
            if request is self._book.elder:
                return None  # nobody passes it
        return None


def _age(request: Request | None) -> float:
    assert request is not None
    return request.arrived
