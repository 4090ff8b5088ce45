"""`make bench-runtime`: measures, prints the table of ratios, writes the results, exits non-zero when a bar fails."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from fleet_bench.peers import comparison
from fleet_bench.peers.bars import BARS, Line, table
from fleet_bench.peers.comparison import choose, say
from fleet_bench.peers.rounds import Results, measure_int8, measure_load, measure_starts, runtime_stage
from fleet_bench.peers.scenarios import SCENARIOS
from fleet_bench.peers.servers import Kind, ensure_kinds, ours
from fleet_contract.cache_folder import cache_folder

SCHEMA: Final = "radixfleet-bench-runtime/1"
PEERS: Final = ("vllm", "vllm-eager", "llama")
ALL: Final = ("start", *SCENARIOS, "int8")
START_PEERS: Final = {"vllm": ("vllm-first", "vllm"), "vllm-eager": ("vllm-eager",), "llama": ("llama",)}
# Which bars each scenario decides.
BAR_KEYS: Final = {"start": ("start", "memory"), "flood": ("flood-itl-mean", "flood-itl-p99"), "int8": ("int8-1",)}


def parser() -> argparse.ArgumentParser:
    """All options."""
    p = argparse.ArgumentParser(
        prog="make bench-runtime ARGS=", description="Our runtime beside vLLM (CPU) and llama.cpp, in one run on this machine."
    )
    p.add_argument("--scenarios", default=",".join(ALL), help="comma-separated choice of: %(default)s")
    p.add_argument("--peers", default=",".join(PEERS), help="comma-separated choice of: %(default)s; empty: ours alone")
    p.add_argument("--rounds", type=int, default=5, help="rounds of each scenario (default %(default)s; fewer are no claim)")
    p.add_argument("--start-rounds", type=int, help="rounds of `start` (default: as --rounds)")
    p.add_argument("--model", default="bundled://smollm2-135m-instruct", help="our --model (default %(default)s)")
    p.add_argument("--model-folder", type=Path, default=cache_folder() / "models/smollm2-135m-instruct", help="the same model for vLLM")
    p.add_argument("--ours-flags", default="--executor native", help="more flags of radixfleet-runtime (default '%(default)s')")
    p.add_argument("--int8-flags", default="--weight-dtype int8", help="added for int8 (default '%(default)s')")
    p.add_argument("--results", type=Path, default=Path("bench/results"), help="folder for the JSON (default %(default)s)")
    return p


def measure(a: argparse.Namespace, scenarios: Sequence[str], peers: Sequence[str]) -> Results:
    """All that was chosen."""
    results = Results()
    flags = shlex.split(a.ours_flags)
    kinds, missing = ensure_kinds(peers, ours_model=a.model, model_folder=str(a.model_folder), ours_flags=flags, say=say)
    for name, reason in missing.items():
        if name in peers:
            results.reason(f"{name}: {reason}")
    if "start" in scenarios:
        names = ["ours", *(n for p in peers for n in START_PEERS[p])]
        measure_starts([kinds[n] for n in names if n in kinds], a.start_rounds or a.rounds, results, say)
    if loads := [s for s in scenarios if s in SCENARIOS]:
        needed = {server for s in loads for server in SCENARIOS[s].servers}
        stage = runtime_stage([kinds[n] for n in ("ours", *peers) if n in kinds and n in needed], results, say)
        try:
            measure_load(stage, loads, a.rounds, results, say)
        finally:
            stage.close()
    if "int8" in scenarios:
        int8: Kind = ours("ours-int8", a.model, [*flags, *shlex.split(a.int8_flags)])
        measure_int8(int8, replace(kinds["ours"], name="ours-bf16"), a.rounds, results, say)
    return results


def judge_all(results: Results, scenarios: Sequence[str]) -> list[Line]:
    """A line for each bar that the chosen scenarios decide."""
    return comparison.judge_all(BARS, BAR_KEYS, results, scenarios)


def report(results: Results, lines: Sequence[Line]) -> str:
    """The table of ratios, then what else was measured, then what was not and why."""
    out = [table(lines)]
    beside = [
        f"  {key:22} {server:12} " + " ".join(f"{v:.5g}" for v in values)
        for key, servers in sorted(results.figures.items())
        for server, values in sorted(servers.items())
    ]
    if beside:
        out += ["", "every figure, one a round:", *beside]
    return "\n".join(out + comparison.not_measured(results))


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 all bars hold, 1 one failed, 3 one could not be measured, 2 wrong usage, 130 interrupted (all servers ended)."""
    a = parser().parse_args(argv)
    try:
        scenarios, peers = choose(a.scenarios, ALL, "--scenarios"), choose(a.peers, PEERS, "--peers")
        if a.rounds < 1 or (a.start_rounds or 1) < 1:
            raise ValueError("--rounds and --start-rounds must be 1 or more")
    except ValueError as e:
        print(f"bench-runtime: {e}", file=sys.stderr)
        return 2
    comparison.interrupt_on_sigterm()
    try:
        results = measure(a, scenarios, peers)
    except KeyboardInterrupt:
        return comparison.INTERRUPTED
    lines = judge_all(results, scenarios)
    return comparison.finish(a, SCHEMA, report(results, lines), results, lines, ("rounds", "ours_flags", "int8_flags", "scenarios", "peers"))


if __name__ == "__main__":
    sys.exit(main())
