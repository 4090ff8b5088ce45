"""A child that was started with `before_exec`, or that calls `die_with_parent`, does not outlive a parent that is killed."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

_STARTED_SO = "p = subprocess.Popen([sys.executable, '-c', 'print(1, flush=True); import time; time.sleep(60)'], preexec_fn=before_exec(os.getpid()))"
_ASKS_FOR_IT = (
    "p = subprocess.Popen([sys.executable, '-c', 'import time; from fleet_contract.lifeline import die_with_parent; '"
    " f'die_with_parent({os.getpid()}); print(1, flush=True); time.sleep(60)'])"
)


@pytest.mark.parametrize("start", [_STARTED_SO, _ASKS_FOR_IT], ids=["before_exec", "die_with_parent"])
def test_a_child_dies_with_its_parent(start: str) -> None:
    code = f"import os, subprocess, sys, time\nfrom fleet_contract.lifeline import before_exec\n{start}\nprint(p.pid, flush=True)\ntime.sleep(60)"
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    words = {int(parent.stdout.readline()), int(parent.stdout.readline())}  # the child's 1 says that it is up
    (child,) = words - {1}
    parent.kill()
    parent.wait(10)
    parent.stdout.close()
    end = time.monotonic() + 10
    while _runs(child):
        assert time.monotonic() < end, "the child lives on"
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
