"""Tool calls as Llama 3 writes them: `{"name": ..., "parameters": {...}}` and nothing else, or behind `<|python_tag|>`; several with `;` between.

Without the tag only an answer that begins with such an object is a call; JSON with any other first key passes as content at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

from fleet_runtime.server.parsing.base import Markers, ToolParser

TAG: Final = "<|python_tag|>"
_TAG: Final = Markers(TAG)


class Llama3Parser(ToolParser):
    """The text's start and every call's end are places where the next call may stand."""

    def __init__(self, names: Collection[str], new_id: Callable[[], str]) -> None:
        super().__init__(names, new_id)
        self._state = self._begin

    def _begin(self) -> bool:
        """Where an object without a tag may be a call."""
        self._content(self._skip_space())
        if self._next == "{":
            self._hold()
            return self._begin_object(known_keys_only=True)
        if not self._next and not self._final:
            return False
        self._state = self._outside
        return True

    def _outside(self) -> bool:
        marker = self._read_to(_TAG, self._content)
        if marker is None:
            return False
        self._hold(marker)
        self._state = self._before_object
        return True

    def _after_call(self) -> bool:
        self._content(self._skip_space())
        if self._next == ";":
            self._pos += 1
            self._hold(";")
            self._state = self._before_next
            return True
        if not self._next and not self._final:
            return False
        self._state = self._begin
        return True

    def _before_next(self) -> bool:
        """Behind a `;`: an object, or a tag and an object."""
        self._held.append(self._skip_space())
        if self._next == "{":
            return self._begin_object(known_keys_only=True)
        return self._expect(_TAG, self._before_object)
