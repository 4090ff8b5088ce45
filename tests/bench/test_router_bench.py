"""The router's bench: its bars, its workers, what it reads of wrk, and a short round on the real router where wrk and nginx are."""

from __future__ import annotations

import http.client
import json
import os
import shutil
from pathlib import Path

import pytest

import fleet_router
from fleet_bench.peers.bars import exit_code, judge
from fleet_bench.peers.servers import Server, ServerFailed
from fleet_bench.router import __main__ as bench
from fleet_bench.router import scenarios
from fleet_bench.router.bars import BAR_KEYS, BARS
from fleet_bench.router.load import CHATS, TURNS, read_result, script
from fleet_bench.router.mocks import record, stream_workers
from fleet_bench.router.routers import cpu_s, ours, wait_ready
from fleet_bench.router.scenarios import SCENARIOS, Round
from fleet_bench.router.tools import Tools

LINE = '{"requests":1000,"us":2000000,"p50_us":900.0,"p99_us":5000.0,"mean_us":1000.0,"status":0,"broken":0}'


def test_every_bar_is_decided_by_a_scenario_and_every_scenario_decides_one() -> None:
    decided = {name: BAR_KEYS.get(name, (name,)) for name in bench.ALL}
    assert {key for keys in decided.values() for key in keys} == {bar.key for bar in BARS}


def test_a_router_two_and_a_half_times_as_fast_passes_and_a_slower_one_fails() -> None:
    bar = next(b for b in BARS if b.key == "chats-rate" and b.binding)
    lines = [judge(bar, {"chats-rate": {"ours": [rate], "sglang-router": [100.0]}}) for rate in (250.0, 249.0)]
    assert [line.verdict for line in lines] == ["pass", "FAIL"]
    assert exit_code(lines) == 1


def test_the_end_of_a_run_of_wrk_is_read_and_a_run_with_refusals_is_no_result() -> None:
    load = read_result(LINE, "u")
    assert (load.per_second, load.p50_us) == (500.0, 900.0)
    for wrong in ('"status":0', '"broken":0', '"requests":1000'):
        name = wrong.partition(":")[0]
        with pytest.raises(ServerFailed):
            read_result(LINE.replace(wrong, f"{name}:{0 if 'requests' in name else 3}"), "u")


def test_scripts_have_no_open_places_and_runs_have_chats_of_their_own() -> None:
    texts = [script(body, start=start) for body in (CHATS, TURNS) for start in (0, 5)]
    assert len(set(texts)) == 4 and not any(word in text for text in texts for word in ("MODEL", "START", "STREAM"))
    assert '"stream":true' in script(CHATS, start=0, stream=True)


def test_each_mock_worker_is_a_worker_of_its_own() -> None:
    records = [json.loads(record(port)) for port in (1000, 1001)]
    assert records[0]["podUid"] != records[1]["podUid"] and records[0]["incarnation"] != records[1]["incarnation"]


def test_wrong_choices_are_named_with_what_is_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--scenarios", "speed"]) == 2
    said = capsys.readouterr().err
    assert "speed" in said and "chats-bytes" in said
    assert bench.main(["--python", "/nowhere/python3"]) == 2
    assert "--python /nowhere/python3 is no file" in capsys.readouterr().err


def test_another_interpreter_runs_ours_with_the_packages_of_this_one() -> None:
    kind = ours("ours", ["http://127.0.0.1:1"], python="/other/python3")
    assert kind.argv(1, 2)[0] == "/other/python3"
    assert str(Path(fleet_router.__file__).parents[1]) in kind.environment["PYTHONPATH"].split(os.pathsep)
    assert not ours("ours", []).environment


def test_streams_of_the_real_router_are_measured_over_mock_workers() -> None:
    with stream_workers(2, chunks=0, pause_s=0.0) as workers:
        server = Server(ours("ours", workers.urls))
        try:
            wait_ready(server)
            here = Round(server, workers.urls[0], Tools(Path(), Path(), {}), 0, 1.0)
            assert scenarios.idle_streams(here, count=20)["idle-streams"] < 10_000
            assert cpu_s(server) > 0 and server.memory_bytes() > 1 << 20
        finally:
            server.stop()
        assert not server.pids()
    with pytest.raises(OSError):
        http.client.HTTPConnection("127.0.0.1", workers.ports[0], timeout=2).request("GET", "/health")


@pytest.mark.skipif(not (shutil.which("wrk") and shutil.which("nginx", path="/usr/sbin:/usr/bin")), reason="wrk and nginx are not installed")
def test_a_round_of_chats_gives_its_figures() -> None:
    tools = bench.ensure_tools(lambda text: None)
    with bench.make_workers("plain", tools, b"") as workers:
        server = Server(ours("ours", workers.urls))
        try:
            wait_ready(server)
            figures = SCENARIOS["chats-bytes"].run(Round(server, workers.urls[0], tools, 0, 1.0))
        finally:
            server.stop()
    assert set(figures) == set(BAR_KEYS["chats-bytes"]) and all(value > 0 for value in figures.values())
