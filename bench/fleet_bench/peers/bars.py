"""What is promised, and whether measured rounds keep it: pure. The source of the bars is docs/performance.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, Literal

Rounds = Sequence[float]
Verdict = Literal["pass", "FAIL", "below", "not measured", "-"]


@dataclass(frozen=True, slots=True)
class Bar:
    """One promise on the figure `key`: ours against `peer`'s (a ratio), or ours alone.

    `invert`: the ratio is peer / ours, for times that should be short ("15 times sooner"). `least`: the value must be at least `limit`, else at
    most. `binding`: a miss fails the run; else it is told only.
    """

    key: str
    title: str
    unit: str
    limit: float
    peer: str | None = "vllm"
    invert: bool = False
    least: bool = True
    strict: bool = False
    binding: bool = True

    def holds(self, value: float) -> bool:
        if self.least:
            return value >= self.limit
        return value < self.limit if self.strict else value <= self.limit

    def words(self) -> str:
        """`>= 1.6 x`, `< 1000 us`."""
        sign = ">=" if self.least else "<" if self.strict else "<="
        return f"{sign} {self.limit:g}{' x' if self.peer else ' ' + self.unit}"


BARS: Final = (
    Bar("decode-1", "decode, batch 1", "tok/s", 1.6),
    Bar("decode-8", "decode, batch 8", "tok/s", 1.5),
    Bar("decode-32", "decode, batch 32", "tok/s", 1.3),
    Bar("context-8", "decode, batch 8, context 1,024", "tok/s", 1.3),
    Bar("prefill", "prefill, 8 prompts of 1,024", "tok/s", 1.1),
    Bar("start", "start to first answer, compiled peer", "s", 15, peer="vllm-first", invert=True),
    Bar("start", "start to first answer, eager peer", "s", 4, peer="vllm-eager", invert=True),
    Bar("memory", "memory of the idle worker", "MiB", 0.4, least=False),
    Bar("scheduler", "scheduler's share of a step, 32 rows", "us", 1000, peer=None, least=False, strict=True),
    Bar("front-end", "cost of a busy front end", "%", 15, peer=None, least=False, strict=True),
    Bar("flood-itl-mean", "time between tokens under a flood of prompts, mean", "ms", 0.8, least=False),
    Bar("flood-itl-p99", "time between tokens under a flood of prompts, p99", "ms", 0.8, least=False),
    Bar("int8-1", "decode, batch 1: int8 against our bf16", "tok/s", 1.5, peer="ours-bf16", binding=False),
)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table of ratios."""

    bar: Bar
    ours: float | None  # medians
    theirs: float | None
    value: float | None  # what the bar is on: a ratio or ours
    low: float | None  # extremes of the rounds' values
    high: float | None
    rounds: int
    verdict: Verdict


def judge(bar: Bar, figures: Mapping[str, Mapping[str, Rounds]]) -> Line:
    """`figures`: by key, then by server, one value a round.

    The ratio is the median of the rounds' ratios: the two sides of a round ran one after the other, so that a machine that becomes slower
    between rounds does not move it.
    """
    of_key = figures.get(bar.key, {})
    own = list(of_key.get("ours", ()))
    theirs = list(of_key.get(bar.peer, ())) if bar.peer else []
    if not own or (bar.peer and not theirs):
        return Line(bar, median(own) if own else None, median(theirs) if theirs else None, None, None, None, 0, "not measured")
    if bar.peer:
        pairs = list(zip(own, theirs, strict=False))
        values = [(b / a if bar.invert else a / b) for a, b in pairs]
    else:
        values = own
    value = median(values)
    verdict: Verdict = "pass" if bar.holds(value) else "FAIL" if bar.binding else "below"
    return Line(bar, median(own), median(theirs) if theirs else None, value, min(values), max(values), len(values), verdict)


def table(lines: Sequence[Line]) -> str:
    """The lines, aligned."""
    head = f"{'':52}{'ours':>10}{'peer':>10} {'':6}{'value':>9}{'min':>8}{'max':>8}   {'bar':12}{'':12}"
    return "\n".join([head.rstrip(), *(_row(line) for line in lines)])


def _row(line: Line) -> str:
    cells = "".join(f"{'-' if v is None else f'{v:,.4g}' if v < 1000 else f'{v:,.0f}':>10}" for v in (line.ours, line.theirs))
    value = "".join(f"{'-' if v is None else f'{v:.2f}':>{w}}" for v, w in ((line.value, 9), (line.low, 8), (line.high, 8)))
    peer = f" ({line.bar.peer})" if line.bar.peer not in (None, "vllm", "ours-bf16") else ""
    return f"{line.bar.title + peer:52}{cells} {line.bar.unit:6}{value}   {line.bar.words():12}{line.verdict}"


def exit_code(lines: Sequence[Line]) -> int:
    """1: a binding bar failed. 3: none failed, but one was not measured. 0: every bar holds."""
    if any(line.verdict == "FAIL" for line in lines):
        return 1
    return 3 if any(line.verdict == "not measured" and line.bar.binding for line in lines) else 0
