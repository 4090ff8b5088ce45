"""The load generator wrk and the server nginx: those of the machine, or Debian's packages unpacked into the user's cache.

Called by `make bench-router`. Nothing is installed into the system; the product needs neither.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fleet_bench.peers.setup import CannotSetUp, Recipe, bench_cache

SGLANG: Final = Recipe("sglang-router", ("sglang-router==0.3.2",))
SMG: Final = Recipe("smg", ("smg==1.13.0",))
PACKAGES: Final = ("wrk", "nginx", "libluajit-5.1-2")


@dataclass(frozen=True, slots=True)
class Tools:
    """Two programs and the environment they need."""

    wrk: Path
    nginx: Path
    environment: dict[str, str]


def ensure_tools(say: Callable[[str], None]) -> Tools:
    """wrk and nginx that run. Raises CannotSetUp."""
    on_path = [shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin") for name in ("wrk", "nginx")]
    if all(on_path):
        return Tools(Path(on_path[0] or ""), Path(on_path[1] or ""), dict(os.environ))
    folder = bench_cache() / "debian"
    if not (folder / "usr/bin/wrk").is_file():
        _unpack(folder, say)
    libraries = ":".join(str(p) for p in sorted(folder.glob("usr/lib/*")) if any(p.glob("*.so*")))
    tools = Tools(folder / "usr/bin/wrk", folder / "usr/sbin/nginx", {**os.environ, "LD_LIBRARY_PATH": libraries})
    for program in (tools.wrk, tools.nginx):
        done = subprocess.run([str(program), "-v"], capture_output=True, text=True, env=tools.environment)
        if "version" not in done.stdout + done.stderr and "wrk" not in done.stdout + done.stderr:
            raise CannotSetUp(f"{program} does not run here ({done.stderr.strip()[:200]}); install both: apt-get install wrk nginx")
    return tools


def _unpack(folder: Path, say: Callable[[str], None]) -> None:
    if missing := [p for p in ("apt-get", "dpkg-deb") if shutil.which(p) is None]:
        raise CannotSetUp(f"wrk and nginx are not here, nor {' and '.join(missing)} to fetch them; install both programs")
    bench_cache().mkdir(parents=True, exist_ok=True)
    say(f"unpacking {', '.join(PACKAGES)} of Debian into {folder}")
    with tempfile.TemporaryDirectory(dir=bench_cache()) as work:
        done = subprocess.run(["apt-get", "download", "-q", *PACKAGES], cwd=work, capture_output=True, text=True)
        if done.returncode:
            tail = "\n".join(done.stderr.splitlines()[-4:])
            raise CannotSetUp(f"apt-get download {' '.join(PACKAGES)} failed (apt-get update, or install wrk and nginx):\n{tail}")
        whole = Path(work, "whole")
        for package in sorted(Path(work).glob("*.deb")):
            subprocess.run(["dpkg-deb", "-x", str(package), str(whole)], check=True, capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)
        whole.replace(folder)
