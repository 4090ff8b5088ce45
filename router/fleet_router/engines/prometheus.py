"""Numbers out of an engine's /metrics (Prometheus text format 0.0.4), without reading the rest of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

_LABEL: Final = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')


def samples(text: bytes, name: str) -> Iterator[tuple[str, float]]:
    """Labels (as text) and value of each sample of one family."""
    wanted = name.encode()
    at = text.find(wanted)
    while at >= 0:
        end = text.find(b"\n", at)
        end = len(text) if end < 0 else end
        starts_line = at == 0 or text[at - 1] == 10
        if starts_line and text[at + len(wanted) : at + len(wanted) + 1] in (b"{", b" "):
            rest = text[at + len(wanted) : end].decode("utf-8", "replace")
            labels, _, number = rest.rpartition("} ") if rest.startswith("{") else ("", "", rest)
            value = _number(number)
            if value is not None:
                yield labels, value
        at = text.find(wanted, end)


def _number(text: str) -> float | None:
    """A sample's value, which a timestamp may follow."""
    try:
        return float(text.split()[0])
    except (ValueError, IndexError):
        return None


def total(text: bytes, name: str) -> float | None:
    """The sum of a family's samples; None without any."""
    values = [v for _, v in samples(text, name)]
    return sum(values) if values else None


def labels_of(text: bytes, name: str) -> list[dict[str, str]]:
    """The labels of each sample of one family."""
    return [dict(_LABEL.findall(labels)) for labels, _ in samples(text, name)]
