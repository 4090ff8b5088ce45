from collections.abc import Callable
from pathlib import Path

import pytest

from fleet_runtime.engine.native.build import this_cpu
from fleet_runtime.engine.native_executor import NativeExecutor
from fleet_runtime.models.families import spec_of
from fleet_runtime.models.files import read_config
from fleet_runtime.models.weights import open_weights
from fleet_testing.tiny_models import make_tiny


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where there is no AVX2 nothing of this folder can run."""
    if not this_cpu():
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="this CPU has no AVX2"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `level` runs with the kernels of every level that this CPU has."""
    if "level" in metafunc.fixturenames:
        metafunc.parametrize("level", this_cpu() or ["none"])


def native_of(
    folder: Path, *, num_pages: int = 64, threads: int = 2, int8: bool = False, level: str | None = None, slots: int = 64
) -> NativeExecutor:
    """An executor whose free pages are poisoned, so that any read of an unwritten number shows."""
    spec = spec_of(folder, read_config(folder))
    with open_weights(folder, spec) as weights:
        executor = NativeExecutor(spec, weights, num_pages=num_pages, slots=slots, threads=threads, int8=int8, level=level)
    executor.poison(range(num_pages))
    return executor


@pytest.fixture
def make_native() -> Callable[..., NativeExecutor]:
    return native_of


@pytest.fixture(scope="session")
def tiny_native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small Llama that the native executor takes: three query heads a KV head, sizes that are no multiple of 32."""
    folder = tmp_path_factory.mktemp("tiny-native")
    make_tiny(folder, "llama", head_dim=16, max_position_embeddings=2048, vocab_size=301)
    return folder
