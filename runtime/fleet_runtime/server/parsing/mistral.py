"""Tool calls as Mistral writes them: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, and since tokenizer version 11
`[TOOL_CALLS]name[ARGS]{...}`, once a call, some with `[CALL_ID]id` before `[ARGS]`."""

from __future__ import annotations

import re
from typing import Final

from fleet_runtime.server.parsing.base import Markers
from fleet_runtime.server.parsing.call_list import CallListParser

TAG: Final = "[TOOL_CALLS]"
CALL_ID: Final = "[CALL_ID]"
ARGS: Final = "[ARGS]"
_TAG: Final = Markers(TAG)
_AFTER_NAME: Final = Markers(CALL_ID, ARGS, "{")
_AFTER_ID: Final = Markers(ARGS, "{")
_NAME_RUN: Final = re.compile(r"[A-Za-z0-9_-]*")
_MAX_ID_CHARS: Final = 64


class MistralParser(CallListParser):
    """Both forms; one text may hold several of either."""

    _name = ""
    _id = ""

    def _outside(self) -> bool:
        marker = self._read_to(_TAG, self._content)
        if marker is None:
            return False
        self._hold(marker)
        self._in_list = False
        self._state = self._after_tag
        return True

    def _after_tag(self) -> bool:
        self._held.append(self._skip_space())
        if self._next == "[":
            self._state = self._list
        elif self._next == "{":
            return self._begin_object(known_keys_only=False)
        elif self._next:
            self._name = ""
            self._state = self._in_name
        else:
            return self._release() if self._final else False
        return True

    def _in_name(self) -> bool:
        self._name += self._run_of_name()
        if not self._next and not self._final and not self._is_hopeless(self._name):
            return False
        if self._name not in self._names:
            return self._release()
        self._state = self._after_name
        return True

    def _after_name(self) -> bool:
        self._held.append(self._skip_space())
        marker = self._ask(_AFTER_NAME)
        if not marker:
            return self._release() if marker is not None else False
        if marker == CALL_ID:
            self._pos += len(CALL_ID)
            self._held.append(CALL_ID)
            self._id = ""
            self._state = self._in_id
            return True
        return self._start_bare(marker, "")

    def _in_id(self) -> bool:
        self._id += self._run_of_name()
        marker = self._ask(_AFTER_ID)
        if marker is None and len(self._id) <= _MAX_ID_CHARS:
            return False
        if not marker or not 0 < len(self._id) <= _MAX_ID_CHARS:
            return self._release()
        return self._start_bare(marker, self._id)

    def _start_bare(self, marker: str, call_id: str) -> bool:
        """At `[ARGS]` or directly at the arguments."""
        if marker == ARGS:
            self._pos += len(ARGS)
        self._start(self._name, call_id)
        self._state = self._before_arguments
        return True

    def _before_arguments(self) -> bool:
        self._skip_space()
        if self._next == "{":
            self._begin_arguments()
        elif self._next or self._final:
            self._state = self._broken
        else:
            return False
        return True

    def _run_of_name(self) -> str:
        run = _NAME_RUN.match(self._text, self._pos)
        assert run is not None  # it may be empty
        self._pos = run.end()
        self._held.append(run.group())
        return run.group()
