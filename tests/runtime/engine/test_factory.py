"""Making an executor: what fits, what is refused and with which sentence, what is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fleet_contract.launch import RuntimeLaunch
from fleet_contract.memory import memory_limit_bytes
from fleet_runtime.engine.factory import make_executor
from fleet_runtime.engine.memory import check_memory, pages_in
from fleet_runtime.errors import StartError
from fleet_runtime.models.simulated_tokenizer import SIMULATED_VOCAB_SIZE
from fleet_testing.tiny_llama import Row, make_step


def launch(**values: Any) -> RuntimeLaunch:
    return RuntimeLaunch(**{"model": "file:///m", "context_length": 256, **values})


def refusal(flags: RuntimeLaunch, folder: Path | None) -> StartError:
    with pytest.raises(StartError) as e:
        make_executor(flags, folder, 1, lambda _p, _t: None)
    return e.value


def test_a_torch_executor_is_loaded_warm_and_reports_its_progress(tiny: Path) -> None:
    said: list[tuple[int, str]] = []
    executor = make_executor(launch(kv_cache_memory=1 << 20), str(tiny), 1, lambda p, t: said.append((p, t)))
    page = 3 * 2 * 2 * 16 * 8 * 4
    assert executor.layout.page_bytes == page and executor.layout.num_pages == (1 << 20) // page
    assert executor.layout.dtype == "float32" and executor.layout.layout == "layer-kv-head-token-dim" and executor.vocab_size == 300
    assert executor.profile.prefill_tokens_per_s > 0
    percents = [p for p, _ in said]
    assert percents == sorted(percents) and percents[-1] == 100 and 0 <= percents[0] < 50
    assert not executor.step(*make_step([Row([1, 2, 3], [0])])).failed.any()


def test_dtype_is_that_of_weights_and_pages(tiny: Path) -> None:
    executor = make_executor(launch(dtype="bfloat16", kv_cache_memory=1 << 20), tiny, 1, lambda _p, _t: None)
    assert executor.layout.dtype == "bfloat16" and executor.layout.page_bytes == 3 * 2 * 2 * 16 * 8 * 2


def test_a_pool_below_one_context_is_refused_with_both_numbers(tiny: Path) -> None:
    error = refusal(launch(kv_cache_memory=1 << 16, context_length=512), tiny)
    assert error.reason == "OutOfMemory"
    assert "65536 bytes and holds 160 tokens" in error.message
    assert f"one context of 512 tokens (--context-length) needs {32 * 6144} bytes" in error.message


def test_a_pool_of_exactly_one_context_is_taken() -> None:
    assert pages_in(10 * 100, 100, 160) == 10
    with pytest.raises(StartError):
        pages_in(10 * 100, 100, 161)


def test_more_than_the_process_may_use_is_refused_before_loading(tiny: Path) -> None:
    error = refusal(launch(kv_cache_memory=1 << 50), tiny)
    assert error.reason == "OutOfMemory" and "lower --kv-cache-memory" in error.message
    check_memory(1, 1, None)
    check_memory(50, 50, 100)
    with pytest.raises(StartError):
        check_memory(51, 50, 100)
    check_memory(50, 40, 100, step=10)
    with pytest.raises(StartError, match="for a step"):
        check_memory(50, 40, 100, step=11)


def test_a_step_that_does_not_fit_beside_weights_and_pages_is_refused_before_loading(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet_runtime.engine.torch_executor.memory_limit_bytes", lambda: 32 << 20)
    assert make_executor(launch(kv_cache_memory=8 << 20, max_step_tokens=64), tiny, 1, lambda _p, _t: None).layout.num_pages
    error = refusal(launch(kv_cache_memory=8 << 20, max_step_tokens=1 << 16), tiny)
    assert error.reason == "OutOfMemory" and "--max-step-tokens" in error.message


def test_a_context_longer_than_the_models_is_refused(tiny: Path) -> None:
    error = refusal(launch(context_length=1024, kv_cache_memory=1 << 20), tiny)
    assert error.reason == "BadFlag" and "--context-length is 1024" in error.message and "at most 512 tokens" in error.message


@pytest.mark.parametrize(("executor", "model"), [("torch", "simulated://"), ("simulated", "file:///m")])
def test_simulated_goes_only_with_simulated(executor: str, model: str) -> None:
    error = refusal(launch(executor=executor, model=model), None)
    assert error.reason == "BadFlag" and repr(executor) in error.message and repr(model) in error.message


def test_neither_the_factory_nor_the_model_files_import_torch() -> None:
    code = (
        "import sys, fleet_runtime.engine.factory, fleet_runtime.models.files, fleet_runtime.models.bundled, fleet_runtime.models.weights;"
        "import fleet_runtime.models.families, fleet_runtime.engine.sampler, fleet_runtime.engine.simulated, fleet_runtime.models.gguf_cache;"
        "print(sorted({'torch', 'transformers', 'gguf', 'safetensors'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def _machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": "MemTotal:  1000 kB\nMemFree: 1 kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, 1000 * 1024),
        ({"sys/fs/cgroup/memory.max": "max\n"}, 1000 * 1024),
        ({"sys/fs/cgroup/memory.max": "5000\n"}, 5000),  # v2, inside a container
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/memory.max": "7000\n", "sys/fs/cgroup/a/b/memory.max": "max\n"}, 7000),
        ({"proc/self/cgroup": "4:memory:/pod\n1:cpu:/pod\n", "sys/fs/cgroup/memory/pod/memory.limit_in_bytes": "9000\n"}, 9000),
        ({"proc/self/cgroup": "4:memory:/host/path\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "8000\n"}, 8000),  # v1, container
        ({"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}, 1000 * 1024),  # v1: no limit
    ],
)
def test_the_memory_limit_is_the_least_of_machine_and_cgroups(tmp_path: Path, files: dict[str, str], limit: int) -> None:
    assert memory_limit_bytes(_machine(tmp_path, files)) == limit


def test_no_memory_limit_is_known_where_there_is_no_proc(tmp_path: Path) -> None:
    assert memory_limit_bytes(tmp_path) is None


def test_a_simulated_executor_is_made_without_a_folder() -> None:
    executor = make_executor(launch(executor="simulated", model="simulated://", kv_cache_memory=1 << 20), "", 1, lambda _p, _t: None)
    assert executor.layout.num_pages * executor.layout.page_bytes <= 1 << 20 and executor.layout.layout == "simulated"
    error = refusal(launch(executor="simulated", model="simulated://", kv_cache_memory=1 << 16, context_length=4096), None)
    assert error.reason == "OutOfMemory" and "one context of 4096 tokens" in error.message


def test_the_simulated_executor_speaks_the_byte_tokenizer() -> None:
    executor = make_executor(launch(executor="simulated", model="simulated://", kv_cache_memory=1 << 20), None, 1, lambda _p, _t: None)
    assert executor.vocab_size == SIMULATED_VOCAB_SIZE
