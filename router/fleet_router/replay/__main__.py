"""`radixfleet replay`: what would this rule and this many workers do with a log of requests?

Without a log it runs all rules over the proof settings and judges the gates; exit code 1 when one fails, 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Final

from fleet_router.replay import gates, trace
from fleet_router.replay.gates import Setting
from fleet_router.replay.rules import RULES as BASELINES
from fleet_router.replay.simulate import OURS, Machine, Result, Simulation
from fleet_router.replay.trace import BLOCK_TOKENS, BadTrace, Request

ALL_RULES: Final = (*BASELINES, *OURS)
HEAD: Final = (
    f"{'rule':14} {'hits %':>7} {'TTFT mean':>10} {'p90':>8} {'p99':>8} {'TPOT ms':>8} {'p99':>7} {'end-to-end':>11} {'prefill':>8} {'busy':>6}"
)


def row(r: Result) -> str:
    """One line of the table; times in seconds, balance as largest over mean."""
    tpot99 = 1e3 * r.tpot[min(len(r.tpot) - 1, int(0.99 * len(r.tpot)))] if r.tpot else 0.0
    return (
        f"{r.rule:14} {100 * r.hit_share:7.2f} {r.ttft_mean:10.3f} {r.ttft_at(0.9):8.3f} {r.ttft_at(0.99):8.3f} {1e3 * r.tpot_mean:8.1f} "
        f"{tpot99:7.1f} {r.end_to_end_s:11.2f} {r.prefill_max_over_mean:8.3f} {r.busy_max_over_mean:6.3f}"
    )


@lru_cache(maxsize=4)
def _log(path: str) -> tuple[Request, ...]:
    return tuple(trace.read(Path(path)) if path else trace.built_in())


def replay(setting: Setting, path: str, rule: str, seed: int) -> tuple[Result, float]:
    """One rule in one setting, and the seconds it took. Runs in a process of the pool."""
    began = time.perf_counter()
    requests = trace.scaled(list(_log(path)), setting.scale, spread_s=setting.spread_s)
    return Simulation(requests, setting.machine, rule, seed=seed).run(), time.perf_counter() - began


def _run(settings: Sequence[tuple[Setting, str]], rules: Sequence[str], jobs: int, seed: int) -> dict[str, list[Result]]:
    """Prints the table of each setting when all its rules are through."""
    results: dict[str, list[Result]] = {}
    with ProcessPoolExecutor(jobs) as pool:
        running = [(s, path, [pool.submit(replay, s, path, rule, seed) for rule in rules]) for s, path in settings]
        for setting, path, futures in running:
            limit = trace.reuse_limit(list(_log(path)))
            found = [f.result() for f in futures]
            results[setting.name] = [result for result, _ in found]
            m = setting.machine
            print(
                f"\n{setting.name}: {found[0][0].requests} requests, {m.workers} workers of {m.capacity_blocks * BLOCK_TOKENS} tokens, "
                f"{m.tokens_per_s:g} tokens/s; one endless cache would hit {100 * limit:.1f} % ({sum(s for _, s in found):.0f} s)"
            )
            print(HEAD)
            for result, _ in found:
                print(row(result), flush=True)
    return results


def _prove(folder: str, jobs: int, seed: int) -> int:
    """All settings, all rules, all gates."""
    if folder:
        settings = [(s, str(Path(folder) / s.log)) for s in gates.TRACE_SETTINGS]
        for path in dict.fromkeys(p for _, p in settings):
            if not Path(path).is_file():
                print(f"radixfleet replay: --traces {folder} has no file {Path(path).name}", file=sys.stderr)
                return 2
    else:
        settings = [(s, "") for s in gates.BUILT_IN_SETTINGS]
    verdicts = gates.judge(_run(settings, gates.RULES, jobs, seed))
    print()
    for v in verdicts:
        word = "not applicable" if v.ok is None else "ok" if v.ok else "FAILED"
        print(f"{v.gate} {v.setting}: {v.text}: {word}")
    failed = sum(v.ok is False for v in verdicts)
    print(f"\n{failed} of {sum(v.ok is not None for v in verdicts)} gates failed" if failed else "\nall gates passed")
    return 1 if failed else 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        self.exit(2, f"radixfleet replay: {message}; see radixfleet replay --help\n")


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} given; a number above 0 is needed")
    return value


def _count(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 10_000_000:
        raise argparse.ArgumentTypeError(f"{text!r} given; a whole number from 1 is needed")
    return int(text)


def build_parser() -> argparse.ArgumentParser:
    """All flags with their help."""
    p = _Parser("radixfleet replay", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    p.add_argument("log", nargs="?", default="", metavar="LOG.jsonl", help=trace.__doc__.partition("\n\n")[2] if trace.__doc__ else None)
    p.add_argument("--traces", default="", metavar="DIR", help=f"prove the gates with {gates.CONVERSATION} and {gates.SYNTHETIC} of this folder")
    p.add_argument("--rule", default="ours", metavar="RULE[,RULE...]", help=f"for a log: all, or of {', '.join(ALL_RULES)} (default ours)")
    p.add_argument("--workers", type=_count, default=8, metavar="N", help="for a log: how many (default 8)")
    p.add_argument("--cache-tokens", type=_count, default=6000 * BLOCK_TOKENS, metavar="N", help="of each worker's KV cache (default 3072000)")
    p.add_argument("--tokens-per-s", type=_positive, default=12_000.0, metavar="N", help="prompt tokens a worker computes (default 12000)")
    p.add_argument("--scale", type=_positive, default=1.0, metavar="X", help="for a log: play it so many times faster (default 1)")
    p.add_argument("--spread", type=float, default=0.0, metavar="SECONDS", help="move requests by up to this, for logs with coarse time stamps")
    p.add_argument("--seed", type=int, default=1, help="of ties that are broken at random (default 1)")
    p.add_argument("--jobs", type=_count, default=os.cpu_count() or 1, metavar="N", help="runs side by side (default: one per core)")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 fine, 1 a gate failed, 2 wrong usage or a bad log."""
    parser = build_parser()
    a = parser.parse_args(argv)
    if a.log and a.traces:
        parser.error("give a log or --traces, not both")
    if not a.log:
        return _prove(a.traces, a.jobs, a.seed)
    rules = ALL_RULES if a.rule == "all" else tuple(a.rule.split(","))
    for rule in rules:
        if rule not in ALL_RULES:
            parser.error(f"--rule has {rule!r}; all, or some of {', '.join(ALL_RULES)} are allowed")
    machine = Machine(a.workers, max(1, a.cache_tokens // BLOCK_TOKENS), a.tokens_per_s)
    setting = Setting(f"{Path(a.log).name} x{a.scale:g}", a.log, a.scale, machine, max(0.0, a.spread))
    try:
        _log(a.log)
        _run([(setting, a.log)], rules, min(a.jobs, len(rules)), a.seed)
    except (BadTrace, OSError, UnicodeDecodeError) as e:
        print(f"radixfleet replay: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
