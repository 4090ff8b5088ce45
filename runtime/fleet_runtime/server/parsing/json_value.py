"""Reads one JSON value as its text comes, and says where it ends or stops being JSON (RFC 8259, strict). Pure.

A pushdown machine: each character is looked at once, the work does not depend on how the text is cut, and depth costs no recursion.
Called by `call_object` and the tool parsers.
"""

from __future__ import annotations

import re
from typing import Final

SPACE: Final = " \t\n\r"
_STRING_RUN: Final = re.compile(r'[^"\\\x00-\x1f]+')
_SPACE_RUN: Final = re.compile(r"[ \t\n\r]+")
_DIGIT_RUN: Final = re.compile(r"[0-9]+")
_HEX: Final = frozenset("0123456789abcdefABCDEF")
_ESCAPES: Final = frozenset('"\\/bfnrt')
_WORDS: Final = {"t": "true", "f": "false", "n": "null"}
# A number's states, and what each kind of character leads to: 0, d (1 to 9), dot, e, s (sign).
_NUMBER: Final[dict[str, dict[str, str]]] = {
    "minus": {"0": "zero", "d": "int"},
    "zero": {".": "dot", "e": "e"},
    "int": {"0": "int", "d": "int", ".": "dot", "e": "e"},
    "dot": {"0": "frac", "d": "frac"},
    "frac": {"0": "frac", "d": "frac", "e": "e"},
    "e": {"0": "exp", "d": "exp", "s": "sign"},
    "sign": {"0": "exp", "d": "exp"},
    "exp": {"0": "exp", "d": "exp"},
}
_NUMBER_ENDS: Final = frozenset(("zero", "int", "frac", "exp"))
_KINDS: Final = {"0": "0", ".": ".", "e": "e", "E": "e", "+": "s", "-": "s"} | dict.fromkeys("123456789", "d")


class JsonValue:
    """One value. Leading space is the caller's; the first character fed is the value's."""

    def __init__(self) -> None:
        self.done = False
        self.failed = False  # the character at the returned position cannot stand there
        self._closers: list[str] = []
        self._step = self._value
        self._number = ""
        self._word = ""  # what is left of true, false or null
        self._is_key = False
        self._hex_left = 0

    def feed(self, text: str, pos: int) -> int:
        """Reads from `pos`; returns where the value's text ends so far. A number is done only when another character follows."""
        while pos < len(text) and not self.done and not self.failed:
            pos = self._step(text, pos)
        return pos

    def _fail(self, pos: int) -> int:
        self.failed = True
        return pos

    def _closed(self) -> None:
        """A value inside ended: what may follow it."""
        if self._closers:
            self._step = self._after
        else:
            self.done = True

    def _value(self, text: str, pos: int) -> int:
        c = text[pos]
        if c == '"':
            self._is_key = False
            self._step = self._string
        elif c == "{":
            self._closers.append("}")
            self._step = self._first_key
        elif c == "[":
            self._closers.append("]")
            self._step = self._first_item
        elif c in _WORDS:
            self._word = _WORDS[c][1:]
            self._step = self._rest_of_word
        elif c == "-" or c in "0123456789":
            self._number = "minus" if c == "-" else "zero" if c == "0" else "int"
            self._step = self._digits
        elif c in SPACE and self._closers:
            return _skip_space(text, pos)
        else:
            return self._fail(pos)
        return pos + 1

    def _first_item(self, text: str, pos: int) -> int:
        if text[pos] in SPACE:
            return _skip_space(text, pos)
        if text[pos] == "]":
            return self._close(pos)
        self._step = self._value
        return pos

    def _first_key(self, text: str, pos: int) -> int:
        return self._close(pos) if text[pos] == "}" else self._key(text, pos)

    def _key(self, text: str, pos: int) -> int:
        if text[pos] in SPACE:
            return _skip_space(text, pos)
        if text[pos] != '"':
            return self._fail(pos)
        self._is_key = True
        self._step = self._string
        return pos + 1

    def _colon(self, text: str, pos: int) -> int:
        if text[pos] in SPACE:
            return _skip_space(text, pos)
        if text[pos] != ":":
            return self._fail(pos)
        self._step = self._value
        return pos + 1

    def _after(self, text: str, pos: int) -> int:
        c = text[pos]
        if c in SPACE:
            return _skip_space(text, pos)
        if c == self._closers[-1]:
            return self._close(pos)
        if c != ",":
            return self._fail(pos)
        self._step = self._key if self._closers[-1] == "}" else self._value
        return pos + 1

    def _close(self, pos: int) -> int:
        self._closers.pop()
        self._closed()
        return pos + 1

    def _string(self, text: str, pos: int) -> int:
        if (run := _STRING_RUN.match(text, pos)) is not None:
            return run.end()
        if text[pos] == "\\":
            self._step = self._escape
        elif text[pos] != '"':
            return self._fail(pos)  # a control character
        elif self._is_key:
            self._step = self._colon
        else:
            self._closed()
        return pos + 1

    def _escape(self, text: str, pos: int) -> int:
        if text[pos] == "u":
            self._hex_left = 4
            self._step = self._hex
        elif text[pos] in _ESCAPES:
            self._step = self._string
        else:
            return self._fail(pos)
        return pos + 1

    def _hex(self, text: str, pos: int) -> int:
        if text[pos] not in _HEX:
            return self._fail(pos)
        self._hex_left -= 1
        if not self._hex_left:
            self._step = self._string
        return pos + 1

    def _digits(self, text: str, pos: int) -> int:
        following = _NUMBER[self._number].get(_KINDS.get(text[pos], ""))
        if following is None:
            if self._number not in _NUMBER_ENDS:
                return self._fail(pos)
            self._closed()
            return pos
        self._number = following
        run = _DIGIT_RUN.match(text, pos) if following in ("int", "frac", "exp") else None
        return run.end() if run is not None else pos + 1

    def _rest_of_word(self, text: str, pos: int) -> int:
        if text[pos] != self._word[0]:
            return self._fail(pos)
        self._word = self._word[1:]
        if not self._word:
            self._closed()
        return pos + 1


def _skip_space(text: str, pos: int) -> int:
    run = _SPACE_RUN.match(text, pos)
    return pos if run is None else run.end()
