"""The replay simulator: its model, its logs, its program; small versions of what the gates prove on the real traces."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fleet_router.decide.queue import QueueRules
from fleet_router.replay import gates, trace
from fleet_router.replay.__main__ import main
from fleet_router.replay.model import STEP_PER_CTX_TOKEN_S, STEP_PER_ROW_S, STEP_S, Job, Worker
from fleet_router.replay.rules import RULES
from fleet_router.replay.simulate import OURS, Machine, Options, Result, Simulation
from fleet_router.replay.trace import BadTrace, Request

RATE = 12_000.0


def run(requests: list[Request], rule: str, *, workers: int = 4, blocks: int = 3000, seed: int = 1, **more: object) -> Result:
    return Simulation(requests, Machine(workers, blocks), rule, seed=seed, options=Options(**more)).run()  # type: ignore[arg-type]


def busy_log() -> list[Request]:
    return trace.scaled(trace.built_in(sessions=120, seconds=200.0), 4.0)


# -- the model, by hand


def test_one_request_takes_the_time_that_the_formula_says() -> None:
    result = run([Request(1.0, 10_000, 3, tuple(range(20)))], "round-robin", workers=1)
    first = STEP_S + 8192 / RATE
    second = STEP_S + (10_000 - 8192) / RATE
    assert result.ttft == [pytest.approx(first + second)]
    decode = [STEP_S + STEP_PER_ROW_S + STEP_PER_CTX_TOKEN_S * (10_000 + n) for n in range(2)]
    assert result.tpot == [pytest.approx(sum(decode) / 2)]


def test_a_prefix_that_is_there_is_not_computed_again() -> None:
    blocks = tuple(range(10))
    result = run([Request(0.0, 5120, 1, blocks), Request(5.0, 5120, 1, blocks)], "round-robin", workers=1)
    assert result.hit_share == pytest.approx(5119 / 10240)


def test_blocks_leave_leaves_first_and_pinned_ones_stay() -> None:
    worker = Worker(4, RATE)

    def serve(*blocks: int) -> Job:
        job = Job(0, Request(0.0, 512 * len(blocks), 1, blocks), 0.0)
        worker.waiting.append(job)
        while worker.begin_step() is not None:
            worker.end_step(1.0)
        return job

    serve(1, 2, 3)
    serve(7, 8)
    assert set(worker.blocks) == {1, 7, 8}
    assert serve(1, 2).hit_tokens == 512


def test_a_request_waits_until_prompt_and_answer_fit() -> None:
    big = Request(0.0, 512 * 6, 512, tuple(range(6)))
    other = Request(0.1, 512 * 6, 512, tuple(range(10, 16)))
    alone = run([big], "round-robin", workers=1, blocks=10)
    both = run([big, other], "round-robin", workers=1, blocks=10)
    assert both.ttft[1] > alone.end_to_end_s


@pytest.mark.parametrize("rule", [*RULES, *OURS])
def test_every_rule_answers_every_request_and_is_the_same_each_time(rule: str) -> None:
    log = trace.built_in(sessions=25, seconds=40.0)
    first, second = run(log, rule), run(log, rule)
    assert first == second or (first.ttft, first.tpot, first.hit_share) == (second.ttft, second.tpot, second.hit_share)
    assert first.requests == len(log) == len(first.ttft) and first.ttft[0] > 0
    assert 0 <= first.hit_share <= trace.reuse_limit(log) + 1e-9


def test_our_index_and_load_add_up_after_a_replay() -> None:
    simulation = Simulation(trace.built_in(sessions=30, seconds=40.0), Machine(4, 400), "ours")
    simulation.run()
    assert simulation.ours is not None
    fleet = simulation.ours.fleet
    fleet.tick(1e6)
    fleet.check_integrity()
    assert all(not load.picks and load.now().committed == 0 for load in fleet.load.slots.values())
    for slot, worker in enumerate(simulation.workers):
        assert fleet.index.held_tokens(slot) == 512 * len(worker.blocks)


# -- what the rule is good for


def test_ours_beats_the_other_rules_on_the_built_in_log() -> None:
    setting = gates.BUILT_IN_SETTINGS[2]
    log = trace.scaled(trace.built_in(), setting.scale)
    results = [Simulation(log, setting.machine, rule).run() for rule in gates.RULES]
    verdicts = [v for v in gates.judge({setting.name: results}) if v.gate == "Q4"]
    assert len(verdicts) == 2 and all(v.ok for v in verdicts), verdicts


@pytest.mark.rule("R36")
def test_r36_without_look_ahead_the_queue_destroys_hits() -> None:
    log = trace.scaled(trace.built_in(sessions=160, seconds=200.0), 8.0)
    wide = run(log, "ours", blocks=600)
    narrow = run(log, "ours", blocks=600, queue=QueueRules(look_ahead=1, max_requests=1 << 20, max_requests_per_tenant=1 << 20))
    assert narrow.hit_share < wide.hit_share - 0.03, (narrow.hit_share, wide.hit_share)


@pytest.mark.rule("R14")
def test_r14_learned_speeds_help_where_half_of_the_workers_are_slow() -> None:
    log = trace.built_in()
    machine = Machine(4, 3000, slow_share=0.25, told_speeds=False)
    fixed, learned = (Simulation(log, machine, "ours", options=Options(learn=learn)).run() for learn in (False, True))
    assert learned.ttft_at(0.99) <= 0.85 * fixed.ttft_at(0.99)
    assert learned.end_to_end_s <= 1.05 * fixed.end_to_end_s


def test_history_loses_little_against_events() -> None:
    log = busy_log()
    events, history, in_bytes = run(log, "ours"), run(log, "ours-history"), run(log, "ours-bytes")
    assert history.hit_share > events.hit_share - 0.03
    assert in_bytes.hit_share > events.hit_share - 0.03, "nor do lengths that are 15 % off"


# -- logs


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2"),
        ("[]", "object"),
        ('{"input_length": 5}', "timestamp"),
        ('{"time": -1, "input_length": 5}', "timestamp"),
        ('{"time": 1}', "input_length"),
        ('{"time": 1, "input_length": 0}', "input_length"),
        ('{"time": 1, "input_length": true}', "input_length"),
        ('{"time": 1, "input_length": 600, "hash_ids": [1]}', "2 blocks"),
        ('{"time": 1, "input_length": 600, "hash_ids": [1, "x"]}', "hash_ids"),
        ('{"time": 1, "input_length": 600, "output_length": -1}', "output_length"),
        ('{"timestamp": "x", "input_length": 600}', "line 2"),
    ],
)
def test_a_bad_line_is_named_with_its_number(line: str, says: str) -> None:
    with pytest.raises(BadTrace, match="line 2") as e:
        trace.parse(['{"time": 0, "input_length": 5}', line], "log")
    assert says in str(e.value)


def test_an_empty_log_is_refused() -> None:
    with pytest.raises(BadTrace, match="no requests"):
        trace.parse(["", "\n"], "log")


def test_prompts_without_hashes_share_nothing() -> None:
    log = trace.parse(['{"time": 0, "input_length": 600, "output_length": 2}'] * 3, "log")
    assert trace.reuse_limit(log) == 0.0 and run(log, "ours").hit_share == 0.0


def test_a_log_is_sorted_and_scaled() -> None:
    log = trace.parse(['{"timestamp": 2000, "hash_ids": [1, 2]}', '{"timestamp": 1000, "input_length": 5}'], "log")
    assert [(r.at, r.input_tokens) for r in log] == [(1.0, 5), (2.0, 1024)]
    assert [r.at for r in trace.scaled(log, 2.0)] == [0.5, 1.0]
    spread = trace.scaled(log, 1.0, spread_s=0.5)
    assert spread == trace.scaled(log, 1.0, spread_s=0.5) and all(0 <= a.at - b.at < 0.5 for a, b in zip(spread, log, strict=True))


# -- the program


def test_a_user_s_log_is_answered(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    lines = [{"time": n * 0.2, "input_length": 2048, "output_length": 20, "hash_ids": [1, 2, n % 5 + 10, n + 100]} for n in range(60)]
    path.write_text("\n".join(map(json.dumps, lines)))
    command = [sys.executable, "-m", "fleet_router.replay", str(path), "--workers", "3", "--rule", "ours,round-robin", "--cache-tokens", "100000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "60 requests, 3 workers of 99840 tokens" in done.stdout
    assert [line.split()[0] for line in done.stdout.splitlines() if line.startswith(("ours", "round"))] == ["ours", "round-robin"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["none.jsonl"], "none.jsonl"),
        (["x", "--rule", "best"], "'best'"),
        (["x", "--workers", "0"], "'0'"),
        (["x", "--traces", "y"], "not both"),
        (["--traces", "/nonexistent"], "has no file conversation_trace.jsonl"),
    ],
)
def test_wrong_usage_ends_with_2_and_a_sentence(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(arguments)
    except SystemExit as e:
        code = int(str(e.code))
    assert code == 2 and says in capsys.readouterr().err


def fake(rule: str, hit: float, ttft: float, *, tpot: float = 0.03, busy: float = 1.1) -> Result:
    return Result(rule, 1, hit, [ttft], [tpot], 1.0, 1.0, busy, 0.0)


@pytest.mark.parametrize(
    ("ours", "failed"),
    [
        (fake("ours", 0.35, 1.0), []),
        (fake("ours", 0.339, 1.0), ["Q1", "Q4"]),
        (fake("ours", 0.35, 1.03), ["Q1"]),
        (fake("ours", 0.35, 1.1), ["Q1", "Q4"]),
        (fake("ours", 0.35, 1.0, tpot=0.067), ["Q1"]),
    ],
)
def test_a_gate_fails_when_its_number_is_missed(ours: Result, failed: list[str]) -> None:
    others = [fake(rule, 0.355 if rule == "gaie" else 0.2, 1.0) for rule in gates.SEVEN]
    verdicts = gates.judge({gates.Q1.name: [*others, ours]})
    assert sorted({v.gate for v in verdicts if v.ok is False}) == failed
    assert {v.gate for v in verdicts if v.ok is None} == {"Q2", "Q3"}


def test_the_program_s_exit_code_tells_of_failed_gates(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    small = (gates.BUILT_IN_SETTINGS[0],)
    monkeypatch.setattr(gates, "BUILT_IN_SETTINGS", small)
    monkeypatch.setattr(trace, "built_in", _tiny(trace.built_in))
    monkeypatch.setattr(gates, "HIT_SLACK", -1.0)
    assert main(["--jobs", "1"]) == 1
    assert "FAILED" in capsys.readouterr().out


def _tiny(whole: Callable[..., list[Request]]) -> Callable[[], list[Request]]:
    return lambda: whole(sessions=10, seconds=20.0)
