"""A `Desk` whose brain is another process: asks it over the link, keeps a copy of its table, and holds on without it.

One per edge process, on its event loop. What it holds (leases, requests that wait) is told again to every new brain, so that counts
are right whatever dies. Without a brain it chooses by `safe_rule`, and counts those picks under a name of its own: workers tell by that
name which picks their load reports hold, and must not take them for a brain's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
from collections.abc import Callable, Collection
from typing import Any, Final

import msgspec

from fleet_contract import names
from fleet_contract.errors import ApiError
from fleet_router import errors, revisions
from fleet_router.counters import Counters
from fleet_router.decide.shares import Use
from fleet_router.desk import ComingLease, Lease, Leg, Turn, Want
from fleet_router.edge import safe_rule
from fleet_router.grid import Presence, call_on_tick
from fleet_router.link import Answer, Channel, keep_connected
from fleet_router.messages import (
    Acquire,
    Blame,
    Draining,
    EdgeHello,
    FirstToken,
    Granted,
    Held,
    HeldLeg,
    LegOver,
    Message,
    NoWorker,
    Over,
    Pulse,
    Refused,
    Report,
    Shares,
    Suspect,
    TableNews,
    Uses,
    Wait,
    WantFacts,
    Welcome,
    WorkerFacts,
)
from fleet_router.observed import ServiceFacts
from fleet_router.settings import Settings
from fleet_router.table import Service, ServiceKey, Table, WorkerView

log = logging.getLogger(__name__)

REPORT_EVERY_S: Final = 1.0
SILENCE_S: Final = 3.0  # a brain that lives says so each second
SHUN_S: Final = 2.0  # without a brain: how long a worker that could not be reached is left alone
EXPLAIN_TIMEOUT_S: Final = 5.0
CLOSE_S: Final = 1.0
AWAY: Final = "the deciding process is away: workers are chosen by a simple rule until it is back"


class _Holding:
    """A lease that is not over, and what was learned by it: the brain hears that at its end."""

    def __init__(
        self, lease: Lease, want: Want, started: bool = False, well: bool = False, cached: int | None = None, steps: int = 0, seconds: float = 0.0,
    ) -> None:  # fmt: skip
        self.lease = lease
        self.want = want
        self.started = started
        self.well = well
        self.cached = cached
        self.steps = steps
        self.seconds = seconds


class _Asked(Turn):
    """A choice that the brain was asked for."""

    def __init__(self, number: int, want: Want, deadline: float) -> None:
        super().__init__(ComingLease())
        self.number = number
        self.want = want
        self.deadline = deadline  # loop time


class RemoteDesk:
    """See the module."""

    def __init__(
        self, settings: Settings, counters: Counters, *, index: int = 0, answer: Answer, connections: Callable[[], int] = lambda: 0,
        draw: Callable[[int], int] | None = None,
    ) -> None:  # fmt: skip
        self.counters = counters
        self.table: Table[WorkerView] = Table()
        self.on_ready: Callable[[WorkerView], None] = lambda view: None  # a worker is ready, told with each change of the table
        self.on_shares: Callable[[Shares], None] = lambda shares: None  # of callers' limits
        self._settings = settings
        self._index = index
        self._answer = answer
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._draw = draw or random.Random(secrets.randbits(64)).randrange
        self._life = secrets.token_hex(8)
        self._safe_pick_id = f"{settings.router_id}.{secrets.token_hex(4)}"
        self._safe_picks: dict[WorkerView, int] = {}  # next number by worker
        self._pick_id = ""
        self._connected: Channel | None = None  # not welcome yet
        self._reported: Report | None = None  # to that brain, last
        self._channel: Channel | None = None
        self._next = 0
        self._synced = False
        self._draining = False
        self._closing = False
        self._version = 0
        self._facts: list[ServiceFacts] = []
        self._views: dict[int, WorkerView] = {}
        self._numbers: dict[WorkerView, int] = {}
        self._busy: dict[WorkerView, int] = {}  # legs of this edge
        self._shunned: dict[WorkerView, float] = {}  # until
        self._held: dict[int, _Holding] = {}
        self._asked: dict[int, _Asked] = {}
        self._waits: dict[int, tuple[ServiceKey, asyncio.Future[None]]] = {}
        self._is_here = asyncio.Event()  # the table of a brain that knows all
        self._timer: asyncio.TimerHandle | None = None
        self._presence = Presence()
        self._line: asyncio.Task[None] | None = None

    # -- life

    def start(self, link_name: str) -> None:
        """Keeps a connection from now on."""
        self._line = self._loop.create_task(keep_connected(link_name, self.make_channel))

    async def until_here(self, limit_s: float) -> None:
        """Waits for the table of a brain that knows all, not longer than that: then what there is has to do."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._is_here.wait()

    def make_channel(self) -> Channel:
        """The edge's end of a connection to the brain."""
        return Channel(self._take, self._on_lost, self._answer, self._on_made)

    async def close(self) -> None:
        """The last counters leave, then the connection ends."""
        self._closing = True
        if self._line is not None:
            self._line.cancel()
        if self._timer is not None:
            self._timer.cancel()
        if self._connected is not None:
            self._report()
            channel = self._connected
            channel.close()
            try:
                async with asyncio.timeout(CLOSE_S):
                    await channel.lost.wait()
            except TimeoutError:
                channel.abort()

    # -- Desk: state

    @property
    def synced(self) -> bool:
        """As the brain said last."""
        return self._synced

    @property
    def degraded(self) -> str:
        return "" if self._channel is not None else AWAY

    @property
    def draining(self) -> bool:
        return self._draining

    @draining.setter
    def draining(self, value: bool) -> None:
        if value and not self._draining and self._connected is not None:
            self._connected.send(Draining())
        self._draining = value

    # -- Desk: choice

    def choose_revision(self, service: Service[Any], exclude: Collection[WorkerView] = ()) -> str | None:
        """By the copy of the table."""
        return revisions.choose_revision(service.facts.traffic, service.ready_units(exclude), self._draw)

    def begin(self, want: Want, timeout_s: float) -> Lease | Turn | None:
        """The brain chooses, without one the safe rule. See `Desk`."""
        if self._channel is None:
            return self._choose_safely(want)
        asked = _Asked(0, want, self._loop.time() + timeout_s)
        self._ask(asked)
        return asked

    def leave(self, turn: Turn) -> None:
        """See `Desk`."""
        assert isinstance(turn, _Asked)
        turn.coming.leave()
        if self._asked.pop(turn.number, None) is not None:
            self._send(Over(turn.number))

    def _ask(self, asked: _Asked) -> None:
        """Under a new number; again after the brain's answer was overtaken by a change of the table."""
        assert self._channel is not None
        asked.number = self._mint()
        self._asked[asked.number] = asked
        self._channel.send(Acquire(asked.number, self._want_facts(asked.want), max(0.001, asked.deadline - self._loop.time())))

    async def explain(self, want: Want) -> dict[str, Any] | None:
        """The brain's words. Raises ApiError when it is away."""
        if self._channel is None:
            raise ApiError(503, f"no decision can be explained now: {AWAY}", type="overloaded_error", code="brain_away", retry_after_s=1)
        body = msgspec.msgpack.encode(self._want_facts(want))
        try:
            reply = await self._channel.ask("explain", body=body, timeout_s=EXPLAIN_TIMEOUT_S)
        except (TimeoutError, ConnectionError):
            raise ApiError(503, "the deciding process did not explain in time", type="overloaded_error", code="brain_away", retry_after_s=1) from None
        if reply.status != 200:
            raise ApiError.from_body(reply.status, reply.body)
        return msgspec.json.decode(reply.body, type=dict[str, Any] | None)

    async def wait_change(self, service: Service[Any], timeout_s: float) -> None:
        """Counted by the brain; without one at most this edge's share may wait."""
        key = service.key
        limit = self._settings.max_queue
        if self._channel is None and len(self._waits) >= -(-limit // self._settings.workers):
            raise errors.queue_full(service.label, limit)
        number = self._mint()
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waits[number] = (key, waiter)
        self._send(Wait(number, key))
        try:
            await asyncio.wait([waiter], timeout=timeout_s)
            if waiter.done():
                waiter.result()
        finally:
            del self._waits[number]
            self._send(Over(number))

    # -- Desk: what is known of workers

    def blame(self, worker: WorkerView) -> None:
        if self._channel is not None and (number := self._numbers.get(worker)) is not None:
            self._channel.send(Blame(number))

    def suspect(self, worker: WorkerView, why: str) -> None:
        if self._channel is not None and (number := self._numbers.get(worker)) is not None:
            self._channel.send(Suspect(number, why))
        elif self._channel is None:
            self._shunned[worker] = self._loop.time() + SHUN_S

    # -- Desk: of leases

    def first_token(self, lease: Lease) -> None:
        if (holding := self._held.get(lease.number)) is not None and not holding.started:
            holding.started = True
            self._send(FirstToken(lease.number))

    def give_back(self, lease: Lease, leg: Leg) -> None:
        self._leave_worker(leg)
        self._send(LegOver(lease.number, 1 if leg is lease.serving and lease.prefill is not None else 0))

    def end(self, lease: Lease, left: list[Leg]) -> None:
        for leg in left:
            self._leave_worker(leg)
        h = self._held.pop(lease.number)
        self._send(Over(lease.number, h.well, h.cached, h.steps, h.seconds))

    def learn_cached(self, lease: Lease, actual: int) -> None:
        if (holding := self._held.get(lease.number)) is not None:
            holding.cached = actual

    def learn_step(self, lease: Lease, steps: int, seconds: float) -> None:
        if (holding := self._held.get(lease.number)) is not None:
            holding.steps, holding.seconds = steps, seconds

    def praise(self, lease: Lease) -> None:
        if (holding := self._held.get(lease.number)) is not None:
            holding.well = True

    def _leave_worker(self, leg: Leg) -> None:
        self._busy[leg.worker] -= 1
        if not self._busy[leg.worker]:
            del self._busy[leg.worker]

    # -- from the brain

    def _on_made(self, channel: Channel) -> None:
        self._connected, self._reported = channel, None
        waits = [(number, key) for number, (key, _) in self._waits.items()]
        held = [self._held_facts(h) for h in self._held.values()]
        channel.send(EdgeHello(self._life, self._index, not self._facts, held, waits, self._draining))
        if self._timer is not None:
            self._timer.cancel()
        self._set_timer()

    def _on_lost(self, channel: Channel) -> None:
        if channel is not self._connected:
            return
        self._connected = None
        if self._channel is not None:
            self._channel = None
            if not self._closing:
                self.counters.add("brain_lost_total")
                log.error("the deciding process is gone: workers are chosen by the safe rule until it is back")
        asked, self._asked = list(self._asked.values()), {}
        for turn in asked:
            turn.coming.give(self._choose_safely(turn.want))

    def _take(self, channel: Channel, message: Message) -> None:
        """Everything but questions and answers."""
        if isinstance(message, Granted | NoWorker | Refused):
            self._take_answer(message)
        elif isinstance(message, TableNews):
            self._take_table(message)
        elif isinstance(message, Pulse):
            self._set_synced(message.synced)
        elif isinstance(message, Shares):
            self.on_shares(message)
        elif isinstance(message, Welcome):
            log.info("the deciding process decides", extra={"pick_id": message.pick_id})
            self._pick_id = message.pick_id
            self._channel = channel
            self._version = -1  # a whole table follows, with numbers of its own
            self._numbers.clear()
        else:
            raise ValueError(f"{type(message).__name__} is not for an edge")

    def _set_synced(self, value: bool) -> None:
        self._synced = value
        if value and self._channel is not None and self._version >= 0:
            self._is_here.set()

    def _take_answer(self, message: Granted | NoWorker | Refused) -> None:
        """Of a brain to an Acquire or a Wait; whoever asked may have left."""
        asked = self._asked.pop(message.number, None)
        if asked is None:
            _, waiter = self._waits.get(message.number, (None, None))
            if waiter is not None and not waiter.done() and isinstance(message, Refused):
                waiter.set_exception(message.error())
        elif isinstance(message, Granted):
            asked.coming.give(self._lease(message, asked.want))
        elif isinstance(message, Refused):
            asked.coming.fail(message.error())
        elif message.version >= self._version:
            asked.coming.give(None)
        else:  # the table has changed since the brain said no
            self._ask(asked)

    def _take_table(self, news: TableNews) -> None:
        if self._version < 0:
            self._start_table(news.changed)
        self._version = news.version
        if news.services is not None:
            self._facts = news.services
        for number in news.gone:
            self._drop(number)
        for facts in news.changed:
            self._take_worker(facts)
        self.table.rebuild(self._facts, list(self._views.values()))
        self._set_synced(news.synced)
        for _, waiter in self._waits.values():
            if not waiter.done():
                waiter.set_result(None)
        for view in self._views.values():
            if view.routable:
                self.on_ready(view)

    def _start_table(self, workers: list[WorkerFacts]) -> None:
        """Numbers are those of another brain now: who is still there keeps its view."""
        old = {view.identity: view for view in self._views.values()}
        self._views.clear()
        for facts in workers:
            r = facts.record
            if (view := old.pop((r.pod_uid, r.rank, r.incarnation), None)) is not None:
                self._views[facts.number], self._numbers[view] = view, facts.number
        for view in old.values():
            view.removed = True

    def _take_worker(self, facts: WorkerFacts) -> None:
        view = self._views.get(facts.number)
        if view is None:
            view = WorkerView(facts.slot, facts.host, facts.record, facts.service, facts.pod, facts.state)
            self._views[facts.number], self._numbers[view] = view, facts.number
        view.slot, view.host, view.record, view.service = facts.slot, facts.host, facts.record, facts.service
        view.pod, view.state = facts.pod, facts.state

    def _drop(self, number: int) -> None:
        view = self._views.pop(number, None)
        if view is not None:
            view.removed = True
            del self._numbers[view]

    # -- inside

    def _mint(self) -> int:
        self._next += 1
        return self._next

    def _send(self, message: Message) -> None:
        """About what `EdgeHello` or an Acquire has told of. Without a connection the next EdgeHello tells the outcome."""
        if self._connected is not None:
            self._connected.send(message)

    def _want_facts(self, want: Want) -> WantFacts:
        exclude = [number for w in want.exclude if (number := self._numbers.get(w)) is not None]
        return WantFacts(
            want.service, want.prompt_tokens, want.answer_tokens, want.revision, want.keys, exclude, want.request_id, want.any_role,
            want.prompt_only, want.silent, want.tenant, want.klass, want.size_bytes, want.key_tokens,
        )  # fmt: skip

    def _lease(self, granted: Granted, want: Want) -> Lease:
        legs = [Leg(self._views[worker], pick) for worker, pick in granted.legs]
        return self._hold(granted.number, self._pick_id, legs, want, granted.predicted_tokens, granted.waited_s)

    def _hold(self, number: int, pick_id: str, legs: list[Leg], want: Want, predicted: int, waited_s: float) -> Lease:
        lease = Lease(self, number, pick_id, legs[-1], legs[0] if len(legs) == 2 else None, want.prompt_tokens, predicted, waited_s)
        self._held[number] = _Holding(lease, want)
        for leg in legs:
            self._busy[leg.worker] = self._busy.get(leg.worker, 0) + 1
        return lease

    def _held_facts(self, holding: _Holding) -> Held:
        lease, answer = holding.lease, holding.want.answer_tokens
        miss = max(0, lease.prompt_tokens - lease.predicted_tokens)
        legs: list[HeldLeg | None] = []
        for leg in lease.legs():
            serving, pair = leg is lease.serving, lease.prefill is not None
            prompt = lease.prompt_tokens if serving else 0
            room = lease.prompt_tokens + (answer if serving else 0)
            legs.append(None if leg.released else HeldLeg(leg.worker.identity, 0 if serving and pair else miss, prompt, room))
        return Held(lease.number, legs, holding.started)

    def _choose_safely(self, want: Want) -> Lease | None:
        service = self.table.services.get(want.service)
        if service is None:
            return None
        now = self._loop.time()
        self._shunned = {w: until for w, until in self._shunned.items() if until > now}
        ready = [w for w in service.workers if w.routable and w.record.revision == want.revision and w not in want.exclude]
        trusted = [w for w in ready if w not in self._shunned]
        alone = names.ROLES if want.any_role else (names.ROLE_UNIFIED, names.ROLE_PREFILL) if want.prompt_only else ()
        chosen = None
        for workers in (trusted, ready):  # better one that failed than none
            chosen = chosen or safe_rule.choose(workers, want.keys, lambda w: self._busy.get(w, 0), alone)
        if chosen is None:
            return None
        self.counters.add("safe_picks_total")
        serving, prefill = chosen
        legs = [Leg(w, self._safe_number(w)) for w in (prefill, serving) if w is not None]
        return self._hold(self._mint(), self._safe_pick_id, legs, want, 0, 0.0)

    def _safe_number(self, worker: WorkerView) -> int:
        """From 0 for each worker, without gaps: it can then tell what it has seen in few words."""
        if len(self._safe_picks) > 2 * len(self._views) + 100:
            self._safe_picks = {w: n for w, n in self._safe_picks.items() if not w.removed}
        number = self._safe_picks.get(worker, 0)
        self._safe_picks[worker] = number + 1
        return number

    def tell_uses(self, uses: list[Use]) -> None:
        """What was asked of callers' limits."""
        self._send(Uses(uses))

    def _report(self) -> None:
        """What this brain has not heard yet: an edge with nothing to do wakes nobody."""
        report = Report(self.counters.snapshot({}), self._connections())
        if self._connected is not None and report != self._reported:
            self._reported = report
            self._connected.send(report)

    def _on_timer(self) -> None:
        """Each second: counters that have changed leave; a brain that says nothing is given up."""
        timer, self._timer = self._timer, None
        if self._connected is None or timer is None:
            return
        self._report()
        now = self._loop.time()
        if self._presence.is_sure(now, timer.when()) and now - self._connected.heard_at > SILENCE_S:
            log.error("the deciding process says nothing for %.0f s: it is left alone until it answers", SILENCE_S)
            self._connected.abort()
            return
        self._set_timer()

    def _set_timer(self) -> None:
        self._timer = call_on_tick(self._loop, REPORT_EVERY_S, self._on_timer)
