"""Reads typed fields of config.json and collects what is wrong with them, so that a user is told all faults at once. Called by `families`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

_MOST: Final = 2**31 - 1  # of a whole number: counts and sizes are int32 in the executors


class Fields:
    """One object of config.json. A field that is wrong reads as 1 (or false) meanwhile; `faults` says what is wrong.

    `within(name)` reads an object inside: its faults join ours, with its name in front.
    """

    def __init__(self, raw: Mapping[str, Any], path: str = "", faults: list[str] | None = None) -> None:
        self.raw = raw
        self._path = path
        self.faults: list[str] = [] if faults is None else faults

    def within(self, name: str, raw: Mapping[str, Any] | None = None) -> Fields:
        """The fields of an object inside this one: of `raw`, else of what is there (none is like {})."""
        value = self.raw.get(name) if raw is None else raw
        if value is not None and not isinstance(value, Mapping):
            self.fault(f"{name} is {value!r}, must be an object or null")
            value = None
        return Fields(value or {}, f"{self._path}{name}.", self.faults)

    def fault(self, text: str) -> None:
        """Notes that the model cannot be used; `text` begins with the field's name."""
        self.faults.append(self._path + text)

    def integer(self, name: str, default: int | None = None, *, most: int = _MOST) -> int:
        """A whole number from 1 to `most`. Missing or null: the default; a fault if there is none."""
        value = self.raw.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= most:
            return value
        allowed = "a whole number above 0" + (f" and at most {most}" if isinstance(value, int) and value > most else "")
        self.fault(f"{name} is missing" if value is None else f"{name} is {_short(value)}, must be {allowed}")
        return 1

    def number(self, name: str, default: float | None = None, *, least: float = 0.0) -> float:
        """A finite number above `least`. Missing or null: the default; a fault if there is none."""
        value = self.raw.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, int | float) and not isinstance(value, bool) and least < value < 1e300 and math.isfinite(value):
            return float(value)
        self.fault(f"{name} is missing" if value is None else f"{name} is {_short(value)}, must be a number above {least:g}")
        return max(1.0, 2 * least)

    def flag(self, name: str, default: bool = False) -> bool:
        """true or false. Missing or null: the default."""
        value = self.raw.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.fault(f"{name} is {_short(value)}, must be true or false")
        return value is True

    def choice(self, name: str, default: str, allowed: Sequence[str]) -> str:
        """One of some words. Missing or null: the default."""
        value = self.raw.get(name)
        if value is None:
            return default
        if isinstance(value, str) and value in allowed:
            return value
        self.fault(f"{name} is {_short(value)}, supported: {', '.join(map(repr, allowed))}")
        return default


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
