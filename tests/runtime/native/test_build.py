"""Finding and building the native library: levels of a CPU, places, a broken compiler, two builders at once, no compiler at all."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fleet_runtime.engine.native import build as building
from fleet_runtime.engine.native.build import LEVELS, BuildError, build, cpu_levels, file_name, find_library, source_key, this_cpu
from fleet_runtime.engine.native.library import NoLibrary, load_library, open_library

AVX2 = "flags\t\t: fpu sse2 avx avx2 fma bmi2"
AVX512 = AVX2 + " avx512f avx512bw avx512dq avx512vl avx512_vnni"


@pytest.mark.parametrize(
    ("cpuinfo", "levels"),
    [
        ("", []),
        ("flags\t\t: fpu sse2 avx", []),
        ("Features\t: fp asimd", []),
        (AVX2, ["avx2"]),
        (AVX2 + " avx512f avx512bw avx512dq avx512vl", ["avx2"]),  # no vnni
        (AVX512, ["avx512", "avx2"]),
        (AVX512 + " avx512_bf16\nflags\t\t: none", ["avx512bf16", "avx512", "avx2"]),
    ],
)
def test_levels_are_those_whose_every_instruction_the_cpu_has(cpuinfo: str, levels: list[str]) -> None:
    assert cpu_levels(cpuinfo) == levels


def fake_compiler(folder: Path, *, works: bool = True) -> str:
    """Writes its last argument's file, as a compiler does; counts its runs."""
    path = folder / "c++"
    body = f'echo run >> {folder}/runs; for last; do :; done; echo made > "$last"' if works else "echo 'x.cpp: error: no such thing' >&2; exit 1"
    path.write_text(f'#!/bin/sh\ncase "$1" in --version) echo fake 1;; *) {body};; esac\n')
    path.chmod(0o755)
    return str(path)


def test_a_library_is_built_once_found_again_and_open_to_other_users(tmp_path: Path) -> None:
    compiler, said = fake_compiler(tmp_path), list[str]()
    made = build("avx2", tmp_path / "cache", compiler=compiler, say=said.append)
    assert made.parent.name.startswith(source_key() + "-") and made.name == file_name("avx2") and len(said) == 1
    assert build("avx2", tmp_path / "cache", compiler=compiler, say=said.append) == made and len(said) == 1
    assert find_library("avx2", [tmp_path / "none", tmp_path / "cache"]) == made and find_library("avx512", [tmp_path / "cache"]) is None
    assert made.stat().st_mode & 0o005 == 0o005 and made.parent.stat().st_mode & 0o005 == 0o005
    assert sorted(p.name for p in made.parent.iterdir()) == [".avx2.lock", made.name]


def test_several_builders_at_once_compile_once(tmp_path: Path) -> None:
    compiler = fake_compiler(tmp_path)
    threads = [threading.Thread(target=build, args=("avx2", tmp_path / "cache"), kwargs={"compiler": compiler, "say": str}) for _ in range(5)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert (tmp_path / "runs").read_text().count("run") == 1


def test_a_compiler_that_fails_leaves_nothing_and_its_first_error(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="no such thing"):
        build("avx2", tmp_path / "cache", compiler=fake_compiler(tmp_path, works=False))
    assert find_library("avx2", [tmp_path / "cache"]) is None and not list((tmp_path / "cache").rglob("*.so"))


def test_a_compiler_that_does_not_start_is_named(tmp_path: Path) -> None:
    (tmp_path / "c++").write_text("#!/no/such/program\n")
    (tmp_path / "c++").chmod(0o755)
    with pytest.raises(BuildError, match=r"c\+\+ cannot be run"):
        build("avx2", tmp_path / "cache", compiler=str(tmp_path / "c++"))


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match="--to"):
        build("avx2", tmp_path / "file" / "below", compiler=fake_compiler(tmp_path))


def test_without_library_and_compiler_the_message_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(building.shutil, "which", lambda _name: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(building, "NATIVE_LIBRARY_DIR", str(tmp_path / "none"))
    with pytest.raises(NoLibrary) as e:
        load_library()
    assert "apt-get install" in str(e.value) and "make setup" in str(e.value) and "--executor torch" in str(e.value)


def test_a_level_that_the_cpu_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet_runtime.engine.native.library.this_cpu", lambda: ["avx2"])
    with pytest.raises(NoLibrary, match="can run avx2"):
        load_library("avx512")
    monkeypatch.setattr("fleet_runtime.engine.native.library.this_cpu", list)
    with pytest.raises(NoLibrary, match="AVX2"):
        load_library()


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.so").write_text("text")
    with pytest.raises(NoLibrary, match="remove it"):
        open_library(tmp_path / "x.so")


def test_the_command_prints_where_the_libraries_of_this_cpu_are() -> None:
    level = this_cpu()[0]
    command = [sys.executable, "-m", "fleet_runtime.engine.native.build", "--level", level]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert Path(done.stdout.splitlines()[-1]).is_file() and level in LEVELS
