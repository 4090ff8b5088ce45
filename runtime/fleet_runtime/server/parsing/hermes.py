"""Tool calls as Hermes, Qwen 2.5 and Qwen 3 write them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one element a call."""

from __future__ import annotations

from typing import Final

from fleet_runtime.server.parsing.base import Markers, ToolParser

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
_OPENERS: Final = Markers(OPEN)
_BOTH: Final = Markers(OPEN, CLOSE)


class HermesParser(ToolParser):
    """A call is over with its object; a missing close tag is forgiven."""

    _closing = False  # a call is over, its close tag was not seen yet

    def _outside(self) -> bool:
        marker = self._read_to(_BOTH if self._closing else _OPENERS, self._content)
        if marker == OPEN:
            self._hold(marker)
            self._state = self._before_object
        elif marker == CLOSE:
            self._closing = False
            if self._blank:
                self._space = []  # it stood before the close tag
        return marker is not None

    def _after_call(self) -> bool:
        self._closing = not self._foreign
        self._state = self._outside
        return True

    def _broken(self) -> bool:
        marker = self._read_to(_BOTH, self._arguments)
        if marker is None and not self._final:
            return False
        if marker == OPEN:  # the model starts anew
            self._pos -= len(OPEN)
        self._end(complete=False)
        self._closing = False
        self._state = self._outside
        return True
