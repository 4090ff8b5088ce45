"""What the parsers of all tool formats share: reading text that comes in pieces, holding what may still be a call, and saying it in events.

A parser is a machine whose states are methods. A state reads from `_text` at `_pos` and returns False when it needs more text. What may
still become a call is held in `_held` exactly as the model wrote it; if it turns out to be none, it comes out as content. The events do
not depend on how the text was cut, apart from the borders of deltas. Every character is looked at a bounded number of times.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Final

from fleet_runtime.server.parsing.call_object import CallObject
from fleet_runtime.server.parsing.events import ContentDelta, Event, ToolCallArguments, ToolCallEnd, ToolCallStart
from fleet_runtime.server.parsing.json_value import SPACE, JsonValue

State = Callable[[], bool]

_MAX_NAME_CHARS: Final = 400  # 64 characters, all written as \uXXXX


class Markers:
    """A set of texts to look for."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self._pattern = re.compile("|".join(re.escape(t) for t in sorted(texts, key=len, reverse=True)))

    def find(self, text: str, pos: int) -> re.Match[str] | None:
        """The first of them at or after `pos`."""
        return self._pattern.search(text, pos)

    def at(self, text: str, pos: int) -> str | None:
        """Which one stands at `pos`."""
        match = self._pattern.match(text, pos)
        return None if match is None else match.group()

    def open_suffix(self, text: str, pos: int) -> int:
        """Length of the longest end of `text[pos:]` with which one of them begins, but which is none yet."""
        longest = 0
        for marker in self.texts:
            for size in range(min(len(marker) - 1, len(text) - pos), longest, -1):
                if text.endswith(marker[:size]):
                    longest = size
                    break
        return longest

    def may_begin(self, text: str, pos: int) -> bool:
        """Whether all of `text[pos:]` is the begin of one of them."""
        size = len(text) - pos
        return any(size < len(m) and text.endswith(m[:size]) for m in self.texts)


class TextParser:
    """No tools: the text is the content."""

    def __init__(self) -> None:
        self._text = ""
        self._pos = 0
        self._final = False
        self._out: list[Event] = []
        self._state: State = self._plain

    def feed(self, text: str) -> list[Event]:
        """More text; returns what is sure by now."""
        if text:
            self._text = self._text[self._pos :] + text
            self._pos = 0
            self._run()
        return self._take()

    def finish(self) -> list[Event]:
        """The text is over; returns what was held."""
        if not self._final:
            self._final = True
            self._run()
            self._ended()
        return self._take()

    def _run(self) -> None:
        while self._state():
            pass

    def _take(self) -> list[Event]:
        out, self._out = self._out, []
        return out

    def _ended(self) -> None:
        """After the last state at the end."""

    # -- reading

    @property
    def _next(self) -> str:
        """The next character; empty when more text is needed."""
        return self._text[self._pos] if self._pos < len(self._text) else ""

    def _skip_space(self) -> str:
        """The space from here."""
        start = self._pos
        while self._pos < len(self._text) and self._text[self._pos] in SPACE:
            self._pos += 1
        return self._text[start : self._pos]

    def _ask(self, markers: Markers) -> str | None:
        """Which marker stands here (it is not read yet); empty when none does; None when more text has to say it."""
        if (marker := markers.at(self._text, self._pos)) is not None:
            return marker
        return None if not self._final and markers.may_begin(self._text, self._pos) else ""

    def _read_to(self, markers: Markers, use: Callable[[str], None]) -> str | None:
        """Passes text on until a marker; returns the marker, which is read; None when more text is needed (at the end: all is read)."""
        match = markers.find(self._text, self._pos)
        if match is not None:
            use(self._text[self._pos : match.start()])
            self._pos = match.end()
            return match.group()
        end = len(self._text) - (0 if self._final else markers.open_suffix(self._text, self._pos))
        use(self._text[self._pos : end])
        self._pos = end
        return None

    # -- without tools

    def _plain(self) -> bool:
        self._content(self._text[self._pos :])
        self._pos = len(self._text)
        return False

    def _content(self, text: str) -> None:
        last = self._out[-1] if self._out else None
        if isinstance(last, ContentDelta):
            self._out[-1] = ContentDelta(last.text + text)
        elif text:
            self._out.append(ContentDelta(text))


class ToolParser(TextParser):
    """Base of all formats. Subclasses set `_state` to their first state and have `_outside`, `_after_call` and `_broken`.

    A call is one only if its name is among the request's tools: what a model makes up, or an example that it quotes, is content.
    """

    def __init__(self, names: Collection[str], new_id: Callable[[], str]) -> None:
        super().__init__()
        self._calls = 0
        self._names = frozenset(names)
        self._new_id = new_id
        self._held: list[str] = []  # may still become a call
        self._blank = True  # nothing but space since the start or the last call
        self._space: list[str] = []  # that space: between calls it belongs to the markup
        self._call = CallObject()
        self._value = JsonValue()
        self._foreign = False  # the object that is being read is no call
        self._open = False  # a call has its start but no end
        self._state = self._outside

    # -- to be had by each format

    def _outside(self) -> bool:
        """In the content."""
        raise NotImplementedError

    def _after_call(self) -> bool:
        """Behind an object, which was a call unless `_foreign`."""
        raise NotImplementedError

    def _broken(self) -> bool:
        """In a call whose JSON is broken: to the end of it, its text goes to the arguments, so that nothing is lost. Here: to the end."""
        self._arguments(self._text[self._pos :])
        self._pos = len(self._text)
        if self._final:
            self._end(complete=False)
        return False

    # -- holding

    def _hold(self, *texts: str) -> None:
        """What may become a call begins with these."""
        self._held = list(texts)

    def _release(self) -> bool:
        """What was held is content."""
        self._content("".join(self._held))
        self._held = []
        self._state = self._outside
        return True

    def _is_hopeless(self, start: str) -> bool:
        """Whether no tool's name begins so. A name with escapes is judged when it is whole."""
        return len(start) > _MAX_NAME_CHARS or ("\\" not in start and not any(name.startswith(start) for name in self._names))

    def _expect(self, markers: Markers, then: State) -> bool:
        """One of the markers behind what is held: it is held too, and `then` is next. Where none stands, all is released."""
        marker = self._ask(markers)
        if marker is None:
            return False
        if not marker:
            return self._release()
        self._pos += len(marker)
        self._held.append(marker)
        self._state = then
        return True

    # -- the object of one call

    def _before_object(self) -> bool:
        """The held text wants an object next."""
        self._held.append(self._skip_space())
        if self._next == "{":
            return self._begin_object(known_keys_only=False)
        return self._release() if self._next or self._final else False

    def _begin_object(self, *, known_keys_only: bool) -> bool:
        self._call = CallObject(known_keys_only=known_keys_only)
        self._foreign = False
        self._state = self._object
        return True

    def _object(self) -> bool:
        """In the object of a call."""
        call, start = self._call, self._pos
        self._pos = call.feed(self._text, start)
        piece = self._text[start : self._pos]
        if self._foreign:
            self._content(piece)
        elif not self._open:
            self._held.append(piece)
            if call.is_foreign or self._is_hopeless(call.name_start) or (call.name is not None and call.name not in self._names):
                self._release()
                self._foreign = True
                self._state = self._object
            elif call.name is not None:
                self._start(call.name)
        if self._open:
            self._arguments(call.take())
        return self._object_ended()

    def _object_ended(self) -> bool:
        """Decides what follows, or that more text is needed."""
        call = self._call
        if not (call.done or call.failed or self._final):
            return False
        if self._open and (call.done or call.arguments_done):  # a missing last brace does not spoil whole arguments
            self._end(complete=True)
        elif self._open and call.failed:
            self._state = self._broken
            return True
        elif self._open:
            self._arguments(call.rest())
            self._end(complete=False)
        elif not self._foreign:
            return self._release()
        self._state = self._after_call
        return True

    def _begin_arguments(self) -> None:
        """The call has started and its arguments stand alone, from the next character."""
        self._value = JsonValue()
        self._foreign = False
        self._state = self._bare_arguments

    def _bare_arguments(self) -> bool:
        start = self._pos
        self._pos = self._value.feed(self._text, start)
        self._arguments(self._text[start : self._pos])
        if self._value.failed:
            self._state = self._broken
        elif self._value.done or self._final:
            self._end(complete=self._value.done)
            self._state = self._after_call
        else:
            return False
        return True

    # -- saying it

    def _ended(self) -> None:
        if self._blank and not self._calls:
            super()._content("".join(self._space))

    def _content(self, text: str) -> None:
        if self._blank and text:
            rest = text.lstrip(SPACE)
            self._space.append(text[: len(text) - len(rest)])
            if not rest:
                return
            text = "".join(self._space) + rest
            self._space, self._blank = [], False
        super()._content(text)

    def _start(self, name: str, call_id: str = "") -> None:
        self._out.append(ToolCallStart(self._calls, call_id or self._new_id(), name))
        self._calls += 1
        self._open = True
        self._held, self._space = [], []

    def _arguments(self, text: str) -> None:
        last = self._out[-1] if self._out else None
        if isinstance(last, ToolCallArguments) and last.index == self._calls - 1:
            self._out[-1] = ToolCallArguments(last.index, last.delta + text)
        elif text:
            self._out.append(ToolCallArguments(self._calls - 1, text))

    def _end(self, *, complete: bool) -> None:
        self._out.append(ToolCallEnd(self._calls - 1, complete))
        self._open = False
        self._blank = True
