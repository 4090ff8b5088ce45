"""The steps of `up`: order, work side by side, failures, and the lines that tell of them."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_local.errors import ClusterError
from fleet_local.steps import Outcome, Progress, Step, ready_steps, run_steps, wait_until


@st.composite
def plans(draw: st.DrawFn) -> dict[str, list[str]]:
    """Steps that need only earlier ones, told in any order."""
    size = draw(st.integers(0, 8))
    needs = {f"s{i}": [f"s{j}" for j in range(i) if draw(st.booleans())] for i in range(size)}
    return {name: needs[name] for name in draw(st.permutations(sorted(needs)))}


@given(plans())
def test_every_step_starts_once_and_after_all_it_needs(needs: dict[str, list[str]]) -> None:
    done: list[str] = []
    while len(done) < len(needs):
        ready = ready_steps(needs, done=done, begun=done)
        assert ready, "nothing can start although steps are left"
        for name in ready:
            assert name not in done and set(needs[name]) <= set(done)
        done.append(ready[0])
    assert ready_steps(needs, done=done, begun=done) == []


@given(plans())
def test_running_keeps_the_order_of_the_plan(needs: dict[str, list[str]]) -> None:
    finished: list[str] = []
    lock = threading.Lock()

    def work(name: str) -> str | None:
        with lock:
            assert set(needs[name]) <= set(finished)
            finished.append(name)
        return None

    run_steps([Step(n, tuple(b), lambda n=n: work(n)) for n, b in needs.items()], lambda _: None)  # type: ignore[misc]
    assert sorted(finished) == sorted(needs)


def test_steps_that_do_not_need_one_another_run_side_by_side() -> None:
    meet = threading.Barrier(2, timeout=60)

    def work() -> None:
        meet.wait()

    assert len(run_steps([Step("a", (), work), Step("b", (), work)], lambda _: None)) == 2


def test_after_a_failure_nothing_new_starts_and_what_runs_is_awaited() -> None:
    failed, told = threading.Event(), list[str]()

    def fail() -> str | None:
        failed.set()
        raise ClusterError("the reason")

    def slow() -> str | None:
        assert failed.wait(10)
        return "ended"

    def never() -> str | None:
        raise AssertionError("must not start")

    with pytest.raises(ClusterError, match="the reason"):
        run_steps([Step("fail", (), fail), Step("slow", (), slow), Step("after", ("fail",), never)], lambda o: told.append(o.name))
    assert told == ["slow"]


@pytest.mark.parametrize("needs", [{"a": ("nobody",)}, {"a": ("b",), "b": ("a",)}])
def test_a_plan_that_cannot_end_is_refused(needs: dict[str, tuple[str, ...]]) -> None:
    with pytest.raises(ValueError, match="steps"):
        run_steps([Step(n, b, lambda: None) for n, b in needs.items()], lambda _: None)


def test_a_line_says_step_seconds_and_what_was_done() -> None:
    lines: list[str] = []
    progress = Progress(lines.append)
    progress.step(Outcome("etcd", 1.25, "started"))
    progress.step(Outcome("node", 0.0, None))
    Progress(lines.append, quiet=True).say("not told")
    assert [line.split() for line in lines] == [["etcd", "1.2", "s", "started"], ["node", "0.0", "s", "already", "there"]]


def test_waiting_ends_at_once_when_it_has_become_hopeless() -> None:
    with pytest.raises(ClusterError, match="etcd ended"):
        wait_until("etcd", lambda: False, limit_s=600, still_possible=lambda: "etcd ended")


def test_waiting_ends_at_its_limit_and_says_where_to_look() -> None:
    with pytest.raises(ClusterError, match=r"etcd is not ready .*`radixfleet local logs"):
        wait_until("etcd", lambda: False, limit_s=0.01, pause_s=0.001)
