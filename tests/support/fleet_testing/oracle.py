"""The judge of greedy answers: transformers in float32 on the same weights, teacher-forced.

Two float32 programs that sum in another order differ in the last digits of a logit, so a greedy answer is judged only where the oracle's
best two logits are further apart than `MARGIN`; elsewhere either token may be right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

# Logits. Our float32 and transformers' differ by about 3e-5 on the bundled model (a test holds it under a quarter of this).
MARGIN = 1e-3
# With weights and inputs in bfloat16 (the native executor) logits of the bundled model differ by about 0.3, root mean square.
BFLOAT16_MARGIN = 1.0


@dataclass(frozen=True)
class Agreement:
    """What a comparison found. compared: positions outside the margin; within_margin: positions left out."""

    compared: int
    within_margin: int
    mismatches: list[int]  # indices into the answer

    @property
    def share_compared(self) -> float:
        """Of all positions."""
        return self.compared / max(1, self.compared + self.within_margin)


@lru_cache(maxsize=2)
def _model(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def oracle_logits(folder: Path, ids: Sequence[int]) -> torch.Tensor:
    """[len(ids), vocab] float32: at each position the logits of the next token."""
    return _model(folder)(torch.tensor([list(ids)])).logits[0]


def teacher_forced(folder: Path, prompt_ids: Sequence[int], answer_ids: Sequence[int], *, margin: float = MARGIN) -> Agreement:
    """Compares each token of a greedy answer with the oracle's argmax after the prompt and the answer so far."""
    logits = oracle_logits(folder, [*prompt_ids, *answer_ids])[len(prompt_ids) - 1 : -1]
    top = logits.topk(2, dim=-1)
    decided = (top.values[:, 0] - top.values[:, 1] > margin).tolist()
    right = (top.indices[:, 0] == torch.tensor(list(answer_ids))).tolist()
    mismatches = [i for i, (d, r) in enumerate(zip(decided, right, strict=True)) if d and not r]
    return Agreement(compared=sum(decided), within_margin=len(decided) - sum(decided), mismatches=mismatches)
