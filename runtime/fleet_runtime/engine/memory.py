"""What fits in the memory that this process may use. Called before a model is loaded."""

from __future__ import annotations

from fleet_contract.names import PAGE_SIZE
from fleet_runtime.errors import StartError
from fleet_runtime.models.spec import ModelSpec


def pages_in(memory_bytes: int, page_bytes: int, context_length: int) -> int:
    """How many pages fit. Raises StartError(OutOfMemory) when they hold less than one full context."""
    count, least = memory_bytes // page_bytes, -(-context_length // PAGE_SIZE)
    if count < least:
        raise StartError(
            "OutOfMemory",
            f"--kv-cache-memory is {memory_bytes} bytes and holds {count * PAGE_SIZE} tokens, one context of {context_length} tokens "
            f"(--context-length) needs {least * page_bytes} bytes; raise the first or lower the second",
        )
    return count


def step_bytes(spec: ModelSpec, *, step_tokens: int, rows: int, context: int, itemsize: int) -> int:
    """What the arrays of the largest step surely take: one layer's activations of a full chunk, the logits of all rows, and the keys, values and
    mask of one whole context. Args: itemsize: bytes of a number."""
    heads = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    activations = step_tokens * (2 * spec.hidden_size + heads + 2 * spec.intermediate_size)
    attention = context * 2 * spec.kv_heads * spec.head_dim + min(step_tokens, context) * context
    return itemsize * (activations + attention) + 4 * rows * spec.vocab_size


def check_memory(weights_bytes: int, kv_bytes: int, limit: int | None, *, step: int = 0) -> None:
    """Refuses what can never fit, before the kernel kills us for it. Args: step: of `step_bytes`. Raises StartError(OutOfMemory)."""
    if limit is not None and weights_bytes + kv_bytes + step > limit:
        scratch = f" and {step >> 20} MiB for a step (--max-step-tokens, --max-rows, --context-length)" if step else ""
        raise StartError(
            "OutOfMemory",
            f"weights of {weights_bytes >> 20} MiB, a KV cache of {kv_bytes >> 20} MiB (--kv-cache-memory){scratch} need more than the "
            f"{limit >> 20} MiB that this process may use; lower --kv-cache-memory or raise the memory limit",
        )
