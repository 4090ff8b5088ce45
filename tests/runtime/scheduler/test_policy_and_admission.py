"""The pure choices: what a step holds, who may enter, what is refused, who is overdue."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fleet_runtime.scheduler.admission import Capacity, Held, lets_pass, may_enter, overdue, refusal
from fleet_runtime.scheduler.policy import Limits, StepPlan, plan_step
from fleet_runtime.scheduler.request import Kind

LIMITS = Limits(step_tokens=64, max_prefill_steps=2)


@pytest.mark.parametrize(
    ("name", "prefill", "decode", "steps", "plan"),
    [
        ("nothing", [], [], 0, StepPlan()),
        ("decode only", [], [1, 2], 0, StepPlan(decode=(0, 1))),
        ("a short prompt", [10], [], 0, StepPlan(chunks=((0, 10),))),
        ("two short prompts share a step", [10, 20], [], 0, StepPlan(chunks=((0, 10), (1, 20)))),
        ("a long prompt is cut at a page", [100], [], 0, StepPlan(chunks=((0, 64),))),
        ("decode rides along, the chunk stays whole pages", [100], [1, 1, 1], 0, StepPlan(chunks=((0, 48),), decode=(0, 1, 2))),
        ("only one prompt is cut", [30, 100, 5], [], 0, StepPlan(chunks=((0, 30), (1, 32)))),
    ],
)
def test_a_step_is_planned(name: str, prefill: list[int], decode: list[int], steps: int, plan: StepPlan) -> None:
    assert plan_step(LIMITS, prefill, decode, prefill_steps=steps) == plan, name


def test_with_too_small_a_budget_prefill_and_decode_alternate() -> None:
    limits = Limits(step_tokens=16, max_prefill_steps=2)
    assert plan_step(limits, [64], [1] * 8, prefill_steps=0) == StepPlan(chunks=((0, 16),))
    assert plan_step(limits, [64], [1] * 8, prefill_steps=1) == StepPlan(chunks=((0, 16),))
    assert plan_step(limits, [64], [1] * 8, prefill_steps=2) == StepPlan(decode=tuple(range(8)))


def test_more_rows_than_budget_take_turns_by_who_waited_longest() -> None:
    plan = plan_step(Limits(16, 1), [], [5] * 10 + [3] * 10, prefill_steps=0)
    assert set(range(10, 20)) < set(plan.decode) and len(plan.decode) == 16


@given(
    st.integers(16, 200),
    st.integers(1, 4),
    st.lists(st.integers(1, 300), max_size=6),
    st.lists(st.integers(0, 50), max_size=80),
    st.integers(0, 4),
)
@example(budget=16, most=1, prefill=[16, 1], decode=[0], steps=1)
def test_every_plan_keeps_the_budget_and_never_idles(budget: int, most: int, prefill: list[int], decode: list[int], steps: int) -> None:
    plan = plan_step(Limits(budget, most), prefill, decode, prefill_steps=min(steps, most))
    assert sum(n for _, n in plan.chunks) + len(plan.decode) <= budget
    assert bool(plan.chunks or plan.decode) == bool(prefill or decode)
    assert len(set(plan.decode)) == len(plan.decode)
    chosen = [i for i, _ in plan.chunks]
    assert chosen == sorted(set(chosen))
    if prefill and budget - len(plan.decode) >= min(16, prefill[0]):
        assert chosen[0] == 0, "the oldest is always in, but where less than a page is left beside rows whose turn it is"
    cut = [i for i, n in plan.chunks if n < prefill[i]]
    assert len(cut) <= 1, "one prompt at a time is cut"
    assert all(n == prefill[i] or n % 16 == 0 for i, n in plan.chunks) and all(0 < n <= prefill[i] for i, n in plan.chunks)
    if cut:
        room = budget - len(plan.decode)
        assert dict(plan.chunks)[cut[0]] >= room // 2 // 16 * 16 or cut[0] > 0, "the long one goes on at half speed at least"
    if decode and steps >= most:
        assert plan.decode, "decode is starved"


UNIFIED = Capacity.of("unified", rows=4, pages=100)


@pytest.mark.parametrize(
    ("name", "held", "kind", "pages", "allowed"),
    [
        ("plain fills all pages", {Kind.PLAIN: (1, 60)}, Kind.PLAIN, 40, True),
        ("decode legs leave the share", {Kind.DECODE: (1, 40)}, Kind.DECODE, 11, False),
        ("decode legs may fill the rest", {Kind.DECODE: (1, 40)}, Kind.DECODE, 10, True),
        ("prefill legs stay in the share", {Kind.PREFILL: (1, 40)}, Kind.PREFILL, 11, False),
        ("plain stays out of the share while a leg is here", {Kind.PREFILL: (1, 5)}, Kind.PLAIN, 51, False),
        ("plain may have the rest while a leg is here", {Kind.PREFILL: (1, 5)}, Kind.PLAIN, 50, True),
        ("rows of decode legs", {Kind.DECODE: (2, 2)}, Kind.DECODE, 1, False),
        ("rows in all", {Kind.PLAIN: (4, 4)}, Kind.PREFILL, 1, False),
    ],
)
def test_shares_of_a_unified_worker(name: str, held: dict[Kind, tuple[int, int]], kind: Kind, pages: int, allowed: bool) -> None:
    state = Held.nothing()
    for k, (rows, n) in held.items():
        state.rows[k], state.pages[k] = rows, n
    state.prefill_legs = state.rows[Kind.PREFILL]
    assert may_enter(UNIFIED, state, kind, pages) is allowed, name


@pytest.mark.parametrize(
    ("name", "decode", "kind", "pages", "waits"),
    [
        ("decode legs wait", (0, 0), Kind.DECODE, 60, True),
        ("prefill legs wait, where decode legs leave the elder its pages", (1, 40), Kind.PREFILL, 60, True),
        ("prefill legs pass, where they do not", (1, 40), Kind.PREFILL, 61, False),
        ("prefill legs pass, where decode legs have all rows", (4, 4), Kind.PREFILL, 60, False),
        ("plain requests have an order of their own", (0, 0), Kind.PLAIN, 60, False),
    ],
)
def test_who_waits_behind_the_elder(name: str, decode: tuple[int, int], kind: Kind, pages: int, waits: bool) -> None:
    held = Held.nothing()
    held.rows[Kind.DECODE], held.pages[Kind.DECODE] = decode
    assert lets_pass(UNIFIED, held, kind, pages) is waits, name
    held.prefill_legs = 1
    assert may_enter(UNIFIED, held, Kind.PLAIN, 60, elder=True) is (decode[0] < 4), "the elder may use the share"


def test_a_worker_with_one_role_keeps_no_share() -> None:
    capacity = Capacity.of("decode", rows=2, pages=10)
    assert capacity.most_pages(Kind.DECODE) == 10 and capacity.most_rows(Kind.DECODE) == 2


def test_what_can_never_fit_is_refused_with_both_numbers() -> None:
    error = refusal(Capacity(4, 10), Kind.PLAIN, prompt_tokens=150, max_new=50, pages=13, waiting=0, max_queue=5)
    assert error is not None and error.status == 400 and error.code == "kv_capacity_exceeded"
    assert "208 tokens" in error.message and "160 tokens" in error.message


def test_a_full_queue_is_429_with_both_numbers() -> None:
    error = refusal(Capacity(4, 10), Kind.PLAIN, prompt_tokens=1, max_new=1, pages=1, waiting=5, max_queue=5)
    assert error is not None and (error.status, error.code) == (429, "queue_full") and "5" in error.message
    assert refusal(Capacity(4, 10), Kind.PLAIN, prompt_tokens=1, max_new=1, pages=1, waiting=4, max_queue=5) is None


@pytest.mark.parametrize(
    ("deadline", "waited", "running", "code"),
    [
        (0.0, 5.0, False, None),
        (0.0, 10.0, False, "queue_timeout"),
        (0.0, 99.0, True, None),
        (108.0, 7.9, False, None),
        (108.0, 8.0, False, "deadline_exceeded"),
        (108.0, 8.0, True, "deadline_exceeded"),
        (200.0, 50.0, False, None),
    ],
)
def test_timeouts_before_the_first_token(deadline: float, waited: float, running: bool, code: str | None) -> None:
    error = overdue(100.0 + waited, deadline=deadline, arrived=100.0, queue_timeout=10.0, running=running, state="waiting")
    assert (error.code if error else None) == code
    assert error is None or (error.status == (504 if deadline else 503) and error.type == "timeout_error" and "waiting" in error.message)
