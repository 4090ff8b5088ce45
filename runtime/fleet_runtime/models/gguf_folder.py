"""A GGUF (llama, qwen2, qwen3) -> a Hugging Face model folder (bfloat16 safetensors). No torch.

Called once a file, by `bundled` and `gguf_cache`.

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

from fleet_runtime.errors import StartError
from fleet_runtime.models.families import spec_of
from fleet_runtime.models.gguf_tokenizer import TokenizerError, write_tokenizer
from fleet_runtime.models.weights import to_bf16

_LAYER_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Architectures of GGUF files, and theirs of config.json. (Not Gemma: what its files say of its
# vocabulary does not give its merges in their order.)
_ARCHITECTURES: Final = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
_INTERLEAVED: Final = ("llama",)  # whose q and k rows are in the file's own order
_ROPE_FACTORS: Final = "rope_freqs.weight"
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

    if (architecture := get("general.architecture")) not in _ARCHITECTURES:
        raise GgufError(f"{source}: architecture {architecture!r}; can be converted: {', '.join(_ARCHITECTURES)}")
    progress("tokenizer")
    try:
        write_tokenizer(folder, get, context=int(get(f"{architecture}.context_length")))
    except TokenizerError as e:
        raise GgufError(f"{source}: {e}") from e
    tensors = {t.name: t for t in reader.tensors}
    factors = tensors.pop(_ROPE_FACTORS, None)
    config = _model_config(get, architecture, tied="output.weight" not in tensors)
    try:
        spec_of(folder, config)
    except StartError as e:
        raise GgufError(f"{source}: {e.message}") from e
    config["rope_scaling"] = _rope_scaling(get, architecture, config, None if factors is None else np.asarray(factors.data, np.float32))
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id") if config[k] is not None})
    progress("weights")
    _write_weights(folder / "model.safetensors", tensors, config)


def _model_config(get: Callable[..., Any], arch: str, *, tied: bool) -> dict[str, Any]:
    heads, hidden = _whole(get, f"{arch}.attention.head_count"), _whole(get, f"{arch}.embedding_length")
    head_dim = _whole(get, f"{arch}.attention.key_length", hidden // max(1, heads))
    for name in ("rope.dimension_count", "attention.value_length"):
        if (found := _whole(get, f"{arch}.{name}", head_dim)) != head_dim:
            raise GgufError(f"{arch}.{name} is {found}, must be the head size {head_dim}")
    eos = _whole(get, "tokenizer.ggml.eos_token_id")
    architecture, model_type = _ARCHITECTURES[arch]
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": len(get("tokenizer.ggml.tokens")),
        "hidden_size": hidden,
        "intermediate_size": _whole(get, f"{arch}.feed_forward_length"),
        "num_hidden_layers": _whole(get, f"{arch}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _whole(get, f"{arch}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": _whole(get, f"{arch}.context_length"),
        "rms_norm_eps": _shortest(get(f"{arch}.attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(get(f"{arch}.rope.freq_base", 10000.0)),
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "bos_token_id": int(bos) if (bos := get("tokenizer.ggml.bos_token_id", -1)) >= 0 else None,
        "eos_token_id": eos,
        "pad_token_id": _whole(get, "tokenizer.ggml.padding_token_id", eos),
    }


def _rope_scaling(get: Callable[..., Any], arch: str, config: dict[str, Any], factors: npt.NDArray[np.float32] | None) -> dict[str, Any] | None:
    """The stretch of the rope. factors: what each frequency is divided by (Llama 3.1 and later), from which the llama3 fields are found."""
    kind = get(f"{arch}.rope.scaling.type", "none")
    original = _whole(get, f"{arch}.rope.scaling.original_context_length", config["max_position_embeddings"])
    if factors is not None:
        # The fields of all Llama 3.x; the factor is that of the slowest frequencies.
        if not (factors.ndim == 1 and np.isfinite(factors).all() and factors.min() >= 1.0):
            raise GgufError(f"{_ROPE_FACTORS} is not that of Llama 3.x: its rope cannot be converted")
        found = {"rope_type": "llama3", "factor": float(factors.max()), "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                 "original_max_position_embeddings": 8192}  # fmt: skip
        plain, scaled = (spec_of(Path(), {**config, "rope_scaling": s}).ropes[0].inv_freq for s in (None, found))
        if len(factors) != len(plain) or not np.allclose(plain / scaled, factors, rtol=1e-3):
            raise GgufError(f"{_ROPE_FACTORS} is not that of Llama 3.x: its rope cannot be converted")
        return found
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise GgufError(f"{arch}.rope.scaling.type is {kind!r}; can be converted: none, linear, yarn")
    scaling = {"rope_type": kind, "factor": _shortest(get(f"{arch}.rope.scaling.factor"))}
    return {**scaling, "original_max_position_embeddings": original} if kind == "yarn" else scaling


def _whole(get: Callable[..., Any], name: str, default: int | None = None) -> int:
    """A field that is a whole number from 0. Raises GgufError."""
    value = get(name, default)
    if isinstance(value, int | np.integer) and not isinstance(value, bool) and value >= 0:
        return int(value)
    raise GgufError(f"{name} is {str(value)[:80]}, must be a whole number")


def _shortest(value: float) -> float:
    """A float32 of the file as the decimal that it stands for: 9.999999747378752e-06 -> 1e-05."""
    return float(str(np.float32(value)))


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
        if config["model_type"] in _INTERLEAVED and ".attn_q." in name:
            values = _unpermute(values, config["num_attention_heads"])
        elif config["model_type"] in _INTERLEAVED and ".attn_k." in name:
            values = _unpermute(values, config["num_key_value_heads"])
        yield hf_name, to_bf16(values).astype("<u2", copy=False).tobytes()


def _hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`. Raises GgufError for a tensor we do not know."""
    stem, _, kind = name.rpartition(".")
    parts = stem.split(".")
    if kind in ("weight", "bias"):
        if len(parts) == 1 and parts[0] in _TOP_NAMES:
            return f"{_TOP_NAMES[parts[0]]}.{kind}"
        if len(parts) == 3 and parts[0] == "blk" and parts[1].isdecimal() and parts[2] in _LAYER_NAMES:
            return f"model.layers.{int(parts[1])}.{_LAYER_NAMES[parts[2]]}.{kind}"
    raise GgufError(f"the tensor {name} has no place in such a model")


def _unpermute(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """weight: [heads * dim, hidden], rows of a head interleaved -> rows in two halves."""
    rows, hidden = weight.shape
    return np.ascontiguousarray(weight.reshape(heads, rows // heads // 2, 2, hidden).swapaxes(1, 2).reshape(rows, hidden))


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
