"""Processes are known by pid and start time: ours are kept, replaced or ended, and nobody else's is ever touched."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fleet_local.errors import ClusterError
from fleet_local.processes import Action, ProcessRecord, boot_id, decide, is_alive, kill_all, parse_stat, pids_below, read_record, start, stop, tail

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
RECORD = ProcessRecord("boot", "f1", 7, 100)


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.005)


def sleeper(tmp_path: Path, *command: str) -> ProcessRecord:
    command = command or ("sleep", "60")
    return start(command, record=tmp_path / "record", fingerprint="f1", log=tmp_path / "log", cgroup_procs=tmp_path / "cgroup.procs")


@pytest.mark.parametrize(
    ("record", "alive", "fingerprint", "action"),
    [
        (None, False, "f1", Action.START),
        (RECORD, False, "f1", Action.START),
        (RECORD, False, "f2", Action.START),
        (RECORD, True, "f1", Action.KEEP),
        (RECORD, True, "f2", Action.REPLACE),
    ],
)
def test_what_to_do_follows_from_record_life_and_fingerprint(record: ProcessRecord | None, alive: bool, fingerprint: str, action: Action) -> None:
    assert decide(record, alive=alive, fingerprint=fingerprint) is action


@pytest.mark.parametrize("name", ["sleep", "a b", "a) R 1 (b", "((", ")"])
def test_the_name_of_a_process_cannot_fake_its_start_time(name: str) -> None:
    fields = ["S", *("0" for _ in range(18)), "4711", "0"]
    assert parse_stat(f"12 ({name}) {' '.join(fields)}") == (12, "S", 4711)


def test_a_started_process_is_recorded_before_it_runs_and_is_nobodys_child(tmp_path: Path) -> None:
    record = sleeper(tmp_path)
    try:
        assert is_alive(record) and read_record(tmp_path / "record") == record
        assert (tmp_path / "cgroup.procs").read_text().strip() == str(record.pid)
        parent = int(Path(f"/proc/{record.pid}/stat").read_text().rpartition(")")[2].split()[1])
        assert parent != os.getpid()
        until(lambda: b"sleep" in Path(f"/proc/{record.pid}/cmdline").read_bytes())
    finally:
        stop(record, grace_s=5)
    assert not is_alive(record)


def test_a_process_that_ignores_sigterm_is_killed_after_its_grace(tmp_path: Path) -> None:
    record = sleeper(tmp_path, "sh", "-c", f"trap '' TERM; touch {tmp_path}/ready; while :; do sleep 0.05; done")
    until((tmp_path / "ready").exists)
    stop(record, grace_s=0.2)
    assert not is_alive(record)


def test_a_process_that_got_the_number_of_ours_is_not_touched() -> None:
    with subprocess.Popen(["sleep", "60"]) as stranger:
        try:
            _, _, ticks = parse_stat(Path(f"/proc/{stranger.pid}/stat").read_text())
            ours = ProcessRecord(boot_id(), "f1", stranger.pid, ticks)
            for other in (replace(ours, started_ticks=ticks - 1), replace(ours, boot_id="another boot")):
                assert not is_alive(other)
                stop(other, grace_s=5)
            assert stranger.poll() is None and is_alive(ours)
        finally:
            stranger.kill()


def test_a_zombie_does_not_count_as_running() -> None:
    child = subprocess.Popen(["sleep", "60"])
    _, _, ticks = parse_stat(Path(f"/proc/{child.pid}/stat").read_text())
    record = ProcessRecord(boot_id(), "f1", child.pid, ticks)
    child.send_signal(signal.SIGKILL)
    until(lambda: not is_alive(record))
    assert Path(f"/proc/{child.pid}").exists()
    child.wait()


@pytest.mark.parametrize("text", ["", "boot\n", "boot\nf\n", "boot\nf\nnot a stat line\n", "boot\nf\n12 (x) S 1\n"])
def test_a_torn_record_is_no_record(tmp_path: Path, text: str) -> None:
    (tmp_path / "r").write_text(text)
    assert read_record(tmp_path / "r") is None
    assert read_record(tmp_path / "none") is None


def test_ending_a_process_that_is_gone_does_nothing() -> None:
    with subprocess.Popen(["true"]) as child:
        pass
    stop(ProcessRecord(boot_id(), "f1", child.pid, 1), grace_s=1)


def test_everything_in_a_cgroup_is_killed_and_nothing_else(tmp_path: Path) -> None:
    inside = [subprocess.Popen(["sleep", "60"]) for _ in range(3)]
    outside = subprocess.Popen(["sleep", "60"])
    (tmp_path / "a" / "b").mkdir(parents=True)
    procs = [tmp_path / "a" / "cgroup.procs", tmp_path / "a" / "b" / "cgroup.procs"]
    try:
        procs[0].write_text(f"{inside[0].pid}\n{inside[1].pid}\n")
        procs[1].write_text(f"{inside[2].pid}\n")
        # A folder of files does not empty itself as a cgroup does, so the survivors are "found" until the limit.
        with pytest.raises(ClusterError, match="do not end after SIGKILL"):
            kill_all([tmp_path / "a"], limit_s=0.1)
        assert [p.wait(10) for p in inside] == [-9, -9, -9]
        assert outside.poll() is None
    finally:
        for p in [*inside, outside]:
            p.kill()
            p.wait()


def test_looking_for_processes_stands_folders_that_vanish_meanwhile(tmp_path: Path) -> None:
    stop_making = threading.Event()

    def churn() -> None:
        n = 0
        while not stop_making.is_set():
            folder = tmp_path / "pods" / f"p{n % 7}" / "c"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "cgroup.procs").write_text("7\n")
            shutil.rmtree(folder.parent)
            n += 1

    (tmp_path / "system").mkdir()
    (tmp_path / "system" / "cgroup.procs").write_text("5\n6\n")
    maker = threading.Thread(target=churn)
    maker.start()
    try:
        for _ in range(300):
            assert {5, 6} <= pids_below([tmp_path]) <= {5, 6, 7}
    finally:
        stop_making.set()
        maker.join()


def test_the_end_of_a_log_is_short_and_indented(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("\n".join(f"line {i}" for i in range(5000)))
    assert tail(tmp_path / "log", 2) == "    line 4998\n    line 4999"
    assert tail(tmp_path / "none") == ""
