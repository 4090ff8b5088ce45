"""The profile of a step, the bars of the comparison, and how servers are frozen and ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from fleet_bench import step
from fleet_bench.peers import __main__ as peers
from fleet_bench.peers import machine, setup
from fleet_bench.peers.bars import BARS, Bar, Line, exit_code, judge, table
from fleet_bench.peers.rounds import Results
from fleet_bench.peers.scenarios import gaps_within
from fleet_bench.peers.servers import Kind, Server, ServerFailed
from fleet_bench.record import Record

PROFILE = {
    "steps": 50,
    "stages": {
        "schedule": {"mean_us": 120.0, "p50_us": 110.0, "p99_us": 300.0, "share": 0.1},
        "executor": {"mean_us": 1000.0, "p50_us": 990.0, "p99_us": 1200.0, "share": 0.8},
        "send": {"mean_us": 80.5, "p50_us": 80.0, "p99_us": 99.0, "share": 0.1},
    },
}


@contextmanager
def worker(status: int, body: bytes) -> Iterator[tuple[str, list[Any]]]:
    """A server that answers POST /profile so; yields its URL and what it was asked."""
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_profile_is_printed_longest_stage_first_with_the_scheduler_s_share(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with worker(200, json.dumps(PROFILE).encode()) as (url, asked):
        assert step.main(["--url", url, "--steps", "50", "--json", str(tmp_path / "p.json")]) == 0
    assert asked == [("/profile", {"steps": 50})]
    out = capsys.readouterr().out
    assert out.index("executor") < out.index("schedule ") < out.index("send")
    assert "outside the executor: 200 us a step" in out
    assert json.loads((tmp_path / "p.json").read_text()) == PROFILE


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [(404, b"", "give the worker's internal port"), (409, b"busy", "HTTP 409: busy"), (200, b"[]", "something else than a profile")],
)
def test_a_worker_without_a_profile_is_explained(status: int, body: bytes, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with worker(status, body) as (url, _):
        assert step.main(["--url", url]) == 1
    assert message in capsys.readouterr().err


RATIO = Bar("k", "k", "tok/s", 1.5)


@pytest.mark.parametrize(
    ("bar", "own", "theirs", "value", "verdict"),
    [
        (RATIO, [15.0, 16.0, 20.0], [10.0, 10.0, 10.0], 1.6, "pass"),
        (RATIO, [30.0, 14.0, 14.0], [20.0, 10.0, 10.0], 1.4, "FAIL"),  # pairs, not medians of each side
        (Bar("k", "k", "s", 15, invert=True), [2.0], [40.0], 20.0, "pass"),
        (Bar("k", "k", "MiB", 0.4, least=False), [40.0], [100.0], 0.4, "pass"),
        (Bar("k", "k", "us", 1000, peer=None, least=False, strict=True), [1000.0], [], 1000.0, "FAIL"),
        (Bar("k", "k", "tok/s", 1.5, binding=False), [1.0], [1.0], 1.0, "below"),
        (RATIO, [1.0], [], None, "not measured"),
        (RATIO, [], [1.0], None, "not measured"),
    ],
)
def test_a_bar_judges_the_median_of_the_rounds_ratios(bar: Bar, own: list[float], theirs: list[float], value: float | None, verdict: str) -> None:
    line = judge(bar, {"k": {"ours": own, "vllm": theirs}})
    assert (line.value if value is None else pytest.approx(line.value), line.verdict) == (value, verdict)


def lines(*verdicts: str) -> list[Line]:
    return [Line(RATIO, 1, 1, 1, 1, 1, 1, v) for v in verdicts]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [(["pass"], 0), (["pass", "below"], 0), (["pass", "FAIL", "not measured"], 1), (["pass", "not measured"], 3)],
)
def test_the_exit_code_is_that_of_the_worst_bar(verdicts: list[str], code: int) -> None:
    assert exit_code(lines(*verdicts)) == code


def test_every_bar_of_the_issue_is_there_and_has_a_line() -> None:
    limits = {(b.key, b.peer): b.limit for b in BARS}
    assert limits == {
        ("decode-1", "vllm"): 1.6, ("decode-8", "vllm"): 1.5, ("decode-32", "vllm"): 1.3, ("context-8", "vllm"): 1.3, ("prefill", "vllm"): 1.1,
        ("start", "vllm-first"): 15, ("start", "vllm-eager"): 4, ("memory", "vllm"): 0.4, ("scheduler", None): 1000, ("front-end", None): 15,
        ("flood-itl-mean", "vllm"): 0.8, ("flood-itl-p99", "vllm"): 0.8, ("int8-1", "ours-bf16"): 1.5,
    }  # fmt: skip
    all_lines = peers.judge_all(Results(), peers.ALL)
    assert [line.bar for line in all_lines] == list(BARS)
    assert table(all_lines).count("not measured") == len(BARS)


def test_a_choice_of_scenarios_judges_only_their_bars() -> None:
    assert [line.bar.key for line in peers.judge_all(Results(), ["prefill", "flood"])] == ["prefill", "flood-itl-mean", "flood-itl-p99"]


def test_a_wrong_choice_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert peers.main(["--scenarios", "decode-2"]) == 2
    assert "--scenarios names decode-2; allowed: start, decode-1" in capsys.readouterr().err


def test_gaps_are_counted_during_the_flood_and_an_endless_stall_counts() -> None:
    def row(*times: float, end: float | None = None) -> Record:
        return Record(0, 0, 0, 0.0, token_s=list(times), end_s=end)

    assert gaps_within([row(0.0, 1.0, 3.0, 4.0, 9.0, end=9.0)], 2.0, 5.0) == [2.0, 1.0]
    assert gaps_within([row(0.0, 1.0)], 2.0, 10.0) == [9.0]


def test_the_machine_is_described_without_its_name() -> None:
    told = machine.describe()
    assert os.uname().nodename not in json.dumps(told) or len(os.uname().nodename) < 4
    assert f"{told['cores']} cores" in machine.words(told)


def test_a_recipe_that_changes_has_another_stamp() -> None:
    changed = setup.Recipe("vllm", (*setup.VLLM.requirements, "x"), setup.VLLM.overrides)
    assert changed.text() != setup.VLLM.text()


TREE = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_server_is_frozen_thawed_and_ended_with_all_its_processes() -> None:
    server = Server(Kind("tree", lambda port, second: [sys.executable, "-c", TREE]))
    try:
        wait_for(lambda: server.log.read_text().strip().isdigit())
        child = int(server.log.read_text())
        assert server.pids() == sorted([server.process.pid, child])
        server.freeze()
        wait_for(lambda: state(child) == "T" and state(server.process.pid) == "T")
        server.thaw()
        wait_for(lambda: state(child) == "S")
        assert server.memory_bytes() > 1 << 20
        server.process.kill()  # its child has no parent of ours now, but is known
        server.process.wait()
    finally:
        server.stop()
    assert state(child) in ("gone", "Z")
    assert not server.log.exists()


def test_a_server_that_ends_says_why() -> None:
    server = Server(Kind("broken", lambda port, second: [sys.executable, "-c", "raise SystemExit('no such model')"]))
    try:
        server.process.wait(20)
        with pytest.raises(ServerFailed, match=r"broken ended with code 1.*\n.*no such model"):
            server.check()
    finally:
        server.stop()


def test_the_command_line_becomes_the_benchmark_s_program() -> None:
    done = subprocess.run([sys.executable, "-m", "fleet_cli", "bench", "serve", "--url", "ftp://x", "--mode", "rate"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "--mode rate needs --rate" in done.stderr and "http://HOST[:PORT]" in done.stderr
