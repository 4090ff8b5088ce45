"""Stop strings in a stream: nothing of a stop is let through, and nothing else is held longer than it may still become one. Pure.

Each stop is followed character by character with the automaton of Knuth, Morris and Pratt (SIAM J. Comput. 6(2), 1977): its state is the length
of the longest end of the text that begins the stop, which is just what must be held. So the cost is linear in the text, whatever the stops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Met:
    """A stop that is complete."""

    stop: str


class StopFilter:
    """The stop strings of one choice. The result does not depend on how the text is cut into pieces: the stop that is complete first
    wins; of several that are complete at the same character, the one that starts first."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """Args: stops: none of them empty. include: the stop stays in the text."""
        self._stops = tuple(sorted(set(stops), key=len, reverse=True))
        self._borders = tuple(_borders(stop) for stop in self._stops)
        self._matched = [0] * len(self._stops)
        self._include = include
        self._held = ""

    def push(self, text: str, *, armed: bool = True) -> tuple[str, Met | None]:
        """Adds text; returns what may go out, and the stop that was met (then nothing follows).

        Args: armed: whether a stop may end the answer in this text. One that is complete while it may not is text like any other.
        """
        if not self._stops or not text:
            return text, None
        held = len(self._held)
        whole = self._held + text
        for at, char in enumerate(text, held + 1):
            stop = self._step(char, armed=armed)
            if stop is not None:
                self._held = ""
                return whole[: at if self._include else at - len(stop)], Met(stop)
        keep = max(self._matched)
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep], None

    def flush(self) -> str:
        """What is held, when the answer ends without a stop."""
        held, self._held = self._held, ""
        return held

    def _step(self, char: str, *, armed: bool) -> str | None:
        """One character; the longest stop that it completes."""
        met = None
        for i, stop in enumerate(self._stops):
            matched, borders = self._matched[i], self._borders[i]
            while matched and stop[matched] != char:
                matched = borders[matched]
            if stop[matched] == char:
                matched += 1
            if matched == len(stop):
                if armed and met is None:
                    met = stop
                matched = borders[matched]
            self._matched[i] = matched
        return met


@lru_cache(maxsize=256)
def _borders(stop: str) -> tuple[int, ...]:
    """Entry n: length of the longest proper end of `stop[:n]` that also begins it."""
    out = [0, 0]
    for char in stop[1:]:
        n = out[-1]
        while n and stop[n] != char:
            n = out[n]
        out.append(n + 1 if stop[n] == char else 0)
    return tuple(out)
