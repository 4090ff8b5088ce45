"""Request logs: one JSON object per line, with an arrival time and, if known, the prompt's blocks.

`timestamp` (milliseconds) or `time` (seconds); `input_length`, `output_length` in tokens; `hash_ids`: one integer per 512-token block
of the prompt, each naming the whole prefix up to and including its block. Without `hash_ids` no two prompts share anything.
This is the format of the Mooncake traces (https://github.com/kvcache-ai/Mooncake, FAST'25 release). A small made-up trace is built in.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

BLOCK_TOKENS: Final = 512
MAX_TOKENS: Final = 10_000_000


class BadTrace(ValueError):
    """The log cannot be replayed; the message says which line and why."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a log."""

    at: float  # seconds
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]


def read(path: Path) -> list[Request]:
    """Reads a log, sorted by time. Raises BadTrace or OSError."""
    with path.open(encoding="utf-8") as lines:
        return parse(lines, str(path))


def parse(lines: Iterable[str], name: str) -> list[Request]:
    """Raises BadTrace with the line's number."""
    out: list[Request] = []
    own = -1  # names of blocks that nobody shares
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found = _request(json.loads(line), own)
        except (ValueError, TypeError, RecursionError) as e:
            raise BadTrace(f"{name} line {number}: {e}") from None
        own -= len(found.blocks)
        out.append(found)
    if not out:
        raise BadTrace(f"{name} has no requests")
    return sorted(out, key=lambda r: r.at)


def _request(fields: Any, own: int) -> Request:
    if not isinstance(fields, dict):
        raise ValueError("a JSON object is needed")
    at = fields["timestamp"] / 1000 if "timestamp" in fields else fields.get("time")
    if not isinstance(at, int | float) or isinstance(at, bool) or not 0 <= at < 1e12:
        raise ValueError(f"timestamp (ms) or time (s) has to be a number from 0, not {at!r}")
    tokens = fields.get("input_length")
    blocks = fields.get("hash_ids")
    if blocks is not None and (not isinstance(blocks, list) or not all(type(b) is int and 0 <= b < 2**64 for b in blocks)):
        raise ValueError("hash_ids has to be a list of integers from 0 to 2**64 - 1")
    if tokens is None and blocks:
        tokens = len(blocks) * BLOCK_TOKENS
    if type(tokens) is not int or not 0 < tokens <= MAX_TOKENS:
        raise ValueError(f"input_length has to be a number of tokens from 1 to {MAX_TOKENS}, not {tokens!r}")
    answer = fields.get("output_length", 1)
    if type(answer) is not int or not 0 <= answer <= MAX_TOKENS:
        raise ValueError(f"output_length has to be a number of tokens from 0 to {MAX_TOKENS}, not {answer!r}")
    needed = -(-tokens // BLOCK_TOKENS)
    if blocks is None:
        blocks = [own - n for n in range(needed)]
    elif len(blocks) != needed:
        raise ValueError(f"{len(blocks)} hash_ids do not fit {tokens} tokens: {needed} blocks of {BLOCK_TOKENS} are needed")
    return Request(float(at), tokens, max(1, answer), tuple(blocks))


def scaled(requests: list[Request], scale: float, *, spread_s: float = 0.0, seed: int = 7) -> list[Request]:
    """Compresses time by `scale`; before that each request moves by a uniform 0..spread_s (logs with coarse time stamps)."""
    draw = random.Random(seed).uniform
    moved = [replace(r, at=(r.at + (draw(0.0, spread_s) if spread_s else 0.0)) / scale) for r in requests]
    return sorted(moved, key=lambda r: r.at)


def built_in(*, sessions: int = 260, seconds: float = 400.0, seed: int = 11) -> list[Request]:
    """Made-up chats and agents: some long system prompts shared by many sessions, several turns each, pauses between turns."""
    rng = random.Random(seed)
    out: list[Request] = []
    fresh = 1_000
    for _ in range(sessions):
        system = rng.choices(range(6), weights=(30, 20, 15, 10, 5, 5))[0]
        blocks = [system * 100 + n for n in range((4, 8, 12, 16, 24, 32)[system])]
        at = rng.uniform(0.0, seconds)
        for _ in range(1 + min(9, int(rng.expovariate(1 / 3.5)))):
            added = 1 + min(40, int(rng.expovariate(1 / 6.0)))
            blocks = [*blocks, *range(fresh, fresh + added)]
            fresh += added
            answer = 20 + min(900, int(rng.expovariate(1 / 220.0)))
            tokens = len(blocks) * BLOCK_TOKENS - rng.randrange(BLOCK_TOKENS)
            out.append(Request(at, tokens, answer, tuple(blocks)))
            at += answer * 0.04 + rng.expovariate(1 / 12.0)
    return sorted(out, key=lambda r: r.at)


def reuse_limit(requests: list[Request]) -> float:
    """Share of prompt tokens that one cache without bounds would hold."""
    seen: set[int] = set()
    hit = total = 0
    for r in requests:
        known = 0
        for block in r.blocks:
            if block not in seen:
                break
            known += 1
        hit += min(known * BLOCK_TOKENS, r.input_tokens)
        total += r.input_tokens
        seen.update(r.blocks)
    return hit / total
