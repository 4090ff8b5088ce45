"""Stop strings in a stream: nothing of a stop is let through, and nothing else is held longer than it may still become one. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class StopFilter:
    """The stop strings of one choice. The result does not depend on how the text is cut into pieces: the stop that is complete first
    wins; of several that are complete at the same character, the one that starts first."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Args: stops: none of them empty."""
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Adds text; returns what may go out, and whether a stop was met (then nothing follows)."""
        if not self._stops or not text:
            return text, False
        text = self._held + text
        found = self._first_match(text)
        if found is not None:
            self._held = ""
            return text[:found], True
        keep = self._open_suffix(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """What is held, when the answer ends without a stop."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> int | None:
        best: tuple[int, int] | None = None  # end, start
        for stop in self._stops:
            at = text.find(stop)
            if at >= 0 and (best is None or (at + len(stop), at) < best):
                best = (at + len(stop), at)
        return None if best is None else best[1]

    def _open_suffix(self, text: str) -> int:
        """Length of the longest end of `text` that begins some stop."""
        longest = 0
        for stop in self._stops:
            at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while at >= 0 and len(text) - at > longest:
                if stop.startswith(text[at:]):
                    longest = len(text) - at
                    break
                at = text.find(stop[0], at + 1)
        return longest
