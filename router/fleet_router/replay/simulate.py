"""Runs one rule over one log: arrivals, workers' steps, polls and ticks in order of time. Deterministic for a seed.

`ours` is the router's own `decide.Fleet`: fed with the model's KV events (or its own history), asked for each request, told of first
tokens and ends. Nothing of its code is copied here. `Options.brains` of them share the workers as several router pods do: each request comes
to one of them at random, and what one picks the others know `share_s` later.
"""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

from fleet_router.decide.fleet import Decision, Fleet, Taken
from fleet_router.decide.keys import STRIDE
from fleet_router.decide.lives import GPU
from fleet_router.decide.load import Speed
from fleet_router.decide.peers import PeerBook
from fleet_router.decide.queue import QueueRules, Waiting
from fleet_router.decide.rule import Ask, Member, Pool
from fleet_router.replay.model import STEP_PER_CTX_TOKEN_S, STEP_PER_ROW_S, STEP_S, Job, Worker
from fleet_router.replay.restart import Restart, RestartedChooser
from fleet_router.replay.rules import Baseline
from fleet_router.replay.trace import BLOCK_TOKENS, Request

OURS: Final = ("ours", "ours-no-queue", "ours-history", "ours-bytes")
BYTES_SHARE: Final = 0.85  # ours-bytes, without a tokenizer: what it takes for the number of tokens, of the true one
POLL_S: Final = 0.2
TICK_S: Final = 0.1
WINDOW_S: Final = 10.0
ANSWER_TOKENS: Final = 350  # what a router expects where clients name no maximum
POOL: Final = "fleet"
WHOLE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Machine:
    """The modelled fleet."""

    workers: int = 8
    capacity_blocks: int = 6000
    tokens_per_s: float = 12_000.0
    slow_share: float = 1.0  # speed of every second worker, against the others
    told_speeds: bool = True  # the router starts from each worker's own speed, else from the fast ones'

    def make(self) -> list[Worker]:
        """Workers that are empty and idle."""
        return [Worker(self.capacity_blocks, self.speed_of(n)) for n in range(self.workers)]

    def speed_of(self, n: int) -> float:
        return self.tokens_per_s * (1.0 if n % 2 else self.slow_share)


@dataclass(frozen=True, slots=True)
class Options:
    """Of our own rule."""

    queue: QueueRules = field(default_factory=lambda: QueueRules(max_requests=1 << 20, max_requests_per_tenant=1 << 20))
    learn: bool = True
    brains: int = 1
    share_s: float = 0.005
    cut: tuple[float, float] = (0.0, 0.0)  # from, until: they do not hear one another
    restart: Restart | None = None  # of the only one


@dataclass(slots=True, eq=False)
class Result:
    """Times in seconds; shares from 0 to 1."""

    rule: str
    requests: int
    hit_share: float
    ttft: list[float]  # sorted
    tpot: list[float]  # sorted
    end_to_end_s: float
    prefill_max_over_mean: float
    busy_max_over_mean: float  # per 10 s
    most_waiting_s: float  # longest time in our queue

    @property
    def ttft_mean(self) -> float:
        return sum(self.ttft) / len(self.ttft)

    @property
    def tpot_mean(self) -> float:
        return sum(self.tpot) / len(self.tpot) if self.tpot else 0.0

    def ttft_at(self, share: float) -> float:
        """A percentile."""
        return self.ttft[min(len(self.ttft) - 1, int(share * len(self.ttft)))]


class Chooser(Protocol):
    """What the simulator asks: a baseline or ours."""

    def arrive(self, job: Job, now: float) -> list[tuple[Job, int]]:
        """A request came: who goes where now."""

    def first_token(self, job: Job, now: float) -> None:
        """Its prompt is computed."""

    def done(self, job: Job, now: float) -> None:
        """It has its answer."""

    def freed(self, now: float) -> list[tuple[Job, int]]:
        """After first tokens, ends and ticks: who goes where now."""

    def poll(self) -> None:
        """The workers' metrics were read."""

    def share(self, now: float) -> list[tuple[Job, int]]:
        """Several routers tell one another: who goes where now. Called at `share_at`."""

    @property
    def share_at(self) -> float:
        """When the next such moment is."""


class _BaselineChooser:
    def __init__(self, baseline: Baseline) -> None:
        self._baseline = baseline

    def arrive(self, job: Job, now: float) -> list[tuple[Job, int]]:
        to = self._baseline.choose(job.request)
        self._baseline.took(job, to)
        return [(job, to)]

    def first_token(self, job: Job, now: float) -> None:
        self._baseline.first_token(job)

    def done(self, job: Job, now: float) -> None:
        self._baseline.done(job)

    def freed(self, now: float) -> list[tuple[Job, int]]:
        return []

    def poll(self) -> None:
        self._baseline.poll()

    def share(self, now: float) -> list[tuple[Job, int]]:
        return []

    @property
    def share_at(self) -> float:
        return math.inf


class OurChooser:
    """The router's own deciding code."""

    def __init__(self, rule: str, workers: list[Worker], machine: Machine, seed: int, options: Options) -> None:
        self.fleet = Fleet(random.Random(seed).randrange, options.queue, block_tokens=BLOCK_TOKENS)
        self.most_waiting_s = 0.0
        self._taken: dict[int, Taken] = {}
        self._queues = rule != "ours-no-queue"
        self._learn = options.learn
        by_history = rule in ("ours-history", "ours-bytes")
        self._share = BYTES_SHARE if rule == "ours-bytes" else 0.0
        for slot, worker in enumerate(workers):
            told = machine.speed_of(slot) if machine.told_speeds else machine.tokens_per_s
            speed = Speed(told, STEP_S, STEP_PER_ROW_S, STEP_PER_CTX_TOKEN_S, machine.capacity_blocks * BLOCK_TOKENS)
            self.fleet.add_worker(slot, speed, by_history=by_history, learn=options.learn, engine_blocks=machine.capacity_blocks)
            if not by_history:
                self._listen(slot, worker)
        self._pool = Pool(tuple(Member(slot, f"worker-{slot}", "unified") for slot in range(len(workers))))
        self.fleet.set_pools({POOL: self._pool})

    def _listen(self, slot: int, worker: Worker) -> None:
        index = self.fleet.index
        hold, drop = worker.on_hold, worker.on_drop  # of other routers

        def on_hold(block: int) -> None:
            _must(index.store(slot, GPU, 0, block, block, STRIDE) == "stored")
            if hold is not None:
                hold(block)

        def on_drop(block: int) -> None:
            _must(index.remove(slot, GPU, 0, block))
            if drop is not None:
                drop(block)

        worker.on_hold, worker.on_drop = on_hold, on_drop

    def arrive(self, job: Job, now: float) -> list[tuple[Job, int]]:
        self.fleet.tick(now)
        ask, keys = Ask(job.request.input_tokens, ANSWER_TOKENS), job.request.blocks
        if self._share:
            ask = Ask(int(ask.prompt_tokens * self._share), ANSWER_TOKENS, BLOCK_TOKENS * self._share)
        if not self._queues:
            decision = self.fleet.decide(self._pool, ask, keys, now)
            assert decision is not None
        else:
            decision = self.fleet.offer(POOL, Waiting(ask, keys, now, float("inf"), tag=job), now)
            if decision is None:
                return self.freed(now)
        return [self._take(job, decision, now)]

    def first_token(self, job: Job, now: float) -> None:
        self.fleet.first_token(self._taken[job.number], now)

    def done(self, job: Job, now: float) -> None:
        taken = self._taken.pop(job.number)
        load = taken.picks[0][0]
        if self._learn:
            load.learn_step(now - job.first_token, job.request.output_tokens - 1)
        self.fleet.learn_cached(job.worker, taken, job.hit_tokens)
        self.fleet.release(taken)

    def freed(self, now: float) -> list[tuple[Job, int]]:
        self.fleet.tick(now)
        out: list[tuple[Job, int]] = []
        while (found := self.fleet.pump(POOL, now)) is not None:
            request, decision = found
            self.most_waiting_s = max(self.most_waiting_s, decision.waited_s)
            out.append(self._take(request.tag, decision, now))
        return out

    def waiting_jobs(self) -> list[Job]:
        """Those in the queue."""
        return [request.tag for queue in self.fleet.queues.values() for request in queue.waiting()]

    def poll(self) -> None:
        pass

    def share(self, now: float) -> list[tuple[Job, int]]:
        return []

    @property
    def share_at(self) -> float:
        return math.inf

    def _take(self, job: Job, decision: Decision, now: float) -> tuple[Job, int]:
        self._taken[job.number] = self.fleet.take(decision, job.request.blocks, now, key=POOL)
        return job, decision.chosen.serving


class SharedChooser:
    """Several routers in front of the same workers."""

    def __init__(self, rule: str, workers: list[Worker], machine: Machine, seed: int, options: Options) -> None:
        self.brains = [OurChooser(rule, workers, machine, seed + n, options) for n in range(options.brains)]
        self.books = [PeerBook(brain.fleet.load, str(n), brain.fleet.rivals, brain.fleet) for n, brain in enumerate(self.brains)]
        self._options = options
        self._draw = random.Random(seed).randrange
        self._brain_of: dict[int, OurChooser] = {}
        self._now = self._whole_at = 0.0
        self._share_at = 0.0
        for brain, book in zip(self.brains, self.books, strict=True):
            book.expect([str(n) for n in range(options.brains)])
            brain.fleet.load.on_unsent = brain.fleet.rivals.on_changed = self._plan
            for slot in range(len(workers)):
                book.worker_added((str(slot), 0, ""), brain.fleet.load.slots[slot])

    @property
    def most_waiting_s(self) -> float:
        return max(brain.most_waiting_s for brain in self.brains)

    def arrive(self, job: Job, now: float) -> list[tuple[Job, int]]:
        self._now = now
        brain = self._brain_of[job.number] = self.brains[self._draw(len(self.brains))]
        return brain.arrive(job, now)

    def first_token(self, job: Job, now: float) -> None:
        self._now = now
        self._brain_of[job.number].first_token(job, now)

    def done(self, job: Job, now: float) -> None:
        self._now = now
        self._brain_of.pop(job.number).done(job, now)

    def freed(self, now: float) -> list[tuple[Job, int]]:
        self._now = now
        return [placed for brain in self.brains for placed in brain.freed(now)]

    def poll(self) -> None:
        pass

    def share(self, now: float) -> list[tuple[Job, int]]:
        self._now = now
        if now < self._share_at:
            return self.freed(now)  # somebody has waited for others for long enough
        self._share_at = math.inf
        whole = now >= self._whole_at
        if whole:
            self._whole_at = now + WHOLE_S
        told = [(n, book.everything(now) if whole else book.changes(now)) for n, book in enumerate(self.books)]
        for n, message in told:
            if message is not None and not self._options.cut[0] <= now < self._options.cut[1]:
                for book in self.books[:n] + self.books[n + 1 :]:
                    book.take(str(n), message, now)
        for book in self.books:
            book.tick(now)
        self._share_at = min(self._share_at, self._whole_at)
        return self.freed(now)

    @property
    def share_at(self) -> float:
        return min(self._share_at, *(max(self._now + 1e-6, brain.fleet.rivals.look_again_at) for brain in self.brains))

    def _plan(self) -> None:
        self._share_at = min(self._share_at, self._now + self._options.share_s)


def _must(ok: bool) -> None:
    assert ok, "the index refused an event of the model"


class Simulation:
    """One run."""

    def __init__(self, requests: list[Request], machine: Machine, rule: str, *, seed: int = 1, options: Options | None = None) -> None:
        self.rule = rule
        self.workers = machine.make()
        self.jobs = [Job(n, r, r.at) for n, r in enumerate(requests)]
        self.ours: OurChooser | None = None
        self.shared: SharedChooser | None = None
        options = options or Options()
        if rule in OURS and options.brains > 1:
            self.shared = SharedChooser(rule, self.workers, machine, seed, options)
        elif rule in OURS:
            self.ours = OurChooser(rule, self.workers, machine, seed, options)
        self._chooser: Chooser = self.shared or self.ours or _BaselineChooser(Baseline(rule, self.workers, seed))
        if options.restart is not None and self.ours is not None:
            by_events = rule != "ours-history"
            new = partial(OurChooser, rule, self.workers, machine, seed + 1, options)
            self._chooser = RestartedChooser(self.ours, new, self.workers, options.restart, by_events=by_events)
        self._ends: list[tuple[float, int]] = []
        self._busy: dict[int, list[float]] = {}
        self._hit = 0
        self._left = len(self.jobs)

    def run(self) -> Result:
        """To the last answer."""
        arrivals, at = self.jobs, 0
        next_tick = 0.0
        pause = TICK_S if self.rule in OURS else POLL_S
        while self._left:
            now = min(
                arrivals[at].arrived if at < len(arrivals) else float("inf"),
                self._ends[0][0] if self._ends else float("inf"),
                next_tick,
                self._chooser.share_at,
            )
            if now == self._chooser.share_at:
                self._place(self._chooser.share(now), now)
            elif now == next_tick:
                next_tick += pause
                self._chooser.poll()
                self._place(self._chooser.freed(now), now)
            elif at < len(arrivals) and arrivals[at].arrived == now:
                at += 1
                self._place(self._chooser.arrive(arrivals[at - 1], now), now)
            else:
                self._end_step(heapq.heappop(self._ends)[1], now)
        return self._result()

    def _end_step(self, n: int, now: float) -> None:
        ended = self.workers[n].end_step(now)
        for job in ended.first_tokens:
            self._hit += job.hit_tokens
            self._chooser.first_token(job, now)
        for job in ended.finished:
            self._left -= 1
            self._chooser.done(job, now)
        self._start(n, now)
        if ended.first_tokens or ended.finished:
            self._place(self._chooser.freed(now), now)

    def _place(self, placed: list[tuple[Job, int]], now: float) -> None:
        for job, to in placed:
            job.worker = to
            self.workers[to].waiting.append(job)
            if not self.workers[to].busy:
                self._start(to, now)

    def _start(self, n: int, now: float) -> None:
        length = self.workers[n].begin_step()
        if length is not None:
            heapq.heappush(self._ends, (now + length, n))
            window = self._busy.setdefault(int(now / WINDOW_S), [0.0] * len(self.workers))
            window[n] += length

    def _result(self) -> Result:
        jobs = self.jobs
        computed = [w.computed_tokens for w in self.workers]
        shares = [max(w) * len(w) / sum(w) for w in self._busy.values() if sum(w) > len(w)]
        return Result(
            rule=self.rule,
            requests=len(jobs),
            hit_share=self._hit / sum(j.request.input_tokens for j in jobs),
            ttft=sorted(j.first_token - j.arrived for j in jobs),
            tpot=sorted((j.done - j.first_token) / (j.request.output_tokens - 1) for j in jobs if j.request.output_tokens > 1),
            end_to_end_s=sum(j.done - j.arrived for j in jobs) / len(jobs),
            prefill_max_over_mean=max(computed) * len(computed) / max(1, sum(computed)),
            busy_max_over_mean=sum(shares) / len(shares) if shares else 1.0,
            most_waiting_s=chooser.most_waiting_s if (chooser := self.shared or self.ours) is not None else 0.0,
        )
