"""Pure: how one StatefulSet gets from its replicas to a goal without cutting a request.

A StatefulSet loses its highest ordinal first, so the pods of ordinal ≥ goal are marked, and it shrinks as soon as the top ones are
idle by every router's word, or when the one deadline has passed. Contract sections 2 and 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from fleet_operator.facts import Mark, Pod, RouterReport, rfc3339, same_moment


@dataclass(frozen=True, slots=True)
class DrainStep:
    """What to write now. `replicas` and `mark` are the StatefulSet's; `pod_marks` are annotations to set or (None) to remove."""

    replicas: int
    mark: Mark | None = None
    pod_marks: dict[str, str | None] = field(default_factory=dict)  # pod uid → deadline
    wake_at: datetime | None = None  # the deadline, when there is something to wait for
    waiting_for: tuple[str, ...] = ()  # names of pods that are not idle


def step(
    *, replicas: int, goal: int, mark: Mark | None, pods: Sequence[Pod], routers: Sequence[RouterReport], now: datetime, timeout_s: int
) -> DrainStep:
    """The next step from `replicas` to `goal`. Calling it again with what it asked for done never undoes anything."""
    if goal >= replicas:
        return DrainStep(goal, None, {p.uid: None for p in pods if p.ordinal < goal and p.draining is not None and not p.is_terminating})
    wanted = _mark(mark, goal, now, timeout_s)
    if now >= wanted.deadline:
        return DrainStep(goal)
    deadline = rfc3339(wanted.deadline)
    leaving = [p for p in pods if p.ordinal >= goal]
    busy = [p for p in leaving if not is_idle(p, deadline, routers)]
    shrunk = min(replicas, max((p.ordinal + 1 for p in busy), default=goal))
    marks: dict[str, str | None] = {p.uid: deadline for p in leaving if not same_moment(p.draining, deadline) and not p.is_terminating}
    marks |= {p.uid: None for p in pods if p.ordinal < goal and p.draining is not None and not p.is_terminating}
    if shrunk == goal and mark == wanted:
        return DrainStep(goal, None, {uid: value for uid, value in marks.items() if value is None})
    if mark != wanted:  # the intent is on the StatefulSet before anything else happens
        shrunk = replicas
    return DrainStep(shrunk, wanted, marks, wanted.deadline, tuple(p.name for p in busy))


def _mark(mark: Mark | None, goal: int, now: datetime, timeout_s: int) -> Mark:
    """The mark that should stand. A drain that gets less deep keeps its deadline; a deeper one starts a new one for all."""
    limit = (now + timedelta(seconds=timeout_s)).replace(microsecond=0)
    if mark is None or goal < mark.replicas:
        return Mark(goal, limit)
    return Mark(goal, min(mark.deadline, limit))


def is_idle(pod: Pod, deadline: str, routers: Sequence[RouterReport]) -> bool:
    """True when no router has or will have a request at the pod.

    A router that cannot be reached, or has not synced, may have one. A pod that a router does not list was never routable there only if
    it is not Ready: a router that lags behind would list it, not drained, a moment later.
    """
    if not same_moment(pod.draining, deadline):
        return False
    for router in routers:
        if router.error or not router.is_synced:
            return False
        worker = router.worker(pod.uid)
        if worker is None:
            if pod.is_ready:
                return False
        elif worker.inflight or not (worker.state == "failed" or same_moment(worker.drain_deadline, deadline)):
            return False
    return True
