"""Drains: marks first, the highest ordinals first, idle by every router's word, one deadline that wins."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_operator.drain import is_idle, step
from fleet_operator.facts import Mark, Pod, RouterReport, WorkerReport, rfc3339

NOW = datetime(2026, 1, 1, 12, 0, 0, 400_000, tzinfo=UTC)
DEADLINE = datetime(2026, 1, 1, 12, 0, 30, tzinfo=UTC)
TEXT = rfc3339(DEADLINE)


def pod(ordinal: int, draining: str | None = None, *, ready: bool = True) -> Pod:
    return Pod(f"s-{ordinal}", f"uid-{ordinal}", ordinal, "r", "decode", is_ready=ready, draining=draining)


def router(*workers: WorkerReport, synced: bool = True, error: str = "") -> RouterReport:
    return RouterReport("r", "a", synced, {"r": {w.pod_uid: w for w in workers}}, error)


def worker(ordinal: int, *, state: str = "draining", inflight: int = 0, deadline: str | None = TEXT) -> WorkerReport:
    return WorkerReport(f"uid-{ordinal}", "decode", state, inflight, deadline)


IDLE = [
    ("drained and empty", router(worker(1)), True),
    ("one request open", router(worker(1, inflight=1)), False),
    ("the router has not seen this drain", router(worker(1, deadline=None)), False),
    ("the router echoes an earlier drain", router(worker(1, deadline="2026-01-01T11:00:00Z")), False),
    ("the same moment in another spelling", router(worker(1, deadline="2026-01-01T13:00:30+01:00")), True),
    ("failed and empty, without an echo", router(worker(1, state="failed", deadline=None)), True),
    ("failed with a request still open", router(worker(1, state="failed", deadline=None, inflight=1)), False),
    ("a ready pod that the router does not list", router(), False),
    ("a router that has not synced", router(worker(1), synced=False), False),
    ("a router that does not answer", router(error="no answer"), False),
]


@pytest.mark.parametrize(("name", "report", "idle"), IDLE, ids=[case[0] for case in IDLE])
def test_idle(name: str, report: RouterReport, idle: bool) -> None:
    assert is_idle(pod(1, TEXT), TEXT, [report]) is idle
    assert is_idle(pod(1, TEXT), TEXT, [router(worker(1)), report]) is idle, "every router must say so"


def test_a_pod_without_this_drains_mark_is_not_idle_and_one_that_was_never_ready_needs_no_listing() -> None:
    assert not is_idle(pod(1), TEXT, [router(worker(1))])
    assert is_idle(pod(1, TEXT, ready=False), TEXT, [router()])
    assert is_idle(pod(1, TEXT), TEXT, []), "without routers nobody sends requests"


def test_the_intent_is_written_before_anything_shrinks() -> None:
    found = step(replicas=2, goal=1, mark=None, pods=[pod(0)], routers=[], now=NOW, timeout_s=30)
    assert found.replicas == 2 and found.mark == Mark(1, DEADLINE) and found.wake_at == DEADLINE


def test_pods_that_leave_are_marked_and_others_lose_a_stale_mark() -> None:
    found = step(replicas=3, goal=2, mark=Mark(2, DEADLINE), pods=[pod(0, TEXT), pod(1), pod(2)], routers=[], now=NOW, timeout_s=30)
    assert found.pod_marks == {"uid-0": None, "uid-2": TEXT} and found.waiting_for == ("s-2",)


def test_idle_pods_on_top_go_before_a_busy_one_below() -> None:
    reports = [router(worker(1, inflight=1), worker(2))]
    found = step(
        replicas=3, goal=1, mark=Mark(1, DEADLINE), pods=[pod(i, TEXT if i else None) for i in range(3)], routers=reports, now=NOW, timeout_s=30
    )
    assert found.replicas == 2 and found.mark == Mark(1, DEADLINE)


def test_the_deadline_wins() -> None:
    pods = [pod(0), pod(1, TEXT)]
    late = step(replicas=2, goal=1, mark=Mark(1, DEADLINE), pods=pods, routers=[router(error="frozen")], now=DEADLINE, timeout_s=30)
    assert late.replicas == 1 and late.mark is None and not late.pod_marks, "the pod keeps its mark for its own shutdown"
    early = step(
        replicas=2,
        goal=1,
        mark=Mark(1, DEADLINE),
        pods=pods,
        routers=[router(error="frozen")],
        now=DEADLINE - timedelta(milliseconds=1),
        timeout_s=30,
    )
    assert early.replicas == 2


def test_a_deadline_longer_than_the_timeout_is_cut_and_a_deeper_drain_starts_anew() -> None:
    far = Mark(1, NOW + timedelta(days=1))
    assert step(replicas=2, goal=1, mark=far, pods=[pod(1)], routers=[], now=NOW, timeout_s=30).mark == Mark(1, DEADLINE)
    soon = Mark(2, NOW + timedelta(seconds=5))
    assert step(replicas=4, goal=1, mark=soon, pods=[pod(1)], routers=[], now=NOW, timeout_s=30).mark == Mark(1, DEADLINE)
    assert step(replicas=4, goal=3, mark=soon, pods=[pod(3)], routers=[], now=NOW, timeout_s=30).mark == Mark(3, soon.deadline)


def test_no_timeout_shrinks_at_once() -> None:
    assert step(replicas=2, goal=0, mark=None, pods=[pod(0), pod(1)], routers=[], now=NOW, timeout_s=0).replicas == 0


@given(
    replicas=st.integers(0, 4),
    goals=st.lists(st.integers(0, 4), min_size=1, max_size=6),
    busy=st.sets(st.integers(0, 3)),
    seconds=st.sampled_from([1, 7, 40]),
)
def test_every_drain_ends_and_no_busy_pod_goes_before_the_deadline(replicas: int, goals: list[int], busy: set[int], seconds: int) -> None:
    """The model: a StatefulSet that does what is written, pods that carry what they were given, one router that sees all of it."""
    now, mark, annotations = NOW, None, dict.fromkeys(range(replicas))
    for goal in [*goals, *[goals[-1]] * 45]:
        pods = [pod(i, annotations[i]) for i in sorted(annotations)]
        report = router(*(worker(i, inflight=int(i in busy), deadline=annotations[i]) for i in annotations))
        found = step(replicas=replicas, goal=goal, mark=mark, pods=pods, routers=[report], now=now, timeout_s=30)
        lost = set(range(found.replicas, replicas))
        for ordinal in lost & busy:
            assert mark is not None and now >= mark.deadline, f"{ordinal} went with a request before its deadline"
        assert min(replicas, goal) <= found.replicas <= max(replicas, goal)
        replicas, mark = found.replicas, found.mark
        annotations = {i: found.pod_marks.get(f"uid-{i}", annotations.get(i)) for i in range(replicas)}
        now += timedelta(seconds=seconds)
    assert replicas == goals[-1] and mark is None
    assert not any(annotations.values()), "nothing is left marked"


def test_an_unreadable_mark_counts_as_none() -> None:
    for text in (None, "", "null", "{}", "[]", '{"replicas": "x", "deadline": "y"}', '{"replicas": 1, "deadline": "2026-01-01T00:00:00"}'):
        assert Mark.from_text(text) is None
    assert Mark.from_text(Mark(1, DEADLINE).to_text()) == Mark(1, DEADLINE)
