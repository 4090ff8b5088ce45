"""`make cases`: runs the tests that are marked with a case's number and prints one line a case. Exits non-zero for a failure or a missing test."""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import pytest

CASES = Path(__file__).parents[2] / "cases.txt"


@dataclass(slots=True, eq=False)  # pluggy keeps its plugins in sets
class Verdicts:
    """A pytest plugin: the outcomes of each case's tests."""

    ids: dict[str, list[str]] = field(default_factory=dict)  # node -> cases
    outcomes: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            self.ids[item.nodeid] = [str(name) for mark in item.iter_markers("case") for name in mark.args]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            for case in self.ids.get(report.nodeid, ()):
                self.outcomes[case].append(report.outcome)


def known_cases(path: Path = CASES) -> dict[str, tuple[str, str]]:
    """Number -> (part, words)."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return {number: (part, words) for number, part, words in (line.split(" ", 2) for line in lines)}


def verdict(outcomes: list[str]) -> str:
    """pass, FAIL, or NO TEST: a test that was skipped proves nothing."""
    if not any(o != "skipped" for o in outcomes):
        return "NO TEST"
    return "pass" if all(o != "failed" for o in outcomes) else "FAIL"


def main(argv: list[str]) -> int:
    """Args: paths for pytest; without: all tests but the cluster's."""
    verdicts = Verdicts()
    status = pytest.main(["-q", "-m", "case", "-p", "no:cacheprovider", *(argv or ["tests"])], plugins=[verdicts])
    cases = known_cases()
    unknown = sorted(set(verdicts.outcomes) - set(cases))
    print()
    results = {number: verdict(verdicts.outcomes.get(number, [])) for number in cases}
    for number, (part, words) in cases.items():
        print(f"{number} {part} {results[number]}  ({words}; {len(verdicts.outcomes.get(number, []))} tests)")
    for number in unknown:
        print(f"{number} is not in {CASES.name}: add its line")
    good = all(v == "pass" for v in results.values()) and not unknown and status == 0
    print(f"{sum(v == 'pass' for v in results.values())} of {len(results)} cases pass")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
