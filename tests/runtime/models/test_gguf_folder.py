"""A tiny GGUF, written here, becomes the Hugging Face folder that it came from; what cannot be converted is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from fleet_runtime.models.files import resolve_model
from fleet_runtime.models.gguf_folder import GgufError, bf16_bytes, convert_gguf
from fleet_testing.tiny_gguf import SHAPE, TOKENS, write_gguf
from fleet_testing.tiny_llama import make_llama


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
        ({"arch": "gpt2"}, "architecture 'gpt2'; only 'llama'"),
        ({"pre": "llama-bpe"}, "pre-tokenizer 'llama-bpe'"),
        ({"extra": "rope_freqs.weight"}, "the tensor rope_freqs.weight has no place in a Llama model"),
    ],
)
def test_what_cannot_be_converted_is_refused(tmp_path: Path, change: dict[str, str], text: str) -> None:
    write_gguf(tmp_path / "m.gguf", make_llama(tmp_path / "hf", vocab_size=len(TOKENS), **SHAPE), **change)
    (tmp_path / "out").mkdir()
    with pytest.raises(GgufError, match=text):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out")


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"<html>" * 100)
    with pytest.raises(GgufError, match="is not a GGUF file"):
        convert_gguf(tmp_path / "m.gguf", tmp_path)


@given(hnp.arrays(np.float32, st.integers(1, 50), elements=st.floats(-(2.0**120), 2.0**120, width=32)))
def test_rounding_to_bfloat16_is_torchs(values: np.ndarray[Any, Any]) -> None:
    assert bf16_bytes(values) == torch.from_numpy(values).bfloat16().view(torch.uint8).numpy().tobytes()
