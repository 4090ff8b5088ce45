"""Reads `{"name": ..., "arguments": {...}}` as its text comes: the name as soon as it is complete, the arguments character by character. Pure.

Called by the parsers of formats that write calls as JSON. Order of keys and space are free; `parameters` means `arguments`.
"""

from __future__ import annotations

import json
from typing import Any, Final

from fleet_runtime.server.parsing.json_value import SPACE, JsonValue

_ARGUMENTS: Final = ("arguments", "parameters")
_KNOWN: Final = ("name", *_ARGUMENTS, "type", "id")
_MAX_KEY_CHARS: Final = 60  # the longest known key, all written as \uXXXX


class CallObject:
    """One call. The first character fed is its `{`.

    Arguments are normally an object and pass unchanged. A model that writes them as a string holding the object's JSON is understood;
    null or no arguments at all are `{}`. Everything else is a failure.
    """

    def __init__(self, *, known_keys_only: bool = False) -> None:
        """Args: known_keys_only: with a key that no call has, before the name, the object is foreign."""
        self.done = False
        self.is_foreign = False  # some other JSON
        self.failed = False  # the character at the returned position cannot stand there
        self.name: str | None = None
        self.name_start = ""  # of a name that is not complete yet
        self.arguments_done = False
        self._known_keys_only = known_keys_only
        self._step = self._open
        self._value = JsonValue()
        self._read: list[str] = []  # text of the key, name or wrapped arguments that is being read
        self._key = ""
        self._ready: list[str] = []  # arguments that nobody took yet
        self._seen: set[str] = set()

    def feed(self, text: str, pos: int) -> int:
        """Reads from `pos`; returns where the call's text ends so far."""
        while pos < len(text) and not self.done and not self.failed:
            pos = self._step(text, pos)
        return pos

    def take(self) -> str:
        """The arguments' text that has come since the last time."""
        text = "".join(self._ready)
        self._ready.clear()
        return text

    def rest(self) -> str:
        """When the text ends inside the call: what was read of arguments that could not be passed on as they came."""
        return "".join(self._read) if self._step == self._in_wrapped else ""

    def _fail(self, pos: int) -> int:
        self.failed = True
        return pos

    def _begin(self, step: Any) -> None:
        self._value = JsonValue()
        self._read = []
        self._step = step

    def _open(self, text: str, pos: int) -> int:
        if text[pos] != "{":
            return self._fail(pos)
        self._step = self._first_key
        return pos + 1

    def _first_key(self, text: str, pos: int) -> int:
        return self._close(pos) if text[pos] == "}" else self._before_key(text, pos)

    def _before_key(self, text: str, pos: int) -> int:
        if text[pos] in SPACE:
            return pos + 1
        if text[pos] != '"':
            return self._fail(pos)
        self._begin(self._in_key)
        return pos

    def _in_key(self, text: str, pos: int) -> int:
        end = self._value.feed(text, pos)
        self._read.append(text[pos:end])
        if self._value.done:
            self._key = _decoded("".join(self._read))
            slot = "arguments" if self._key in _ARGUMENTS else self._key
            if slot in self._seen:
                return self._fail(end)
            self.is_foreign |= self._known_keys_only and self.name is None and self._key not in _KNOWN
            if slot in ("name", "arguments"):
                self._seen.add(slot)
            self._step = self._colon
        elif self._value.failed:
            return self._fail(end)
        elif self._known_keys_only and self.name is None and not self.is_foreign:
            start = "".join(self._read)[1:]
            self.is_foreign = len(start) > _MAX_KEY_CHARS or ("\\" not in start and not any(k.startswith(start) for k in _KNOWN))
        return end

    def _colon(self, text: str, pos: int) -> int:
        if text[pos] in SPACE:
            return pos + 1
        if text[pos] != ":":
            return self._fail(pos)
        self._step = self._before_value
        return pos + 1

    def _before_value(self, text: str, pos: int) -> int:
        c = text[pos]
        if c in SPACE:
            return pos + 1
        if self._key == "name":
            if c != '"':
                return self._fail(pos)
            self._begin(self._in_name)
        elif self._key not in _ARGUMENTS:
            self._begin(self._in_other)
        elif c == "{":
            self._begin(self._in_arguments)
        elif c in '"n':
            self._begin(self._in_wrapped)
        else:
            return self._fail(pos)
        return pos

    def _in_name(self, text: str, pos: int) -> int:
        end = self._value.feed(text, pos)
        self._read.append(text[pos:end])
        if self._value.done:
            self.name = _decoded("".join(self._read))
            self._step = self._after_value
        elif self._value.failed:
            return self._fail(end)
        else:
            self.name_start = "".join(self._read)[1:]  # short: a name that no tool has is given up early
        return end

    def _in_arguments(self, text: str, pos: int) -> int:
        end = self._value.feed(text, pos)
        self._ready.append(text[pos:end])
        return self._value_ended(end)

    def _in_wrapped(self, text: str, pos: int) -> int:
        """Arguments as a string, or null."""
        end = self._value.feed(text, pos)
        self._read.append(text[pos:end])
        if self._value.done or self._value.failed:
            raw = "".join(self._read)
            arguments = "{}" if raw == "null" else _object_text(raw) if self._value.done else None
            self._ready.append(raw if arguments is None else arguments)
            if arguments is None:
                self._step = self._after_value  # nothing is left for `rest`
                return self._fail(end)
        return self._value_ended(end)

    def _in_other(self, text: str, pos: int) -> int:
        end = self._value.feed(text, pos)
        return self._value_ended(end)

    def _value_ended(self, end: int) -> int:
        if self._value.failed:
            return self._fail(end)
        if self._value.done:
            self.arguments_done |= self._key in _ARGUMENTS
            self._step = self._after_value
        return end

    def _after_value(self, text: str, pos: int) -> int:
        if text[pos] in SPACE:
            return pos + 1
        if text[pos] == "}":
            return self._close(pos)
        if text[pos] != ",":
            return self._fail(pos)
        self._step = self._before_key
        return pos + 1

    def _close(self, pos: int) -> int:
        if self.name is None:
            return self._fail(pos)
        if not self.arguments_done:
            self._ready.append("{}")
            self.arguments_done = True
        self.done = True
        return pos + 1


def _decoded(raw: str) -> str:
    """The text of a JSON string that JsonValue has read."""
    value = json.loads(raw)
    assert isinstance(value, str)
    return value


def _object_text(raw: str) -> str | None:
    """The JSON object that a JSON string holds, as text; None when it holds something else."""
    text = _decoded(raw).strip(SPACE)
    value = JsonValue()
    whole = text.startswith("{") and value.feed(text, 0) == len(text) and value.done
    return text if whole else None
