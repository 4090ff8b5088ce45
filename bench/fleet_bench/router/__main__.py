"""`make bench-router`: measures, prints the table of ratios, writes the results, exits non-zero when a bar fails."""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

from fleet_bench.peers import comparison, setup
from fleet_bench.peers.bars import table
from fleet_bench.peers.comparison import choose, say
from fleet_bench.peers.rounds import Results, Stage, interleave
from fleet_bench.peers.servers import Server, ServerFailed
from fleet_bench.router import routers, scenarios
from fleet_bench.router.bars import BAR_KEYS, BARS
from fleet_bench.router.mocks import Workers, nginx_workers, stream_workers, tokenizer_zip
from fleet_bench.router.scenarios import SCENARIOS, Entry, Round
from fleet_bench.router.tools import SGLANG, SMG, Tools, ensure_tools
from fleet_contract.cache_folder import cache_folder

SCHEMA: Final = "radixfleet-bench-router/1"
PEERS: Final = {"sglang-router": (SGLANG, "sglang_router.launch_router"), "smg": (SMG, "smg.launch_router")}
FLOOR: Final = "nginx"  # routes nothing: what is left of a request on this machine when the router does next to nothing
ALL: Final = (*SCENARIOS, "choice")
WORKERS: Final = 4


def parser() -> argparse.ArgumentParser:
    """All options."""
    p = argparse.ArgumentParser(prog="make bench-router ARGS=", description="Our router beside sglang-router and smg, in one run on this machine.")
    p.add_argument("--scenarios", default=",".join(ALL), help="comma-separated choice of: %(default)s")
    p.add_argument("--peers", default=",".join((*PEERS, FLOOR)), help="comma-separated choice of: %(default)s; empty: ours alone")
    p.add_argument("--rounds", type=int, default=5, help="rounds of each scenario (default %(default)s; fewer are no claim)")
    p.add_argument("--seconds", type=float, default=5.0, help="of each round of load (default %(default)g)")
    p.add_argument("--ours-flags", default="--workers=auto", help="more flags of radixfleet-router (default %(default)s)")
    p.add_argument(
        "--python",
        default="",
        help="runs ours: another interpreter of this version, built with profile-guided optimisation for example (default: this one)",
    )
    p.add_argument("--memory-requests", type=int, default=scenarios.MEMORY_REQUESTS, help="of the scenario memory (default %(default)s)")
    p.add_argument("--model-folder", type=Path, default=cache_folder() / "models/smollm2-135m-instruct", help="whose tokenizer the workers give")
    p.add_argument("--results", type=Path, default=Path("bench/results"), help="folder for the JSON (default %(default)s)")
    return p


def _connects(server: Server) -> bool:
    """Its port answers something: the mock workers of an idle fleet serve no chats that count."""
    return routers.answers(server)


def make_workers(what: str, tools: Tools, tokenizer: bytes) -> Workers:
    """The mock workers of a scenario."""
    match what:
        case "paced":
            return stream_workers(WORKERS, chunks=scenarios.CHUNKS, pause_s=scenarios.CHUNK_PAUSE_S)
        case "silent":
            return stream_workers(WORKERS, chunks=0, pause_s=0.0)
        case "many":
            return nginx_workers(tools, scenarios.IDLE_WORKERS, tokenizer=tokenizer)
        case "plain":
            return nginx_workers(tools, WORKERS, tokenizer=None)
    return nginx_workers(tools, WORKERS, tokenizer=tokenizer)


def measure(a: argparse.Namespace, chosen: Sequence[str], peers: Sequence[str]) -> Results:
    """All that was chosen."""
    results = Results()
    try:
        tools = ensure_tools(say)
    except setup.CannotSetUp as e:
        results.reason(str(e))
        return results
    pythons: dict[str, Path] = {}
    for name in (p for p in peers if p in PEERS):
        try:
            pythons[name] = setup.ensure(PEERS[name][0], say)
        except setup.CannotSetUp as e:
            results.reason(f"{name}: {e}")
    tokenizer = tokenizer_zip(a.model_folder)
    for name in (s for s in chosen if s in SCENARIOS):
        entry = SCENARIOS[name]
        with make_workers(entry.workers, tools, tokenizer) as workers, tempfile.TemporaryDirectory(prefix="radixfleet-bench-proxy-") as folder:
            kinds = [routers.ours("ours", workers.urls, shlex.split(a.ours_flags), a.python or sys.executable)]
            if entry.peers:
                kinds += [routers.peer(p, python, PEERS[p][1], workers.urls) for p, python in pythons.items()]
                if FLOOR in peers and name.startswith("chats"):
                    kinds.append(routers.floor(FLOOR, tools, workers.urls, Path(folder)))
            ask = _connects if len(workers.ports) > WORKERS else None
            stage = Stage(kinds, results, say, partial(routers.wait_ready, ask=ask))
            try:
                turn = partial(_turn, stage, workers, entry, tools, a.seconds)
                interleave(name, list(stage.servers), 1 if entry.once else a.rounds, turn, BAR_KEYS.get(name, (name,)), results, say)
            finally:
                stage.close()
    if "choice" in chosen:
        try:
            for _ in range(a.rounds):
                results.add("ours", scenarios.choice())
        except ServerFailed as e:
            results.reason(str(e))
    return results


def _turn(stage: Stage, workers: Workers, entry: Entry, tools: Tools, seconds: float, name: str, number: int) -> scenarios.Figures:
    """One round on one router. Raises ServerFailed."""

    def work(server: Server) -> scenarios.Figures:
        if len(workers.ports) <= WORKERS:
            routers.wait_ready(server)
        return entry.run(Round(server, workers.urls[0], tools, number, seconds))

    return stage.turn(name, work)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 all bars hold, 1 one failed, 3 one could not be measured, 2 wrong usage, 130 interrupted (all processes ended)."""
    a = parser().parse_args(argv)
    try:
        chosen, peers = choose(a.scenarios, ALL, "--scenarios"), choose(a.peers, (*PEERS, FLOOR), "--peers")
        if a.rounds < 1 or a.seconds < 1:
            raise ValueError("--rounds and --seconds must be 1 or more")
        if not (a.model_folder / "tokenizer.json").is_file():
            raise ValueError(f"--model-folder {a.model_folder} has no tokenizer.json; `make setup` fetches the bundled model")
        if a.python and not Path(a.python).is_file():
            raise ValueError(f"--python {a.python} is no file")
    except ValueError as e:
        print(f"bench-router: {e}", file=sys.stderr)
        return 2
    comparison.interrupt_on_sigterm()
    try:
        results = measure(a, chosen, peers)
    except KeyboardInterrupt:
        return comparison.INTERRUPTED
    lines = comparison.judge_all(BARS, BAR_KEYS, results, chosen)
    report = "\n".join([table(lines), *comparison.not_measured(results)])
    return comparison.finish(a, SCHEMA, report, results, lines, ("rounds", "seconds", "ours_flags", "python", "scenarios", "peers"))


if __name__ == "__main__":
    sys.exit(main())
