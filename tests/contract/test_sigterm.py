"""A program that is process 1 of a container minds SIGTERM before it imports what takes time."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Tells the handler of SIGTERM at the moment when the first module of the program beside its entry is looked for.
SCRIPT = """
import os, signal, sys
pid = int(sys.argv[1])
if pid:
    os.getpid = lambda: pid

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(package + ".") and name != package + ".__main__" or name in ("pydantic", "kopf"):
            print("default" if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL else "handled", flush=True)
            os._exit(0)

package = sys.argv[2]
sys.meta_path.insert(0, Finder())
import importlib
importlib.import_module(package + ".__main__")
"""


@pytest.mark.parametrize("package", ["fleet_operator", "fleet_router", "fleet_runtime"])
@pytest.mark.parametrize(("pid", "expected"), [(1, "handled"), (0, "default")])
def test_sigterm_is_handled_from_the_first_import_on_and_only_by_process_1(package: str, pid: int, expected: str) -> None:
    result = subprocess.run([sys.executable, "-c", SCRIPT, str(pid), package], capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == expected, result.stderr


def test_process_1_ends_with_0_at_a_sigterm_that_comes_early() -> None:
    script = "import os; pid = os.getpid(); os.getpid = lambda: 1\nimport fleet_contract.sigterm, signal, time\n"
    script += "os.kill(pid, signal.SIGTERM)\ntime.sleep(60)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0
