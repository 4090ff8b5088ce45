"""The settings that are replayed to prove the rule, and the gates it has to pass. Pure.

With the real traces: two logs, each at a normal and at a too high rate, each with a large and a small cache; gates Q1-Q3 are absolute
numbers of three of these settings, Q4 compares with the seven other rules in all eight. The built-in log has Q4 only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fleet_router.replay.rules import SEVEN
from fleet_router.replay.simulate import Machine, Result

CONVERSATION: Final = "conversation_trace.jsonl"
SYNTHETIC: Final = "synthetic_trace.jsonl"
BUILT_IN: Final = ""
OUR_RULE: Final = "ours"
RULES: Final = (*SEVEN, OUR_RULE)
TTFT_SLACK: Final = 1.05  # of the best of the others
HIT_SLACK: Final = 0.01  # below the best of the others


@dataclass(frozen=True, slots=True)
class Setting:
    """One log at one rate on one fleet."""

    name: str
    log: str
    scale: float
    machine: Machine
    spread_s: float = 0.0  # the log's time stamps are that coarse


def _of(log: str, scale: float, blocks: int, *, workers: int = 8) -> Setting:
    word = log.partition("_")[0] or "built-in"
    spread_s = 3.0 if log == CONVERSATION else 0.0
    return Setting(f"{word} x{scale:g} cache {blocks}", log, scale, Machine(workers, blocks), spread_s)


Q1: Final = _of(CONVERSATION, 2.2, 6000)
Q2: Final = _of(SYNTHETIC, 3.5, 6000)
Q3: Final = _of(CONVERSATION, 1.5, 900)
TRACE_SETTINGS: Final = (
    _of(CONVERSATION, 1.5, 6000), Q3, Q1, _of(CONVERSATION, 2.2, 900),
    _of(SYNTHETIC, 2, 6000), _of(SYNTHETIC, 2, 900), Q2, _of(SYNTHETIC, 3.5, 900),
)  # fmt: skip
BUILT_IN_SETTINGS: Final = tuple(_of(BUILT_IN, scale, blocks, workers=4) for scale in (1, 2) for blocks in (3000, 600))


@dataclass(frozen=True, slots=True)
class Verdict:
    """One gate in one setting. `ok` None: it does not apply."""

    gate: str
    setting: str
    text: str
    ok: bool | None


_Bound = tuple[str, Callable[[Result], float], str, float]
_HIT: Final[Callable[[Result], float]] = lambda r: 100 * r.hit_share  # noqa: E731
_ABSOLUTE: Final[tuple[tuple[str, Setting, tuple[_Bound, ...]], ...]] = (
    ("Q1", Q1, (
        ("hits %", _HIT, ">=", 34.0), ("mean TTFT s", lambda r: r.ttft_mean, "<=", 1.02), ("mean TPOT ms", lambda r: 1e3 * r.tpot_mean, "<=", 66.0),
    )),
    ("Q2", Q2, (
        ("hits %", _HIT, ">=", 62.0), ("mean TTFT s", lambda r: r.ttft_mean, "<=", 18.0), ("p99 TTFT s", lambda r: r.ttft_at(0.99), "<=", 42.0),
        ("busy max/mean", lambda r: r.busy_max_over_mean, "<=", 1.2),
    )),
    ("Q3", Q3, (("hits %", _HIT, ">=", 15.0), ("mean TTFT s", lambda r: r.ttft_mean, "<=", 1.05))),
)  # fmt: skip


def judge(results: Mapping[str, Sequence[Result]]) -> list[Verdict]:
    """All gates over the results of each setting."""
    out: list[Verdict] = []
    for gate, setting, bounds in _ABSOLUTE:
        found = results.get(setting.name)
        if found is None:
            out.append(Verdict(gate, setting.name, "needs the real traces: give --traces DIR", None))
            continue
        ours = next(r for r in found if r.rule == OUR_RULE)
        for what, number, sign, limit in bounds:
            value = number(ours)
            ok = value >= limit if sign == ">=" else value <= limit
            out.append(Verdict(gate, setting.name, f"{what} {value:.2f} {sign} {limit:g}", ok))
    for name, found in results.items():
        out += _against_the_rest(name, found)
    return out


def _against_the_rest(name: str, found: Sequence[Result]) -> list[Verdict]:
    """Q4: never much worse than the best of the other rules."""
    ours = next(r for r in found if r.rule == OUR_RULE)
    others = [r for r in found if r.rule in SEVEN]
    fastest = min(others, key=lambda r: r.ttft_mean)
    most = max(others, key=lambda r: r.hit_share)
    limit, least = TTFT_SLACK * fastest.ttft_mean, most.hit_share - HIT_SLACK
    return [
        Verdict("Q4", name, f"mean TTFT s {ours.ttft_mean:.3f} <= {limit:.3f} ({fastest.rule} + 5 %)", ours.ttft_mean <= limit),
        Verdict("Q4", name, f"hits % {100 * ours.hit_share:.2f} >= {100 * least:.2f} ({most.rule} - 1)", ours.hit_share >= least),
    ]
