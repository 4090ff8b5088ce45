"""Pure: which revision gets the traffic, and how many replicas each role of each revision should have next.

Thin on purpose: the new revision comes up whole beside the old one, and the old one goes when the new one serves. The planner with surge,
pause and deadlines keeps this seam: `plan_rollout(target, goal, revisions, traffic)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """Where a rollout is; the reason of condition Progressing."""

    STARTING = "WorkersStarting"
    SWITCHING = "TrafficSwitching"
    DRAINING = "WorkersDraining"
    COMPLETE = "Complete"


@dataclass(frozen=True, slots=True)
class RoleState:
    """One StatefulSet."""

    replicas: int  # as it stands
    pods: int  # that exist, terminating ones too
    ready: int  # Ready, not draining, not terminating


@dataclass(frozen=True, slots=True)
class RevisionState:
    """One revision. `is_routable`: a router has its workers and a request went through. `is_hopeless`: a role has only lasting failures."""

    revision: str
    number: int
    roles: Mapping[str, RoleState]
    is_routable: bool = False
    is_hopeless: bool = False
    is_retiring: bool = False  # its drain to zero has begun

    @property
    def is_serving(self) -> bool:
        """Every role has a ready pod."""
        return bool(self.roles) and all(role.ready > 0 for role in self.roles.values())

    @property
    def is_gone(self) -> bool:
        """Nothing of it runs any more."""
        return all(role.replicas == 0 and role.pods == 0 for role in self.roles.values())


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """Replicas to go to (by draining, when fewer), revisions to delete, and what is waited for."""

    replicas: Mapping[tuple[str, str], int]  # (revision, role)
    remove: tuple[str, ...]
    phase: Phase


def is_full(state: RevisionState | None, goal: Mapping[str, int]) -> bool:
    """The revision serves with all replicas that are wanted."""
    return state is not None and state.is_routable and all(role in state.roles and state.roles[role].ready >= n for role, n in goal.items())


def choose_traffic(target: str, goal: Mapping[str, int], revisions: Sequence[RevisionState], current: str | None) -> str | None:
    """The revision that new requests go to; None when none can take any."""
    by_name = {r.revision: r for r in revisions}
    wanted, held = by_name.get(target), by_name.get(current or "")
    if is_full(wanted, goal) or (current == target and wanted is not None and wanted.is_serving):
        return target
    if held is not None and held.is_serving:
        return held.revision
    others = [r for r in revisions if r.is_serving and r.revision != target]
    if others:
        return max(others, key=lambda r: r.number).revision
    return target if wanted is not None and wanted.is_serving else None


def plan_rollout(target: str, goal: Mapping[str, int], revisions: Sequence[RevisionState], traffic: str | None) -> RolloutPlan:
    """The next step.

    Args: `target` the revision of the spec; `goal` its replicas by role; `revisions` all that have a StatefulSet; `traffic` the revision
    that the routers have already been told to use.
    """
    by_name = {r.revision: r for r in revisions}
    wanted = by_name.get(target)
    replicas = {(target, role): n for role, n in goal.items()}
    old = [r for r in revisions if r.revision != target]
    is_off = not any(goal.values())
    may_begin = is_off or (is_full(wanted, goal) and traffic == target)
    for state in old:
        keeps_on = state.is_retiring and (not state.is_serving or (wanted is not None and wanted.is_serving))
        retire = may_begin or keeps_on or (state.is_hopeless and not state.is_serving)
        for role, counts in state.roles.items():
            replicas[state.revision, role] = 0 if retire else counts.replicas
    remove = tuple(r.revision for r in old if r.is_gone)
    left = [r for r in old if not r.is_gone]
    settled = wanted is not None and all(
        role in wanted.roles and (wanted.roles[role].replicas, wanted.roles[role].pods) == (n, n) for role, n in goal.items()
    )
    if not (is_off or is_full(wanted, goal)):
        phase = Phase.STARTING
    elif not is_off and traffic != target:
        phase = Phase.SWITCHING
    elif left or not settled:
        phase = Phase.DRAINING
    else:
        phase = Phase.COMPLETE
    return RolloutPlan(replicas, remove, phase)
