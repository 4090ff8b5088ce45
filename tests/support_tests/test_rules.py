"""Every rule of the router has a test or a reason, and the reader of the marks cannot be green by accident."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleet_testing import rules
from fleet_testing.rules import Rule, known_rules, marked, misses


def test_every_rule_of_the_router_has_a_test_or_a_reason() -> None:
    found = known_rules()
    assert list(found) == [f"R{n}" for n in range(1, 43)]
    assert misses(found, marked(rules.TESTS, rules.TESTS.parent / "e2e")) == []


def test_a_rule_passes_with_either_a_test_or_a_reason_but_not_with_both_or_none() -> None:
    assert misses({"R1": Rule("a"), "R2": Rule("b", "why")}, {"R1": ["t"]}) == []
    assert "R1 has no test" in misses({"R1": Rule("a")}, {})[0]
    assert "take its reason out" in misses({"R1": Rule("a", "why")}, {"R1": ["t"]})[0]
    assert "R9 of t is not in" in misses({}, {"R9": ["t"]})[0]


def test_marks_are_found_on_functions_coroutines_and_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "TESTS", tmp_path / "tests")
    source = (
        "import pytest\n\n@pytest.mark.rule('R1', 'R2')\ndef test_a(): ...\n\n@pytest.mark.slow\n@pytest.mark.rule('R1')\nasync def test_b(): ...\n"
        "\n@pytest.mark.rule('R3')\nclass TestC: ...\n\n# @pytest.mark.rule('R4')\ndef test_d(): ...\n"
    )
    (tmp_path / "test_x.py").write_text(source)
    assert marked(tmp_path) == {"R1": ["test_x.py::test_a", "test_x.py::test_b"], "R2": ["test_x.py::test_a"], "R3": ["test_x.py::TestC"]}
