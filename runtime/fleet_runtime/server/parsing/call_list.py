"""Tool calls as a JSON list of objects: a part of Mistral's format, and the whole text when a grammar forces calls."""

from __future__ import annotations

from collections.abc import Callable, Collection

from fleet_runtime.server.parsing.base import ToolParser


class CallListParser(ToolParser):
    """`[{...}, {...}]` from `_list` on; behind it the text is content."""

    _in_list = False

    def _list(self) -> bool:
        """The held text wants `[` next."""
        self._held.append(self._skip_space())
        if self._next == "[":
            self._pos += 1
            self._held.append("[")
            self._in_list = True
            self._state = self._before_object
            return True
        return self._release() if self._next or self._final else False

    def _after_call(self) -> bool:
        """Behind a call. What separates calls of a list is markup; behind an object that was no call it is content like it."""
        self._content(self._skip_space())
        sign = self._next if self._in_list else ""
        if not self._next and not self._final:
            return False
        if sign and sign in ",]":
            self._pos += 1
            if self._foreign:
                self._content(sign)
            if sign == ",":
                self._hold("" if self._foreign else sign)
                self._state = self._before_object
                return True
        self._in_list = False
        self._state = self._outside
        return True


class ForcedListParser(CallListParser):
    """The text of an answer whose grammar is `forced_schema` of tool_choice `required`."""

    def __init__(self, names: Collection[str], new_id: Callable[[], str]) -> None:
        super().__init__(names, new_id)
        self._state = self._list

    def _outside(self) -> bool:
        return self._plain()


class ForcedCallParser(ToolParser):
    """The text of an answer whose grammar is `forced_schema` of a named function: its arguments, nothing else."""

    def __init__(self, name: str, new_id: Callable[[], str]) -> None:
        super().__init__((name,), new_id)
        self._name = name
        self._state = self._first

    def _first(self) -> bool:
        self._content(self._skip_space())
        if self._next == "{":
            self._start(self._name)
            self._begin_arguments()
            return True
        if not self._next and not self._final:
            return False
        self._state = self._outside
        return True

    def _outside(self) -> bool:
        return self._plain()

    def _after_call(self) -> bool:
        self._state = self._outside
        return True
