"""A random run of the scheduler over the fake engine: requests of all kinds, aborts, stops and control calls at any time, in a small pool.

Every answer is compared with the one that follows from its prompt alone, so it is exact alone, in any batch, in any chunks, from the cache, after
retractions, with overlap or without. Long form: `python -m fleet_testing.scheduler_run --steps 100000`.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass, field

from fleet_runtime import messages as m
from fleet_testing.fake_engine import expected
from fleet_testing.scheduler_harness import Answer, FakeWorker, rid_of

STOP_IDS = [5, 200]
SCHEMA = '{"type":"object","properties":{"a":{"type":"boolean"}},"required":["a"],"additionalProperties":false}'


@dataclass
class Asked:
    """One request of the run, and what it should get."""

    prompt: list[int]
    max_new: int
    fields: dict[str, object]
    answer: Answer
    aborted: bool = False
    stopped: bool = False


@dataclass
class Run:
    """See the module. Equal seeds give equal runs."""

    seed: int
    features: bool = True  # sampling options, grammars, embeddings, logprobs
    check_every: int = 1
    ended: int = 0
    exact: int = 0
    open: dict[str, Asked] = field(default_factory=dict)
    n: int = 0
    _seen_ends: int = 0

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        self.pages = rng.choice([8, 12, 20, 40])
        self.worker = FakeWorker(
            self.pages,
            debug_checks=self.check_every == 1,
            max_rows=rng.choice([1, 4, 8, 8]),
            max_step_tokens=rng.choice([16, 48, 128]),
            max_prefill_steps=rng.randint(1, 3),
            overlap=rng.random() < 0.8,
            mixed_chunk=rng.random() < 0.7,
            schedule_policy=rng.choice(["fcfs", "lpm", "dfs-weight", "priority"]),
            new_token_ratio=rng.choice([0.01, 0.01, 0.1, 0.7, 1.0]),
            queue_timeout=10_000,
        )
        self.shared = [rng.choices(range(256), k=64) for _ in range(3)]

    def go(self, steps: int) -> Run:
        """Runs so many steps, then to the end, and checks that nothing is left."""
        scheduler, rng = self.worker.scheduler, self.rng
        while self.worker.engine.steps < steps:
            if (len(self.open) < 12 and rng.random() < 0.3) or not self.open:
                self._ask()
            if rng.random() < 0.03:
                self._disturb()
            scheduler.iterate()
            if self.check_every > 1 and self.worker.engine.steps % self.check_every == 0:
                self.worker.book.check_integrity()
            self._collect()
        scheduler.paused = False
        self.worker.run()
        self._collect()
        assert not self.open, f"never ended: {self.open}"
        self.worker.assert_idle()
        return self

    def _ask(self) -> None:
        rng = self.rng
        self.n += 1
        rid = rid_of(self.n)
        start = rng.choice(self.shared)[: rng.choice([0, 16, 40])]
        prompt = start + rng.choices(range(256), k=rng.randint(1, 40))
        max_new = rng.randint(1, min(100, self.pages * 16 - len(prompt) + 1))
        fields: dict[str, object] = {"stop_ids": rng.choice([[], STOP_IDS, STOP_IDS]), "priority": rng.randint(0, 3)}
        fields["salt"] = rng.choice(["", "", "x"])
        if self.features and rng.random() < 0.25:
            fields |= rng.choice(
                [
                    {"temperature": 0.8, "seed": rng.randint(0, 9)},
                    {"frequency_penalty": 0.5, "repetition_penalty": 1.2},
                    {"logprobs": 2, "prompt_logprobs": rng.choice([-1, 1])},
                    {"min_tokens": 5},
                    {"grammar": m.Grammar(kind="json_schema", text=SCHEMA)},
                    {"embed": rng.choice(["mean", "last"])},
                ]
            )
            if "embed" in fields:
                max_new = 0
        self.open[rid] = Asked(prompt, max_new, fields, self.worker.admit(rid, prompt, max_new, **fields))

    def _disturb(self) -> None:
        """Something of the kind that happens to a server."""
        scheduler, rng = self.worker.scheduler, self.rng
        what = rng.random()
        ratio = self.worker.book.ratio
        if not ratio.promises_all and rng.random() < 0.5:
            ratio.value = 0.01  # as after many quiet steps: more is let in than fits
        if what < 0.1:
            scheduler.paused = True
        elif what < 0.2:
            self.worker.control("flush_cache")
        elif what < 0.3:
            scheduler.handle(m.Abort(rid=rid_of(rng.randint(1, self.n + 3)) if rng.random() < 0.5 else ""))  # mostly of nobody
        elif self.open:
            rid = rng.choice(list(self.open))
            asked = self.open[rid]
            if what < 0.5 and asked.answer.ids:
                asked.stopped = True
                scheduler.handle(m.Stopped(rid=rid, index=0))
            else:
                scheduler.handle(m.Abort(rid=rid))
        if (scheduler.paused and rng.random() < 0.8) or not self.worker.book.requests:
            scheduler.paused = False

    def _collect(self) -> None:
        if self.worker.scheduler.paused and self.rng.random() < 0.3:
            self.worker.scheduler.paused = False
        totals = self.worker.book.totals
        if (ends := totals.finished + totals.failed + totals.aborted) == self._seen_ends:
            return
        self._seen_ends = ends
        for rid in [rid for rid, asked in self.open.items() if asked.answer.end is not None]:
            asked = self.open.pop(rid)
            del self.worker.inbox.answers[rid, 0]
            self.ended += 1
            self._judge(asked)

    def _judge(self, asked: Asked) -> None:
        answer, end = asked.answer, asked.answer.end
        options = set(asked.fields) - {"stop_ids", "priority", "salt"}
        if isinstance(end, m.Failed):
            assert end.code == "aborted", end
        if isinstance(end, m.Embedded):
            assert len(end.vector) == 16
            return
        if "logprobs" in options:
            assert len(answer.logprobs) == len(answer.ids)
        if options - {"logprobs", "prompt_logprobs"}:
            return
        right = expected(asked.prompt, asked.max_new, asked.fields["stop_ids"])  # type: ignore[arg-type]
        if isinstance(end, m.Failed) or asked.stopped:
            assert answer.ids == right[: len(answer.ids)]
        else:
            self.exact += 1
            assert answer.ids == right, f"seed {self.seed}: {answer.ids} is not {right}"
            assert end == ("length" if len(right) == asked.max_new else "stop")


def main(argv: list[str]) -> int:
    """Prints one line a run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--plain", action="store_true", help="requests without options, whose cost is the fake engine's")
    args = parser.parse_args(argv)
    begin, ended, exact = time.process_time(), 0, 0
    for seed in range(args.seeds):
        run = Run(seed, features=not args.plain, check_every=500).go(args.steps // args.seeds)
        c = run.worker.scheduler.counters()
        ended, exact = ended + run.ended, exact + run.exact
        print(
            f"seed {seed}: {run.worker.engine.steps} steps, {run.ended} requests, {run.exact} compared, {c['retractions_total']} retractions,"
            f" {c['aborted_requests_total']} aborts, {run.worker.engine.late_samples} late draws, {c['wasted_tokens_total']} tokens thrown away"
        )
    seconds = time.process_time() - begin
    print(f"{args.steps} steps in {seconds:.1f} s of CPU, {ended} requests ended once each, {exact} answers equal to the right ones")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
