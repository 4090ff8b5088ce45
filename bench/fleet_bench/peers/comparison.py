"""What every comparison with peers shares as a command: choices, the verdict, the results file, the end by a signal."""

from __future__ import annotations

import argparse
import datetime
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final, NoReturn

from fleet_bench.peers import machine
from fleet_bench.peers.bars import Bar, Line, exit_code, judge
from fleet_bench.peers.rounds import Results
from fleet_bench.report import write_json

INTERRUPTED: Final = 130  # exit code


def say(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)


def choose(text: str, allowed: Sequence[str], flag: str) -> list[str]:
    """The words of a comma-separated option, in the order of what is allowed. Raises ValueError."""
    words = [w.strip() for w in text.split(",") if w.strip()]
    if bad := [w for w in words if w not in allowed]:
        raise ValueError(f"{flag} names {', '.join(bad)}; allowed: {', '.join(allowed)}")
    return [w for w in allowed if w in words]


def interrupt_on_sigterm() -> None:
    """SIGTERM raises KeyboardInterrupt, so that all processes are ended then too."""

    def interrupted(number: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupted)


def judge_all(bars: Sequence[Bar], bar_keys: Mapping[str, Sequence[str]], results: Results, chosen: Sequence[str]) -> list[Line]:
    """A line for each bar that the chosen scenarios decide. Args: bar_keys: which bars a scenario decides, where not that of its own name."""
    keys = {key for s in chosen for key in bar_keys.get(s, (s,))}
    return [judge(bar, results.figures) for bar in bars if bar.key in keys]


def not_measured(results: Results) -> list[str]:
    """Lines that say what was not measured, and why."""
    return ["", "not measured:", *(f"  {r}" for r in results.reasons)] if results.reasons else []


def finish(a: argparse.Namespace, schema: str, report: str, results: Results, lines: Sequence[Line], settings: Sequence[str]) -> int:
    """Prints the report and writes the results file; fields in docs/performance.md. Returns the exit code.

    Args:
        a: the options; `a.results` is the folder.
        schema: `radixfleet-bench-<what>/<version>`; the file is named by <what>.
        settings: names of the options that belong into the file.
    """
    facts = machine.describe()
    print(f"{machine.words(facts)}\n\n{report}")
    now = datetime.datetime.now(datetime.UTC)
    what = schema.removeprefix("radixfleet-bench-").partition("/")[0]
    file = a.results / f"{what}-{now:%Y%m%dT%H%M%SZ}.json"
    told: dict[str, Any] = {
        "schema": schema,
        "date": now.date().isoformat(),
        "machine": facts,
        "settings": {name: getattr(a, name) for name in settings},
        "bars": [asdict(line) for line in lines],
        "figures": results.figures,
        "not_measured": results.reasons,
    }
    write_json(file, told)
    print(f"\nwritten to {file}")
    return exit_code(lines)
