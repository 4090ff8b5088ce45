"""The printer of `make cases` cannot be green by accident."""

from __future__ import annotations

from fleet_testing.case_report import known_cases, verdict


def test_a_case_passes_only_when_a_test_ran_and_none_failed() -> None:
    assert verdict(["passed"]) == verdict(["skipped", "passed"]) == "pass"
    assert verdict(["passed", "failed"]) == "FAIL"
    assert verdict([]) == verdict(["skipped"]) == "NO TEST"


def test_every_line_of_the_list_names_a_number_a_part_and_the_fault() -> None:
    cases = known_cases()
    assert {part for part, _ in cases.values()} >= {"runtime-http", "runtime-scheduler", "runtime-cache"}
    assert all(number[0] == "C" and number[1:].isdigit() and words for number, (_, words) in cases.items())
