"""Two runtimes for all tests of this folder: one whose text the prompt scripts, and one that computes with the simulated executor."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import ollama
import openai
import pytest

from fleet_testing.dialects import KEY
from fleet_testing.runtime import Runtime

FLAGS = ("--served-model-name=tiny", "--served-model-name=ns/tiny", "--context-length=2048", "--request-timeout=20", "--reasoning-parser=think")


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    with Runtime(tmp_path_factory.mktemp("scripted"), *FLAGS, fake=True) as runtime:
        yield runtime.wait_ready()


@pytest.fixture(scope="session")
def computing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    folder = tmp_path_factory.mktemp("computing")
    keys = folder / "keys"
    keys.write_text(KEY)
    with Runtime(folder, *FLAGS[:3], "--simulated-step-base-ms=0", f"--api-key-file={keys}") as runtime:
        yield runtime.wait_ready()


@pytest.fixture
def claude(scripted: Runtime) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=scripted.data, api_key="none", max_retries=0)


@pytest.fixture
def llama(scripted: Runtime) -> ollama.Client:
    return ollama.Client(host=scripted.data)


@pytest.fixture
def gpt(scripted: Runtime) -> openai.OpenAI:
    return openai.OpenAI(base_url=scripted.data + "/v1", api_key="none", max_retries=0)
