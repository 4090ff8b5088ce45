"""The compiled form of the data path: which sources it is of, when it is used, and that a request costs no task (R29)."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fleet_contract.names import ENV_COMPILED
from fleet_router import compile as compiling
from fleet_router import compiled
from fleet_testing.router_fleet import MakeFleet, MakeWorker

_WHERE = "import fleet_router.edge.relay as r, fleet_router.decide.rule as d; print(r.__file__, d.__file__)"


def loaded(flag: str, cache: Path | None = None) -> list[str]:
    """The files that a new process runs."""
    env = {**os.environ, ENV_COMPILED: flag} | ({"XDG_CACHE_HOME": str(cache)} if cache is not None else {})
    return subprocess.run([sys.executable, "-c", _WHERE], env=env, capture_output=True, text=True, check=True).stdout.split()


def test_all_modules_are_there() -> None:
    for module in compiled.MODULES:
        assert compiled.source_of(module).is_file(), module
    assert list(compiled.MODULES) == sorted(set(compiled.MODULES))


@pytest.mark.processes
def test_a_build_is_used_unless_told_otherwise() -> None:
    """`make setup` has built it where it could."""
    if compiled.find_build() is None:
        lacking = compiling.what_is_lacking()
        assert lacking is not None, "make setup would build it"
        pytest.skip(lacking)
    assert all(file.endswith(compiled.SUFFIX) for file in loaded("1"))
    assert all(file.endswith(".py") for file in loaded("0"))


def test_old_builds_and_what_killed_ones_left_go(tmp_path: Path) -> None:
    now = time.time()
    for name, age in [(f"{n:016x}", 10.0 * n) for n in range(compiling.KEPT_BUILDS + 2)] + [
        (".building-old", 2 * compiling.STALE_S),
        (".building-new", 1),
    ]:
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (now - age, now - age))
    compiling._prune(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".building-new", *(f"{n:016x}" for n in range(compiling.KEPT_BUILDS))]


def test_a_changed_source_has_another_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in compiled.MODULES:
        shutil.copyfile(compiled.source_of(module), tmp_path / module)
    monkeypatch.setattr(compiled, "source_of", tmp_path.joinpath)
    compiled.key.cache_clear()
    try:
        same = compiled.key()
        with (tmp_path / "fleet_router.decide.rule").open("a") as f:
            f.write("# changed\n")
        compiled.key.cache_clear()
        assert compiled.key() != same
    finally:
        monkeypatch.undo()
        compiled.key.cache_clear()
    assert compiled.key() == same


def test_a_build_is_found_in_the_image_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image, cache = tmp_path / "image", tmp_path / "cache"
    monkeypatch.setattr(compiled, "places", lambda: [image, cache])
    assert compiled.find_build() is None
    for place in (cache, image):
        (place / compiled.key()).mkdir(parents=True)
        assert compiled.find_build() != place / compiled.key()  # an empty folder is no build
        (place / compiled.key() / f"{compiled.GROUP}{compiled.SUFFIX}").touch()
        assert compiled.find_build() == place / compiled.key()


def test_what_is_lacking_is_told_with_the_remedy(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setattr(compiled, "places", lambda: [tmp_path])
    monkeypatch.setenv("CC", "no-such-compiler")
    assert compiling.main([]) == 3
    assert "no-such-compiler" in (text := capsys.readouterr().err) and "apt-get install gcc" in text and "interpreted" in text


@pytest.mark.rule("R29")
async def test_a_request_costs_no_task(make_worker: MakeWorker, make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = await make_worker()
    fleet = await make_fleet(worker)
    for stream in (False, True):  # what is new is dialled and read once
        assert (await fleet.chat("hello", stream=stream)).status_code == 200
    loop = asyncio.get_running_loop()
    made: list[str] = []
    create_task = loop.create_task

    def count(work, **options):  # type: ignore[no-untyped-def]
        made.append(work.__qualname__)
        return create_task(work, **options)

    monkeypatch.setattr(loop, "create_task", count)
    for n in range(20):
        assert (await fleet.chat(f"hello {n}", stream=bool(n % 2))).status_code == 200
    ours = [name for name in made if any(name.startswith(c) for c in ("Handling", "DataService", "DataProtocol", "Attempt", "Brain", "RemoteDesk"))]
    assert not ours and len(worker.legs) == 22
