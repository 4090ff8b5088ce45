"""A Llama GGUF with a byte-level BPE vocabulary -> a Hugging Face model folder (bfloat16 safetensors). Called once, by `bundled`.

Sources: the GGUF specification (ggml docs/gguf.md) for names and metadata; the safetensors format description (8 bytes of header
length, JSON header, data); GGUF files of the llama architecture hold the rows of q and k in interleaved order, [head, dim/2, 2], where
the Hugging Face layout wants [head, 2, dim/2].
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

# GGUF token type of control tokens (llama.cpp's LLAMA_TOKEN_TYPE_CONTROL).
_CONTROL: Final = 3

_LAYER_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


class GgufError(ValueError):
    """The file is not a GGUF that can be converted; the message says why."""


def convert_gguf(source: Path, folder: Path, progress: Callable[[str], None] = lambda _: None) -> None:
    """Writes the model folder of `source` into `folder`, which must exist. Raises GgufError, OSError."""
    try:
        reader = GGUFReader(source)
    except (ValueError, IndexError, KeyError) as e:
        raise GgufError(f"{source} is not a GGUF file: {e}") from e

    def get(name: str, default: Any = None) -> Any:
        field = reader.fields.get(name)
        if field is None:
            if default is None:
                raise GgufError(f"{source}: the field {name} is missing")
            return default
        return field.contents()

    if (architecture := get("general.architecture")) != "llama":
        raise GgufError(f"{source}: architecture {architecture!r}; only 'llama' can be converted")
    progress("tokenizer")
    _write_tokenizer(folder, get)
    tensors = {t.name: t for t in reader.tensors}
    config = _model_config(get, tied="output.weight" not in tensors)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")})
    progress("weights")
    _write_weights(folder / "model.safetensors", tensors, config)


def _model_config(get: Callable[..., Any], *, tied: bool) -> dict[str, Any]:
    heads = int(get("llama.attention.head_count"))
    hidden = int(get("llama.embedding_length"))
    rotated = int(get("llama.rope.dimension_count", hidden // heads))
    if rotated != hidden // heads:
        raise GgufError(f"llama.rope.dimension_count is {rotated}, must be the head size {hidden // heads}")
    eos = int(get("tokenizer.ggml.eos_token_id"))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(get("tokenizer.ggml.tokens")),
        "hidden_size": hidden,
        "intermediate_size": int(get("llama.feed_forward_length")),
        "num_hidden_layers": int(get("llama.block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(get("llama.attention.head_count_kv", heads)),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": int(get("llama.context_length")),
        "rms_norm_eps": _shortest(get("llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(get("llama.rope.freq_base", 10000.0)),
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "bos_token_id": int(get("tokenizer.ggml.bos_token_id")),
        "eos_token_id": eos,
        "pad_token_id": int(get("tokenizer.ggml.padding_token_id", eos)),
    }


def _shortest(value: float) -> float:
    """A float32 of the file as the decimal that it stands for: 9.999999747378752e-06 -> 1e-05."""
    return float(str(np.float32(value)))


def _write_tokenizer(folder: Path, get: Callable[..., Any]) -> None:
    """tokenizer.json, tokenizer_config.json, chat_template.jinja from the GGUF's vocabulary, merges, token types and template."""
    kind, pre = get("tokenizer.ggml.model"), get("tokenizer.ggml.pre")
    if (kind, pre) != ("gpt2", "smollm"):
        raise GgufError(f"the tokenizer is {kind!r} with pre-tokenizer {pre!r}; only 'gpt2' with 'smollm' can be converted")
    tokens: list[str] = get("tokenizer.ggml.tokens")
    merges = [tuple(m.split(" ", 1)) for m in get("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    # SmolLM: every digit alone, then the GPT-2 pattern, no space put in front.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types: list[int] = get("tokenizer.ggml.token_type")
    control = [t for t, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    eos = get("tokenizer.ggml.eos_token_id")
    special = {
        "bos_token": get("tokenizer.ggml.bos_token_id"),
        "eos_token": eos,
        "unk_token": get("tokenizer.ggml.unknown_token_id", eos),
        "pad_token": get("tokenizer.ggml.padding_token_id", eos),
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(get("llama.context_length")),
        **{name: tokens[i] for name, i in special.items()},
    }
    _write_json(folder / "tokenizer_config.json", config)
    (folder / "chat_template.jinja").write_text(get("tokenizer.chat_template"), encoding="utf-8")


def _write_weights(path: Path, tensors: dict[str, Any], config: dict[str, Any]) -> None:
    """One safetensors file in bfloat16, written tensor by tensor. GGUF shapes are reversed: the innermost dimension comes first."""
    names = {_hf_name(name): name for name in sorted(tensors)}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for hf_name, name in names.items():
        shape = [int(n) for n in reversed(tensors[name].shape)]
        size = 2 * int(np.prod(shape))
        header[hf_name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as f:
        f.write(struct.pack("<Q", len(head)) + head)
        for _, data in _bf16_tensors(names, tensors, config):
            f.write(data)


def _bf16_tensors(names: dict[str, str], tensors: dict[str, Any], config: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    for hf_name, name in names.items():
        tensor = tensors[name]
        values = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if ".attn_q." in name:
            values = _unpermute(values, config["num_attention_heads"])
        elif ".attn_k." in name:
            values = _unpermute(values, config["num_key_value_heads"])
        yield hf_name, bf16_bytes(values)


def _hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`. Raises GgufError for a tensor we do not know."""
    parts = name.removesuffix(".weight").split(".")
    if name.endswith(".weight"):
        if len(parts) == 1 and parts[0] in _TOP_NAMES:
            return f"{_TOP_NAMES[parts[0]]}.weight"
        if len(parts) == 3 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
            return f"model.layers.{int(parts[1])}.{_LAYER_NAMES[parts[2]]}.weight"
    raise GgufError(f"the tensor {name} has no place in a Llama model")


def _unpermute(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """weight: [heads * dim, hidden], rows of a head interleaved -> rows in two halves."""
    rows, hidden = weight.shape
    return np.ascontiguousarray(weight.reshape(heads, rows // heads // 2, 2, hidden).swapaxes(1, 2).reshape(rows, hidden))


def bf16_bytes(values: npt.NDArray[np.float32]) -> bytes:
    """float32 -> bfloat16, round to nearest even, little-endian. Values must be finite."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return rounded.astype("<u2").tobytes()


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
