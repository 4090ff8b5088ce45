"""The rollout planner: never below what serves, always ends, no way back and forth."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from fleet_operator.rollout import Phase, RevisionState, RoleState, choose_traffic, plan_rollout

GOAL = {"prefill": 1, "decode": 2}


def state(revision: str, number: int, *, ready: tuple[int, int] = (1, 2), routable: bool = True, hopeless: bool = False) -> RevisionState:
    roles = {"prefill": RoleState(1, 1, ready[0]), "decode": RoleState(2, 2, ready[1])}
    return RevisionState(revision, number, roles, routable, hopeless)


def test_the_old_revision_stays_whole_until_the_new_one_is_full_and_has_the_traffic() -> None:
    old, starting, full = state("a", 1), state("b", 2, ready=(1, 1)), state("b", 2)
    for new, traffic, retires in [(starting, "a", False), (full, "a", False), (full, "b", True), (replace(full, is_routable=False), "b", False)]:
        plan = plan_rollout("b", GOAL, [old, new], traffic)
        assert (plan.replicas["a", "decode"] == 0) is retires, (new, traffic)


def test_a_retirement_that_has_begun_goes_on_while_the_new_revision_serves_and_is_undone_when_it_does_not() -> None:
    old = replace(state("a", 1), is_retiring=True)
    assert plan_rollout("b", GOAL, [old, state("b", 2, ready=(1, 1))], "b").replicas["a", "decode"] == 0
    assert plan_rollout("b", GOAL, [old, state("b", 2, ready=(0, 0))], "b").replicas["a", "decode"] == 2


def test_a_hopeless_old_revision_goes_at_once_but_one_that_serves_never() -> None:
    broken = state("b", 2, ready=(0, 0), routable=False, hopeless=True)
    plan = plan_rollout("c", GOAL, [state("a", 1), broken], "a")
    assert plan.replicas["b", "decode"] == 0 and plan.replicas["a", "decode"] == 2
    assert plan_rollout("c", GOAL, [replace(state("a", 1), is_hopeless=True)], "a").replicas["a", "decode"] == 2


def test_traffic_stays_where_it_is_until_the_target_is_full_and_goes_back_only_when_the_target_is_dead() -> None:
    old = state("a", 1)
    assert choose_traffic("b", GOAL, [old, state("b", 2, ready=(1, 1))], "a") == "a"
    assert choose_traffic("b", GOAL, [old, state("b", 2)], "a") == "b"
    assert choose_traffic("b", GOAL, [old, state("b", 2, ready=(1, 1))], "b") == "b"
    assert choose_traffic("b", GOAL, [old, state("b", 2, ready=(1, 0))], "b") == "a"
    assert choose_traffic("b", GOAL, [state("b", 2, ready=(1, 0))], "b") is None


def test_without_a_record_the_newest_serving_revision_gets_the_traffic() -> None:
    assert choose_traffic("c", GOAL, [state("a", 1), state("b", 2), state("c", 3, ready=(0, 0))], None) == "b"


def test_zero_replicas_retire_everything() -> None:
    plan = plan_rollout("b", {"prefill": 0, "decode": 0}, [state("a", 1), state("b", 2)], "a")
    assert set(plan.replicas.values()) == {0}


roles = st.builds(lambda replicas, pods, ready: RoleState(replicas, pods, min(ready, pods)), st.integers(0, 3), st.integers(0, 3), st.integers(0, 3))
states = st.builds(
    RevisionState,
    revision=st.just(""),
    number=st.just(0),
    roles=st.fixed_dictionaries({"prefill": roles, "decode": roles}),
    is_routable=st.booleans(),
    is_hopeless=st.booleans(),
    is_retiring=st.booleans(),
)
worlds = st.lists(states, min_size=1, max_size=3).map(lambda found: [replace(s, revision="abc"[i], number=i) for i, s in enumerate(found)])


@given(worlds, st.sampled_from("abc"), st.sampled_from(["a", "b", "c", None]), st.integers(0, 2), st.integers(1, 3))
def test_no_step_takes_away_the_only_revision_that_serves(
    world: list[RevisionState], target: str, traffic: str | None, prefill: int, decode: int
) -> None:
    goal = {"prefill": prefill, "decode": decode if prefill else 0}
    plan = plan_rollout(target, goal, world, traffic)
    assert {role for revision, role in plan.replicas if revision == target} == set(goal)
    for old in (s for s in world if s.revision != target):
        for role, counts in old.roles.items():
            assert plan.replicas[old.revision, role] in (0, counts.replicas), "an old revision never grows"
        shrinks = any(plan.replicas[old.revision, role] < counts.replicas for role, counts in old.roles.items())
        wanted = next((s for s in world if s.revision == target), None)
        if shrinks and old.is_serving and any(goal.values()):
            assert wanted is not None and wanted.is_serving
    assert all(s.is_gone for s in world if s.revision in plan.remove) and target not in plan.remove


@given(worlds, st.sampled_from("abc"), st.sampled_from(["a", "b", "c", None]), st.integers(1, 2), st.integers(1, 3))
def test_a_rollout_ends_when_pods_come_up_and_never_turns_back(
    world: list[RevisionState], target: str, traffic: str | None, prefill: int, decode: int
) -> None:
    goal = {"prefill": prefill, "decode": decode}
    phases = []
    for _ in range(12):
        told = traffic
        traffic = choose_traffic(target, goal, world, told)
        plan = plan_rollout(target, goal, world, told)
        phases.append(plan.phase)
        world = [_advance(s, plan.replicas, s.revision == target) for s in world if s.revision not in plan.remove]
        if target not in {s.revision for s in world}:
            world.append(RevisionState(target, 9, {role: RoleState(n, 0, 0) for role, n in goal.items()}))
    assert phases[-1] is Phase.COMPLETE and [s.revision for s in world] == [target] and traffic == target
    order = [p for i, p in enumerate(phases) if i == 0 or phases[i - 1] is not p]
    assert len(order) == len(set(order)), f"a phase came back: {order}"


def _advance(s: RevisionState, replicas: object, is_target: bool) -> RevisionState:
    """Every StatefulSet reaches what was asked for, and the target's pods come up."""
    roles = {role: replicas[s.revision, role] for role in s.roles}  # type: ignore[index]
    retiring = not is_target and not any(roles.values())
    counts = {role: RoleState(n, n, 0 if retiring else n if is_target else min(s.roles[role].ready, n)) for role, n in roles.items()}
    return replace(s, roles=counts, is_routable=is_target or s.is_routable, is_retiring=retiring)
