"""What a chat template writes around the messages of a chat, by the row of their roles: rendered once, then only filled in.

Called by `prompt` for chats of plain texts. A row is tried with texts that are watched (`watched`): where the template looks at one, and where
one comes twice, changed, or out of order, the row is left to the template. Trimming is understood. Two more renderings of each row try the outline.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from fleet_text.watched import TRIMMED, WatchedText

MAX_ROWS: Final = 512
MAX_MESSAGES: Final = 256
MAX_FAILURES: Final = 8  # rows in a row that were left to the template: then no more are tried

Row = tuple[str, ...]
Message = Mapping[str, Any]
Render = Callable[[list[Message]], str]  # raises what templates raise


class Outline:
    """The pieces around the texts of one row of roles; one more than texts."""

    __slots__ = ("pieces", "trims")

    def __init__(self, pieces: list[str], trims: list[bool]) -> None:
        self.pieces = pieces
        self.trims = trims

    def fill(self, texts: Sequence[str]) -> str:
        """The prompt."""
        out = [self.pieces[0]]
        for text, trim, piece in zip(texts, self.trims, self.pieces[1:], strict=True):
            out.append(text.strip() if trim else text)
            out.append(piece)
        return "".join(out)


class Outlines:
    """Of one template. May be used by several threads."""

    def __init__(self, render: Render, watched: Render, *, max_failures: int = MAX_FAILURES) -> None:
        """Args: render: the template over messages. watched: the same, raising Looked. max_failures: 0: nothing is tried."""
        self._render = render
        self._watched = watched
        self._max_failures = max_failures
        self._rows: dict[Row, Outline | None] = {}
        self._failures = 0

    def fill(self, messages: Sequence[Message]) -> str | None:
        """The prompt of messages that are a role and a text that is not blank each; None where the template has to be asked."""
        texts: list[str] = []
        roles: list[str] = []
        for message in messages:
            text = message.get("content")
            if len(message) != 2 or type(text) is not str or not text or text.isspace():
                return None
            texts.append(text)
            roles.append(message["role"])
        row = tuple(roles)
        outline = self._rows.get(row)
        if outline is None:
            if row in self._rows or self._failures >= self._max_failures or len(row) > MAX_MESSAGES:
                return None
            outline = self._learn(row)
        return None if outline is None else outline.fill(texts)

    def _learn(self, row: Row) -> Outline | None:
        try:
            outline = self._try(row)
        except Exception:  # whatever a template does: it is asked itself then, and says so again
            outline = None
        self._failures = 0 if outline is not None else self._failures + 1
        if len(self._rows) >= MAX_ROWS:
            self._rows.clear()
        self._rows[row] = outline
        return outline

    def _try(self, row: Row) -> Outline | None:
        marks = [f"\ue000{secrets.token_hex(8)}\ue000" for _ in row]
        text = self._watched([{"role": role, "content": WatchedText(mark)} for role, mark in zip(row, marks, strict=True)])
        pieces: list[str] = []
        trims: list[bool] = []
        for mark in marks:
            piece, found, text = text.partition(mark)
            if not found:
                return None
            trims.append(text.startswith(TRIMMED))
            pieces.append(piece)
            text = text.removeprefix(TRIMMED)
        pieces.append(text)
        if any(mark in piece for mark in (*marks, TRIMMED) for piece in pieces):
            return None
        outline = Outline(pieces, trims)
        for texts in (["x"] * len(row), [f" \n{n}<|x|> </s>\n\n{mark[1:-1]}\n " for n, mark in enumerate(marks)]):
            if outline.fill(texts) != self._render([{"role": role, "content": text} for role, text in zip(row, texts, strict=True)]):
                return None
        return outline
