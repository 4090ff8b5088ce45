"""A tiny GGUF, written here, becomes the Hugging Face folder that it came from; what cannot be converted is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from fleet_runtime.errors import StartError
from fleet_runtime.models.families import spec_of
from fleet_runtime.models.files import resolve_model
from fleet_runtime.models.gguf_folder import GgufError, convert_gguf
from fleet_testing.executors import random_ids, torch_executor
from fleet_testing.tiny_gguf import SHAPE, TOKENS, write_gguf
from fleet_testing.tiny_llama import Row, make_batch, make_llama
from fleet_testing.tiny_models import make_model


@pytest.mark.parametrize("tied", [True, False])
def test_weights_come_back_in_the_order_of_hugging_face(tmp_path: Path, tied: bool) -> None:
    model = make_llama(tmp_path / "hf", vocab_size=len(TOKENS), tie_word_embeddings=tied, **SHAPE)
    write_gguf(tmp_path / "m.gguf", model)
    out = tmp_path / "out"
    out.mkdir()
    convert_gguf(tmp_path / "m.gguf", out)
    got = load_file(out / "model.safetensors")
    expected = {n: t for n, t in model.state_dict().items() if not (tied and n == "lm_head.weight")}
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        values = tensor.numpy()
        if values.ndim == 2:  # rows keep their quantisation wherever they stand
            values = dequantize(quantize(values, GGMLQuantizationType.Q4_1), GGMLQuantizationType.Q4_1)
        assert torch.equal(got[name], torch.from_numpy(np.ascontiguousarray(values)).bfloat16()), name
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.config.rope_parameters["rope_theta"] == 5000.0 and loaded.config.rms_norm_eps == 1e-5
    assert loaded.config.tie_word_embeddings is tied and loaded.generation_config.eos_token_id == 2
    assert resolve_model(str(out)).folder == out


def test_the_tokenizer_splits_digits_and_puts_no_space_in_front(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", make_llama(tmp_path / "hf", vocab_size=len(TOKENS), **SHAPE))
    out = tmp_path / "out"
    out.mkdir()
    convert_gguf(tmp_path / "m.gguf", out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.tokenize("hello a") == ["hell", "o", "Ġa"]
    assert tokenizer.tokenize(" 12") == ["Ġ", "1", "2"]  # though the merges "Ġ 1" and "1 2" are there
    assert tokenizer.tokenize("<|im_start|>a  <|im_end|>") == ["<|im_start|>", "a", "ĠĠ", "<|im_end|>"]
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "he"}], tokenize=False) == "he"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"arch": "gpt2"}, "architecture 'gpt2'; can be converted: llama, qwen2, qwen3"),
        ({"pre": "chameleon"}, "pre-tokenizer 'chameleon'; can be converted: 'llama', and 'gpt2' with 'smollm', 'gpt-2', 'llama-bpe', 'qwen2'"),
        ({"extra": "rope_freqs.weight"}, "rope_freqs.weight is not that of Llama 3.x"),
        ({"heads": 0}, "num_attention_heads is 0, must be a whole number above 0"),
        ({"extra": "blk.0.ffn_gate_inp.weight"}, "the tensor blk.0.ffn_gate_inp.weight has no place in such a model"),
    ],
)
def test_what_cannot_be_converted_is_refused(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    write_gguf(tmp_path / "m.gguf", make_llama(tmp_path / "hf", vocab_size=len(TOKENS), **SHAPE), **change)
    (tmp_path / "out").mkdir()
    with pytest.raises(GgufError, match=text):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out")


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"<html>" * 100)
    with pytest.raises(GgufError, match="is not a GGUF file"):
        convert_gguf(tmp_path / "m.gguf", tmp_path)


@pytest.mark.parametrize(
    ("arch", "architecture", "pre", "more"),
    [
        ("qwen2", "Qwen2ForCausalLM", "qwen2", {}),
        ("qwen3", "Qwen3ForCausalLM", "qwen2", {"head_dim": 32}),
        ("llama", "LlamaForCausalLM", "llama-bpe", {}),
    ],
)
def test_other_architectures_have_the_logits_of_what_was_written(
    tmp_path: Path, arch: str, architecture: str, pre: str, more: dict[str, Any]
) -> None:
    how: dict[str, Any] = {"vocab_size": len(TOKENS), "tie_word_embeddings": False, **SHAPE, **more}
    model = make_model(tmp_path / "hf", architecture, **{**how, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}})
    with torch.no_grad():
        for weight in model.parameters():  # as the file will hold them
            if weight.ndim == 2:
                weight.copy_(torch.from_numpy(dequantize(quantize(weight.numpy(), GGMLQuantizationType.Q4_1), GGMLQuantizationType.Q4_1)).bfloat16())
            else:
                weight.copy_(weight.bfloat16())
    write_gguf(tmp_path / "m.gguf", model, arch=arch, pre=pre)
    found = resolve_model(f"file://{tmp_path}/m.gguf", models_dir=tmp_path / "cache")
    assert found.folder is not None
    ids = [i % len(TOKENS) for i in random_ids(30)]
    got = torch_executor(found.folder).logits(make_batch([Row(ids, [0, 1])]))[0]
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0, -1].numpy()
    assert np.corrcoef(got, expected)[0, 1] > 0.999  # Q4_1 rounds its scales once more


def test_factors_of_llama_3_become_its_rope_scaling(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    model = make_llama(tmp_path / "hf", vocab_size=len(TOKENS), **SHAPE)
    base = {**json.loads((tmp_path / "hf/config.json").read_text()), "rope_parameters": None, "rope_theta": 5000.0}
    plain, scaled = (spec_of(tmp_path, {**base, "rope_scaling": s}).ropes[0].inv_freq for s in (None, scaling))
    write_gguf(tmp_path / "m.gguf", model, rope_factors=plain / scaled)
    (tmp_path / "out").mkdir()
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["rope_scaling"] == scaling


def test_a_begin_of_text_is_put_in_front_where_the_file_says_so(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", make_llama(tmp_path / "hf", vocab_size=len(TOKENS), **SHAPE), pre="llama-bpe", add_bos=True)
    (tmp_path / "out").mkdir()
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out/tokenizer.json"))
    assert tokenizer.encode("he").ids == [1, *tokenizer.encode("he", add_special_tokens=False).ids]


def test_a_gguf_file_is_converted_once_into_the_cache_and_keeps_its_revision(tmp_path: Path) -> None:
    write_gguf(tmp_path / "small.gguf", make_llama(tmp_path / "hf", vocab_size=len(TOKENS), **SHAPE))
    first = resolve_model(str(tmp_path / "small.gguf"), models_dir=tmp_path / "cache")
    assert first.base_name == "small" and first.folder is not None and first.folder.parent == tmp_path / "cache/gguf"
    made = (first.folder / "model.safetensors").stat().st_mtime_ns
    (tmp_path / "small.gguf").rename(tmp_path / "other.gguf")
    again = resolve_model(f"file://{tmp_path}/other.gguf", models_dir=tmp_path / "cache")
    assert again.revision == first.revision and again.base_name == "other"  # the same content under another name
    assert resolve_model(str(tmp_path / "other.gguf"), models_dir=tmp_path / "cache") == again
    assert (first.folder / "model.safetensors").stat().st_mtime_ns == made
    assert not list((tmp_path / "cache/gguf").glob(".*tmp-*"))


def test_a_gguf_that_cannot_be_converted_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"<html>" * 100)
    with pytest.raises(StartError, match=r"bad.gguf is not a GGUF file") as e:
        resolve_model(str(tmp_path / "bad.gguf"), models_dir=tmp_path / "cache")
    assert e.value.reason == "ModelInvalid" and not [p for p in (tmp_path / "cache/gguf").iterdir() if p.is_dir()]
    (tmp_path / "file").touch()
    with pytest.raises(StartError, match=r"must be converted once.*gguf_cache .* --to DIR"):
        resolve_model(str(tmp_path / "bad.gguf"), models_dir=tmp_path / "file")


def test_conversion_imports_no_torch(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", make_llama(tmp_path / "hf", vocab_size=len(TOKENS), **SHAPE))
    code = (
        "import sys; from fleet_runtime.models.gguf_cache import main; main(sys.argv[1:]);"
        "print(sorted({'torch', 'transformers', 'safetensors'} & set(sys.modules)))"
    )
    args = [sys.executable, "-c", code, str(tmp_path / "m.gguf"), "--to", str(tmp_path / "cache")]
    lines = subprocess.run(args, capture_output=True, text=True, check=True).stdout.splitlines()
    assert Path(lines[0]).is_dir() and lines[1] == "[]"
