"""One runtime with the scripted scheduler for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet_testing.runtime import Runtime

FLAGS = (
    "--served-model-name=tiny",
    "--served-model-name=ns/tiny",
    "--context-length=512",
    "--max-body-bytes=65536",
    "--body-timeout=1",
    "--write-timeout=1",
    "--request-timeout=20",
)


@pytest.fixture(scope="session")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    folder: Path = tmp_path_factory.mktemp("http")
    with Runtime(folder, *FLAGS, fake=True) as runtime:
        yield runtime.wait_ready()
