"""`python -m fleet_router.compile`: builds the modules of `compiled` with mypyc and a C compiler, once for each state of their sources.

Exit code 0: it is there. 1: the compiler refused. 3: no mypyc or no C compiler; the router then runs interpreted.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from fleet_contract.cache_folder import make_dir, open_to_all
from fleet_contract.names import ENV_COMPILED
from fleet_router import compiled

KEPT_BUILDS: Final = 8
STALE_S: Final = 3600.0  # a build takes minutes: an older one was killed
_BUILDING: Final = ".building-"
PACKAGES: Final = ("fleet_contract", "fleet_router", "fleet_text")  # of the modules, and of what they import of ours
_SETUP: Final = """
import sys
from mypyc.build import mypycify
from setuptools import setup
setup(name="radixfleet-compiled", packages=[], ext_modules=mypycify(sys.argv[3:], opt_level="3", debug_level="0", group_name="fleet_router"),
      script_args=["-q", "build_ext", "--build-lib", sys.argv[1], "--build-temp", sys.argv[2]])
"""


def build(to: Path | None = None) -> Path:
    """Compiles. Raises subprocess.CalledProcessError with the compiler's words.

    Args:
        to: folder of builds; the user's cache unless given.
    Returns:
        The build's folder.
    """
    place = to if to is not None else compiled.places()[-1]
    make_dir(place)
    target = place / compiled.key()
    if target.is_dir():
        return target
    with tempfile.TemporaryDirectory(dir=place, prefix=_BUILDING) as name:
        work = Path(name)
        sources = work / "sources"
        for package in PACKAGES:  # side by side, as mypyc wants its files
            shutil.copytree(compiled.folder_of(package), sources / package, ignore=shutil.ignore_patterns("__pycache__"))
        paths = [str(Path(*m.split(".")).with_suffix(".py")) for m in compiled.MODULES]
        argv = [sys.executable, "-c", _SETUP, str(work / "lib"), str(work / "temp"), "--config-file", str(work / "mypy.ini"), *paths]
        (work / "mypy.ini").write_text("[mypy]\npython_version = 3.11\nignore_missing_imports = True\nfollow_imports = silent\n")
        env = {**os.environ, "MYPYPATH": "", "CFLAGS": "-w", "PYTHONPATH": "", ENV_COMPILED: "0"}
        subprocess.run(argv, cwd=sources, env=env, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        flat = work / "flat"
        flat.mkdir()
        for file in (work / "lib").rglob("*.so"):
            shutil.move(file, flat / ".".join(file.relative_to(work / "lib").parts))
        open_to_all(flat)
        with contextlib.suppress(OSError):  # somebody else was faster
            flat.rename(target)
    _prune(place)
    return target


def what_is_lacking() -> str | None:
    """Why nothing can be built here, and how to mend it."""
    if importlib.util.find_spec("mypyc") is None or importlib.util.find_spec("setuptools") is None:
        return "mypyc is not installed (pip install 'radixfleet[compile]')"
    compiler = os.environ.get("CC", "").split(" ")[0] or sysconfig.get_config_var("CC").split(" ")[0]
    if shutil.which(compiler) is None:
        return f"there is no C compiler {compiler!r} (Debian: apt-get install gcc)"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return f"{sysconfig.get_path('include')}/Python.h is not there (Debian: apt-get install python3-dev)"
    return None


def _prune(place: Path) -> None:
    """The newest builds stay: checkouts of several states may share the folder. What killed builds left goes."""
    builds = sorted((p for p in place.iterdir() if p.is_dir() and not p.name.startswith(".")), key=lambda p: p.stat().st_mtime)
    killed = [p for p in place.glob(f"{_BUILDING}*") if time.time() - p.stat().st_mtime > STALE_S]
    for old in [*builds[:-KEPT_BUILDS], *killed]:
        shutil.rmtree(old, ignore_errors=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of the command."""
    parser = argparse.ArgumentParser(prog="python -m fleet_router.compile", description="Compiles the router's data path.")
    parser.add_argument("--to", type=Path, metavar="DIR", help=f"folder of builds (default: {compiled.places()[-1]})")
    args: Any = parser.parse_args(argv)
    if args.to is None and (there := compiled.find_build()) is not None:
        print(f"already there: {there}")
        return 0
    if (lacking := what_is_lacking()) is not None:
        print(f"{lacking}: the router runs interpreted", file=sys.stderr)
        return 3
    began = time.monotonic()
    try:
        folder = build(args.to)
    except subprocess.CalledProcessError as e:
        print(f"{e.stdout[-3000:]}\nthe router's modules could not be compiled", file=sys.stderr)
        return 1
    print(f"compiled {len(compiled.MODULES)} modules in {time.monotonic() - began:.0f} s: {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
