"""`make bench-router`: measures, prints the table of ratios, writes the results, exits non-zero when a bar fails."""

from __future__ import annotations

import argparse
import datetime
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, NoReturn

from fleet_bench.peers import machine, setup
from fleet_bench.peers.bars import Line, exit_code, judge, table
from fleet_bench.peers.rounds import Results
from fleet_bench.peers.servers import Kind, Server, ServerFailed
from fleet_bench.report import write_json
from fleet_bench.router import routers, scenarios
from fleet_bench.router.bars import BAR_KEYS, BARS
from fleet_bench.router.mocks import Workers, nginx_workers, stream_workers, tokenizer_zip
from fleet_bench.router.scenarios import SCENARIOS, Entry, Round
from fleet_bench.router.tools import SGLANG, SMG, Tools, ensure_tools
from fleet_contract.cache_folder import cache_folder

SCHEMA: Final = "radixfleet-bench-router/1"
PEERS: Final = {"sglang-router": (SGLANG, "sglang_router.launch_router"), "smg": (SMG, "smg.launch_router")}
ALL: Final = (*SCENARIOS, "choice")
WORKERS: Final = 4


def parser() -> argparse.ArgumentParser:
    """All options."""
    p = argparse.ArgumentParser(prog="make bench-router ARGS=", description="Our router beside sglang-router and smg, in one run on this machine.")
    p.add_argument("--scenarios", default=",".join(ALL), help="comma-separated choice of: %(default)s")
    p.add_argument("--peers", default=",".join(PEERS), help="comma-separated choice of: %(default)s; empty: ours alone")
    p.add_argument("--rounds", type=int, default=5, help="rounds of each scenario (default %(default)s; fewer are no claim)")
    p.add_argument("--seconds", type=float, default=5.0, help="of each round of load (default %(default)g)")
    p.add_argument("--ours-flags", default="--workers=auto", help="more flags of radixfleet-router (default %(default)s)")
    p.add_argument("--memory-requests", type=int, default=scenarios.MEMORY_REQUESTS, help="of the scenario memory (default %(default)s)")
    p.add_argument("--model-folder", type=Path, default=cache_folder() / "models/smollm2-135m-instruct", help="whose tokenizer the workers give")
    p.add_argument("--results", type=Path, default=Path("bench/results"), help="folder for the JSON (default %(default)s)")
    return p


def say(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)


class Stage:
    """Mock workers of one kind, and the routers over them; all frozen but the one at work."""

    def __init__(self, workers: Workers, kinds: Sequence[Kind], results: Results) -> None:
        self.workers = workers
        self.servers: dict[str, Server] = {}
        for kind in kinds:
            server = Server(kind)
            try:
                routers.wait_ready(server, ask=_connects if len(workers.ports) > WORKERS else None)
                server.freeze()
                self.servers[kind.name] = server
            except ServerFailed as e:
                server.stop()
                results.reason(str(e))
                say(str(e))
            except BaseException:
                server.stop()
                self.close()
                raise

    def turn(self, name: str, entry: Entry, tools: Tools, number: int, seconds: float) -> scenarios.Figures:
        """One round on one router. Raises ServerFailed."""
        server = self.servers[name]
        server.thaw()
        try:
            if len(self.workers.ports) <= WORKERS:
                routers.wait_ready(server)
            return entry.run(Round(server, self.workers.urls[0], tools, number, seconds))
        finally:
            server.freeze()

    def close(self) -> None:
        for server in self.servers.values():
            server.stop()
        self.servers.clear()


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
    for name in peers:
        try:
            pythons[name] = setup.ensure(PEERS[name][0], say)
        except setup.CannotSetUp as e:
            results.reason(f"{name}: {e}")
    tokenizer = tokenizer_zip(a.model_folder)
    for name in (s for s in chosen if s in SCENARIOS):
        entry = SCENARIOS[name]
        with make_workers(entry.workers, tools, tokenizer) as workers:
            kinds = [routers.ours("ours", workers.urls, shlex.split(a.ours_flags))]
            if entry.peers:
                kinds += [routers.peer(p, python, PEERS[p][1], workers.urls) for p, python in pythons.items()]
            stage = Stage(workers, kinds, results)
            try:
                _rounds(stage, name, entry, tools, a, results)
            finally:
                stage.close()
    if "choice" in chosen:
        try:
            for _ in range(a.rounds):
                results.add("ours", scenarios.choice())
        except ServerFailed as e:
            results.reason(str(e))
    return results


def _rounds(stage: Stage, name: str, entry: Entry, tools: Tools, a: argparse.Namespace, results: Results) -> None:
    """A B C A B C …; a router that fails is left out, with its reason."""
    failed: set[str] = set()
    for n in range(1 if entry.once else a.rounds):
        for server in (s for s in stage.servers if s not in failed):
            try:
                figures = stage.turn(server, entry, tools, n, a.seconds)
            except ServerFailed as e:
                failed.add(server)
                results.drop(server, BAR_KEYS.get(name, (name,)))
                results.reason(f"{name}: {e}")
                say(f"{name}: {e}")
                continue
            results.add(server, figures)
            say(f"{name}, round {n + 1}: {server} " + ", ".join(f"{k} {v:.4g}" for k, v in figures.items()))


def judge_all(results: Results, chosen: Sequence[str]) -> list[Line]:
    """A line for each bar that the chosen scenarios decide."""
    keys = {key for s in chosen for key in BAR_KEYS.get(s, (s,))}
    return [judge(bar, results.figures) for bar in BARS if bar.key in keys]


def as_json(a: argparse.Namespace, results: Results, lines: Sequence[Line]) -> dict[str, Any]:
    """The results file; fields in docs/performance.md."""
    return {
        "schema": SCHEMA,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine.describe(),
        "settings": {"rounds": a.rounds, "seconds": a.seconds, "ours_flags": a.ours_flags, "scenarios": a.scenarios, "peers": a.peers},
        "bars": [asdict(line) for line in lines],
        "figures": results.figures,
        "not_measured": results.reasons,
    }


def _choice(text: str, allowed: Sequence[str], flag: str) -> list[str]:
    words = [w.strip() for w in text.split(",") if w.strip()]
    if bad := [w for w in words if w not in allowed]:
        raise ValueError(f"{flag} names {', '.join(bad)}; allowed: {', '.join(allowed)}")
    return [w for w in allowed if w in words]


def _interrupted(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 all bars hold, 1 one failed, 3 one could not be measured, 2 wrong usage, 130 interrupted (all processes ended)."""
    a = parser().parse_args(argv)
    try:
        chosen, peers = _choice(a.scenarios, ALL, "--scenarios"), _choice(a.peers, tuple(PEERS), "--peers")
        if a.rounds < 1 or a.seconds < 1:
            raise ValueError("--rounds and --seconds must be 1 or more")
        if not (a.model_folder / "tokenizer.json").is_file():
            raise ValueError(f"--model-folder {a.model_folder} has no tokenizer.json; `make setup` fetches the bundled model")
    except ValueError as e:
        print(f"bench-router: {e}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, _interrupted)  # so that the processes are ended then too
    try:
        results = measure(a, chosen, peers)
    except KeyboardInterrupt:
        return 130
    lines = judge_all(results, chosen)
    print(f"{machine.words(machine.describe())}\n\n{table(lines)}")
    if results.reasons:
        print("\n".join(["", "not measured:", *(f"  {r}" for r in results.reasons)]))
    file = a.results / f"router-{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%SZ}.json"
    write_json(file, as_json(a, results, lines))
    print(f"\nwritten to {file}")
    return exit_code(lines)


if __name__ == "__main__":
    sys.exit(main())
