"""The bundled model on the native executor, judged by transformers in float32: argmax of bfloat16 and int8, perplexity, and greedy text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from fleet_runtime.engine.native_executor import NativeExecutor
from fleet_runtime.errors import StartError
from fleet_runtime.models.files import resolve_model
from fleet_testing.oracle import oracle_logits
from fleet_testing.tiny_llama import Row, make_step
from fleet_text.prompt import PromptEncoder

pytestmark = pytest.mark.model

TEXTS = [
    "The water cycle describes how water moves between the ground, the oceans and the air. The sun warms the surface of the sea, and water rises "
    "as vapour. High above the ground the vapour cools and becomes clouds; from clouds it falls as rain or snow, and rivers carry it back.",
    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n\n\nprint(fibonacci(9))\n",
    "<|im_start|>user\nWhat is the capital of France, and what is it known for?<|im_end|>\n<|im_start|>assistant\nThe capital of France is Paris. "
    "It is known for the Eiffel Tower, the Louvre and its food.<|im_end|>\n",
]  # fmt: skip

F64 = npt.NDArray[np.float64]


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        found = resolve_model("bundled://smollm2-135m-instruct").folder
    except StartError as e:
        pytest.skip(e.message)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def texts(folder: Path) -> list[list[int]]:
    encoder = PromptEncoder.from_folder(folder)
    return [list(encoder.encode(text, add_special_tokens=False)) for text in TEXTS]


def judged(executor: NativeExecutor, ids: list[int]) -> tuple[npt.NDArray[np.int32], F64]:
    """Argmax and logprob of the next token at each position but the last, from one chunk."""
    batch, sampling = make_step([Row(ids, list(range(-(-len(ids) // 16))))])
    batch.prompt_logprobs = np.ones(1, np.int32)
    batch.next_ids = np.array([*ids[1:], -1], np.int32)
    found = executor.step(batch, sampling).prompt_logprobs[0]
    return found.ids[:, 0], found.chosen.astype(np.float64)


def test_bfloat16_and_int8_agree_with_float32(folder: Path, texts: list[list[int]], make_native: Callable[..., NativeExecutor], level: str) -> None:
    expected = [oracle_logits(folder, ids)[:-1].argmax(-1).numpy() for ids in texts]
    executors = {int8: make_native(folder, level=level, int8=int8, num_pages=16) for int8 in (False, True)}
    bf16, int8 = ([judged(executors[kind], ids) for ids in texts] for kind in (False, True))
    right = {name: np.concatenate([a == e for (a, _), e in zip(got, expected, strict=True)]).mean() for name, got in (("bf16", bf16), ("int8", int8))}
    perplexity = {name: np.exp(-np.concatenate([p for _, p in got]).mean()) for name, got in (("bf16", bf16), ("int8", int8))}
    assert right["bf16"] >= 0.95
    assert right["int8"] >= 0.90
    assert perplexity["int8"] <= 1.03 * perplexity["bf16"]
