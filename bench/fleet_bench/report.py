"""A run's summary as a table for people and as JSON for programs. The JSON's fields are listed in docs/performance.md."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from fleet_bench.record import Record
from fleet_bench.stats import Spread, Summary

SCHEMA: Final = "radixfleet-bench-serve/1"


def table(s: Summary) -> str:
    """The summary, a few lines of aligned text."""
    cached = "" if s.cached_tokens is None else f", {s.cached_tokens} of them cached"
    lines = [
        f"requests      {s.completed} of {s.requests} ended well in {s.duration_s:.2f} s: {s.requests_per_s:.2f} a second",
        f"tokens        {s.prompt_tokens} in{cached}, {s.output_tokens} out (by {s.token_counts}): "
        f"{s.output_tokens_per_s:.1f} out a second, {s.total_tokens_per_s:.1f} in all",
    ]
    if s.goodput_per_s is not None:
        lines.append(f"goodput       {s.good} of {s.requests} within the limits: {s.goodput_per_s:.2f} a second")
    lines += ["", f"{'ms':24}" + "".join(f"{h:>11}" for h in ("mean", "p50", "p90", "p95", "p99"))]
    rows = [
        ("time to first token", s.ttft_ms), ("between tokens (ITL)", s.itl_ms), ("per token (TPOT)", s.tpot_ms),
        ("whole request (E2E)", s.e2e_ms), ("sent late by", s.send_delay_ms),
    ]  # fmt: skip
    lines += [f"{name:24}" + _row(values) for name, values in rows]
    if s.errors:
        lines += ["", *(f"error: {kind:20} {n}" for kind, n in s.errors.items())]
    return "\n".join(lines)


def _row(s: Spread | None) -> str:
    if s is None:
        return f"{'-':>11}" * 5
    return "".join(f"{v:>11.2f}" for v in (s.mean, s.p50, s.p90, s.p95, s.p99))


def as_json(summary: Summary, records: Sequence[Record], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Summary, settings and one entry a request. Times of requests are seconds from the first request's origin."""
    zero = min((r.origin_s for r in records), default=0.0)
    return {"schema": SCHEMA, "settings": dict(settings), "summary": asdict(summary), "requests": [_entry(r, zero) for r in records]}


def _entry(r: Record, zero: float) -> dict[str, Any]:
    def since(t: float | None) -> float | None:
        return None if t is None else round(t - zero, 6)

    return {
        "index": r.index, "session": r.session, "turn": r.turn, "origin_s": since(r.origin_s), "sent_s": since(r.sent_s),
        "first_byte_s": since(r.first_byte_s), "token_s": [since(t) for t in r.token_s], "end_s": since(r.end_s), "status": r.status,
        "error": r.error, "message": r.message, "prompt_tokens": r.prompt_tokens, "output_tokens": r.output_tokens, "cached_tokens": r.cached_tokens,
    }  # fmt: skip


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(json.dumps(value, indent=1) + "\n")
    temporary.replace(path)
