"""What is asked: sessions of one or more turns, the same for the same seed. Read by `load`; pure but for reading a file."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any

from fleet_bench.exchange import Prompt
from fleet_bench.words import Calibration, text

Message = dict[str, str]
TRACE_BLOCK = 512  # tokens that one hash id of a Mooncake trace stands for


class BadDataset(ValueError):
    """The data set cannot be used; the message says which line and what is needed."""


@dataclass(frozen=True, slots=True)
class Length:
    """A number of tokens, fixed or drawn evenly from low to high."""

    low: int
    high: int

    @classmethod
    def parse(cls, value: str) -> Length:
        """`128` or `64-256`. Raises ValueError."""
        low, dash, high = value.partition("-")
        made = cls(int(low), int(high) if dash else int(low))
        if not 1 <= made.low <= made.high:
            raise ValueError(f"{value!r}: a number of tokens or LOW-HIGH is needed, 1 or more")
        return made

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Turn:
    """One question. `content`: new text, token ids, or whole messages (of a file)."""

    content: str | list[int] | list[Message]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Session:
    """Turns that follow one another; each repeats what was said before, with the answers that came."""

    turns: Sequence[Turn]
    at_s: float | None = None  # of a trace: when its first turn is due, from the start


@dataclass(frozen=True, slots=True)
class Shape:
    """How the built-in data sets look. `vocabulary`: token ids are drawn from [first, last] for prompts of ids."""

    input: Length
    output: Length
    seed: int
    prompt_ids: bool = False
    vocabulary: tuple[int, int] = (100, 40_000)
    prefixes: int = 8
    prefix_tokens: int = 512
    turns: int = 4
    calibration: Calibration = field(default_factory=Calibration)


def _content(shape: Shape, rng: random.Random, tokens: int, *, with_fixed: bool = True) -> str | list[int]:
    if shape.prompt_ids:
        return [rng.randint(*shape.vocabulary) for _ in range(tokens)]
    return text(rng, shape.calibration.words(tokens, with_fixed=with_fixed))


def random_sessions(shape: Shape) -> Iterator[Session]:
    """Single questions with nothing in common."""
    rng = random.Random(f"random {shape.seed}")
    while True:
        yield Session([Turn(_content(shape, rng, shape.input.draw(rng)), shape.output.draw(rng))])


def shared_prefix_sessions(shape: Shape) -> Iterator[Session]:
    """Single questions, each behind one of `prefixes` common beginnings of `prefix_tokens`; `input` counts what is behind it."""
    rng = random.Random(f"shared prefix {shape.seed}")
    beginnings = [_content(shape, rng, shape.prefix_tokens, with_fixed=False) for _ in range(shape.prefixes)]
    while True:
        begin, own = rng.choice(beginnings), _content(shape, rng, shape.input.draw(rng))
        yield Session([Turn(_join(begin, own), shape.output.draw(rng))])


def _join(begin: str | list[int], end: str | list[int]) -> str | list[int]:
    if isinstance(begin, str) and isinstance(end, str):
        return f"{begin} {end}"
    assert isinstance(begin, list) and isinstance(end, list)
    return begin + end


def multi_turn_sessions(shape: Shape) -> Iterator[Session]:
    """Conversations of `turns` questions; a turn's prompt holds all before it."""
    rng = random.Random(f"multi-turn {shape.seed}")
    while True:
        first = [Turn(_content(shape, rng, shape.input.draw(rng)), shape.output.draw(rng))]
        later = [Turn(_content(shape, rng, shape.input.draw(rng), with_fixed=False), shape.output.draw(rng)) for _ in range(shape.turns - 1)]
        yield Session(first + later)


def file_sessions(path: Path, output: Length, seed: int) -> Iterator[Session]:
    """A JSON-lines file, over and over: each line has `prompt` (text or ids) or `messages`, and may have `max_tokens`. Raises BadDataset."""
    rng = random.Random(f"file {seed}")
    rows = []
    for n, row in _json_lines(path):
        content = row.get("messages", row.get("prompt"))
        if not isinstance(content, str | list) or not content:
            raise BadDataset(f"{path}, line {n}: 'prompt' (text or token ids) or 'messages' (a list) is needed")
        if row.get("max_tokens") is not None and (not isinstance(row["max_tokens"], int) or row["max_tokens"] < 1):
            raise BadDataset(f"{path}, line {n}: max_tokens is {row['max_tokens']!r}; a number of 1 or more is needed")
        rows.append((content, row.get("max_tokens")))
    for _ in count():
        for content, limit in rows:
            yield Session([Turn(content, limit or output.draw(rng))])


def trace_sessions(path: Path, shape: Shape, speed: float, block: int = TRACE_BLOCK) -> list[Session]:
    """A Mooncake trace: `timestamp` (ms), `input_length`, `output_length` and maybe `hash_ids`, one id for each block of tokens.

    Equal ids give equal blocks, so that requests share the prefixes they shared when they were recorded. Raises BadDataset.
    """
    rows = []
    for n, row in _json_lines(path):
        wanted = ("timestamp", "input_length", "output_length")
        if bad := [k for k in wanted if not isinstance(row.get(k), int | float) or row[k] < 0]:
            raise BadDataset(f"{path}, line {n}: {', '.join(bad)} must be a number of 0 or more")
        ids = row.get("hash_ids")
        if ids is not None and (not isinstance(ids, list) or len(ids) * block < row["input_length"] - block):
            raise BadDataset(
                f"{path}, line {n}: {len(ids) if isinstance(ids, list) else ids!r} hash_ids do not cover input_length in blocks of {block}"
            )
        rows.append(row)
    rows.sort(key=lambda r: float(r["timestamp"]))
    first = float(rows[0]["timestamp"])
    return [_trace_session(shape, row, n, (float(row["timestamp"]) - first) / 1000 / speed, block) for n, row in enumerate(rows)]


def _trace_session(shape: Shape, row: dict[str, Any], n: int, at_s: float, block: int) -> Session:
    length = max(1, int(row["input_length"]))
    ids = row.get("hash_ids") or []
    content: str | list[int] = [] if shape.prompt_ids else ""
    for place, hash_id in enumerate(ids):
        tokens = min(block, length - place * block)
        if tokens <= 0:
            break
        rng = random.Random(f"block {shape.seed} {hash_id}")
        piece = _content(shape, rng, block, with_fixed=False)
        piece = piece[:tokens] if isinstance(piece, list) else " ".join(piece.split(" ")[: shape.calibration.words(tokens, with_fixed=False)])
        content = _join(content, piece) if content else piece
    if (left := length - len(ids) * block) > 0:
        rest = _content(shape, random.Random(f"trace {shape.seed} {n}"), left, with_fixed=not ids)
        content = _join(content, rest) if content else rest
    return Session([Turn(content, max(1, int(row["output_length"])))], at_s=at_s)


def _json_lines(path: Path) -> list[tuple[int, dict[str, Any]]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise BadDataset(f"{path} cannot be read: {e}") from e
    out = []
    for n, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as e:
            raise BadDataset(f"{path}, line {n} is not JSON: {e}") from e
        if not isinstance(row, dict):
            raise BadDataset(f"{path}, line {n}: a JSON object is needed")
        out.append((n, row))
    if not out:
        raise BadDataset(f"{path} holds no request")
    return out


def limit_requests(sessions: Iterator[Session], requests: int) -> Iterator[Session]:
    """Sessions of that many turns in all; the last one is cut."""
    left = requests
    for session in sessions:
        if left <= 0:
            return
        turns = list(islice(session.turns, left))
        left -= len(turns)
        yield Session(turns, session.at_s)


class History:
    """A session's words so far, and the prompt of its next turn."""

    def __init__(self, *, chat: bool) -> None:
        self._chat = chat
        self._messages: list[Message] = []
        self._text = ""

    def prompt(self, turn: Turn) -> Prompt:
        """The next prompt: all before it and the new question. Raises BadDataset when the endpoint cannot take it."""
        content = turn.content
        if self._chat:
            if isinstance(content, str):
                self._messages.append({"role": "user", "content": content})
            elif content and isinstance(content[0], dict):
                self._messages += [m for m in content if isinstance(m, dict)]
            else:
                raise BadDataset("prompts of token ids need --endpoint completions")
            return list(self._messages)
        if isinstance(content, str):
            self._text += f"\n{content}" if self._text else content
            return self._text
        if content and isinstance(content[0], dict):
            raise BadDataset("a data set with messages needs --endpoint chat")
        return [t for t in content if isinstance(t, int)]

    def answered(self, text: str) -> None:
        """Takes the answer to the last prompt."""
        if self._chat:
            self._messages.append({"role": "assistant", "content": text})
        else:
            self._text += text
