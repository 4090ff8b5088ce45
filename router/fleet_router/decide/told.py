"""Which keys of a prompt routers tell one another: few, and at depths where a reader finds them again.

A prompt's keys name its prefixes. A pick tells at most MAX_KEYS of those that its worker did not hold yet: the last one, those before it at
depths of one ratio, and one of what was held. Only depths of GRID (numbers of at most five significant bits) are told, so that a reader knows
which keys of another prompt to look for. What a reader credits is short of the truth by the gap to the next told depth.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

MAX_KEYS: Final = 8
_BITS: Final = 5
_MAX_DEPTH_BITS: Final = 18

GRID: Final = tuple(sorted({m << shift for shift in range(_MAX_DEPTH_BITS - _BITS + 1) for m in range(1, 1 << _BITS)}))  # depths in blocks
_IN_GRID: Final = frozenset(GRID)

Prefix = Sequence[tuple[int, int]]  # (depth in blocks, key), rising


def depths_up_to(blocks: int) -> tuple[int, ...]:
    """All of GRID that a prompt of so many blocks has."""
    return GRID[: bisect_right(GRID, blocks)]


def some(keys: Sequence[int], held_blocks: int) -> list[tuple[int, int]]:
    """What is told of a prompt. Args: held_blocks: that its worker held already."""
    depths = depths_up_to(len(keys))
    at = bisect_right(depths, held_blocks)
    new, anchor = depths[at:], depths[max(0, at - 1) : at]  # what is held is where a reader finds the beginning
    if not new:
        return []
    most = MAX_KEYS - len(anchor)
    if len(new) > most:
        ratio = (new[-1] / new[0]) ** (1 / (most - 1))
        new = tuple(sorted({new[bisect_right(new, new[0] * ratio**n + 1e-6) - 1] for n in range(most)}))
    return [(depth, keys[depth - 1]) for depth in (*anchor, *new)]


def checked(prefix: Prefix) -> list[tuple[int, int]]:
    """Of what another router said, what can be used."""
    out: list[tuple[int, int]] = []
    for depth, key in prefix[:MAX_KEYS]:
        if depth in _IN_GRID and (not out or depth > out[-1][0]):
            out.append((depth, key))
    return out
