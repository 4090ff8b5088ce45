"""The deciding half as one object: index, load, rule and queues of all pools. The brain asks it; so does the replay simulator.

No clock, no I/O, no tasks: every method takes `now` (seconds, never falls) and returns what to do. A request is either decided at
once or waits; after anything that frees work the caller calls `pump`, which gives the requests that may go now.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Final

from fleet_router.decide import rule
from fleet_router.decide.index import PrefixIndex
from fleet_router.decide.lives import Expectation
from fleet_router.decide.load import CAPACITY, COMMITTED, ROWS, WAIT, LoadTable, Pick, SlotLoad, Speed
from fleet_router.decide.queue import BATCH, BATCH_SHARE_OF_THETA, CacheQueue, QueueRules, Waiting
from fleet_router.decide.rivals import Rivals
from fleet_router.decide.rule import Ask, Bools, Chosen, Draw, FewTerms, Hits, Pool, Terms
from fleet_router.decide.told import Prefix, some

FEW_SLOTS: Final = 16  # of the load table, up to which hits are a list; pools of up to `rule.FEW` workers read them so
SWEEP_SLICE: Final = 5_000  # entries of retired lives that one tick clears: about a millisecond


class Decision:
    """A choice with what it was made of."""

    def __init__(self, pool: Pool, ask: Ask, chosen: Chosen, parts: tuple[Terms, ...] | FewTerms, hits: Hits, waited_s: float = 0.0) -> None:
        self.pool = pool
        self.ask = ask
        self.chosen = chosen
        self.parts = parts
        self.hits = hits
        self.waited_s = waited_s

    @property
    def terms(self) -> tuple[Terms, ...]:
        """The costs by kind of worker."""
        return (self.parts.as_terms(),) if isinstance(self.parts, FewTerms) else self.parts


class Taken:
    """A counted choice: one pick per worker. `fleet.release` gives it back."""

    def __init__(self, decision: Decision, keys: Sequence[int]) -> None:
        self.decision = decision
        self.keys = keys
        self.picks: list[tuple[SlotLoad, Pick]] = []  # prefill first
        self.expectations: list[Expectation] = []

    @property
    def predicted_tokens(self) -> int:
        """Tokens of the prompt that the worker which computes it should have."""
        return int(self.decision.hits.of(self.decision.chosen.first))


class Fleet:
    """See the module."""

    def __init__(self, draw: Draw, rules: QueueRules | None = None, *, block_tokens: int | None = None) -> None:
        self.index = PrefixIndex() if block_tokens is None else PrefixIndex(block_tokens)
        self.load = LoadTable()
        self.rivals = Rivals()
        self.rules = rules or QueueRules()
        self.queues: dict[Hashable, CacheQueue] = {}
        self._pools: dict[Hashable, Pool] = {}
        self._pages: dict[int, int] = {}  # by slot: tokens of a page, where known
        self._coarse: dict[int, int] = {}  # those with pages larger than a block of the index
        self._draw = draw

    # -- workers

    def add_worker(self, slot: int, speed: Speed, *, by_history: bool, learn: bool = True, engine_blocks: int = 0, page_tokens: int = 0) -> SlotLoad:
        """A worker that is empty and idle as far as we know.

        Args: page_tokens: it finds whole pages of so many tokens in its cache, and computes the last token of a prompt always; 0: anything.
        """
        if page_tokens:
            self._pages[slot] = page_tokens
            if page_tokens > self.index.block_tokens:
                self._coarse[slot] = page_tokens
        self.index.add_slot(slot, speed.kv_capacity_tokens, by_history=by_history, engine_blocks=engine_blocks)
        return self.load.add(slot, speed, learn=learn)

    def remove_worker(self, slot: int) -> None:
        """It is gone, or another incarnation has its place. Its picks may still be released."""
        self.index.remove_slot(slot)
        self.load.remove(slot)
        self._pages.pop(slot, None)
        self._coarse.pop(slot, None)

    def set_pools(self, pools: Mapping[Hashable, Pool]) -> None:
        """The ready workers by pool; queues of pools that are gone keep their requests until they are withdrawn."""
        self._pools = dict(pools)
        for key, queue in list(self.queues.items()):
            if key not in pools and not len(queue):
                del self.queues[key]
            else:
                queue.set_pool(pools.get(key, Pool()))

    def pool(self, key: Hashable) -> Pool | None:
        """None when the pool has no ready workers."""
        return self._pools.get(key)

    # -- choices

    def look_up(self, keys: Sequence[int], key_tokens: float = 0.0) -> Hits:
        """Hits of a prompt in all slots. Args: key_tokens: see `Ask`."""
        width = self.load.width
        few = self.index.few_hits(keys, width, key_tokens) if width <= FEW_SLOTS else None
        hits = Hits(few) if few is not None else Hits(*self.index.hits(keys, width, key_tokens))
        if not key_tokens:
            for slot, page in self._coarse.items():  # the index knows parts of its pages
                hits.lessen(slot, hits.of(slot) % page)
        return hits

    def decide(self, pool: Pool, ask: Ask, keys: Sequence[int], now: float, open_slots: Bools | None = None) -> Decision | None:
        """The choice that would be made now; changes nothing. None when nobody in the pool can serve."""
        self.load.tick(now)
        hits = self.look_up(keys, ask.key_tokens)
        if keys and ask.prompt_tokens == len(keys) * self.index.block_tokens and not ask.key_tokens:
            self._leave_last(hits, ask.prompt_tokens)
        found = rule.choose(self.load, pool, ask, hits, self._draw, open_slots)
        return Decision(pool, ask, *found, hits) if found is not None else None

    def _leave_last(self, hits: Hits, prompt_tokens: int) -> None:
        """Whoever holds a whole prompt computes its last page all the same: the next token comes from there."""
        for slot in [n for n, tokens in enumerate(hits.values()) if tokens >= prompt_tokens]:
            hits.lessen(slot, self._pages.get(slot, 0))

    def take(self, decision: Decision, keys: Sequence[int], now: float, *, silent: bool = False, key: Hashable = None) -> Taken:
        """Counts a choice, before anything is awaited.

        Args:
            silent: nobody will see the first token (the answer comes in one piece).
            key: of the pool's queue, whose requests are told.
        """
        chosen, ask = decision.chosen, decision.ask
        taken = Taken(decision, keys)
        miss = max(0, ask.prompt_tokens - int(decision.hits.saved_by(chosen.first)))
        whole = ask.prompt_tokens + ask.answer_tokens
        if chosen.prefill is None:
            self._pick(taken, chosen.serving, (miss, ask.prompt_tokens, whole), now, silent)
        else:
            self._pick(taken, chosen.prefill, (miss, 0, ask.prompt_tokens), now, silent)
            self._pick(taken, chosen.serving, (0, ask.prompt_tokens, whole), now, silent)
        queue = self.queues.get(key)
        if queue is not None and len(queue):
            queue.expect(chosen.first, keys, ask.key_tokens or self.index.block_tokens)
        return taken

    def _pick(self, taken: Taken, slot: int, tokens: tuple[int, int, int], now: float, silent: bool) -> None:
        load = self.load.slots[slot]
        pick = load.pick(*tokens, now)
        taken.picks.append((load, pick))
        if silent:
            self.load.watch_silent(load, pick, now)
        key_tokens = taken.decision.ask.key_tokens
        hit_blocks = int(taken.decision.hits.of(slot) / (key_tokens or self.index.block_tokens))
        if self.load.shared:
            pick.prefix, pick.key_tokens = some(taken.keys, hit_blocks), key_tokens
        if self.index.is_told and not key_tokens:
            hit_blocks = self.index.hit_blocks(slot, taken.keys)
        expectation = self.index.expect(slot, taken.keys, hit_blocks, key_tokens)
        if expectation is not None:
            taken.expectations.append(expectation)
        load.set_cached(self.index.held_tokens(slot))

    # -- picks of other routers

    def foresee(self, slot: int, prefix: Prefix, key_tokens: float = 0.0) -> Expectation | None:
        """One of which some keys are known."""
        for queue in self.queues.values():
            queue.expect_told(slot, prefix, key_tokens or self.index.block_tokens)
        expectation = self.index.foresee(slot, prefix, key_tokens)
        if (load := self.load.slots.get(slot)) is not None:
            load.set_cached(self.index.held_tokens(slot))
        return expectation

    # -- what becomes of ours

    def first_token(self, taken: Taken, now: float) -> None:
        """The prompt is computed: it is no waiting work any more. Again is nothing."""
        for load, pick in taken.picks:
            load.start(pick, now)
        self.computed(taken, now)

    def computed(self, taken: Taken, now: float) -> None:
        """The same where nobody has seen the first token: nothing is learned of its time. Again is nothing."""
        for expectation in taken.expectations:
            self.index.settle(expectation, now)
        taken.expectations.clear()

    def learn_cached(self, slot: int, taken: Taken, actual_tokens: int) -> None:
        """What the worker that computed the prompt had cached."""
        self.index.feedback(slot, taken.predicted_tokens, actual_tokens, taken.decision.ask.key_tokens)

    def release(self, taken: Taken, which: int | None = None) -> None:
        """A pick (all: None) is over. Again is nothing."""
        for load, pick in taken.picks if which is None else [taken.picks[which]]:
            load.release(pick)
        if which is None:
            for expectation in taken.expectations:
                self.index.cancel(expectation)
            taken.expectations.clear()

    # -- waiting

    def offer(self, key: Hashable, request: Waiting, now: float) -> Decision | None:
        """`at_once`, or the request waits, and `pump` may give it.

        Raises QueueFull. The pool may have no workers: then it waits for them.
        """
        decision = self.at_once(key, request.ask, request.keys, now, request.klass, request.exclude, prompt_only=request.prompt_only)
        if decision is None:
            self.wait(key, request)
        return decision

    def at_once(
        self, key: Hashable, ask: Ask, keys: Sequence[int], now: float, klass: str = "default", exclude: Collection[int] = (),
        *, prompt_only: bool = False,
    ) -> Decision | None:  # fmt: skip
        """Decides when nobody waits and the best worker is open: the normal case. Nothing is counted yet."""
        queue = self.queues.get(key)
        pool = self._pools.get(key)
        if pool is None or (queue is not None and len(queue)) or self.rivals.wait_for(pool.slots_prompt):
            return None  # it takes its turn, also after what waits at other routers
        if prompt_only:
            pool = pool.for_prompts()
        decision = self.decide(pool.without(exclude) if exclude else pool, ask, keys, now)
        return decision if decision is not None and self.is_open(decision, klass) else None

    def wait(self, key: Hashable, request: Waiting) -> None:
        """Puts a request into its pool's queue. Raises QueueFull."""
        queue = self.queues.get(key)
        if queue is None:
            queue = self.queues[key] = CacheQueue(self.load, self.rules, self.look_up, self.rivals)
            queue.set_pool(self._pools.get(key, Pool()))
        queue.put(request)

    def pump(self, key: Hashable, now: float) -> tuple[Waiting, Decision] | None:
        """The next waiting request of a pool that may go now. The caller counts it with `take`, then asks again."""
        queue = self.queues.get(key)
        if queue is None or not len(queue):
            return None
        self.load.tick(now)
        self.rivals.look(now)
        found = queue.take(now)
        if found is None:
            return None
        request, open_slots = found
        pool = queue.pool.for_prompts() if request.prompt_only else queue.pool
        decision = self.decide(pool, request.ask, request.keys, now, open_slots)
        assert decision is not None, "the queue gave a request that nobody can take"
        self.rivals.took(decision.chosen.first)
        decision.waited_s = now - request.arrived
        return request, decision

    def too_late(self, now: float) -> list[tuple[Waiting, float]]:
        """Takes out all requests whose deadline is over, each with the seconds after which trying again makes sense."""
        out: list[tuple[Waiting, float]] = []
        for queue in self.queues.values():
            if queue.next_deadline() <= now:
                out += [(request, queue.predicted_wait_s()) for request in queue.too_late(now)]
        return out

    def is_open(self, decision: Decision, klass: str = "default") -> bool:
        """Whether the chosen workers would begin soon and have room."""
        ask, chosen = decision.ask, decision.chosen
        first, serving = self.load.slots[chosen.first].column, self.load.slots[chosen.serving].column
        theta = self.rules.theta_s * (BATCH_SHARE_OF_THETA if klass == BATCH else 1.0)
        if first[WAIT] >= theta:
            return False
        need = ask.prompt_tokens + ask.answer_tokens
        if serving[COMMITTED] + need > serving[CAPACITY] and serving[ROWS] > 0:
            return False
        return chosen.prefill is None or first[COMMITTED] + ask.prompt_tokens <= first[CAPACITY] or first[WAIT] <= 0

    def tick(self, now: float) -> None:
        """What only time changes: old reports, silent prompts, settled expectations, retired bits."""
        self.load.tick(now)
        self.index.expire(now)
        self.index.sweep(SWEEP_SLICE)

    @property
    def needs_ticks(self) -> bool:
        """Something waits for time to pass: `tick` and `pump` are to be called every tenth of a second or so."""
        return self.index.needs_ticks or self.anybody_waits

    @property
    def anybody_waits(self) -> bool:
        """In any queue."""
        for queue in self.queues.values():  # noqa: SIM110 (asked several times for each request, and a generator costs more)
            if len(queue):
                return True
        return False

    def check_integrity(self) -> None:
        """Raises AssertionError when something does not add up."""
        self.index.check_integrity()
        self.load.check_integrity()
        for queue in self.queues.values():
            queue.check_integrity()
