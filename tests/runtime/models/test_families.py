"""Families: what config.json may say, in its old and its new spelling; and the logits of each family are those of transformers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fleet_runtime.errors import StartError
from fleet_runtime.models.families import FAMILIES, checkpoint_names, spec_of
from fleet_runtime.models.files import read_config
from fleet_runtime.models.spec import LAYER_WEIGHTS, MODEL_WEIGHTS, ModelSpec
from fleet_runtime.models.weights import weight_shapes
from fleet_testing.executors import random_ids, run, scrambled, torch_executor
from fleet_testing.tiny_models import TINY, make_tiny

CLOSE = 1e-4  # of a logit, in float32
HERE = Path("/model")
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 300, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip


def of(architecture: str, **values: Any) -> dict[str, Any]:
    return {**LLAMA, "architectures": [architecture], **values}


def same(a: ModelSpec, b: ModelSpec) -> bool:
    """Whether two descriptions are equal, the arrays too."""
    ropes = len(a.ropes) == len(b.ropes) and all(
        np.array_equal(x.inv_freq, y.inv_freq) and x.factor == y.factor for x, y in zip(a.ropes, b.ropes, strict=False)
    )
    return ropes and replace(a, ropes=()) == replace(b, ropes=())


@pytest.mark.parametrize("cuts", [[150], [40, 41, 42, 77, 96, 112, 113, 150]], ids=["whole", "chunks"])
@pytest.mark.parametrize("name", list(TINY))
def test_logits_are_those_of_transformers(tmp_path: Path, name: str, cuts: list[int]) -> None:
    model = make_tiny(tmp_path, name)
    ids = random_ids(150)
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    assert np.abs(expected).max() > 0.5
    for position, logits in run(torch_executor(tmp_path), ids, scrambled(10), cuts).items():
        np.testing.assert_allclose(logits, expected[position], atol=CLOSE, rtol=0)


@pytest.mark.parametrize("name", ["llama yarn", "qwen3 with bias and windows", "gemma3"])
def test_every_position_has_the_logits_of_transformers(tmp_path: Path, name: str) -> None:
    model = make_tiny(tmp_path, name)
    ids = random_ids(90, 1)
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    for position, logits in run(torch_executor(tmp_path), ids, scrambled(6), list(range(1, 91))).items():
        np.testing.assert_allclose(logits, expected[position], atol=CLOSE, rtol=0)


@pytest.mark.parametrize("name", list(TINY))
def test_the_description_has_a_name_and_a_shape_for_each_tensor_of_the_checkpoint(tmp_path: Path, name: str) -> None:
    model = make_tiny(tmp_path, name)
    spec = spec_of(tmp_path, read_config(tmp_path))
    shapes = weight_shapes(spec)
    expected = {n: tuple(p.shape) for n, p in model.named_parameters()}
    assert {theirs: shapes[ours] for ours, theirs in checkpoint_names(spec).items()} == expected
    assert {n.rpartition(".")[2] for n in checkpoint_names(spec)} <= {*MODEL_WEIGHTS, *LAYER_WEIGHTS}
    config = model.config
    assert (spec.heads, spec.kv_heads, spec.tied) == (config.num_attention_heads, config.num_key_value_heads, config.tie_word_embeddings)


SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
SPELLINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "theta": (of("LlamaForCausalLM", rope_theta=500.0), of("LlamaForCausalLM", rope_parameters={"rope_type": "default", "rope_theta": 500.0})),
    "llama3": (
        of("LlamaForCausalLM", rope_theta=500.0, rope_scaling={"rope_type": "llama3", **SCALING}),
        of("LlamaForCausalLM", rope_parameters={"rope_type": "llama3", "rope_theta": 500.0, **SCALING}),
    ),
    "linear, the oldest word": (
        of("LlamaForCausalLM", rope_scaling={"type": "linear", "factor": 2}),
        of("LlamaForCausalLM", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000}),
    ),
    "gemma3": (
        of("Gemma3ForCausalLM", rope_theta=7e5, rope_local_base_freq=300.0, rope_scaling={"factor": 8.0, "rope_type": "linear"},
           sliding_window_pattern=3),
        of("Gemma3ForCausalLM", layer_types=["sliding_attention", "sliding_attention", "full_attention"], rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 7e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        }),
    ),
    "gemma's first word for its activation": (of("GemmaForCausalLM", hidden_act="gelu"), of("GemmaForCausalLM", hidden_act="gelu_pytorch_tanh")),
    "qwen2 windows": (
        of("Qwen2ForCausalLM", use_sliding_window=True, sliding_window=64, max_window_layers=2),
        of("Qwen2ForCausalLM", use_sliding_window=True, sliding_window=64, layer_types=["full_attention", "full_attention", "sliding_attention"]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(SPELLINGS))
def test_older_and_newer_spellings_mean_the_same(name: str) -> None:
    old, new = SPELLINGS[name]
    assert same(spec_of(HERE, old), spec_of(HERE, new))
    assert not same(spec_of(HERE, old), spec_of(HERE, {**LLAMA, "num_hidden_layers": 4}))


def test_windows_ropes_and_contexts_are_as_the_config_says() -> None:
    assert [layer.window for layer in spec_of(HERE, of("MistralForCausalLM")).layers] == [4096] * 3
    assert [layer.window for layer in spec_of(HERE, of("Qwen3ForCausalLM", sliding_window=8)).layers] == [0] * 3  # use_sliding_window is not set
    gemma3 = spec_of(HERE, of("Gemma3ForCausalLM", num_hidden_layers=7, sliding_window=8))
    assert [(layer.window, layer.rope) for layer in gemma3.layers] == [(8, 1)] * 5 + [(0, 0), (8, 1)]
    assert len(gemma3.ropes) == 2 and gemma3.ropes[0].inv_freq[1] < gemma3.ropes[1].inv_freq[1]
    linear = {"rope_type": "linear", "factor": 4.0}
    assert spec_of(HERE, of("LlamaForCausalLM", rope_parameters=linear)).max_context == 2048  # 4 * 512
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert spec_of(HERE, of("Qwen2ForCausalLM", rope_parameters=yarn)).max_context == 2048
    dynamic = {"rope_type": "dynamic", "factor": 4.0}
    assert spec_of(HERE, of("LlamaForCausalLM", rope_parameters=dynamic)).max_context == 512  # longer texts would change their past


FAULTS: list[tuple[dict[str, Any], str]] = [
    (of("GPT2LMHeadModel"), "architectures is ['GPT2LMHeadModel']; supported: LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM"),
    ({**LLAMA, "architectures": None}, "architectures is None"),
    ({**LLAMA, "architectures": [["x"]]}, "architectures is [['x']]"),
    ({**LLAMA, "hidden_size": None}, "hidden_size is missing"),
    ({**LLAMA, "vocab_size": "300"}, "vocab_size is '300', must be a whole number above 0"),
    ({**LLAMA, "vocab_size": True}, "vocab_size is True, must be a whole number above 0"),
    ({**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers is 0, must be a whole number above 0"),
    ({**LLAMA, "num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, must be a whole number above 0 and at most 4096"),
    ({**LLAMA, "head_dim": 10**9}, "head_dim is 1000000000, must be a whole number above 0 and at most 4096"),
    ({**LLAMA, "hidden_size": 10**12}, "hidden_size is 1000000000000, must be a whole number above 0 and at most"),
    ({**LLAMA, "num_key_value_heads": 4}, "num_key_value_heads is 4, must divide num_attention_heads 6"),
    ({**LLAMA, "head_dim": 7}, "head_dim is 7, must be even"),
    ({**LLAMA, "hidden_act": "relu"}, "hidden_act is 'relu', supported: 'silu'"),
    ({**LLAMA, "hidden_act": ["silu"]}, "hidden_act is ['silu'], supported"),
    ({**LLAMA, "attention_bias": 1}, "attention_bias is 1, must be true or false"),
    ({**LLAMA, "quantization_config": {"quant_method": "gptq"}}, "quantization_config is set (gptq): weights must be float32"),
    ({**LLAMA, "rms_norm_eps": -1}, "rms_norm_eps is -1, must be a number above 0"),
    ({**LLAMA, "rms_norm_eps": 10**400}, "rms_norm_eps is 1000"),
    ({**LLAMA, "tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', must be true or false"),
    ({**LLAMA, "rope_parameters": {"rope_type": "longrope"}}, "rope_parameters.rope_type is 'longrope', supported: 'default', 'linear', 'dynamic'"),
    ({**LLAMA, "rope_scaling": {"type": "su", "factor": 2}}, "rope_scaling.type is 'su'"),
    ({**LLAMA, "rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
    ({**LLAMA, "rope_scaling": {"type": "linear", "factor": "2"}}, "rope_scaling.factor is '2', must be a number above 0"),
    ({**LLAMA, "rope_parameters": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
     "rope_parameters.high_freq_factor is 4.0, must be above low_freq_factor 4.0"),
    ({**LLAMA, "rope_parameters": {"rope_type": "yarn", "factor": 2, "rope_theta": 1}}, "rope_parameters.rope_theta is 1.0, must be above 1"),
    ({**LLAMA, "rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}}, "rope_parameters.llama_4_scaling_beta is set"),
    ({**LLAMA, "rope_parameters": 5}, "rope_parameters is 5, must be an object or null"),
    ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; models with it not 1 are not supported"),
    ({**LLAMA, "rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor is 0.5"),
    ({**LLAMA, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types differ"),
    (of("MistralForCausalLM", sliding_window=0), "sliding_window is 0, must be a whole number above 0"),
    (of("Qwen2ForCausalLM", layer_types=["full_attention"]), "layer_types must be a list of 3 (num_hidden_layers) words"),
    (of("Qwen2ForCausalLM", layer_types=["full_attention", "chunked_attention", {}]), "layer_types must be a list of 3"),
    (of("Qwen2ForCausalLM", layer_types=["sliding_attention"] * 3), "use_sliding_window is not true"),
    (of("Qwen3ForCausalLM", max_window_layers=-1), "max_window_layers is -1, must be a whole number from 0"),
    (of("Gemma3ForCausalLM", rope_parameters={"full_attention": {"rope_type": "su"}}), "rope_parameters.full_attention.rope_type is 'su'"),
    (of("Gemma2ForCausalLM", attn_logit_softcapping=-1), "attn_logit_softcapping is -1, must be a number above 0"),
    (of("Gemma3ForCausalLM", use_bidirectional_attention=True), "use_bidirectional_attention is true"),
]  # fmt: skip


@pytest.mark.parametrize(("raw", "text"), FAULTS, ids=[text[:40] for _, text in FAULTS])
def test_a_field_that_is_wrong_or_unsupported_is_named(raw: dict[str, Any], text: str) -> None:
    with pytest.raises(StartError) as e:
        spec_of(HERE, json.loads(json.dumps(raw)))
    assert e.value.reason == "ModelInvalid" and text in e.value.message and "/model/config.json: " in e.value.message and "\n" not in e.value.message


def test_all_faults_of_a_config_are_told_at_once() -> None:
    with pytest.raises(StartError, match=r"hidden_size is missing.*hidden_act is 'relu'"):
        spec_of(HERE, {**LLAMA, "hidden_size": None, "mlp_bias": 3, "hidden_act": "relu"})


@pytest.mark.parametrize("architecture", list(FAMILIES))
@pytest.mark.parametrize("junk", [None, -1, "x", [], {}, 10**400, 1.5, True], ids=repr)
def test_no_junk_in_any_field_raises_anything_but_a_sentence(architecture: str, junk: object) -> None:
    good = of(architecture, rope_parameters={"rope_type": "yarn", "factor": 2.0})
    names: Sequence[str] = [*good, "head_dim", "sliding_window", "layer_types", "rope_theta", "rope_scaling", "sliding_window_pattern",
                            "final_logit_softcapping", "query_pre_attn_scalar", "max_window_layers", "use_sliding_window", "hidden_activation",
                            "rms_norm_eps", "original_max_position_embeddings", "tie_word_embeddings", "attention_bias"]  # fmt: skip
    inner = ["factor", "beta_fast", "mscale", "attention_factor", "truncate", "rope_theta", "original_max_position_embeddings", "rope_type"]
    configs = [{**good, name: junk} for name in names]
    configs += [{**good, "rope_parameters": {"rope_type": "yarn", "factor": 2.0, name: junk}} for name in inner]
    for raw in configs:
        with contextlib.suppress(StartError):
            spec_of(HERE, raw)
