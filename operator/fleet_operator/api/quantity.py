"""Kubernetes quantities ("512Mi", "0.5", "2e3"): parsed to Decimal and written in one canonical way.

Source: Kubernetes API reference, "Quantity". Pure; used by validation, hashing, rendering and comparing.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

_SUFFIXES: Final = {
    "": Decimal(1), "n": Decimal(10) ** -9, "u": Decimal(10) ** -6, "m": Decimal(10) ** -3,
    "k": Decimal(10) ** 3, "M": Decimal(10) ** 6, "G": Decimal(10) ** 9, "T": Decimal(10) ** 12, "P": Decimal(10) ** 15, "E": Decimal(10) ** 18,
    "Ki": Decimal(2) ** 10, "Mi": Decimal(2) ** 20, "Gi": Decimal(2) ** 30, "Ti": Decimal(2) ** 40, "Pi": Decimal(2) ** 50, "Ei": Decimal(2) ** 60,
}  # fmt: skip
_PATTERN: Final = re.compile(r"^([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))(?:([KMGTPE]i|[numkMGTPE])|[eE]([+-]?[0-9]{1,3}))?$")
PATTERN: Final = r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))))?$"


def parse(text: str) -> Decimal:
    """The quantity's value. Raises ValueError that says what a quantity looks like."""
    match = _PATTERN.match(text)
    if match is None:
        raise ValueError(f"{text!r} is not a quantity; write a number with an optional suffix, for example 512Mi, 2Gi, 500m or 1.5")
    number, suffix, exponent = match.groups()
    value = Decimal(number)
    return value.scaleb(int(exponent)) if exponent else value * _SUFFIXES[suffix or ""]


def canonical(text: str | int) -> str:
    """One spelling for each value, so that `1`, `1000m` and `"1.0"` make the same revision."""
    value = parse(str(text)).normalize()
    return format(value, "f")


def is_equal(a: str, b: str) -> bool:
    """True when both are quantities of the same value."""
    try:
        return parse(a) == parse(b)
    except ValueError:
        return False
