"""Processes of the cluster: started detached, recorded before they run, ended only when they are provably ours.

A record is the line of `/proc/<pid>/stat` that the process itself wrote between fork and exec, with the boot it belongs to. A pid that was given
to somebody else has another start time, so it is never taken for ours and never signalled; `pidfd_open` closes the gap between look and kill.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from fleet_local.errors import ClusterError

# Joins the cgroup, writes the record, then becomes the component: $1 cgroup.procs, $2 record, $3 boot id, $4 fingerprint, then the command.
_BIRTH = """
set -e
echo $$ > "$1"
read -r stat < /proc/$$/stat
printf '%s\\n%s\\n%s\\n' "$3" "$4" "$stat" > "$2.tmp"
mv "$2.tmp" "$2"
shift 4
exec "$@"
"""
_RECORD_LIMIT_S = 10.0


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """Who a process is, and what it was started with.

    `started_ticks` is field 22 of /proc/pid/stat (clock ticks since boot, proc(5)); `fingerprint` is a hash over its command and configuration.
    """

    boot_id: str
    fingerprint: str
    pid: int
    started_ticks: int


class Action(Enum):
    """What `up` does about one component."""

    KEEP = "keep"
    START = "start"
    REPLACE = "replace"


def decide(record: ProcessRecord | None, *, alive: bool, fingerprint: str) -> Action:
    """Keep a process that runs with the wanted command and configuration, replace one that runs with another, else start it. Pure."""
    if record is None or not alive:
        return Action.START
    return Action.KEEP if record.fingerprint == fingerprint else Action.REPLACE


def parse_stat(line: str) -> tuple[int, str, int]:
    """pid, state letter and start time of a /proc/pid/stat line; the command in brackets may hold spaces and brackets itself."""
    head, _, tail = line.rpartition(")")
    fields = tail.split()
    return int(head.split("(", 1)[0]), fields[0], int(fields[19])


def boot_id() -> str:
    """The kernel's name of this boot; start times of different boots must not be compared."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def read_record(path: Path) -> ProcessRecord | None:
    """The record, or None when there is none (or only a torn one)."""
    try:
        boot, fingerprint, stat = path.read_text().split("\n")[:3]
        pid, _, ticks = parse_stat(stat)
    except (OSError, ValueError, IndexError):
        return None
    return ProcessRecord(boot, fingerprint, pid, ticks)


def is_alive(record: ProcessRecord, *, this_boot: str | None = None) -> bool:
    """True when the recorded process itself (not another with its number) runs; a zombie does not."""
    if record.boot_id != (this_boot or boot_id()):
        return False
    try:
        _, state, ticks = parse_stat(Path(f"/proc/{record.pid}/stat").read_text())
    except (OSError, ValueError, IndexError):
        return False
    return ticks == record.started_ticks and state not in "ZX"


def start(command: Sequence[str], *, record: Path, fingerprint: str, log: Path, cgroup_procs: Path, pass_fds: Sequence[int] = ()) -> ProcessRecord:
    """Starts a command as an orphan in a session of its own and returns its record; it outlives us, and we leave no zombie.

    Blocks until the record is written (milliseconds). Raises ClusterError when it never is.
    """
    record.unlink(missing_ok=True)
    with log.open("ab") as out:
        subprocess.run(
            ["setsid", "--fork", "sh", "-c", _BIRTH, "birth", str(cgroup_procs), str(record), boot_id(), fingerprint, *command],
            stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, pass_fds=pass_fds, check=True, cwd="/",
        )  # fmt: skip
    limit = time.monotonic() + _RECORD_LIMIT_S
    while (found := read_record(record)) is None:
        if time.monotonic() > limit:
            raise ClusterError(f"could not start {command[0]}; see {log}\n{tail(log)}")
        time.sleep(0.005)
    return found


def stop(record: ProcessRecord, *, grace_s: float) -> None:
    """SIGTERM, then SIGKILL after `grace_s`; returns when the process is gone. Nothing happens when it is not ours or not there."""
    try:
        fd = os.pidfd_open(record.pid)
    except ProcessLookupError:
        return
    try:
        if not is_alive(record):
            return
        for number, limit_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 10.0)):
            try:
                signal.pidfd_send_signal(fd, number)
            except ProcessLookupError:
                return
            if select.select([fd], [], [], limit_s)[0]:
                return
    finally:
        os.close(fd)


def kill_all(cgroup_folders: Iterable[Path], *, limit_s: float) -> None:
    """SIGKILLs every process below the given cgroups until none is left; whatever is in there was put there by this cluster.

    Raises ClusterError when some survive (stuck in the kernel).
    """
    folders = list(cgroup_folders)
    limit = time.monotonic() + limit_s
    while pids := pids_below(folders):
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > limit:
            raise ClusterError(f"processes {sorted(pids)} do not end after SIGKILL; they hang in the kernel: try `radixfleet local down` again later")
        time.sleep(0.02)


def pids_below(folders: Iterable[Path]) -> set[int]:
    """All processes in the given cgroups and those below."""
    found: set[int] = set()
    for folder in folders:
        for path, _, files in os.walk(folder):  # passes over folders that go meanwhile, which rglob does not
            if "cgroup.procs" in files:
                try:
                    found.update(int(word) for word in Path(path, "cgroup.procs").read_text().split())
                except OSError:
                    continue
    found.discard(0)  # a process of another pid namespace
    return found


def tail(log: Path, lines: int = 8) -> str:
    """The last lines of a log, indented for an error message."""
    try:
        with log.open("rb") as f:
            f.seek(0, os.SEEK_END)
            f.seek(max(0, f.tell() - 8192))
            text = f.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join("    " + line for line in text.splitlines()[-lines:])
