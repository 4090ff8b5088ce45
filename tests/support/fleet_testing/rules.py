"""`make rules`: the router's design rules and the tests that are marked with each. Reads the sources of the tests; runs nothing."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parents[2]
RULES = TESTS / "router" / "rules.txt"
NO_TEST = " | no test: "


@dataclass(frozen=True, slots=True)
class Rule:
    """A line of rules.txt."""

    words: str
    reason: str = ""  # why it has no test


def known_rules(path: Path = RULES) -> dict[str, Rule]:
    """By number."""
    out: dict[str, Rule] = {}
    for line in path.read_text().splitlines():
        if line and not line.startswith("#"):
            number, text = line.split(" ", 1)
            words, _, reason = text.partition(NO_TEST)
            out[number] = Rule(words, reason)
    return out


def marked(*folders: Path) -> dict[str, list[str]]:
    """Number -> tests that carry `@pytest.mark.rule` with it, as file::test. A class's mark counts for the class."""
    out: dict[str, list[str]] = defaultdict(list)
    for path in sorted(p for folder in folders for p in folder.rglob("test_*.py")):
        text = path.read_text()
        if "mark.rule(" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                for number in (n for d in node.decorator_list for n in _numbers(d)):
                    out[number].append(f"{path.relative_to(TESTS.parent)}::{node.name}")
    return dict(out)


def _numbers(decorator: ast.expr) -> list[str]:
    """Of one decorator."""
    if not (isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.rule"):
        return []
    return [a.value for a in decorator.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]


def misses(rules: dict[str, Rule], tests: dict[str, list[str]]) -> list[str]:
    """Sentences: rules without a test or a reason, reasons that are no longer true, numbers that nobody knows."""
    out = [
        f"{n} has no test: mark one, or say why behind {NO_TEST.strip()!r} in {RULES.name}"
        for n, r in rules.items()
        if not r.reason and n not in tests
    ]
    out += [f"{n} has tests ({tests[n][0]}): take its reason out of {RULES.name}" for n, r in rules.items() if r.reason and n in tests]
    return out + [f"{n} of {tests[n][0]} is not in {RULES.name}" for n in tests if n not in rules]


def main() -> int:
    """Prints one line a rule and its tests below it."""
    rules, tests = known_rules(), marked(TESTS, TESTS.parent / "e2e")
    for number, rule in rules.items():
        print(f"{number} {rule.words}" + (f"  (no test: {rule.reason})" if rule.reason else ""))
        for test in tests.get(number, ()):
            print(f"    {test}")
    found = misses(rules, tests)
    print(*found, f"{sum(n in tests for n in rules)} of {len(rules)} rules have tests", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
