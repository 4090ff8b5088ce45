"""When `--executor auto` takes native, when torch and with which words; what a native worker imports; pages, poison and refusals."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleet_contract.launch import RuntimeLaunch
from fleet_runtime.engine.factory import make_executor
from fleet_runtime.engine.native.library import NoLibrary
from fleet_runtime.engine.native_executor import NativeExecutor
from fleet_runtime.errors import StartError
from fleet_testing.tiny_llama import Row, make_batch, make_step
from fleet_testing.tiny_models import make_tiny

Make = Callable[..., NativeExecutor]


def launch(**values: Any) -> RuntimeLaunch:
    return RuntimeLaunch(**{"model": "file:///m", "context_length": 256, "kv_cache_memory": 1 << 20, **values})


def made(folder: Path, **values: Any) -> Any:
    return make_executor(launch(**values), folder, 2, lambda _p, _t: None)


def test_auto_takes_native_and_reports_its_progress(tiny_native: Path) -> None:
    said: list[int] = []
    executor = make_executor(launch(), tiny_native, 2, lambda p, _t: said.append(p))
    assert isinstance(executor, NativeExecutor)
    assert executor.layout.dtype == "bfloat16" and executor.layout.page_bytes == 3 * 2 * 2 * 16 * 16 * 2
    assert executor.layout.num_pages == (1 << 20) // executor.layout.page_bytes
    assert executor.profile.prefill_tokens_per_s > 0 and executor.slots == 64 and executor.vocab_size == 301
    assert said == sorted(said) and said[-1] == 100


@pytest.mark.parametrize(("dtype", "native"), [("auto", True), ("bfloat16", True), ("float32", False), ("float16", False)])
def test_the_dtype_decides(dtype: str, native: bool, tiny_native: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        executor = made(tiny_native, dtype=dtype)
    assert isinstance(executor, NativeExecutor) == native
    assert native or f"--dtype is {dtype}" in caplog.text


def test_a_head_size_that_native_does_not_take_goes_to_torch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_tiny(tmp_path, "llama", head_dim=12)
    with caplog.at_level(logging.WARNING):
        assert not isinstance(made(tmp_path), NativeExecutor)
    assert "head_dim is 12" in caplog.text
    with pytest.raises(StartError) as e:
        made(tmp_path, executor="native")
    assert e.value.reason == "ModelInvalid" and "--executor torch" in e.value.message


def test_without_a_library_auto_takes_torch_and_native_says_what_to_do(
    tiny_native: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(_level: str | None = None) -> Any:
        raise NoLibrary("no library here")

    monkeypatch.setattr("fleet_runtime.engine.native_executor.load_library", none)
    with caplog.at_level(logging.WARNING):
        assert not isinstance(made(tiny_native), NativeExecutor)
    assert "no library here" in caplog.text
    for flags in ({"executor": "native"}, {"weight_dtype": "int8"}):
        with pytest.raises(StartError) as e:
            made(tiny_native, **flags)
        assert e.value.reason == "BadFlag" and "no library here" in e.value.message


@pytest.mark.parametrize(
    "flags", [{"executor": "torch", "weight_dtype": "int8"}, {"executor": "native", "dtype": "float32"}, {"weight_dtype": "int8", "dtype": "float16"}]
)
def test_flags_that_contradict_are_refused(flags: dict[str, str], tiny_native: Path) -> None:
    with pytest.raises(StartError) as e:
        made(tiny_native, **flags)
    assert e.value.reason == "BadFlag"


def test_a_context_beyond_the_models_or_the_pools_is_refused(tiny_native: Path) -> None:
    with pytest.raises(StartError, match="at most 2048 tokens"):
        made(tiny_native, context_length=4096)
    with pytest.raises(StartError, match="one context of 2048 tokens"):
        made(tiny_native, context_length=2048, kv_cache_memory=1 << 18)


def test_a_native_executor_imports_neither_torch_nor_transformers(tiny_native: Path) -> None:
    code = (
        "import sys; from fleet_contract.launch import RuntimeLaunch; from fleet_runtime.engine.factory import make_executor\n"
        "import fleet_runtime.scheduler.process, fleet_runtime.server.process, fleet_runtime.detokenizer.process\n"
        f"e = make_executor(RuntimeLaunch(model='file:///m', context_length=64, kv_cache_memory=1 << 20), {str(tiny_native)!r}, 1, lambda p, t: 0)\n"
        "print(type(e).__name__, sorted({'torch', 'transformers', 'safetensors', 'gguf'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "NativeExecutor []"


def test_a_page_of_the_wrong_length_or_number_is_refused_and_nothing_changes(tiny_native: Path, make_native: Make) -> None:
    executor = make_native(tiny_native, num_pages=4)
    executor.logits(make_batch([Row(list(range(20)), [0, 1])]))
    before = [executor.read_page(p) for p in range(4)]
    with pytest.raises(ValueError, match="a page has"):
        executor.write_page(1, b"short")
    for page in (-1, 4):
        with pytest.raises(IndexError):
            executor.read_page(page)
        with pytest.raises(IndexError):
            executor.write_page(page, before[0])
        with pytest.raises(IndexError):
            executor.logits(make_batch([Row([1, 2], [page])]))
    assert [executor.read_page(p) for p in range(4)] == before


@pytest.mark.parametrize("int8", [False, True])
def test_a_poisoned_page_fails_its_row_and_no_other(int8: bool, level: str, tiny_native: Path, make_native: Make) -> None:
    executor = make_native(tiny_native, level=level, int8=int8)
    rows = [Row([5 + i] * 40, [4 * i, 4 * i + 1, 4 * i + 2]) for i in range(4)]
    executor.logits(make_batch([Row(r.ids, r.pages, 0, 39) for r in rows]))
    next_rows = [Row(r.ids, r.pages, 39, temperature=t) for r, t in zip(rows, [0.0, 0.0, 1.0, 1.0], strict=True)]
    good = executor.step(*make_step(next_rows))
    assert not good.failed.any()
    executor.poison([1 * 4 + 1, 2 * 4 + 1])
    bad = executor.step(*make_step(next_rows))
    assert bad.failed.tolist() == [False, True, True, False]
    assert bad.tokens[[0, 3]].tolist() == good.tokens[[0, 3]].tolist()


@pytest.mark.parametrize("unknown", [-1, 301, 2**31 - 1])
@pytest.mark.parametrize("int8", [False, True])
def test_an_id_outside_the_vocabulary_fails_its_row_and_what_follows_it_only(unknown: int, int8: bool, tiny_native: Path, make_native: Make) -> None:
    executor, good = make_native(tiny_native, int8=int8), list(range(20))
    bad = [*good[:10], unknown, *good[11:]]
    out = executor.step(*make_step([Row(good, [0, 1]), Row(bad, [2, 3])]))
    assert out.failed.tolist() == [False, True]
    assert executor.step(*make_step([Row([*bad, 5], [2, 3], 20)])).failed.tolist() == [True]
    assert executor.step(*make_step([Row(bad, [4, 5], 0, 15, sample=False)])).failed.tolist() == [True]


def test_a_pool_that_is_reserved_takes_no_memory(tiny_native: Path) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    executor = made(tiny_native, kv_cache_memory=8 << 30, max_rows=4)
    before = resident()
    executor.step(*make_step([Row([1, 2, 3], [executor.layout.num_pages - 1])]))
    assert resident() - before < 64 << 20
    assert np.frombuffer(executor.read_page(0), np.uint8).any() == 0
