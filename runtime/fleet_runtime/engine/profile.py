"""What an executor says of its speed, from four measured steps. Pure; called by the executors that compute something."""

from __future__ import annotations

from fleet_contract.worker import Profile


def profile_of(*, chunk: int, rows: int, context: int, chunk_s: float, one_s: float, rows_s: float, context_s: float) -> Profile:
    """Speed from four measured steps: a chunk, one decode row, several, and one with a long context.

    Other processes disturb such short runs, so what a row adds is kept under half of a step of one row, and what 512 tokens of context add
    under a step of one row; both are far above what an executor really needs.
    """
    per_row_s = min(max(0.0, (rows_s - one_s) / max(1, rows - 1)), one_s / 2)
    return Profile(
        prefill_tokens_per_s=chunk / chunk_s,
        step_base_s=one_s - per_row_s,
        step_per_row_s=per_row_s,
        step_per_ctx_token_s=min(max(0.0, (context_s - one_s) / max(1, context - 1)), one_s / 512),
    )
