"""The order of measuring: interleaved rounds, one server running at a time, every figure kept. Called by `__main__`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from fleet_bench.peers.scenarios import SCENARIOS, Bench, Entry, Figures, RoundFailed, first_answer
from fleet_bench.peers.servers import Kind, Server, ServerFailed
from fleet_bench.step import NoProfile

SETTLE_S = 3.0  # after its first answer an idle server frees what it needed to start


@dataclass(slots=True)
class Results:
    """Figures by key and server, one a round; and why something was not measured."""

    figures: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)

    def add(self, server: str, got: Mapping[str, float]) -> None:
        for key, value in got.items():
            self.figures.setdefault(key, {}).setdefault(server, []).append(value)

    def drop(self, server: str, keys: Sequence[str]) -> None:
        """Forgets a server's figures of a scenario that failed in a later round: half a series is none."""
        for key in keys:
            self.figures.get(key, {}).pop(server, None)

    def reason(self, text: str) -> None:
        if text not in self.reasons:
            self.reasons.append(text)


def measure_starts(kinds: Sequence[Kind], rounds: int, results: Results, say: Callable[[str], None]) -> None:
    """Start to first answer, and the memory of the idle server afterwards; each server alone on the machine, in turn."""
    failed: set[str] = set()
    for n in range(rounds):
        for kind in kinds:
            if kind.name in failed:
                continue
            server = Server(kind)
            try:
                figures = asyncio.run(first_answer(Bench(server, n)))
                time.sleep(SETTLE_S)
                figures["memory"] = server.memory_bytes() / (1 << 20)
                results.add(kind.name, figures)
                say(f"start, round {n + 1}: {kind.name} {figures['start']:.1f} s, {figures['memory']:.0f} MiB")
            except (RoundFailed, ServerFailed) as e:
                failed.add(kind.name)
                results.drop(kind.name, ("start", "memory"))
                results.reason(f"start: {e}")
                say(f"start: {e}")
            finally:
                server.stop()


class Stage:
    """All servers started; all frozen but the one at work. Owns them until `close`."""

    def __init__(self, kinds: Sequence[Kind], results: Results, say: Callable[[str], None], await_ready: Callable[[Server], None]) -> None:
        """Args: await_ready: raises RoundFailed or ServerFailed for a server that does not get ready; it is left out then."""
        self.servers: dict[str, Server] = {}
        for kind in kinds:
            server = Server(kind)
            try:
                await_ready(server)
                server.freeze()
                self.servers[kind.name] = server
            except (RoundFailed, ServerFailed) as e:
                server.stop()
                results.reason(str(e))
                say(str(e))
            except BaseException:
                server.stop()
                self.close()
                raise

    def turn(self, name: str, work: Callable[[Server], Figures]) -> Figures:
        """One round of work on one server. Raises what `work` raises."""
        server = self.servers[name]
        server.thaw()
        try:
            return work(server)
        finally:
            server.freeze()

    def close(self) -> None:
        for server in self.servers.values():
            server.stop()
        self.servers.clear()


def interleave(
    name: str, servers: Sequence[str], rounds: int, turn: Callable[[str, int], Figures], keys: Sequence[str], results: Results,
    say: Callable[[str], None],
) -> None:  # fmt: skip
    """Rounds of A B C A B C …; a server that fails is left out of the scenario, with its reason and without its figures of these keys."""
    failed = set[str]()
    for n in range(rounds):
        for server in (s for s in servers if s not in failed):
            try:
                figures = turn(server, n)
            except (RoundFailed, ServerFailed, NoProfile) as e:
                failed.add(server)
                results.drop(server, keys)
                results.reason(f"{name}: {e}")
                say(f"{name}: {e}")
                continue
            results.add(server, figures)
            say(f"{name}, round {n + 1}: {server} " + ", ".join(f"{k} {v:.4g}" for k, v in figures.items()))


def runtime_stage(kinds: Sequence[Kind], results: Results, say: Callable[[str], None]) -> Stage:
    """Runtimes that have answered once."""

    def await_ready(server: Server) -> None:
        asyncio.run(first_answer(Bench(server, -1)))
        say(f"{server.kind.name} is up")

    return Stage(kinds, results, say, await_ready)


def _turn(stage: Stage, entry: Entry, name: str, seed: int) -> Figures:
    """One round of a scenario on one server. Raises RoundFailed, ServerFailed, NoProfile."""

    async def run(server: Server) -> Figures:
        return await entry.run(Bench(server, seed))

    def work(server: Server) -> Figures:
        server.check()
        return asyncio.run(run(server))

    return stage.turn(name, work)


def measure_load(stage: Stage, names: Sequence[str], rounds: int, results: Results, say: Callable[[str], None]) -> None:
    """The chosen scenarios."""
    for name in names:
        entry = SCENARIOS[name]
        keys = (name, f"{name}-itl-mean", f"{name}-itl-p99", f"{name}-prefill", f"{name}-tokenize")
        interleave(name, [s for s in entry.servers if s in stage.servers], rounds, partial(_turn, stage, entry), keys, results, say)


def measure_int8(int8: Kind, bf16: Kind, rounds: int, results: Results, say: Callable[[str], None]) -> None:
    """Our int8 weights against our bf16 at batch 1, interleaved; under the key `int8-1`."""
    own = Results()
    stage = runtime_stage((int8, bf16), own, say)
    try:
        if len(stage.servers) == 2:
            for n in range(rounds):
                for kind in (int8, bf16):
                    got = _turn(stage, SCENARIOS["decode-1"], kind.name, n)
                    own.add("ours" if kind is int8 else "ours-bf16", {"int8-1": got["decode-1"]})
                    say(f"int8, round {n + 1}: {kind.name} {got['decode-1']:.4g} tok/s")
            results.figures |= own.figures
    except (RoundFailed, ServerFailed) as e:
        own.reason(str(e))
    finally:
        stage.close()
    for text in own.reasons:
        results.reason(f"int8: {text}")
