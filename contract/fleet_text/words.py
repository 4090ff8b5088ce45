"""Token ids of a text word by word, out of a table of words seen before: several times cheaper than tokenizing the text anew.

Called by `chains` for new text. A text is cut before each single space between two other characters. Byte-level BPE never merges
across such a place when no entry of the vocabulary does, and its pre-tokenizers always cut there; `find_words` looks at the vocabulary
and tries random texts, and gives nothing for other tokenizers. May be used by several threads.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from typing import Any, Final

from fleet_contract.wire import encode_ids
from fleet_text.prompt import PromptEncoder

MAX_WORDS: Final = 50_000
MAX_NUMBER_PARTS: Final = 7  # of digits and what is between them: words with longer numbers hardly come again
MAX_WORD_CHARS: Final = 48  # longer ones hardly come again
PROOFS: Final = 64  # random texts that a tokenizer is tried with
_KNOWN_STEPS: Final = frozenset({"ByteLevel", "Digits", "Split"})
_SPACE: Final = "Ġ"  # a space in byte-level letters; then the other blanks of one byte
_BLANKS: Final = frozenset("ĠĊĉčċČ")
_AROUND_DIGITS: Final = re.compile("([0-9])")

SCRAPS: Final = (
    " ", "  ", "\n", "\n\n", "\t", "word", " word", "Word", "don't", "1234567", "3.14", "{}", "é", "e\u0301", "中文", "😀", "\u00a0", "\u200b",
    "<", "|>", "<|", "ﬁ", "I", "▁", " 12", " a", " 'll", "\r\n", " \n", "\n ", " ...", " the", " (x)", "_id", " é", "\u3000",
)  # fmt: skip


class WordIds:
    """The table of one tokenizer."""

    def __init__(self, encoder: PromptEncoder, *, digits_apart: bool = False) -> None:
        """Args: digits_apart: each digit is a word of its own for the tokenizer, so that a new number is made of known ones."""
        self._encoder = encoder
        self._digits_apart = digits_apart
        self._ids: dict[str, bytes] = {}

    def encode(self, text: str) -> bytes:
        """Little-endian u32 ids of a text without special tokens added."""
        words = split_words(text)
        found = list(map(self._ids.get, words))
        if None in found:
            new = dict.fromkeys([word for word, ids in zip(words, found, strict=True) if ids is None], b"")
            self._read(new)
            return b"".join([new[word] if ids is None else ids for word, ids in zip(words, found, strict=True)])
        return b"".join(found)  # type: ignore[arg-type]

    def _read(self, new: dict[str, bytes]) -> None:
        """Fills in the ids of new words."""
        known = self._ids
        parts = {word: [p for p in _AROUND_DIGITS.split(word) if p] if self._digits_apart else [word] for word in new}
        lacking = list({part: None for word in parts.values() for part in word if part not in known})
        read = dict(zip(lacking, map(encode_ids, self._encoder.encode_all(lacking)), strict=True)) if lacking else {}
        for word, made_of in parts.items():
            new[word] = b"".join([known[part] if part not in read else read[part] for part in made_of])
        few = {word: ids for word, ids in new.items() if 1 < len(parts[word]) <= MAX_NUMBER_PARTS}
        self._keep({**read, **few})

    def __len__(self) -> int:
        return len(self._ids)

    def _keep(self, new: Mapping[str, bytes]) -> None:
        if len(self._ids) + len(new) > MAX_WORDS:
            self._ids.clear()
        self._ids.update([(word, ids) for word, ids in new.items() if len(word) <= MAX_WORD_CHARS][:MAX_WORDS])


def split_words(text: str) -> list[str]:
    """The text, cut before each single space that has a character on either side which is none."""
    parts = text.split(" ")
    word, out = parts[0], []
    for part in parts[1:]:
        if part and word and not part[0].isspace() and not word[-1].isspace():
            out.append(word)
            word = " " + part
        else:
            word += " " + part
    out.append(word)
    return out


def find_words(encoder: PromptEncoder) -> WordIds | None:
    """The table for a tokenizer whose words do not depend on their neighbours; None for others."""
    tokenizer = json.loads(encoder.tokenizer.to_str())
    if not _keeps_words(tokenizer):
        return None
    if _cuts_digits(tokenizer) and _holds(words := WordIds(encoder, digits_apart=True), encoder):
        return words
    return words if _holds(words := WordIds(encoder), encoder) else None


def _keeps_words(tokenizer: Mapping[str, Any]) -> bool:
    """By its parts: byte-level BPE, nothing that looks across a space, no entry that lies across one."""
    model = tokenizer.get("model") or {}
    if model.get("type") != "BPE" or model.get("dropout") or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return False
    if any(tokenizer.get(part) is not None for part in ("normalizer", "truncation", "padding")):
        return False
    step = tokenizer.get("pre_tokenizer") or {}
    steps = step.get("pretokenizers", []) if step.get("type") == "Sequence" else [step]
    if any(s.get("type") not in _KNOWN_STEPS or s.get("add_prefix_space") or s.get("behavior") == "Removed" for s in steps):
        return False
    if not any(s.get("type") == "ByteLevel" for s in steps):
        return False
    added = tokenizer.get("added_tokens") or []
    if any(a.get("lstrip") or a.get("rstrip") or a.get("single_word") or len(split_words(a["content"])) > 1 for a in added):
        return False
    return not any(_lies_across(entry) for entry in model.get("vocab") or {})


def _cuts_digits(tokenizer: Mapping[str, Any]) -> bool:
    """Whether each digit is cut out before anything else is looked at; tokens that are taken out before that have none."""
    step = tokenizer["pre_tokenizer"]
    first = step["pretokenizers"][0] if step["type"] == "Sequence" else step
    marks = [a["content"] for a in tokenizer.get("added_tokens") or []]
    return first["type"] == "Digits" and bool(first.get("individual_digits")) and not any(_AROUND_DIGITS.search(mark) for mark in marks)


def _lies_across(entry: str) -> bool:
    """True when a space follows another character inside an entry."""
    at = entry.find(_SPACE, 1)
    while at > 0:
        if entry[at - 1] not in _BLANKS:
            return True
        at = entry.find(_SPACE, at + 1)
    return False


def _holds(words: WordIds, encoder: PromptEncoder) -> bool:
    """Whether random texts give the ids of the whole."""
    rng = random.Random(2)
    marks = [token.content for token in encoder.tokenizer.get_added_tokens_decoder().values() if token.content] or ["<s>"]
    for _ in range(PROOFS):
        text = noise(rng, rng.choice(marks)) + " " + noise(rng, rng.choice(marks))
        if words.encode(text) != encode_ids(encoder.encode(text, add_special_tokens=False)):
            return False
    return True


def noise(rng: random.Random, mark: str) -> str:
    """Up to two dozen scraps that look for trouble; now and then a mark of the model, whole or broken."""
    out = [rng.choice(SCRAPS) for _ in range(rng.randrange(24))]
    if rng.random() < 0.2:
        out.insert(rng.randrange(len(out) + 1), mark[: rng.randrange(1, len(mark) + 1)])
    return "".join(out)
