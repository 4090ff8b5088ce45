from collections.abc import Callable
from pathlib import Path

import pytest

from fleet_runtime.engine.torch_executor import TorchExecutor
from fleet_testing.executors import torch_executor
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


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of one tiny model."""
    folder = tmp_path_factory.mktemp("tiny")
    make_llama(folder)
    return folder


@pytest.fixture(scope="session")
def shared_executor(tiny: Path) -> TorchExecutor:
    """For tests with many examples; each leaves all pages poisoned."""
    return torch_executor(tiny)


@pytest.fixture
def make_executor_of() -> Callable[..., TorchExecutor]:
    return torch_executor


@pytest.fixture(params=list(SHAPES))
def shape(request: pytest.FixtureRequest) -> dict[str, object]:
    return SHAPES[request.param]
