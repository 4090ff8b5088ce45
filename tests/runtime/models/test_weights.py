"""Config fields and weights of the Llama family: what is refused, and with which sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fleet_runtime.errors import StartError
from fleet_runtime.models.registry import load_model
from fleet_runtime.models.weights import Weights, count_parameters

Copy = Callable[[Path], Path]


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return load_model(folder, dtype=dtype, context_length=64, progress=lambda _p, _t: None)


def change_config(folder: Path, **values: Any) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, **values}))


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures is ['GPT2LMHeadModel']; supported: LlamaForCausalLM"),
        ({"architectures": None}, "architectures is None"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": "300"}, "vocab_size is '300', must be a whole number above 0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, must be a whole number above 0"),
        ({"num_key_value_heads": 4}, "num_key_value_heads is 4, must divide num_attention_heads 6"),
        ({"head_dim": 7}, "head_dim is 7, must be even"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', supported: 'silu'"),
        ({"attention_bias": True}, "attention_bias is set"),
        ({"mlp_bias": True}, "mlp_bias is set"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is set"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1, must be a number above 0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', must be true or false"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4}}, "rope_scaling's type is 'yarn', supported: default, linear, llama3"),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic"}}, "rope_scaling's type is 'dynamic'"),
        ({"rope_parameters": {"rope_type": "llama3", "low_freq_factor": 4, "high_freq_factor": 4}}, "high_freq_factor is 4.0, must be above"),
        ({"rope_parameters": 5}, "rope_scaling is 5, must be an object or null"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not 1"),
    ],
)
def test_a_field_that_is_wrong_or_unsupported_is_named(tiny_source: Path, copy_of: Copy, values: dict[str, Any], text: str) -> None:
    folder = copy_of(tiny_source)
    change_config(folder, **values)
    with pytest.raises(StartError) as e:
        load(folder)
    assert e.value.reason == "ModelInvalid" and text in e.value.message and str(folder / "config.json") in e.value.message


def test_all_faults_of_a_config_are_told_at_once(tiny_source: Path, copy_of: Copy) -> None:
    folder = copy_of(tiny_source)
    change_config(folder, hidden_size=None, mlp_bias=True, hidden_act="relu")
    with pytest.raises(StartError, match=r"hidden_size is missing.*mlp_bias is set.*hidden_act is 'relu'"):
        load(folder)


def test_older_config_fields_of_rope_mean_the_same(tiny_source: Path, copy_of: Copy) -> None:
    folder = copy_of(tiny_source)
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    change_config(folder, rope_parameters={"rope_type": "llama3", "rope_theta": 500.0, **scaling})
    new = load(folder).config
    change_config(folder, rope_parameters=None, rope_theta=500.0, rope_scaling={"rope_type": "llama3", **scaling})
    assert load(folder).config == new
    assert new.rope_theta == 500.0 and new.rope_scaling.factor == 8.0


def test_missing_unexpected_and_misshapen_tensors_are_named_together(tiny_source: Path, copy_of: Copy) -> None:
    folder = copy_of(tiny_source)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(48)
    tensors["model.layers.1.mlp.down_proj.weight"] = torch.zeros(48, 95)
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(96, 48, dtype=torch.int8)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(StartError) as e:
        load(folder)
    for text in (
        "missing tensors: model.norm.weight;",
        "unexpected tensors: model.layers.0.self_attn.q_proj.bias;",
        "model.layers.1.mlp.down_proj.weight is [48, 95], config.json says [48, 96]",
        "model.layers.2.mlp.up_proj.weight is I8, allowed: BF16, F16, F32",
    ):
        assert text in e.value.message


def test_a_long_list_of_missing_tensors_is_cut(tiny_source: Path, copy_of: Copy) -> None:
    folder = copy_of(tiny_source)
    change_config(folder, num_hidden_layers=5)
    with pytest.raises(StartError, match=r"missing tensors: .* and 13 more"):
        load(folder)


def test_unused_tensors_of_older_checkpoints_are_let_be(tiny_source: Path, copy_of: Copy) -> None:
    folder = copy_of(tiny_source)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()  # tied
    save_file(tensors, folder / "model.safetensors")
    load(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sharded_and_single_files_give_the_same_model(tiny_source: Path, sharded_source: Path, dtype: torch.dtype) -> None:
    config = load(tiny_source).config
    percents: list[int] = []
    with Weights(tiny_source, dtype=dtype) as one, Weights(sharded_source, dtype=dtype, progress=lambda p, _t: percents.append(p)) as many:
        for weights in (one, many):
            weights.check(config.tensors(), ignored=lambda _n: False)
        for name in config.tensors():
            a, b = one.take(name), many.take(name)
            assert a.dtype == dtype and torch.equal(a, b)
    assert percents == sorted(percents) and percents[-1] == 100
    assert count_parameters(tiny_source) == count_parameters(sharded_source) == sum(torch.Size(s).numel() for s in config.tensors().values())


def test_weights_outlive_their_files(tiny_source: Path, copy_of: Copy) -> None:
    folder = copy_of(tiny_source)
    model = load(folder)
    with (folder / "model.safetensors").open("r+b") as f:  # a mapping would see this
        f.write(b"\0" * (folder / "model.safetensors").stat().st_size)
    assert model.logits(torch.ones(1, 48)).abs().sum() > 0
