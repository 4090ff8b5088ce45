"""Architectures that we do not describe: run through transformers with paged attention, or refused with the cause."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fleet_runtime.engine.base import POOL_LAST, greedy
from fleet_runtime.errors import StartError
from fleet_runtime.models import registry
from fleet_testing.executors import random_ids, run, scrambled, torch_executor
from fleet_testing.tiny_llama import Row, make_batch
from fleet_testing.tiny_models import make_model

Copy = Callable[[Path], Path]
OTHERS: dict[str, dict[str, Any]] = {
    "GPTNeoXForCausalLM": {},
    "GPT2LMHeadModel": {},
    "OPTForCausalLM": {},
    "Olmo2ForCausalLM": {},
    "StableLmForCausalLM": {"tie_word_embeddings": False},
    "Phi3ForCausalLM": {"sliding_window": 25},
    "Cohere2ForCausalLM": {"sliding_window": 25},  # scales its logits
    "Qwen3MoeForCausalLM": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}


@pytest.mark.parametrize("architecture", list(OTHERS))
def test_logits_in_any_chunks_and_batches_are_those_of_transformers(tmp_path: Path, architecture: str) -> None:
    model = make_model(tmp_path, architecture, **OTHERS[architecture])
    ids, other = random_ids(100), random_ids(40, 1)
    with torch.inference_mode():
        expected, of_other = (model(torch.tensor([t])).logits[0].numpy() for t in (ids, other))
    executor = torch_executor(tmp_path)
    for position, logits in run(executor, ids, scrambled(8), [40, 41, 77, 100]).items():
        np.testing.assert_allclose(logits, expected[position], atol=1e-4, rtol=0)
    executor.poison(range(64))
    both = executor.logits(make_batch([Row(ids, [0, 1, 2, 3, 4, 5, 6]), Row(other, [7, 8, 9])]))
    np.testing.assert_allclose(both, [expected[-1], of_other[-1]], atol=1e-4, rtol=0)


def test_pooled_vectors_and_unknown_ids_are_as_in_our_own_families(tmp_path: Path) -> None:
    model = make_model(tmp_path, "Olmo2ForCausalLM")
    ids, executor = random_ids(20), torch_executor(tmp_path)
    with torch.inference_mode():
        expected = model.model(torch.tensor([ids])).last_hidden_state[0, -1].numpy()
    batch = make_batch([Row(ids, [0, 1]), Row([*ids[:5], 300, *ids[5:]], [2, 3])])
    batch.pool = np.array([POOL_LAST, POOL_LAST], np.int8)
    out = executor.step(batch, greedy(2))
    np.testing.assert_allclose(out.pooled[0], expected, atol=1e-4)
    assert out.failed.tolist() == [False, True]
    after = executor.step(make_batch([Row([*ids[:5], 300, *ids[5:], 7], [2, 3], 21)]), greedy(1))
    assert after.failed.tolist() == [True]  # it read what the unknown id left


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "BloomForCausalLM": ({}, "0 calls of attention for 3 layers"),
    "MambaForCausalLM": ({}, "0 calls of attention for 3 layers"),
    "GptOssForCausalLM": ({}, "it has attention sinks"),
    "T5ForConditionalGeneration": ({}, "cannot be served"),
}


@pytest.mark.parametrize("architecture", list(REFUSED))
def test_a_model_whose_attention_cannot_be_paged_is_refused_with_the_cause(tmp_path: Path, architecture: str) -> None:
    values, text = REFUSED[architecture]
    make_model(tmp_path, architecture, **values)
    with pytest.raises(StartError) as e:
        torch_executor(tmp_path)
    assert e.value.reason == "ModelInvalid" and text in e.value.message and str(tmp_path) in e.value.message and "\n" not in e.value.message


def test_a_window_that_attention_does_not_pass_on_is_refused(tmp_path: Path) -> None:
    make_model(tmp_path, "Olmo2ForCausalLM")
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "sliding_window": 8}))
    with pytest.raises(StartError, match="sliding_window is 8, its attention does not pass it on"):
        torch_executor(tmp_path)


def test_without_transformers_the_message_says_how_to_get_it(tiny_source: Path, copy_of: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copy_of(tiny_source)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "architectures": ["GPTNeoXForCausalLM"]}))
    monkeypatch.setattr(registry, "find_spec", lambda _name: None)
    with pytest.raises(StartError, match=r"supported: LlamaForCausalLM.*install radixfleet\[transformers\]"):
        torch_executor(folder)


def test_an_architecture_that_nobody_knows_is_refused(tiny_source: Path, copy_of: Copy) -> None:
    folder = copy_of(tiny_source)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "architectures": ["NobodyForCausalLM"], "model_type": "nobody"}))
    with pytest.raises(StartError) as e:
        torch_executor(folder)
    assert e.value.reason == "ModelInvalid" and "nobody" in e.value.message
