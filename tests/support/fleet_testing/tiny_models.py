"""Random models of a few kB, of each family, as transformers makes and saves them; used by the runtime's tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models
from transformers import PreTrainedModel

SHAPE: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "initializer_range": 0.2, "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip


def make_model(folder: Path, architecture: str, *, seed: int = 0, max_shard_size: str = "5GB", **overrides: Any) -> PreTrainedModel:
    """Saves a random model of an architecture of transformers, and a word-per-id tokenizer; returns it, float32, written-out attention.

    Norms and biases are random, too, or a mistake in them would not show. An override of None that is not there by default is left out.
    """
    model_class = getattr(transformers, architecture)
    torch.manual_seed(seed)
    model = model_class(model_class.config_class(**{**SHAPE, **overrides})).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.add_(0.2 * torch.randn_like(weight))
            elif name.endswith("bias"):
                weight.copy_(0.2 * torch.randn_like(weight))
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    save_word_tokenizer(folder, model.config.vocab_size)
    model.set_attn_implementation("eager")  # the only one with Gemma's soft cap
    return model


def save_word_tokenizer(folder: Path, vocab_size: int) -> None:
    """One word for each id."""
    vocab = {f"w{i}": i for i in range(vocab_size)}
    Tokenizer(models.WordLevel(vocab, unk_token="w0")).save(str(folder / "tokenizer.json"))


# Name -> architecture and what makes it differ. Windows are shorter than the texts of the tests and no multiple of a page; original contexts
# are shorter, too.
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 64}  # fmt: skip
_YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 64}
_GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 50_000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama untied, multi-head": ("LlamaForCausalLM", {"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": False}),
    "llama multi-query, own head size": ("LlamaForCausalLM", {"num_key_value_heads": 1, "head_dim": 20}),
    "llama with biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama with gelu": ("LlamaForCausalLM", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama linear": ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "llama llama3": ("LlamaForCausalLM", {"rope_parameters": _LLAMA3}),
    "llama dynamic": ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}}),
    "llama yarn": ("LlamaForCausalLM", {"rope_parameters": _YARN}),
    "llama yarn, all fields": ("LlamaForCausalLM", {
        "rope_parameters": {**_YARN, "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.8, "mscale_all_dim": 0.5, "truncate": False}}),
    "llama yarn, own attention factor": ("LlamaForCausalLM", {"rope_parameters": {**_YARN, "attention_factor": 0.7}}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 25}),
    "mistral without window": ("MistralForCausalLM", {"sliding_window": None, "head_dim": 10}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen2 with windows": ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 41, "max_window_layers": 1}),
    "qwen2 with layer types": ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 17,
                               "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 12}),
    "qwen3 with bias and windows": ("Qwen3ForCausalLM", {"head_dim": 12, "attention_bias": True, "use_sliding_window": True,
                                    "sliding_window": 33, "max_window_layers": 2, "tie_word_embeddings": False}),
    "gemma": ("GemmaForCausalLM", {"head_dim": 12}),
    "gemma2": ("Gemma2ForCausalLM", {"head_dim": 12, "sliding_window": 25, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0,
               "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3ForCausalLM", {"head_dim": 12, "sliding_window": 25, "query_pre_attn_scalar": 24, "sliding_window_pattern": 2,
               "rope_parameters": _GEMMA3_ROPE, "final_logit_softcapping": 4.0}),
}  # fmt: skip


def make_tiny(folder: Path, name: str, **overrides: Any) -> PreTrainedModel:
    """`make_model` of one line of TINY."""
    architecture, values = TINY[name]
    return make_model(folder, architecture, **{**values, **overrides})
