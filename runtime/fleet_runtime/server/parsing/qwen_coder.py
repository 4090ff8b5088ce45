"""Tool calls as Qwen3-Coder writes them, in XML of its own:

    <tool_call>
    <function=name>
    <parameter=key>
    any text
    </parameter>
    </function>
    </tool_call>

The arguments are not JSON here; we write them as JSON, each value in the type that the tool's schema gives it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from fleet_runtime.server.parsing.base import Markers, ToolParser
from fleet_runtime.server.parsing.json_value import SPACE, JsonValue

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
FUNCTION: Final = "<function="
END_FUNCTION: Final = "</function>"
PARAMETER: Final = "<parameter="
END_PARAMETER: Final = "</parameter>"
_OPENERS: Final = Markers(OPEN, FUNCTION)
_OR_CLOSER: Final = Markers(OPEN, FUNCTION, CLOSE)
_FUNCTION: Final = Markers(FUNCTION)
_IN_BODY: Final = Markers(PARAMETER, END_FUNCTION, CLOSE, OPEN, FUNCTION)
_VALUE_ENDS: Final = Markers("\n" + END_PARAMETER, END_PARAMETER)
_NAME_ENDS: Final = Markers(">", "\n")
_PYTHON_WORDS: Final = {"True": "true", "False": "false", "None": "null"}


class QwenCoderParser(ToolParser):
    """`<tool_call>` around the function may be missing, as may the tags behind the last parameter."""

    def __init__(self, tools: Mapping[str, Mapping[str, Any] | None], new_id: Callable[[], str]) -> None:
        """Args: tools: the parameters' JSON schema by name."""
        super().__init__(tools, new_id)
        self._tools = tools
        self._name = ""
        self._properties: Mapping[str, Any] = {}
        self._key = ""
        self._count = 0  # parameters of this call
        self._as_text = True  # the value is a text and passes as it comes
        self._read: list[str] = []  # a value of another type
        self._closing = False
        self._strayed = False  # text was found between parameters

    def _outside(self) -> bool:
        marker = self._read_to(_OR_CLOSER if self._closing else _OPENERS, self._content)
        if marker == CLOSE:
            self._closing = False
            if self._blank:
                self._space = []
        elif marker is not None:
            self._hold(marker)
            self._name = ""
            self._state = self._before_function if marker == OPEN else self._in_name
        return marker is not None

    def _before_function(self) -> bool:
        self._held.append(self._skip_space())
        return self._expect(_FUNCTION, self._in_name)

    def _in_name(self) -> bool:
        """Up to `>`."""
        start = self._pos
        end = self._text.find(">", start)
        self._pos = len(self._text) if end < 0 else end
        piece = self._text[start : self._pos]
        self._name += piece
        self._held.append(piece)
        if end < 0 and not self._final and not self._is_hopeless(self._name):
            return False
        if end < 0 or self._name not in self._names:
            return self._release()
        self._pos += 1
        self._begin_call()
        return True

    def _begin_call(self) -> None:
        properties = (self._tools[self._name] or {}).get("properties")
        self._properties = properties if isinstance(properties, Mapping) else {}
        self._count = 0
        self._start(self._name)
        self._arguments("{")
        self._state = self._in_body

    def _in_body(self) -> bool:
        """Between parameters. Text that is no tag is content, so that nothing is lost, but for the space at its begin."""
        marker = self._read_to(_IN_BODY, self._between)
        self._strayed &= marker is None
        if marker == PARAMETER:
            self._key = ""
            self._state = self._in_key
        elif marker is not None:
            self._arguments("}")
            self._end(complete=True)
            if marker != END_FUNCTION:
                self._pos -= len(marker)
            self._closing = True
            self._state = self._outside
        elif self._final:
            self._cut()
        return marker is not None

    def _between(self, text: str) -> None:
        text = text if self._strayed else text.lstrip(SPACE)
        if text:
            self._strayed = True
            self._blank = False
            self._content(text)

    def _in_key(self) -> bool:
        marker = self._read_to(_NAME_ENDS, self._add_key)
        if marker is None:
            if self._final:
                self._cut()
            return False
        known = self._properties.get(self._key)
        self._as_text = _types(known) <= {"string"}
        self._arguments((", " if self._count else "") + json.dumps(self._key, ensure_ascii=False) + ": " + ('"' if self._as_text else ""))
        self._count += 1
        self._read = []
        self._state = self._before_value if marker == ">" else self._in_value
        return True

    def _add_key(self, text: str) -> None:
        self._key += text

    def _before_value(self) -> bool:
        """One line break behind the tag is markup."""
        if not self._next and not self._final:
            return False
        if self._next == "\n":
            self._pos += 1
        self._state = self._in_value
        return True

    def _in_value(self) -> bool:
        marker = self._read_to(_VALUE_ENDS, self._add_text if self._as_text else self._read.append)
        if marker is None:
            if self._final:
                self._arguments("".join(self._read))
                self._cut()
            return False
        self._arguments('"' if self._as_text else _typed("".join(self._read), _types(self._properties.get(self._key))))
        self._state = self._in_body
        return True

    def _add_text(self, text: str) -> None:
        self._arguments(json.dumps(text, ensure_ascii=False)[1:-1])

    def _cut(self) -> None:
        self._end(complete=False)
        self._state = self._outside

    def _after_call(self) -> bool:
        raise AssertionError("this format has no call objects")


def _types(schema: Any) -> set[str]:
    """The JSON types that a schema allows, as far as it says so; empty when it does not."""
    if not isinstance(schema, Mapping):
        return set()
    found: set[str] = set()
    named = schema.get("type")
    found.update(t for t in (named if isinstance(named, list) else [named]) if isinstance(t, str))
    for key in ("anyOf", "oneOf"):
        branches = schema.get(key)
        for branch in branches if isinstance(branches, list) else ():
            found |= _types(branch)
    values = schema.get("enum")
    if not found and isinstance(values, list):
        found.update(_type_of(v) for v in values)
    return found


def _type_of(value: Any) -> str:
    kinds = ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array"), (dict, "object"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "null")


def _typed(text: str, types: set[str]) -> str:
    """The JSON text of a value: as written when it is JSON of an allowed type, else a string."""
    bare = text.strip(SPACE)
    bare = _PYTHON_WORDS.get(bare, bare)
    value = JsonValue()
    if bare and value.feed(bare + " ", 0) == len(bare) and value.done:
        try:
            kind = _type_of(json.loads(bare))
        except (ValueError, RecursionError):  # more digits or depth than Python reads
            kind = ""
        allowed = types | ({"integer"} if "number" in types else set()) | (set() if "string" in types else {"null"})
        if kind != "string" and kind in allowed:
            return bare
    return json.dumps(text, ensure_ascii=False)
