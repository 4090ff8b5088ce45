"""Writes a tiny Llama as a GGUF (Q4_1) with a byte-level BPE vocabulary, as llama.cpp's converter would; used by the tests of conversion."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from transformers import PreTrainedModel

from fleet_runtime.models.simulated_tokenizer import simulated_tokenizer_files

SHAPE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BYTES = list(json.loads(simulated_tokenizer_files()["tokenizer.json"])["model"]["vocab"])
MERGES = ["h e", "Ġ a", "l l", "he ll", "Ġ Ġ", "Ġ 1", "1 2"]
TOKENS = [*SPECIALS, *BYTES, *[m.replace(" ", "") for m in MERGES]]
NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def interleave(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """The order of q and k rows in a llama GGUF: row 2i is the old i, row 2i+1 the old i + dim / 2 of each head."""
    per_head = weight.reshape(heads, -1, weight.shape[1])
    half = per_head.shape[1] // 2
    out = np.empty_like(per_head)
    out[:, 0::2], out[:, 1::2] = per_head[:, :half], per_head[:, half:]
    return out.reshape(weight.shape)


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    *,
    arch: str = "llama",
    pre: str = "smollm",
    extra: str = "",
    rope_factors: Any = None,
    add_bos: bool = False,
    heads: int | None = None,
    pieces: tuple[list[str], list[int], list[float]] | None = None,
) -> None:
    """pieces: tokens, types and scores of a SentencePiece vocabulary, in place of the byte-level one."""
    config, w = model.config, GGUFWriter(path, arch)
    w.add_block_count(config.num_hidden_layers)
    w.add_context_length(512)
    w.add_embedding_length(config.hidden_size)
    w.add_feed_forward_length(config.intermediate_size)
    w.add_head_count(config.num_attention_heads if heads is None else heads)
    w.add_head_count_kv(config.num_key_value_heads)
    w.add_rope_freq_base(5000.0)
    w.add_layer_norm_rms_eps(1e-5)
    if getattr(config, "head_dim", None):
        w.add_key_length(config.head_dim)
        w.add_value_length(config.head_dim)
    if pieces is None:
        w.add_add_bos_token(add_bos)
        w.add_tokenizer_model("gpt2")
        w.add_tokenizer_pre(pre)
        w.add_token_list(TOKENS)
        w.add_token_types([3] * len(SPECIALS) + [1] * (len(TOKENS) - len(SPECIALS)))
        w.add_token_merges(MERGES)
    else:
        w.add_tokenizer_model("llama")
        w.add_token_list(pieces[0])
        w.add_token_types(pieces[1])
        w.add_token_scores(pieces[2])
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    w.add_unk_token_id(0)
    w.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        if name.startswith("model.layers."):
            stem, _, kind = name.rpartition(".")
            _, _, layer, *rest = stem.split(".")
            short = NAMES[".".join(rest)]
            if arch == "llama" and short in ("attn_q", "attn_k"):
                values = interleave(values, config.num_attention_heads if short == "attn_q" else config.num_key_value_heads)
            gguf_name = f"blk.{layer}.{short}.{kind}"
        else:
            gguf_name = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head.weight": "output"}[name] + ".weight"
        if gguf_name == "output.weight" and config.tie_word_embeddings:
            continue
        type_ = GGMLQuantizationType.Q4_1 if values.ndim == 2 else GGMLQuantizationType.F32
        w.add_tensor(gguf_name, quantize(values, type_), raw_dtype=type_)
    if rope_factors is not None:
        w.add_tensor("rope_freqs.weight", np.asarray(rope_factors, np.float32))
    if extra:
        w.add_tensor(extra, np.zeros(32, np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
