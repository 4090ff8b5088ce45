"""Times steps of the native executor: rows x context -> milliseconds and tokens a second. Nothing of a server is in it.

    python -m fleet_runtime.engine.native.bench [--model DIR] [--rows 1,8,32] [--context 128,1024] [--prefill 512] [--weight-dtype int8] [--profile]

`--profile` (`radixfleet bench step --kernels`) also tells which kernels take the time of each step, and how long threads wait for others in them.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fleet_contract.names import PAGE_SIZE
from fleet_runtime.engine.base import Sampling, StepInput, greedy
from fleet_runtime.engine.native.build import LEVELS
from fleet_runtime.engine.native.library import KINDS
from fleet_runtime.engine.native_executor import NativeExecutor
from fleet_runtime.models.bundled import cache_dir
from fleet_runtime.models.families import spec_of
from fleet_runtime.models.files import read_config
from fleet_runtime.models.weights import open_weights

_STEPS = 30  # of one measurement, fewer where they are long
_SECONDS = 2.0


@dataclass(frozen=True)
class Timing:
    """A step: median and 90th percentile of its seconds; `kinds`: its cycles, as NativeExecutor.profile_steps gives them."""

    median_s: float
    slow_s: float
    kinds: npt.NDArray[np.uint64]


def measure(executor: NativeExecutor, *, rows: int, new: int, context: int, temperature: float = 0.0, top_p: float = 1.0) -> Timing:
    """Times a step of `rows` rows, `new` new tokens each, that end at `context`."""
    pages = -(-context // PAGE_SIZE)
    table = np.random.default_rng(0).permutation(executor.layout.num_pages)[: rows * pages]
    ids = np.random.default_rng(1).integers(0, executor.vocab_size, rows * new)
    step = StepInput(
        token_ids=ids.astype(np.int32),
        positions=np.tile(np.arange(context - new, context, dtype=np.int32), rows),
        row_starts=np.arange(rows + 1, dtype=np.int32) * np.int32(new),
        context_lens=np.full(rows, context, np.int32),
        page_tables=table.astype(np.int32).reshape(rows, pages),
        sample=np.ones(rows, np.bool_),
        slots=np.arange(rows, dtype=np.int32),
    )
    sampling: Sampling = greedy(rows)
    sampling.temperature[:] = temperature
    sampling.top_p[:] = top_p
    executor.step(step, sampling)  # memory of steps of this size, caches
    seconds: list[float] = []
    executor.profile_steps(on=True)
    end = time.perf_counter() + _SECONDS
    while len(seconds) < 3 or (len(seconds) < _STEPS and time.perf_counter() < end):
        start = time.perf_counter()
        executor.step(step, sampling)
        seconds.append(time.perf_counter() - start)
    return Timing(float(np.median(seconds)), float(np.quantile(seconds, 0.9)), executor.profile_steps(on=False))


def kernel_table(timing: Timing) -> str:
    """Kinds of work, the longest first: milliseconds of a step at work and waiting for other threads (means of the threads), and share. Pure.

    Cycles become time by their share of a step, so no clock rate is needed. What is between the kernels, and Python, is in none of them.
    """
    cycles = timing.kinds.sum(axis=0).astype(float)
    total = cycles.sum() or 1.0
    lines = [f"    {'kernel':12}{'work ms':>10}{'wait ms':>10}{'share':>9}"]
    for i in np.argsort(-cycles.sum(axis=1), kind="stable"):
        if cycles[i].any():
            work, wait = cycles[i] / total * timing.median_s * 1e3
            lines.append(f"    {KINDS[i]:12}{work:>10.3f}{wait:>10.3f}{cycles[i].sum() / total:>9.1%}")
    return "\n".join(lines)


def tell(what: str, timing: Timing, *, tokens: int, kernels: bool) -> None:
    """Prints a measured step."""
    print(f"{what}  {timing.median_s * 1e3:8.2f} ms (p90 {timing.slow_s * 1e3:.2f})  {tokens / timing.median_s:7.0f} tok/s", flush=True)
    if kernels:
        print(kernel_table(timing), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `python -m fleet_runtime.engine.native.bench`."""
    parser = argparse.ArgumentParser(prog="python -m fleet_runtime.engine.native.bench", description="Time steps of the native executor.")
    parser.add_argument("--model", type=Path, default=cache_dir() / "smollm2-135m-instruct", help="model folder (default: %(default)s)")
    parser.add_argument("--rows", default="1,8,32", help="rows of a decode step (default: %(default)s)")
    parser.add_argument("--context", default="128,1024", help="contexts (default: %(default)s)")
    parser.add_argument("--prefill", default="512", help="tokens of a prompt; 0: none (default: %(default)s)")
    parser.add_argument("--weight-dtype", choices=("bfloat16", "int8"), default="bfloat16")
    parser.add_argument("--level", choices=list(LEVELS), help="kernels (default: the best of this CPU)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--profile", action="store_true", help="which kernels take the time of each step")
    args = parser.parse_args(argv)
    rows, contexts, prompts = ([int(n) for n in text.split(",")] for text in (args.rows, args.context, args.prefill))
    pages = max(max(rows) * -(-max(contexts) // PAGE_SIZE), -(-max(prompts) // PAGE_SIZE))
    start = time.perf_counter()
    spec = spec_of(args.model, read_config(args.model))
    with open_weights(args.model, spec) as weights:
        executor = NativeExecutor(
            spec, weights, num_pages=pages, slots=max(rows), threads=args.threads, int8=args.weight_dtype == "int8", level=args.level
        )
    print(f"{executor.level}, {args.threads} threads, {args.weight_dtype}; loaded in {time.perf_counter() - start:.2f} s")
    noise = (np.random.default_rng(2).normal(0, 1, executor.layout.page_bytes // 2).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    for page in range(pages):
        executor.write_page(page, noise.tobytes())
    for context in contexts:
        for n in rows:
            timing = measure(executor, rows=n, new=1, context=context, temperature=args.temperature, top_p=args.top_p)
            tell(f"decode   context {context:5}  rows {n:3}", timing, tokens=n, kernels=args.profile)
    for n in prompts:
        if n:
            tell(f"prefill  tokens  {n:5}          ", measure(executor, rows=1, new=n, context=n), tokens=n, kernels=args.profile)
    return 0


if __name__ == "__main__":
    sys.exit(main())
