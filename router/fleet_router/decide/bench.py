"""`python -m fleet_router.decide.bench`: what a decision costs (R11). Prints microseconds; exit code 1 when one is over its bound.

A command and no test: time depends on the machine. Each number is the median over many decisions, best of five rounds.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final

from fleet_contract.worker import LoadReport, Profile, Seen
from fleet_router.decide.fleet import Fleet
from fleet_router.decide.keys import BLOCK_TOKENS
from fleet_router.decide.load import Speed
from fleet_router.decide.queue import QueueRules, Waiting
from fleet_router.decide.rule import Ask, Member, Pool

ROUNDS: Final = 5
CASES: Final = ((32, 192, 40.0), (32, 2048, 80.0), (1000, 192, 150.0))  # workers, blocks, bound in us
CAPACITY: Final = 3_000_000


def build(workers: int, blocks: int, *, prompts: int = 40) -> tuple[Fleet, Pool, list[tuple[int, ...]]]:
    """A fleet in use: prompts of several depths are spread over the workers, a first part is on all of them."""
    rng = random.Random(1)
    fleet = Fleet(random.Random(2).randrange, QueueRules(max_requests=1 << 20, max_requests_per_tenant=1 << 20))
    speed = Speed.of(Profile(12_000.0, 0.015, 5e-5, 2.7e-8), CAPACITY)
    for slot in range(workers):
        fleet.add_worker(slot, speed, by_history=True)
    pool = Pool(tuple(Member(n, f"w{n}", "unified") for n in range(workers)))
    fleet.set_pools({"p": pool})
    shared = tuple(rng.getrandbits(64) for _ in range(blocks // 8))
    made = [(*shared, *(rng.getrandbits(64) for _ in range(blocks - len(shared)))) for _ in range(prompts)]
    for slot in range(workers):
        fleet.index.remember(slot, shared)
    for prompt in made:
        for part in (blocks, blocks // 2, blocks // 3):
            fleet.index.remember(rng.randrange(workers), prompt[:part])
    return fleet, pool, made


def median_us(call: Callable[[Sequence[int]], object], prompts: list[tuple[int, ...]], *, repeat: int = 10) -> float:
    """Median time of one call, best of the rounds."""
    rounds = []
    for _ in range(ROUNDS):
        times = []
        for prompt in prompts * repeat:
            began = time.perf_counter()
            call(prompt)
            times.append(time.perf_counter() - began)
        rounds.append(statistics.median(times))
    return 1e6 * min(rounds)


def decisions() -> list[tuple[str, float, float]]:
    """(what, us, bound in us): look-up, score and choice; then with counting and giving back."""
    out = []
    for workers, blocks, bound in CASES:
        fleet, pool, prompts = build(workers, blocks)
        ask = Ask(blocks * BLOCK_TOKENS, 350)
        now = [0.0]

        def decide(prompt: Sequence[int], fleet: Fleet = fleet, pool: Pool = pool, ask: Ask = ask) -> None:
            fleet.decide(pool, ask, prompt, 0.0)

        def serve(prompt: Sequence[int], fleet: Fleet = fleet, pool: Pool = pool, ask: Ask = ask, now: list[float] = now) -> None:
            now[0] += 0.001
            decision = fleet.decide(pool, ask, prompt, now[0])
            assert decision is not None
            taken = fleet.take(decision, prompt, now[0])
            fleet.first_token(taken, now[0])
            fleet.release(taken)

        name = f"{workers} workers x {blocks} blocks"
        out.append((f"decide, {name}", median_us(decide, prompts), bound))
        out.append((f"decide + count + give back, {name}", median_us(serve, prompts), 0.0))
    return out


def look() -> list[tuple[str, float, float]]:
    """One look at a full window of the queue."""
    out = []
    for workers in (8, 32, 1000):
        fleet, _, prompts = build(workers, 192)
        for slot in fleet.load.slots:
            fleet.load.slots[slot].pick(30_000, 30_000, 30_350, 0.0)
        for n in range(256):
            prompt = prompts[n % len(prompts)]
            assert fleet.offer("p", Waiting(Ask(len(prompt) * BLOCK_TOKENS, 350), prompt, 0.0, 1e9), 0.0) is None
        fleet.load.slots[0].take_report(_idle(), "r", 0.0)

        def pump(_: Sequence[int], fleet: Fleet = fleet) -> None:
            found = fleet.pump("p", 0.0)
            if found is not None:  # back in line: the next look sees as many
                fleet.queues["p"].put(found[0])

        out.append((f"one look at the queue, 256 requests x {workers} workers", median_us(pump, prompts, repeat=1), 0.0))
    return out


def _idle() -> LoadReport:
    return LoadReport(seq=1, seen={"r": Seen(up_to=1 << 30)})


def main() -> int:
    """Prints one line for each case."""
    failed = 0
    for what, us, bound in [*decisions(), *look()]:
        over = bool(bound) and us > bound
        failed += over
        print(f"{us:8.1f} us  {what}" + (f"  (bound {bound:g} us{': OVER' if over else ''})" if bound else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
