"""`make other-engines`: checks the router against a real vLLM for CPUs, prints a table, exits non-zero on a miss.

    python -m fleet_testing.other_engines [--checks a,b]

The first run installs vLLM and NIXL (9 GB of disk) into the user's cache, as `make bench-runtime` does. Nothing of it is needed by the product.
SGLang is not here: its kernels for CPUs are on no package index, so its adapter is tested against a scripted server alone.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

from fleet_bench.peers import setup
from fleet_bench.peers.servers import ServerFailed
from fleet_contract.cache_folder import cache_folder
from fleet_testing.other_engines.checks import CHECKS, Miss
from fleet_testing.other_engines.stage import Stage


def say(text: str) -> None:
    print(text, flush=True)


async def run(python: Path, model: Path, names: list[str], nixl: Path | None) -> int:
    """The number of misses."""
    misses = 0
    with tempfile.TemporaryDirectory(prefix="radixfleet-other-engines-") as folder:
        stage = Stage(python, model, Path(folder), nixl)
        try:
            say("starting two vLLM servers and a router")
            await stage.begin()
            for name in names:
                began = time.monotonic()
                try:
                    verdict, words = "pass", await CHECKS[name](stage)
                except (Miss, AssertionError, ServerFailed, KeyError, ValueError, OSError) as e:
                    verdict, words = "MISS", f"{type(e).__name__}: {e}"
                    misses += 1
                say(f"{verdict}  {name:16} {time.monotonic() - began:6.1f} s  {words}")
        finally:
            await stage.end()
    say(f"{len(names) - misses} of {len(names)} checks pass")
    return misses


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 all pass, 1 a miss, 2 wrong usage, 3 vLLM cannot be had here."""
    p = argparse.ArgumentParser(prog="make other-engines ARGS=", description="The router in front of a real vLLM on this machine.")
    p.add_argument("--checks", default=",".join(CHECKS), help="comma-separated choice of: %(default)s")
    p.add_argument("--model-folder", type=Path, default=cache_folder() / "models/smollm2-135m-instruct", help="default %(default)s")
    args = p.parse_args(argv)
    names = [name for name in args.checks.split(",") if name]
    if unknown := [name for name in names if name not in CHECKS]:
        print(f"other-engines: --checks names {', '.join(unknown)}; there is {', '.join(CHECKS)}", file=sys.stderr)
        return 2
    try:
        python = setup.ensure(setup.VLLM, say)
    except setup.CannotSetUp as e:
        print(f"other-engines: {e}", file=sys.stderr)
        return 3
    try:
        nixl = next(setup.ensure(setup.NIXL, say).parents[1].glob("lib/python*/site-packages")) if "pairs" in names else None
    except setup.CannotSetUp as e:
        say(str(e))
        nixl = None
    return 1 if asyncio.run(run(python, args.model_folder, names, nixl)) else 0


if __name__ == "__main__":
    sys.exit(main())
