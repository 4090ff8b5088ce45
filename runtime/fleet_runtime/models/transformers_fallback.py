"""Any other causal LM of `transformers`: its own modules, with our paged attention in place of its attention. Chosen by `registry` only.

transformers lets attention functions be registered by name (AttentionInterface); ours finds the step that runs in a context variable. Rows
are flattened into one sequence with their own positions, which is right only if tokens meet in attention alone. So a model is tried when it is
loaded: two texts in one step, one of them in two chunks, against the model's own attention; and each layer must have come through ours,
with one shape and a window where its config says so. What fails this (state-space and hybrid models, ALiBi, latent attention, attention sinks,
encoder-decoders) is refused with the cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from fleet_runtime.errors import StartError
from fleet_runtime.models.base import Attention, AttentionKind, KvShape

_NAME: Final = "radixfleet_paged"
_TRIAL: Final = (11, 7, 6)  # tokens: the first text; the first and second chunk of the other
# Of the largest logit: float32 sums in another order, and what bfloat16 and float16 round.
_TOLERANCE: Final = {torch.float32: 1e-3, torch.bfloat16: 0.08, torch.float16: 0.02}
# What model code raises for configurations that it does not take.
_MODEL_ERRORS: Final = (ValueError, KeyError, TypeError, AttributeError, IndexError, OSError, ImportError, RuntimeError, NotImplementedError)


class _Refused(ValueError):
    """The model's attention is not one that we can page; says why."""


@dataclass(slots=True)
class _Step:
    """What the attention function needs of the running step. known: [T], False: a token whose keys and values become NaN."""

    attention: Attention
    known: torch.Tensor
    layers: list[int] = field(default_factory=list)


_running: ContextVar[_Step] = ContextVar("running_step")


def _paged(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None,
    scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None, **others: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """The registered function. query: [1, heads, T, D]; key, value: [1, kv_heads, T, D]. Returns [1, T, heads, D]."""
    step = _running.get()
    if attention_mask is not None:
        raise _Refused("it brings an attention mask of its own")
    if others.get("s_aux") is not None:
        raise _Refused("it has attention sinks")
    if key.shape != value.shape:
        raise _Refused(f"its keys have {key.shape[-1]} numbers a head, its values {value.shape[-1]}")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    kv = torch.cat((k, v), dim=1).masked_fill(~step.known[:, None, None], float("nan"))
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    step.layers.append(layer)
    kind = AttentionKind(scale=scaling or q.shape[-1] ** -0.5, window=sliding_window or 0, softcap=softcap or 0.0)
    return step.attention.attend(layer, q, kv, kind).view(1, *q.shape), None


AttentionInterface.register(_NAME, _paged)


class _States:
    """What a decoder returns, with nothing but the hidden states in it."""

    def __init__(self, last_hidden_state: torch.Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getitem__(self, _first: int) -> torch.Tensor:
        return self.last_hidden_state

    def __getattr__(self, _name: str) -> None:
        return None  # attentions, router logits and the like: a family's own class has more of them than any other


class _Given(torch.nn.Module):
    """Stands for the decoder when only what comes after it is wanted: returns the hidden states that it is given."""

    @property
    def decoder(self) -> _Given:
        """What families with an outer module (OPT) call."""
        return self

    def forward(self, *_args: Any, inputs_embeds: torch.Tensor, **_: Any) -> _States:
        return _States(inputs_embeds)


class TransformersLm:
    """A loaded model; see `CausalLm`. Owns its weights."""

    def __init__(self, model: Any, *, kv_shape: KvShape, max_context: int) -> None:
        """Args: model: of AutoModelForCausalLM, taken over: its decoder is taken out."""
        self._config = model.config
        self._decoder = model.base_model
        setattr(model, model.base_model_prefix, _Given())
        self._after = model  # the head and what a family does to logits
        self.kv_shape = kv_shape
        self._max_context = max_context

    @property
    def vocab_size(self) -> int:
        """See CausalLm."""
        return int(self._config.vocab_size)

    @property
    def hidden_size(self) -> int:
        """See CausalLm."""
        return int(self._config.hidden_size)

    @property
    def max_context(self) -> int:
        """See CausalLm."""
        return self._max_context

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        """See CausalLm.forward; the final norm is in it."""
        known = (token_ids >= 0) & (token_ids < self.vocab_size)
        with _step(_Step(attention, known)) as step:
            out = self._decoder(input_ids=(token_ids * known)[None], position_ids=positions[None], use_cache=False)
        if step.layers != list(range(self.kv_shape.layers)):
            raise _Refused(f"{len(step.layers)} calls of attention for {self.kv_shape.layers} layers")
        hidden: torch.Tensor = out.last_hidden_state[0].masked_fill(~known[:, None], float("nan"))
        return hidden

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """See CausalLm.normed."""
        return hidden

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """See CausalLm.logits."""
        found: torch.Tensor = self._after(inputs_embeds=normed[None], use_cache=False).logits[0]
        return found.float()


@contextmanager
def _step(step: _Step) -> Iterator[_Step]:
    token = _running.set(step)
    try:
        yield step
    finally:
        _running.reset(token)


def load(folder: Path, *, dtype: torch.dtype, progress: Callable[[int, str], None]) -> TransformersLm:
    """Loads a folder with transformers and tries it. Raises StartError(ModelInvalid)."""
    try:
        progress(1, "loading weights with transformers")
        disable_progress_bar()  # type: ignore[no-untyped-call]
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager", local_files_only=True, trust_remote_code=False
        )
        return _tried(model.eval(), dtype)
    except _MODEL_ERRORS as e:
        if isinstance(e, RuntimeError) and "memory" in str(e):
            raise
        cause = " ".join(str(e).split())[:400] or type(e).__name__
        raise StartError("ModelInvalid", f"{folder}: this model of transformers cannot be served: {cause}") from e


@torch.inference_mode()
def _tried(model: Any, dtype: torch.dtype) -> TransformersLm:
    """The model with our attention, if its logits are those that it has with its own. Raises _Refused, and what model code raises."""
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise _Refused("it is an encoder-decoder")
    if model.base_model is model:
        raise _Refused("its decoder is not a module of its own")
    first, chunk, rest = _TRIAL
    ids = torch.arange(first + chunk + rest) * 7919 % int(config.vocab_size)
    texts = ids[:first], ids[first:]
    expected = torch.cat([model(input_ids=t[None], use_cache=False).logits[0].float() for t in texts])
    model.set_attn_implementation(_NAME)
    dense = _Dense()
    lm = TransformersLm(model, kv_shape=KvShape(int(config.num_hidden_layers), 1, 1), max_context=_max_context(config))
    hidden = [
        lm.forward(ids[: first + chunk], torch.cat((torch.arange(first), torch.arange(chunk))), dense.rows([("a", first), ("b", chunk)])),
        lm.forward(ids[first + chunk :], torch.arange(chunk, chunk + rest), dense.rows([("b", rest)])),
    ]
    got = lm.logits(lm.normed(torch.cat(hidden)))
    difference, scale = float((got - expected).abs().max()), float(expected.abs().max())
    if not difference <= _TOLERANCE[dtype] * max(scale, 1e-6):
        raise _Refused(f"its logits differ by {difference:.2g} (of {scale:.2g}) from those with its own attention: tokens meet elsewhere, too")
    _check_windows(config, dense.kinds)
    if len(dense.shapes) != 1:
        raise _Refused(f"its layers keep different numbers of keys: {sorted(dense.shapes)}")
    kv_heads, head_dim = dense.shapes.pop()
    lm.kv_shape = KvShape(int(config.num_hidden_layers), kv_heads, head_dim)
    return lm


def _max_context(config: Any) -> int:
    """Longest context. longrope has other frequencies for long texts, which would change a text's past: only its short ones are served."""
    longest = int(config.max_position_embeddings)
    rope = getattr(config, "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings") if rope.get("rope_type") == "longrope" else None
    return min(longest, int(original)) if original else longest


def _check_windows(config: Any, kinds: dict[int, AttentionKind]) -> None:
    """Short texts do not show a window that is missing: each layer must have passed the one of its config."""
    types = getattr(config, "layer_types", None) or []
    for layer, kind in enumerate(types):
        if kind not in ("full_attention", "sliding_attention"):
            raise _Refused(f"layer {layer} is {kind!r}")
        if (kind == "sliding_attention") != (kinds[layer].window > 0):
            raise _Refused(f"layer {layer} is {kind!r} and attends with a window of {kinds[layer].window}")
    sliding = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if not types and sliding and not all(kind.window == sliding for kind in kinds.values()):
        raise _Refused(f"sliding_window is {sliding}, its attention does not pass it on")


class _Dense:
    """Attention over rows kept in lists: what a model is tried with."""

    def __init__(self) -> None:
        self.kinds: dict[int, AttentionKind] = {}
        self.shapes: set[tuple[int, int]] = set()  # KV heads, head size
        self._kept: dict[tuple[str, int], torch.Tensor] = {}
        self._rows: list[tuple[str, int]] = []

    def rows(self, rows: list[tuple[str, int]]) -> _Dense:
        """The next step: names of its rows and their new tokens."""
        self._rows = rows
        return self

    def attend(self, layer: int, q: torch.Tensor, kv: torch.Tensor, kind: AttentionKind) -> torch.Tensor:
        """See models.base.Attention.attend."""
        self.kinds[layer] = kind
        self.shapes.add((kv.shape[1] // 2, kv.shape[2]))
        out, start = [], 0
        for name, count in self._rows:
            new = kv[start : start + count]
            all_kv = self._kept[name, layer] = torch.cat([self._kept[name, layer], new]) if (name, layer) in self._kept else new
            out.append(_dense(q[start : start + count], all_kv, kind))
            start += count
        return torch.cat(out)


def _dense(q: torch.Tensor, kv: torch.Tensor, kind: AttentionKind) -> torch.Tensor:
    """q: [N, heads, D]; kv: [S, 2 * kv_heads, D], the last N positions are q's. Returns [N, heads * D]."""
    k, v = (x.transpose(0, 1).repeat_interleave(q.shape[1] // x.shape[1], dim=0) for x in kv.chunk(2, dim=1))
    scores = (q.transpose(0, 1) @ k.transpose(1, 2)) * kind.scale
    if kind.softcap:
        scores = torch.tanh(scores / kind.softcap) * kind.softcap
    last = torch.arange(len(kv) - len(q), len(kv))[:, None]
    seen = torch.arange(len(kv)) <= last
    if kind.window:
        seen &= torch.arange(len(kv)) > last - kind.window
    weights = F.softmax(scores.float().masked_fill(~seen, float("-inf")), dim=-1).to(v.dtype)
    return (weights @ v).transpose(0, 1).reshape(len(q), -1)
