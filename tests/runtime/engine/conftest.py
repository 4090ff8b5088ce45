from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fleet_runtime.engine.kv_pool import KvPool
from fleet_runtime.engine.torch_executor import TorchExecutor
from fleet_runtime.models.registry import load_model
from fleet_testing.tiny_llama import make_llama

# Shapes that a mistake in one of them would show: heads per KV head 3 and 1, tied and not, head size other than hidden / heads.
SHAPES: dict[str, dict[str, object]] = {
    "grouped": {},
    "multi-head": {"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": False},
    "multi-query": {"num_key_value_heads": 1, "head_dim": 20},
    "llama3-rope": {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "linear-rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
}  # fmt: skip


def executor_of(folder: Path, *, num_pages: int = 64, dtype: torch.dtype = torch.float32) -> TorchExecutor:
    """An executor whose free pages are poisoned, so that any read of an unwritten number shows."""
    torch.set_num_threads(2)
    model = load_model(folder, dtype=dtype, context_length=512, progress=lambda _p, _t: None)
    executor = TorchExecutor(model, KvPool(model.kv_shape, num_pages, dtype), slots=64)
    executor.poison(range(num_pages))
    return executor


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of one tiny model."""
    folder = tmp_path_factory.mktemp("tiny")
    make_llama(folder)
    return folder


@pytest.fixture(scope="session")
def shared_executor(tiny: Path) -> TorchExecutor:
    """For tests with many examples; each leaves all pages poisoned."""
    return executor_of(tiny)


@pytest.fixture
def make_executor_of() -> Callable[..., TorchExecutor]:
    return executor_of


@pytest.fixture(params=list(SHAPES))
def shape(request: pytest.FixtureRequest) -> dict[str, object]:
    return SHAPES[request.param]
