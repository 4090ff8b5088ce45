import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fleet_testing.tiny_llama import make_llama


@pytest.fixture(scope="session")
def tiny_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "small"
    make_llama(folder)
    return folder


@pytest.fixture(scope="session")
def sharded_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights in several files."""
    folder = tmp_path_factory.mktemp("sharded") / "small"
    make_llama(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[Path], Path]:
    def copy(source: Path) -> Path:
        return Path(shutil.copytree(source, tmp_path / "copy" / source.name))

    return copy
