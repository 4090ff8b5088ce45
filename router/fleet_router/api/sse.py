"""Server-sent events as bytes: their JSON, and the one event that a client did not ask for.

Used by relay on every piece of a stream; nothing here changes a byte of an event that is passed on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from fleet_router.errors import UNDECODABLE

_BLANK_LINE: Final = re.compile(rb"\r?\n\r?\n")
_NO_CHOICES: Final = (b'"choices":[]', b'"choices": []')


def split_events(data: bytes) -> Iterator[bytes]:
    """The events of `data`, each with its blank line; what follows the last one comes last."""
    start = 0
    for match in _BLANK_LINE.finditer(data):
        yield data[start : match.end()]
        start = match.end()
    if start < len(data):
        yield data[start:]


def event_json(event: bytes) -> Any:
    """The JSON of an event's `data:` line; None when it has none."""
    line = next((x for x in event.splitlines() if x.startswith(b"data:")), b"")
    try:
        return msgspec.json.decode(line[5:])
    except UNDECODABLE:
        return None


class UsageFilter:
    """Takes the event with the usage out of a stream whose client did not ask for it, and keeps it for the books.

    It is fed with whole events, however the stream was cut. OpenAI's API: with `stream_options.include_usage` the last event before
    `[DONE]` has no choices and the usage of the whole request.
    """

    def __init__(self) -> None:
        self.event = b""

    def __call__(self, data: bytes) -> bytes:
        """`data` without that event."""
        if not any(mark in data for mark in _NO_CHOICES):
            return data
        kept: list[bytes] = []
        for event in split_events(data):
            if self._is_usage(event):
                self.event = event
            else:
                kept.append(event)
        return b"".join(kept)

    @staticmethod
    def _is_usage(event: bytes) -> bool:
        if not any(mark in event for mark in _NO_CHOICES):
            return False
        said = event_json(event)
        return isinstance(said, dict) and said.get("choices") == [] and isinstance(said.get("usage"), dict)
