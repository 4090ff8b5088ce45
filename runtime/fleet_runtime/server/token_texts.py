"""The bytes that each token id stands for, also of a token that is a part of a character. Called for logprobs and `/tokenize`.

A tokenizer's decoder works on runs of tokens; logprobs need each one alone. How a vocabulary writes bytes is read from the decoder's parts:
byte-level BPE has one character per byte; SentencePiece-like ones write a space as U+2581 and single bytes as `<0xE4>`.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Collection, Sequence
from typing import Any, Final

import msgspec
from tokenizers import Tokenizer

_BYTE_PIECE: Final = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE_SIGN: Final = "\u2581"


class _Decoder(msgspec.Struct):
    decoder: dict[str, Any] | None = None


class TokenTexts:
    """See the module. Immutable but for its memory of what was asked."""

    def __init__(self, tokenizer: Tokenizer, tokenizer_json: bytes, shown: Collection[str] = ()) -> None:
        """Args: shown: special tokens whose text is never left out: markup of tool calls and reasoning."""
        kinds = _kinds(msgspec.json.decode(tokenizer_json, type=_Decoder).decoder)
        self._tokenizer = tokenizer
        self._byte_level = {c: b for b, c in enumerate(_byte_characters())} if "ByteLevel" in kinds else None
        self._byte_pieces = "ByteFallback" in kinds
        self._space_sign = bool(kinds & {"Replace", "Metaspace"})
        added = tokenizer.get_added_tokens_decoder()
        self._added: dict[int, tuple[str, bool]] = {i: (t.content, t.special and t.content not in shown) for i, t in added.items()}
        self._known: dict[int, bytes] = {}

    def bytes_of(self, token: int) -> bytes:
        """What the id stands for; empty for an id without text."""
        if (known := self._known.get(token)) is None:
            known = self._known[token] = self._look_up(token)
        return known

    def text_of(self, token: int) -> str:
        """The same as text; an unfinished character shows as U+FFFD."""
        return self.bytes_of(token).decode("utf-8", "replace")

    def is_special(self, token: int) -> bool:
        """Whether its text is left out of answers (unless `skip_special_tokens` is false)."""
        return token in self._added and self._added[token][1]

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        """The text of a run of ids."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special))

    def _look_up(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token][0].encode()
        piece: str | None = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if self._byte_level is not None:
            try:
                return bytes(self._byte_level[c] for c in piece)
            except KeyError:
                return piece.encode()
        if self._byte_pieces and (match := _BYTE_PIECE.fullmatch(piece)) is not None:
            return bytes([int(match[1], 16)])
        return (piece.replace(_SPACE_SIGN, " ") if self._space_sign else piece).encode()


class Offsets:
    """Where each token of an answer's text begins, in characters. A token inside a character begins where the character does.

    `start` -1: the first token's space is not in the text."""

    def __init__(self, texts: TokenTexts, start: int, *, keep_special: bool) -> None:
        self._texts = texts
        self._at = start
        self._keep_special = keep_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def next(self, token: int) -> int:
        """Offset of this token; the next one follows it."""
        at = self._at
        if self._keep_special or not self._texts.is_special(token):
            self._at += len(self._decoder.decode(self._texts.bytes_of(token)))
        return max(0, at)


def _kinds(decoder: dict[str, Any] | None) -> set[str]:
    """Types of a decoder and of its parts."""
    if decoder is None:
        return set()
    kinds = {str(decoder.get("type"))}
    for part in decoder.get("decoders") or ():
        kinds |= _kinds(part)
    return kinds


def _byte_characters() -> list[str]:
    """The character that stands for each byte in byte-level BPE: itself where it prints in Latin-1, else the next one from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]
