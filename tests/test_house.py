"""Guards of the house: nothing shadows the standard library, files stay small, nothing names what it should not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("contract", "operator", "router", "runtime", "cli", "bench", "e2e", "tests")


def _tracked(suffix: str = "") -> list[Path]:
    names = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=True).stdout.split("\n")
    return [ROOT / n for n in names if n and n.endswith(suffix) and (ROOT / n).is_file()]


def test_no_package_is_named_like_a_standard_module() -> None:
    inits = [p.relative_to(ROOT) for p in ROOT.glob("*/__init__.py")] + [p.relative_to(ROOT) for p in ROOT.glob("*/*/__init__.py")]
    assert inits, "no package found: the guard looks at the wrong place"
    assert [str(p) for p in inits if p.parent.name in sys.stdlib_module_names] == []


def test_the_standard_operator_module_wins_with_the_root_on_the_path() -> None:
    code = "import sys; sys.path.insert(0, '.'); import operator; operator.itemgetter; import collections"
    subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize("room", ROOMS)
def test_no_file_has_more_than_600_lines(room: str) -> None:
    long = {str(p.relative_to(ROOT)): n for p in _tracked(".py") if p.is_relative_to(ROOT / room) and (n := len(p.read_text().splitlines())) > 600}
    assert long == {}


def test_no_module_is_called_utils_or_common() -> None:
    assert [str(p) for p in _tracked(".py") if p.stem in ("utils", "util", "common", "helpers", "misc")] == []


def test_the_tests_stay_folders_not_packages() -> None:
    allowed = ROOT / "tests" / "support"
    assert [str(p) for p in _tracked("__init__.py") if p.is_relative_to(ROOT / "tests") and not p.is_relative_to(allowed)] == []
