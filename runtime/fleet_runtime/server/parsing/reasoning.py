"""Parts the reasoning of an answer from the rest: `<think>...</think>` and then the answer. In front of the tool parser. Pure."""

from __future__ import annotations

from enum import Enum
from typing import Final

from fleet_runtime.server.parsing.base import Markers, TextParser
from fleet_runtime.server.parsing.events import ReasoningDelta
from fleet_runtime.server.parsing.json_value import SPACE

THINK: Final = ("<think>", "</think>")


class Thinking(Enum):
    """Where an answer begins, as its prompt left it."""

    MAY_BEGIN = "may begin"  # the answer may begin with the open tag
    OPEN = "open"  # the prompt ends within the reasoning
    OVER = "over"  # the prompt holds the whole reasoning, mostly an empty one: the answer has none


def thinking_at_start(prompt_end: str, continued: str | None = None, tags: tuple[str, str] = THINK) -> Thinking:
    """Where an answer begins.

    Args:
        prompt_end: the last characters of the rendered prompt, special tokens included; 200 are enough.
        continued: the text of the last message when the answer continues it (`continue_final_message`).
    """
    begin, end = tags
    if continued:
        opened, closed = continued.rfind(begin), continued.rfind(end)
        return Thinking.OPEN if opened > closed else Thinking.OVER
    text = prompt_end.rstrip(SPACE)
    return Thinking.OPEN if text.endswith(begin) else Thinking.OVER if text.endswith(end) else Thinking.MAY_BEGIN


class ReasoningParser(TextParser):
    """Reasoning stands only at the beginning: the tags further on, in an answer that talks of them, are content.

    Space beside a tag belongs to it: reasoning neither begins nor ends with space, nor does the content behind it begin with any.
    """

    def __init__(self, start: Thinking = Thinking.MAY_BEGIN, tags: tuple[str, str] = THINK) -> None:
        super().__init__()
        self.tags = tags
        self._begin, self._close = Markers(tags[0]), Markers(tags[1])
        self._space: list[str] = []  # space that belongs to a tag if one follows
        self._blank = True
        self._state = {Thinking.MAY_BEGIN: self._before, Thinking.OPEN: self._opened, Thinking.OVER: self._plain}[start]

    @property
    def ended(self) -> bool:
        """The answer proper has begun, or its end tag was passed: from the next token on a grammar holds."""
        return self._state in (self._plain, self._behind)

    def _before(self) -> bool:
        """Before the first sign."""
        self._space.append(self._skip_space())
        tag = self._ask(self._begin)
        if tag is None:
            return False
        self._pos += len(tag)
        if tag:
            self._space = []
            self._state = self._inside
        else:
            self._content("".join(self._space))
            self._state = self._plain
        return True

    def _opened(self) -> bool:
        """The prompt had the open tag; a model that repeats it is forgiven."""
        self._skip_space()
        tag = self._ask(self._begin)
        if tag is None:
            return False
        self._pos += len(tag)
        self._state = self._inside
        return True

    def _inside(self) -> bool:
        if self._read_to(self._close, self._reason) is None:
            return False
        self._state = self._behind
        return True

    def _behind(self) -> bool:
        self._skip_space()
        if self._pos == len(self._text):
            return False
        self._state = self._plain
        return True

    def _reason(self, text: str) -> None:
        """Passes reasoning on, but for space at its begin and space that may be its end."""
        bare = text.rstrip(SPACE)
        if bare:
            out = "".join(self._space) + bare
            self._out.append(ReasoningDelta(out.lstrip(SPACE) if self._blank else out))
            self._space, self._blank = [], False
        self._space.append(text[len(bare) :])
