"""The printer of `make cases` cannot be green by accident."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fleet_testing.case_report import known_cases, main, verdict


def test_a_case_passes_only_when_a_test_ran_and_none_failed() -> None:
    assert verdict(["passed"]) == verdict(["skipped", "passed"]) == "pass"
    assert verdict(["passed", "failed"]) == "FAIL"
    assert verdict([]) == verdict(["skipped"]) == "NO TEST"


def test_every_line_of_the_list_names_a_number_a_part_and_the_fault() -> None:
    cases = known_cases()
    assert {part for part, _ in cases.values()} >= {"runtime-http", "runtime-scheduler", "runtime-cache"}
    assert all(number[0] == "C" and number[1:].isdigit() and words for number, (_, words) in cases.items())


def test_cases_in_folders_with_hooks_of_their_own_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Seen red: pytest asks for a set of its plugins then, and the report could not be in one."""
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "conftest.py").write_text("def pytest_runtest_logreport(report): pass\n")
        (tmp_path / folder / f"test_{folder}.py").write_text("import pytest\n@pytest.mark.case('C55')\ndef test_it(): pass\n")
    main([str(tmp_path), "--rootdir", str(tmp_path), "-c", os.devnull, "--import-mode=importlib", "-p", "no:asyncio"])
    out = capsys.readouterr().out
    assert "INTERNALERROR" not in out and "2 passed" in out
    assert any(line.startswith("C55 ") and " pass " in line and "2 tests" in line for line in out.splitlines()), out[-3000:]
