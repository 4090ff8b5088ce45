"""From token ids to text, piece by piece: the joined pieces are the decoded answer, and no piece ends inside a character.

Pure; called by `choices`. The decoder of a tokenizer is not additive (a leading space, bytes of one character in several tokens), so new
text is what the decoded *window* of the last ids has more than before. Method: a window that starts at an earlier boundary, as in
Hugging Face's text-generation-inference (prefix and read offset).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import Final

Decode = Callable[[Sequence[int]], str]

REPLACEMENT: Final = "\ufffd"
_MAX_OPEN: Final = 3  # a character has 4 bytes: at most so many of its bytes, each a replacement sign, may wait for the last one
_MAX_WINDOW: Final = 32
_MAX_DISAGREEING: Final = 8


def unspaced(decode: Decode, added: Collection[int]) -> Decode:
    """`decode` without what a tokenizer puts between two added tokens that stand side by side (`spaces_between_special_tokens: false`).

    Tokenizers without a decoder, and those of WordPiece, join all tokens by spaces; others put none there, and nothing changes.
    """

    def joined(ids: Sequence[int]) -> str:
        cuts = [0, *(i for i in range(1, len(ids)) if ids[i] in added and ids[i - 1] in added), len(ids)]
        return "".join([decode(ids[start:end]) for start, end in pairwise(cuts)])

    return joined


class IncrementalText:
    """Text of one choice. Ids that have no text may be given."""

    def __init__(self, decode: Decode, prompt_tail: Sequence[int] = ()) -> None:
        """Args: prompt_tail: the last few prompt ids, so that the first new token joins them as it should; their text is not emitted."""
        self._decode = decode
        self._window = list(prompt_tail)
        self._read = len(self._window)  # ids before this one are emitted in full
        self._emitted = decode(self._window) if self._window else ""  # the window's text that is out already
        self._prompt_text: str | None = _without_open_end(self._emitted)  # if the answer completes a character that the prompt began

    def push(self, ids: Sequence[int]) -> str:
        """Adds ids, returns the new text that is final."""
        return "".join([self._push_one(i) for i in ids])

    def flush(self) -> str:
        """What was held back, at the end of the answer: an unfinished character shows as U+FFFD."""
        text = self._decode(self._window)
        new = text[len(self._emitted) :] if text.startswith(self._emitted) else self._decode(self._window[self._read :])
        self._window, self._read, self._emitted = [], 0, ""
        return new

    def _push_one(self, new_id: int) -> str:
        self._window.append(new_id)
        text = self._decode(self._window)
        if not text.startswith(self._emitted):
            if self._prompt_text is None or not text.startswith(self._prompt_text):
                return self._disagreement()
            self._emitted = self._prompt_text
        new = _without_open_end(text[len(self._emitted) :])
        if len(self._emitted) + len(new) < len(text):  # something is held: the window must keep its start
            self._emitted += new
            if len(self._window) > _MAX_WINDOW:
                self._cut(text)
        elif new:
            tail = self._window[self._read :]
            self._emitted = self._decode(tail)
            self._window, self._read, self._prompt_text = tail, len(tail), None
        else:
            self._read = len(self._window)
        return new

    def _disagreement(self) -> str:
        """The decoder changed its mind about what is out (byte fallback judges a run of bytes as a whole). Wait for it to come round; if it
        does not, go on from here."""
        if len(self._window) - self._read < _MAX_DISAGREEING:
            return ""
        text = self._decode(self._window[self._read :])
        self._window, self._read, self._emitted, self._prompt_text = [], 0, "", None
        return text

    def _cut(self, text: str) -> None:
        """Shortens a window that grows because each id ends inside a character. A place where both sides decode to the whole is the
        boundary of a character."""
        for cut in range(len(self._window) - 1, max(0, len(self._window) - 6), -1):
            left, right = self._decode(self._window[:cut]), self._decode(self._window[cut:])
            if left + right == text and len(self._emitted) >= len(left):
                self._emitted = self._emitted[len(left) :]
                self._window, self._read, self._prompt_text = self._window[cut:], 0, None
                return


def _without_open_end(text: str) -> str:
    """Without the replacement signs at its end that more bytes may turn into a character."""
    end = len(text)
    while end > 0 and len(text) - end < _MAX_OPEN and text[end - 1] == REPLACEMENT:
        end -= 1
    return text[:end]
