"""How few tokens a text can have, without tokenizing it: so that a prompt far over the context is refused before megabytes are tokenized.

Pure; called by `prompt`. Exact only for tokenizers whose every token covers at most as many characters of the text as it is long: byte-level
BPE without a normalizer and without an unknown token. For all others there is no bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_COVERS_ALL: Final = frozenset({"ByteLevel", "Digits", "Split"})


class PromptTooLong(ValueError):
    """The text has at least `least` tokens, more than the limit. Raised instead of tokenizing it."""

    def __init__(self, least: int) -> None:
        super().__init__(f"the text has at least {least} tokens")
        self.least = least


def longest_token(tokenizer: Mapping[str, Any]) -> int:
    """Most characters of a text that one token covers, from the content of tokenizer.json; 0 if there is no bound."""
    model = tokenizer.get("model")
    if not isinstance(model, dict) or model.get("type") != "BPE" or model.get("unk_token") is not None:
        return 0
    if tokenizer.get("normalizer") is not None or not _keeps_all(tokenizer.get("pre_tokenizer")):
        return 0
    added = [a["content"] for a in tokenizer.get("added_tokens") or () if isinstance(a, dict) and isinstance(a.get("content"), str)]
    if any(a.get("lstrip") or a.get("rstrip") for a in tokenizer.get("added_tokens") or () if isinstance(a, dict)):
        return 0  # such a token takes any number of spaces beside it
    vocabulary = model.get("vocab")
    return max(map(len, [*vocabulary, *added]), default=0) if isinstance(vocabulary, dict) else 0


def _keeps_all(step: object) -> bool:
    """True for pre-tokenizers after which every character of the text is still there, one byte-level letter a byte."""
    steps = step.get("pretokenizers", []) if isinstance(step, dict) and step.get("type") == "Sequence" else [step]
    known = all(isinstance(s, dict) and s.get("type") in _COVERS_ALL and s.get("behavior") != "Removed" for s in steps)
    return known and any(isinstance(s, dict) and s.get("type") == "ByteLevel" for s in steps)
