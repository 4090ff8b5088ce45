"""A GGUF's SentencePiece vocabulary gives the ids that SentencePiece's own rule gives, and the text back."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from fleet_runtime.models.gguf_folder import convert_gguf
from fleet_runtime.models.gguf_tokenizer import write_tokenizer
from fleet_testing.tiny_gguf import SHAPE, write_gguf
from fleet_testing.tiny_llama import make_llama

CORPUS = ["▁the▁cat▁sat▁on▁the▁mat", "▁banana▁bananas", "▁ana▁nan▁anna", "▁ababab▁abba▁baab", "▁▁▁▁le▁café▁é", "▁hahaha▁aha▁haha", "▁中文▁中中文"]
ALPHABET = "▁abcehlmnost中文é"  # characters with a piece of their own; all others become bytes


def learned(count: int) -> list[str]:
    """Pieces of two characters and more, the best first: the pair of neighbours that is there most often becomes one."""
    texts, out = [list(text) for text in CORPUS], list[str]()
    while len(out) < count:
        pairs = Counter(pair for text in texts for pair in pairwise(text))
        (left, right), _ = min(pairs.items(), key=lambda p: (-p[1], p[0]))
        if left + right not in out:
            out.append(left + right)
        for text in texts:
            for i in range(len(text) - 1, 0, -1):
                if text[i - 1 : i + 1] == [left, right]:
                    text[i - 1 : i + 1] = [left + right]
    return out


PIECES = learned(40)
TOKENS = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], *PIECES, *ALPHABET, "<|user|>"]
TYPES = [2, 3, 3, *[6] * 256, *[1] * len(PIECES + list(ALPHABET)), 4]
SCORES = [*[0.0] * 259, *[-float(i) for i in range(len(PIECES))], *[-1e6 - i for i in range(len(ALPHABET))], 0.0]
IDS = {token: i for i, token in enumerate(TOKENS)}


def by_the_rule(text: str) -> list[int]:
    """Joins the leftmost of the neighbours whose joined piece has the best score, until there are none."""
    parts = list(("▁" + text if text else text).replace(" ", "▁"))
    while True:
        able = [(-SCORES[IDS[a + b]], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in PIECES]
        if not able:
            break
        _, i = min(able)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return [n for part in parts for n in ([IDS[part]] if part in IDS else [IDS[f"<0x{byte:02X}>"] for byte in part.encode()])]


def fields(**more: Any) -> dict[str, Any]:
    names = {"tokens": TOKENS, "token_type": TYPES, "scores": SCORES, "model": "llama", "bos_token_id": 1, "eos_token_id": 2, **more}
    return {f"tokenizer.ggml.{name}": value for name, value in names.items()}


def written(folder: Path, **more: Any) -> Tokenizer:
    given = fields(**more)
    write_tokenizer(folder, lambda name, default=None: given.get(name, default), context=512)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return written(tmp_path_factory.mktemp("pieces"))


@settings(max_examples=400, deadline=None)
@given(text=st.text("ab n", max_size=40) | st.text("abcehlmnost ▁中é☃😀\n", max_size=40) | st.text(max_size=20))
def test_ids_are_those_of_sentencepieces_rule_and_their_text_is_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if "<" not in text:
        assert ids == by_the_rule(text)
    if "▁" not in text:
        assert tokenizer.decode(ids) == text


def test_special_tokens_stand_alone_and_a_text_begins_with_its_begin(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the<|user|>cat</s>").ids
    assert ids == [1, *by_the_rule("the"), IDS["<|user|>"], *by_the_rule("cat"), 2]
    assert tokenizer.encode("", add_special_tokens=False).ids == []


def test_a_file_may_want_no_space_in_front(tmp_path: Path) -> None:
    tokenizer = written(tmp_path, add_space_prefix=False, add_bos_token=False)
    ids = tokenizer.encode("the cat").ids
    assert TOKENS[ids[0]].startswith("t")
    assert tokenizer.decode(ids) == "the cat" and tokenizer.decode(tokenizer.encode(" the").ids) == " the"


def test_a_whole_file_becomes_the_tokenizer_that_transformers_reads_from_it(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", make_llama(tmp_path / "hf", vocab_size=len(TOKENS), **SHAPE), pieces=(TOKENS, TYPES, SCORES))
    (tmp_path / "out").mkdir()
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    ours, theirs = AutoTokenizer.from_pretrained(tmp_path / "out"), AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in (
        "the banana",
        "hahaha é ☃",
        "aha</s>",
        *[text.replace("▁", " ").strip() for text in CORPUS],
    ):  # it puts no space behind a special token, where llama.cpp does
        assert ours(text)["input_ids"] == theirs(text)["input_ids"], text
    assert (ours.bos_token, ours.eos_token, ours.unk_token) == ("<s>", "</s>", "<unk>")


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"token_type": [1, *TYPES[1:]]}, "0 unknown and 256 byte tokens; 1 and 256 are needed"),
        ({"token_type": [*TYPES[:3], 1, *TYPES[4:]]}, "1 unknown and 255 byte tokens"),
        ({"tokens": [*TOKENS[:-2], TOKENS[-3], TOKENS[-1]]}, "names a piece twice"),
        ({"model": "t5"}, "the tokenizer is 't5'"),
    ],
)
def test_a_vocabulary_that_cannot_be_rebuilt_is_refused(tmp_path: Path, more: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        written(tmp_path, **more)
