"""Compiles the native library, once per level of the CPU's vector instructions, and finds what was compiled before.

    python -m fleet_runtime.engine.native.build [--to DIR] [--level LEVEL ...]

Called by `make setup` and by the image build, and by the executor's loader where nothing was built but a compiler is there. Libraries lie in
<hash of sources and flags>-<hash of the compiler's version>/libradixfleet-<level>.so. Safe when run twice at once (a file lock) and when killed
(temporary file, then rename).
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from fleet_contract.cache_folder import cache_folder, make_dir
from fleet_contract.names import NATIVE_LIBRARY_DIR

SOURCES: Final = Path(__file__).parent / "src"
BESIDE_SOURCES: Final = Path(__file__).parent / "lib"  # a package may bring its libraries along
COMPILERS: Final = ("c++", "g++", "clang++")
# -ffp-contract=off: the order and rounding of sums is that of the sources, wherever a function is inlined.
FLAGS: Final = ("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=default", "-fPIC", "-shared", "-pthread")
_AVX512: Final = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni")
# Best first; each level's instructions as compilers and, with other spelling, /proc/cpuinfo name them.
LEVELS: Final[dict[str, tuple[str, ...]]] = {
    "avx512bf16": ("avx2", "fma", *_AVX512, "avx512bf16"),
    "avx512": ("avx2", "fma", *_AVX512),
    "avx2": ("avx2", "fma"),
}
_CPUINFO_NAMES: Final = {"avx512vnni": "avx512_vnni", "avx512bf16": "avx512_bf16"}

Say = Callable[[str], None]


class BuildError(Exception):
    """The library cannot be built; one line that says why."""


def cpu_levels(cpuinfo: str) -> list[str]:
    """The levels that a CPU can run, best first. Pure. cpuinfo: content of /proc/cpuinfo."""
    flags = next((set(line.partition(":")[2].split()) for line in cpuinfo.splitlines() if line.startswith("flags")), set())
    return [level for level, needs in LEVELS.items() if all(_CPUINFO_NAMES.get(n, n) in flags for n in needs)]


def this_cpu() -> list[str]:
    """The levels of this machine, best first; none where it is no x86-64 Linux."""
    try:
        return cpu_levels(Path("/proc/cpuinfo").read_text())
    except OSError:
        return []


def cache_dir() -> Path:
    """The user's folder of built libraries."""
    return cache_folder() / "native"


def source_key() -> str:
    """Hash of all sources and flags."""
    digest = hashlib.sha256(repr((FLAGS, LEVELS)).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def find_library(level: str, places: Sequence[Path] | None = None) -> Path | None:
    """A library of these sources that was built before, by whichever compiler; the newest in the first place that has one."""
    for place in places if places is not None else (BESIDE_SOURCES, Path(NATIVE_LIBRARY_DIR), cache_dir()):
        found = [p for p in place.glob(f"{source_key()}-*/{file_name(level)}") if p.is_file()]
        if found:
            return max(found, key=lambda p: p.stat().st_mtime)
    return None


def file_name(level: str) -> str:
    """Of a level's library."""
    return f"libradixfleet-{level}.so"


def find_compiler() -> str | None:
    """The first C++ compiler on PATH."""
    return next((path for name in COMPILERS if (path := shutil.which(name))), None)


def build(level: str, to: Path | None = None, *, compiler: str | None = None, say: Say = print) -> Path:
    """The library of a level, built by this compiler if it is not there. Blocks while another process builds it. Raises BuildError."""
    compiler = compiler or find_compiler()
    if compiler is None:
        raise BuildError(f"no C++ compiler is there ({', '.join(COMPILERS)}); install one: apt-get install -y g++")
    to = to or cache_dir()
    folder = to / f"{source_key()}-{_compiler_key(compiler)}"
    target = folder / file_name(level)
    if target.is_file():
        return target
    try:
        make_dir(folder)
        with (folder / f".{level}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.is_file():
                _compile(compiler, level, target, say)
    except OSError as e:
        raise BuildError(f"cannot write {folder}: {e.strerror or e}; choose another folder with --to") from e
    return target


def _compile(compiler: str, level: str, target: Path, say: Say) -> None:
    start = time.monotonic()
    work = Path(tempfile.mkdtemp(prefix=".tmp-", dir=target.parent))
    try:
        made = work / target.name
        command = [compiler, *FLAGS, *(f"-m{n}" for n in LEVELS[level]), *map(str, sorted(SOURCES.glob("*.cpp"))), "-o", str(made)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            faults = [line for line in done.stderr.splitlines() if "error" in line] or [f"exit code {done.returncode}"]
            raise BuildError(f"{compiler} cannot compile level {level}: {faults[0][-400:]}")
        made.chmod(0o755)
        made.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    say(f"native library {level}: compiled in {time.monotonic() - start:.1f} s")


def _compiler_key(compiler: str) -> str:
    try:
        done = subprocess.run([compiler, "--version"], stdin=subprocess.DEVNULL, capture_output=True, check=False)
    except OSError as e:
        raise BuildError(f"{compiler} cannot be run: {e.strerror or e}; install a working C++ compiler") from e
    if done.returncode != 0:
        raise BuildError(f"{compiler} --version fails with exit code {done.returncode}; install a working C++ compiler")
    return hashlib.sha256(done.stdout).hexdigest()[:12]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `python -m fleet_runtime.engine.native.build`."""
    parser = argparse.ArgumentParser(prog="python -m fleet_runtime.engine.native.build", description="Compile the native library.")
    parser.add_argument("--to", type=Path, metavar="DIR", help=f"folder of libraries (default: {cache_dir()})")
    parser.add_argument("--level", action="append", choices=list(LEVELS), help="only these (default: all)")
    args = parser.parse_args(argv)
    try:
        for level in args.level or LEVELS:
            print(build(level, args.to), flush=True)
    except BuildError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
