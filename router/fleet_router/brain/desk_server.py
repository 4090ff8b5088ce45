"""The brain's end of the link: each edge's desk (`remote_desk`), the control process's questions, and who is told of the table.

A session is one connection. What an edge holds is counted in its session and given back at once when the connection is lost. An edge
that worked with another brain tells what it has in flight: those legs are counted on the same incarnations as soon as they are known.
All handlers are plain functions: a choice is counted before anything is awaited, in the order in which the edge asked.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from fleet_contract.errors import ApiError
from fleet_router import metrics
from fleet_router.brain import reports
from fleet_router.brain.brain import Brain
from fleet_router.brain.worker import Worker
from fleet_router.decide.load import Pick
from fleet_router.desk import ComingLease, Lease, Turn, Want
from fleet_router.grid import call_on_tick
from fleet_router.link import NO_EDGE, Answer, Channel
from fleet_router.messages import (
    ASK_AGAIN,
    Acquire,
    Ask,
    Blame,
    Draining,
    EdgeHello,
    FirstToken,
    Granted,
    Held,
    HeldLeg,
    LegOver,
    Message,
    News,
    NoWorker,
    Over,
    Pulse,
    Refused,
    Report,
    Suspect,
    TableNews,
    Uses,
    Wait,
    WantFacts,
    Welcome,
    WorkerFacts,
)
from fleet_router.observed import Observed, ServiceFacts
from fleet_router.table import ServiceKey

log = logging.getLogger(__name__)

PULSE_S: Final = 1.0
HURRY_S: Final = 0.05  # between two looks while an edge waits for a complete table
WELCOME_AT_LATEST_S: Final = 4.0  # after our start; then a table that lacks something is better than the safe rule
EDGES_TELL_S: Final = 10.0  # after our start we do not wait for edges that never came
KEPT_LIVES: Final = 64  # of edges that are gone; older ones are added up
PROBE_TIMEOUT_S: Final = 30.0


@dataclass(slots=True, eq=False)
class _AdoptedLeg:
    facts: HeldLeg
    worker: Worker | None = None
    pick: Pick | None = None
    over: bool = False


@dataclass(slots=True, eq=False)
class _Adopted:
    """A lease that another brain gave, or the edge itself. A leg waits until its worker is known; it may never be."""

    legs: list[_AdoptedLeg | None]
    started: bool


@dataclass(slots=True, eq=False)
class _Session:
    """What one edge has now."""

    channel: Channel
    life: str
    index: int
    fresh: bool
    draining: bool
    is_welcome: bool = False
    leases: dict[int, Lease] = field(default_factory=dict)
    adopted: dict[int, _Adopted] = field(default_factory=dict)
    turns: dict[int, Turn] = field(default_factory=dict)
    waits: dict[int, ServiceKey] = field(default_factory=dict)


class DeskServer:
    """See the module. Is an `answers.Edges` and a `brain.WorkerWatcher`."""

    def __init__(self, brain: Brain, edges: int, take_observed: Callable[[Observed], None]) -> None:
        """`edges`: so many are expected."""
        self.answer: Answer  # of the control process's questions; set by the owner
        self._brain = brain
        self._expected = edges
        self._take_observed = take_observed
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._sessions: dict[Channel, _Session] = {}
        self._told: set[int] = set()  # indexes of edges that said what they hold
        self._reports: dict[str, Report] = {}  # by life, the dead ones' too
        self._dead = metrics.Snapshot()  # of lives before those
        self._next_worker = 0
        self._workers: dict[int, Worker] = {}
        self._numbers: dict[Worker, int] = {}
        self._version = 0
        self._is_dirty = False
        self._sent_services: list[ServiceFacts] = []
        self._sent: dict[int, WorkerFacts] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._handlers: dict[type, Callable[[_Session, Any], None]] = {
            Acquire: self._acquire, FirstToken: self._first_token, LegOver: self._leg_over, Over: self._over,
            Wait: self._wait, Blame: self._blame, Suspect: self._suspect, Report: self._report,
            Draining: self._drain, Uses: self._uses,
        }  # fmt: skip
        brain.watchers.append(self)
        brain.on_table = self._table_changed
        brain.edges_told = self._edges_told

    def start(self) -> None:
        """Begins to pulse."""
        self._on_timer()

    def close(self) -> None:
        """Ends pulsing; the channels are their server's."""
        if self._timer is not None:
            self._timer.cancel()

    def make_channel(self) -> Channel:
        """Our end of a new connection."""
        return Channel(self._take, self._lost, self._answer)

    # -- answers.Edges

    def readiness(self) -> dict[str, Any]:
        """Body of /readyz: one edge that serves is enough."""
        synced, draining = self._brain.synced, self._brain.draining
        state = "draining" if draining else NO_EDGE if not self._sessions else "ready" if synced else "syncing"
        return {"status": state, "synced": synced, "draining": draining}

    def snapshot(self) -> metrics.Snapshot:
        """The sum of all processes; the last words of edges that are gone included."""
        connections = sum(r.connections for s in self._sessions.values() if (r := self._reports.get(s.life)) is not None)
        own = reports.snapshot(self._brain, connections)
        own.gauges.append(("edges", (), len(self._sessions)))
        return metrics.merge(own, self._dead, *(r.counters for r in self._reports.values()))

    async def ask(self, ask: Ask) -> bytes:
        """Any edge that serves answers for all. Raises ApiError."""
        session = next((s for s in self._sessions.values() if s.is_welcome and not s.draining), None)
        if session is None:
            raise ApiError(503, "no edge process of this router serves now; try again", type="overloaded_error", code="no_edge", retry_after_s=1)
        return await self._ask(session, ask)

    async def ask_all(self, ask: Ask) -> list[bytes]:
        """Every edge that is here, the draining ones too; one that goes away meanwhile says nothing. Raises ApiError."""
        said = await asyncio.gather(*(self._ask(s, ask) for s in list(self._sessions.values()) if s.is_welcome), return_exceptions=True)
        refused = [e for e in said if isinstance(e, BaseException) and not (isinstance(e, ApiError) and e.code == "no_edge")]
        if refused:
            raise refused[0]
        return [body for body in said if isinstance(body, bytes)]

    async def _ask(self, session: _Session, ask: Ask) -> bytes:
        try:
            reply = await session.channel.ask(ask.what, *ask.args, body=ask.body, timeout_s=PROBE_TIMEOUT_S)
        except (TimeoutError, ConnectionError):
            raise ApiError(503, "the edge process that was asked went away; try again", type="overloaded_error", code="no_edge") from None
        if reply.status != 200:
            raise ApiError.from_body(reply.status, reply.body)
        return reply.body

    # -- brain.WorkerWatcher

    def added(self, worker: Worker) -> None:
        """Before it can be picked: what edges have there already is counted."""
        self._next_worker += 1
        self._workers[self._next_worker] = worker
        self._numbers[worker] = self._next_worker
        for session in self._sessions.values():
            for adopted in session.adopted.values():
                self._place(adopted, worker)

    def gone(self, worker: Worker) -> None:
        """Nothing more can be said about it."""
        del self._workers[self._numbers.pop(worker)]

    # -- connections

    async def _answer(self, ask: Ask) -> bytes:
        if ask.what != "explain":
            return await self.answer(ask)
        decision = await self._brain.explain(self._want(msgspec.msgpack.decode(ask.body, type=WantFacts)))
        return msgspec.json.encode(decision)

    def _take(self, channel: Channel, message: Message) -> None:
        session = self._sessions.get(channel)
        if isinstance(message, News):
            self._take_observed(message.observed)
        elif isinstance(message, EdgeHello):
            self._hello(channel, message)
        elif session is None:
            raise ValueError(f"{type(message).__name__} before EdgeHello")
        else:
            self._handlers[type(message)](session, message)

    def _hello(self, channel: Channel, hello: EdgeHello) -> None:
        session = _Session(channel, hello.life, hello.index, hello.fresh, hello.draining)
        self._sessions[channel] = session
        self._told.add(hello.index)
        for held in hello.held:
            self._adopt(session, held)
        for number, key in hello.waits:
            self._wait(session, Wait(number, key), bounded=False)
        log.info("edge %d is here", hello.index, extra={"held": len(hello.held)})
        self._count_draining()
        self._on_timer()

    def _lost(self, channel: Channel) -> None:
        """All that the edge had is given back at once."""
        session = self._sessions.pop(channel, None)
        if session is None:
            return
        self._brain.limits.leave(session.life)
        counts = {"leases": len(session.leases) + len(session.adopted), "waiting": len(session.turns) + len(session.waits)}
        log.info("edge %d is gone", session.index, extra=counts)
        for number in [*session.turns, *session.waits, *session.adopted, *session.leases]:
            self._over(session, Over(number))
        self._count_draining()
        lives = {s.life for s in self._sessions.values()}
        while len(self._reports) > KEPT_LIVES + len(lives):
            life = next(n for n in self._reports if n not in lives)
            self._dead = metrics.merge(self._dead, self._reports.pop(life).counters)

    def _edges_told(self) -> bool:
        return len(self._told) >= self._expected or self._loop.time() - self._began > EDGES_TELL_S

    # -- the table

    def _table_changed(self) -> None:
        """Told once per turn of the loop, and before any lease that may need it."""
        self._version += 1
        if not self._is_dirty:
            self._is_dirty = True
            self._loop.call_soon(self._push)

    def _push(self) -> None:
        """What changed since the last time, to all who are welcome. That may be nothing they can see: those who wait look again all the same."""
        if not self._is_dirty:
            return
        services = [s.facts for s in self._brain.table.services.values()]
        now = {number: _facts(number, worker) for number, worker in self._workers.items()}
        changed = [facts for number, facts in now.items() if self._sent.get(number) != facts]
        gone = [number for number in self._sent if number not in now]
        news = TableNews(self._version, self._brain.synced, services if services != self._sent_services else None, changed, gone)
        self._is_dirty, self._sent_services, self._sent = False, services, now
        for session in self._sessions.values():
            if session.is_welcome:
                session.channel.send(news)

    def _welcome(self, session: _Session) -> None:
        """From now on we decide for this edge; it gets the whole table as it was sent to the others."""
        self._push()
        session.is_welcome = True
        self._brain.limits.join(session.life, session.channel.send)
        session.channel.send(Welcome(self._brain.pick_id))
        session.channel.send(TableNews(self._version, self._brain.synced, self._sent_services, list(self._sent.values()), []))

    def _is_complete(self) -> bool:
        """The table is as good as it gets soon."""
        if self._loop.time() - self._began > WELCOME_AT_LATEST_S:
            return True
        return self._brain.all_asked() and (self._brain.observed is not None or not self._brain.settings.kubernetes)

    def _on_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        synced, hurry = self._brain.synced, not self._brain.synced
        for session in self._sessions.values():
            if not session.is_welcome:
                if session.fresh or self._is_complete():
                    self._welcome(session)
                else:
                    hurry = True
            session.channel.send(Pulse(synced))
        self._timer = self._loop.call_later(HURRY_S, self._on_timer) if hurry else call_on_tick(self._loop, PULSE_S, self._on_timer)

    # -- desk: an edge's messages

    def _want(self, facts: WantFacts) -> Want:
        exclude = [w for n in facts.exclude if (w := self._workers.get(n)) is not None]
        return Want(
            facts.service, facts.prompt_tokens, facts.answer_tokens, facts.revision, facts.keys, exclude, facts.request_id, facts.any_role,
            facts.prompt_only, facts.silent, facts.tenant, facts.klass, facts.size_bytes, facts.key_tokens,
        )  # fmt: skip

    def _acquire(self, session: _Session, message: Acquire) -> None:
        number = message.number
        try:
            turn = self._brain.begin(self._want(message.want), message.timeout_s)
        except ApiError as e:
            session.channel.send(Refused.of(number, e))
            return
        if not isinstance(turn, Turn):
            self._give(session, number, turn)
            return
        session.turns[number] = turn
        turn.coming.when_done(lambda coming: self._turn_came(session, number, coming))

    def _turn_came(self, session: _Session, number: int, coming: ComingLease) -> None:
        del session.turns[number]
        try:
            lease = coming.result()
        except ApiError as e:
            session.channel.send(Refused.of(number, e))
        else:
            self._give(session, number, lease)

    def _give(self, session: _Session, number: int, lease: Lease | None) -> None:
        if lease is None:
            session.channel.send(NoWorker(number, self._version))
            return
        self._push()  # it may be on a worker that the edge has not heard of
        legs = [(n, leg.pick_number) for leg in lease.legs() if (n := self._numbers.get(leg.worker)) is not None]  # type: ignore[call-overload]
        if len(legs) < len(lease.legs()):  # its turn came, and its worker went in the same moment
            lease.release()
            session.channel.send(NoWorker(number, ASK_AGAIN))
            return
        session.leases[number] = lease
        session.channel.send(Granted(number, legs, lease.predicted_tokens, lease.waited_s))

    def _first_token(self, session: _Session, message: FirstToken) -> None:
        if (lease := session.leases.get(message.number)) is not None:
            lease.first_token()
        elif (adopted := session.adopted.get(message.number)) is not None:
            adopted.started = True
            for leg in adopted.legs:
                if leg is not None and leg.worker is not None and leg.pick is not None and not leg.over:
                    self._brain.adopted_started(leg.worker, leg.pick)

    def _leg_over(self, session: _Session, message: LegOver) -> None:
        if (lease := session.leases.get(message.number)) is not None:
            lease.release_leg(lease.legs()[message.leg])
        elif (adopted := session.adopted.get(message.number)) is not None and (leg := adopted.legs[message.leg]) is not None:
            self._leave(leg)

    def _over(self, session: _Session, message: Over) -> None:
        """Whatever has this number is over; a number that nothing has is no error."""
        number = message.number
        if (lease := session.leases.pop(number, None)) is not None:
            if message.cached is not None:
                lease.cached(message.cached)
            if message.steps:
                self._brain.learn_step(lease, message.steps, message.seconds)
            if message.well:
                lease.praise()
            lease.release()
        elif (turn := session.turns.pop(number, None)) is not None:
            self._brain.leave(turn)
        elif (key := session.waits.pop(number, None)) is not None:
            self._brain.one_waits_no_more(key)
        elif (adopted := session.adopted.pop(number, None)) is not None:
            for leg in adopted.legs:
                if leg is not None:
                    self._leave(leg)

    def _wait(self, session: _Session, message: Wait, *, bounded: bool = True) -> None:
        try:
            self._brain.one_waits(message.service, bounded=bounded)
        except ApiError as e:
            session.channel.send(Refused.of(message.number, e))
            return
        session.waits[message.number] = message.service

    def _blame(self, session: _Session, message: Blame) -> None:
        if (worker := self._workers.get(message.worker)) is not None:
            self._brain.blame(worker)

    def _suspect(self, session: _Session, message: Suspect) -> None:
        if (worker := self._workers.get(message.worker)) is not None:
            self._brain.suspect(worker, message.why)

    def _report(self, session: _Session, message: Report) -> None:
        self._reports[session.life] = message

    def _uses(self, session: _Session, message: Uses) -> None:
        self._brain.limits.take(session.life, message.uses)

    def _drain(self, session: _Session, message: Draining) -> None:
        session.draining = True
        self._count_draining()

    def _count_draining(self) -> None:
        """The router drains when all its edges do; the last one to leave does not undo it."""
        if self._sessions:
            self._brain.draining = all(s.draining for s in self._sessions.values())

    # -- leases of before

    def _adopt(self, session: _Session, held: Held) -> None:
        adopted = _Adopted([_AdoptedLeg(facts) if facts is not None else None for facts in held.legs], held.started)
        session.adopted[held.number] = adopted
        for worker in self._workers.values():
            self._place(adopted, worker)

    def _place(self, adopted: _Adopted, worker: Worker) -> None:
        for leg in adopted.legs:
            if leg is not None and not leg.over and leg.worker is None and leg.facts.identity == worker.identity:
                leg.worker = worker
                tokens = (leg.facts.miss_tokens, leg.facts.prompt_tokens, leg.facts.room_tokens)
                leg.pick = self._brain.adopt(worker, *tokens, started=adopted.started)

    def _leave(self, leg: _AdoptedLeg) -> None:
        if leg.over:
            return
        leg.over = True
        if leg.worker is not None and leg.pick is not None:
            self._brain.adopted_over(leg.worker, leg.pick)


def _facts(number: int, w: Worker) -> WorkerFacts:
    return WorkerFacts(number, w.slot, w.host, w.record, w.service, w.pod, w.state)
