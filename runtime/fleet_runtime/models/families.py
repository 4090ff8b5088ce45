"""From config.json to `ModelSpec`, one small function per family, and from our names of weights to the checkpoint's. No torch.

Called by `registry` (torch), by the native executor and by what checks memory. Field names and defaults are those of Hugging Face's
config.json, in its older spelling (rope_theta, rope_scaling) and the one of transformers 5 (rope_parameters). Sources: Touvron et al.,
"LLaMA" and "Llama 2"; Jiang et al., "Mistral 7B" (sliding window); the Qwen2 and Qwen3 technical reports (bias of q, k, v; norm of q and k);
the Gemma, Gemma 2 and Gemma 3 reports (norm weights around 0, scaled embedding, soft caps, norms after each branch, local and global layers).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

from fleet_runtime.errors import StartError
from fleet_runtime.models.config_fields import Fields
from fleet_runtime.models.rope import read_rope
from fleet_runtime.models.spec import LayerSpec, ModelSpec

_MOST_LAYERS: Final = 4096
_MOST_HEADS: Final = 4096
_MOST_HEAD_DIM: Final = 4096
_ACTIVATIONS: Final[dict[str, Literal["silu", "gelu_tanh"]]] = {
    "silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
}  # fmt: skip
_FULL, _SLIDING = "full_attention", "sliding_attention"


def architecture_of(raw_config: Mapping[str, Any]) -> str | None:
    """The first of `architectures`; None if there is none."""
    names = raw_config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    return name if isinstance(name, str) else None


def is_known(raw_config: Mapping[str, Any]) -> bool:
    """Whether `spec_of` knows the architecture; everything else about the config may still be wrong."""
    return architecture_of(raw_config) in FAMILIES


def spec_of(folder: Path, raw_config: Mapping[str, Any]) -> ModelSpec:
    """The description of a model folder. Raises StartError(ModelInvalid) that names every wrong or unsupported field."""
    where = folder / "config.json"
    family = FAMILIES.get(architecture_of(raw_config) or "")
    if family is None:
        raise StartError("ModelInvalid", f"{where}: architectures is {raw_config.get('architectures')!r}; supported: {', '.join(FAMILIES)}")
    fields = Fields(raw_config)
    if quantized := raw_config.get("quantization_config"):
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        fields.fault(f"quantization_config is set ({method}): weights must be float32, float16 or bfloat16; take the model that is not quantised")
    spec = family(fields)
    if fields.faults:
        raise StartError("ModelInvalid", f"{where}: {'; '.join(dict.fromkeys(fields.faults))}")
    return spec


def checkpoint_names(spec: ModelSpec) -> dict[str, str]:
    """Our name of each weight -> the checkpoint's. `head` is absent when it is the embedding."""
    names = {"embedding": "model.embed_tokens.weight", "final_norm": "model.norm.weight"}
    if not spec.tied:
        names["head"] = "lm_head.weight"
    layer = {
        "input_norm": "input_layernorm.weight",
        "mlp_norm": "pre_feedforward_layernorm.weight" if spec.post_norms else "post_attention_layernorm.weight",
        **{n: f"self_attn.{n}_proj.weight" for n in "qkvo"},
        **{n: f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")},
    }
    if spec.qkv_bias:
        layer |= {f"{n}_bias": f"self_attn.{n}_proj.bias" for n in "qkv"}
    if spec.o_bias:
        layer["o_bias"] = "self_attn.o_proj.bias"
    if spec.mlp_bias:
        layer |= {f"{n}_bias": f"mlp.{n}_proj.bias" for n in ("gate", "up", "down")}
    if spec.qk_norm:
        layer |= {f"{n}_norm": f"self_attn.{n}_norm.weight" for n in "qk"}
    if spec.post_norms:
        layer |= {"attention_post_norm": "post_attention_layernorm.weight", "mlp_post_norm": "post_feedforward_layernorm.weight"}
    names |= {f"{i}.{ours}": f"model.layers.{i}.{theirs}" for i in range(len(spec.layers)) for ours, theirs in layer.items()}
    return names


def _llama(fields: Fields) -> ModelSpec:
    bias = fields.flag("attention_bias")
    return _decoder(fields, "llama", max_positions=2048, qkv_bias=bias, o_bias=bias, mlp_bias=fields.flag("mlp_bias"))


def _mistral(fields: Fields) -> ModelSpec:
    return _decoder(fields, "mistral", kv_heads=8, max_positions=4096 * 32, window=_window(fields), is_sliding=lambda _layer: True)


def _qwen2(fields: Fields) -> ModelSpec:
    return _qwen_decoder(fields, "qwen2", qkv_bias=True)


def _qwen3(fields: Fields) -> ModelSpec:
    bias = fields.flag("attention_bias")
    return _qwen_decoder(fields, "qwen3", head_dim=128, qkv_bias=bias, o_bias=bias, qk_norm=True)


def _gemma(fields: Fields) -> ModelSpec:
    return _gemma_decoder(fields, "gemma", kv_heads=16, activation="hidden_act", max_positions=8192)


def _gemma2(fields: Fields) -> ModelSpec:
    return _gemma_decoder(
        fields, "gemma2", kv_heads=4, max_positions=8192, window=_window(fields), typed=True,
        is_sliding=lambda i: (i + 1) % 2 != 0,
        post_norms=True,
        attention_scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        attention_softcap=_softcap(fields, "attn_logit_softcapping", 50.0),
        logit_softcap=_softcap(fields, "final_logit_softcapping", 30.0),
    )  # fmt: skip


def _gemma3(fields: Fields) -> ModelSpec:
    pattern = fields.integer("sliding_window_pattern", 6)
    return _gemma_decoder(
        fields, "gemma3", kv_heads=4, max_positions=131_072, window=_window(fields), typed=True,
        is_sliding=lambda i: (i + 1) % pattern != 0,
        two_ropes=True,
        post_norms=True,
        qk_norm=True,
        attention_scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        logit_softcap=_softcap(fields, "final_logit_softcapping", 0.0),
    )  # fmt: skip


FAMILIES: Final[dict[str, Callable[[Fields], ModelSpec]]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "GemmaForCausalLM": _gemma,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
}


def _qwen_decoder(fields: Fields, family: str, **more: Any) -> ModelSpec:
    """Layers from `max_window_layers` on have a window, if `use_sliding_window` is set."""
    first = fields.raw.get("max_window_layers", 28)
    if not isinstance(first, int) or isinstance(first, bool) or first < 0:
        fields.fault(f"max_window_layers is {first!r}, must be a whole number from 0")
        first = 0
    window = _window(fields) if fields.flag("use_sliding_window") else 0
    return _decoder(
        fields, family, kv_heads=32, max_positions=32768, window=window, typed=True, is_sliding=lambda i: window > 0 and i >= first, **more
    )


def _gemma_decoder(fields: Fields, family: str, *, kv_heads: int, activation: str = "hidden_activation", **more: Any) -> ModelSpec:
    if fields.flag("use_bidirectional_attention"):
        fields.fault("use_bidirectional_attention is true; such a model is no decoder")
    bias = fields.flag("attention_bias")
    if activation == "hidden_act" and fields.raw.get("hidden_act") == "gelu":  # the first releases say gelu and mean the tanh form
        fields = Fields({**fields.raw, "hidden_act": "gelu_pytorch_tanh"}, faults=fields.faults)
    return _decoder(
        fields, family, kv_heads=kv_heads, head_dim=256, activation=activation, default_activation="gelu_pytorch_tanh", tied=True,
        qkv_bias=bias, o_bias=bias, norm_offset=1.0, scaled_embedding=True, **more,
    )  # fmt: skip


def _decoder(
    fields: Fields, family: str, *, max_positions: int, kv_heads: int | None = None, head_dim: int | None = None,
    window: int = 0, is_sliding: Callable[[int], bool] = lambda _layer: False, typed: bool = False, two_ropes: bool = False,
    activation: str = "hidden_act", default_activation: str = "silu", tied: bool = False,
    scaled_embedding: bool = False, attention_scale: float | None = None, **more: Any,
) -> ModelSpec:  # fmt: skip
    """What all families share.

    Args: kv_heads, head_dim, max_positions: the family's values where config.json has none. window: of sliding layers, 0: none. is_sliding: of
    a layer's number, where there is no `layer_types`; typed: whether the family reads that field. two_ropes: sliding layers have their own.
    """
    heads, hidden = fields.integer("num_attention_heads", most=_MOST_HEADS), fields.integer("hidden_size")
    if "num_key_value_heads" in fields.raw and fields.raw["num_key_value_heads"] is None:
        kv_heads = heads
    groups = fields.integer("num_key_value_heads", kv_heads or heads, most=_MOST_HEADS)
    dim = fields.integer("head_dim", head_dim or max(1, hidden // heads), most=_MOST_HEAD_DIM)
    if heads % groups:
        fields.fault(f"num_key_value_heads is {groups}, must divide num_attention_heads {heads}")
    if dim % 2:
        fields.fault(f"head_dim is {dim}, must be even")
    sliding = _sliding_layers(fields, window, is_sliding, typed=typed)
    positions = fields.integer("max_position_embeddings", max_positions)
    ropes, reach = _ropes(fields, dim, positions, two=two_ropes)
    return ModelSpec(
        family=family,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        heads=heads,
        kv_heads=groups,
        head_dim=dim,
        max_context=reach,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        layers=tuple(LayerSpec(window=window if s else 0, rope=1 if two_ropes and s else 0) for s in sliding),
        ropes=ropes,
        attention_scale=attention_scale or dim**-0.5,
        tied=fields.flag("tie_word_embeddings", tied),
        embedding_scale=hidden**0.5 if scaled_embedding else 1.0,
        activation=_ACTIVATIONS[fields.choice(activation, default_activation, list(_ACTIVATIONS))],
        **more,
    )


def _sliding_layers(fields: Fields, window: int, is_sliding: Callable[[int], bool], *, typed: bool) -> list[bool]:
    """Which layers have the window: by `layer_types`, else by the family's pattern."""
    count = fields.integer("num_hidden_layers", most=_MOST_LAYERS)
    pattern = [is_sliding(i) for i in range(count)]
    types = fields.raw.get("layer_types")
    if types is None:
        return pattern
    if not isinstance(types, list) or len(types) != count or not all(t in (_FULL, _SLIDING) for t in types):
        fields.fault(f"layer_types must be a list of {count} (num_hidden_layers) words, each {_FULL!r} or {_SLIDING!r}")
        return pattern
    found = [t == _SLIDING for t in types]
    if not typed and len(set(found)) > 1:
        fields.fault("layer_types differ; in this architecture all layers are alike")
    elif typed and any(found) and not window:
        fields.fault(f"layer_types has {_SLIDING!r}, but sliding_window is null or use_sliding_window is not true")
    return found if typed else pattern


def _ropes(fields: Fields, head_dim: int, max_positions: int, *, two: bool) -> tuple[tuple[Any, ...], int]:
    """The rope of all layers; with `two`, that of full layers and that of sliding ones. And the longest context."""
    name = "rope_scaling" if fields.raw.get("rope_scaling") else "rope_parameters"
    theta = fields.number("rope_theta", 1_000_000.0 if two else 10_000.0)
    values = fields.within(name)
    if not two:
        rope, reach = read_rope(values, fields, head_dim=head_dim, theta=theta, max_positions=max_positions)
        return (rope,), reach
    nested = _FULL in values.raw or _SLIDING in values.raw
    full = values.within(_FULL) if nested else values
    sliding = values.within(_SLIDING) if nested else Fields({})
    local = fields.number("rope_local_base_freq", 10_000.0)
    # Gemma 3 states the stretched context: a linear factor does not lengthen it once more.
    first, _ = read_rope(full, fields, head_dim=head_dim, theta=theta, max_positions=max_positions)
    second, _ = read_rope(sliding, Fields({}), head_dim=head_dim, theta=local, max_positions=max_positions)
    return (first, second), max_positions


def _window(fields: Fields) -> int:
    """`sliding_window`, by default 4096; 0 when it is null."""
    return 0 if fields.raw.get("sliding_window", 4096) is None else fields.integer("sliding_window", 4096)


def _softcap(fields: Fields, name: str, default: float) -> float:
    """A soft cap; null: none."""
    if name in fields.raw and fields.raw[name] is None:
        return 0.0
    return fields.number(name) if name in fields.raw else default
