"""Ids made word by word are those of the whole text; where that cannot be known, no table is used."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from fleet_contract.wire import encode_ids
from fleet_text import words as words_module
from fleet_text.prompt import PromptEncoder
from fleet_text.words import SCRAPS, find_words, noise, split_words

GPT4 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
MARK = AddedToken("<|im_start|>", special=True, normalized=False)
MERGES = [("w", "o"), ("r", "d"), ("wo", "rd"), ("Ġ", "word"), ("Ġ", "a"), ("Ġ", "Ġ"), ("Ċ", "Ċ"), ("Ċ", "Ġ"), ("1", "2"), ("Ġ", "<"), ("d", "on")]


def make(pre: Any = None, *, merges: list[tuple[str, str]] = MERGES, added: AddedToken = MARK, normalizer: Any = None) -> PromptEncoder:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: n for n, text in enumerate(dict.fromkeys([*letters, *(part for m in merges for part in (*m, "".join(m)))]))}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre or pre_tokenizers.ByteLevel(add_prefix_space=False)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens([added])
    return PromptEncoder({"tokenizer.json": tokenizer.to_str().encode()})


def gpt4() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(GPT4), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def digits() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])


KINDS = {"gpt2": make(), "gpt4": make(gpt4()), "digits": make(digits())}


@pytest.mark.parametrize("kind", KINDS)
def test_words_give_the_ids_of_the_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = KINDS[kind]
    words = find_words(encoder)
    assert words is not None
    monkeypatch.setattr(words_module, "MAX_WORDS", 200)  # the table is emptied now and then
    rng = random.Random(5)
    for _ in range(400):
        text = " ".join(noise(rng, MARK.content) for _ in range(rng.randrange(1, 5)))
        assert words.encode(text) == encode_ids(encoder.encode(text, add_special_tokens=False))
        assert len(words) <= 200


@given(st.lists(st.one_of(st.sampled_from(SCRAPS), st.text(max_size=5)), max_size=12).map("".join))
@settings(max_examples=150, deadline=None)
def test_any_text_is_cut_without_loss_and_gives_the_ids_of_the_whole(text: str) -> None:
    assert "".join(split_words(text)) == text
    if text.isprintable():  # lone surrogates are no text for any tokenizer
        for encoder in KINDS.values():
            words = find_words_once(encoder)
            assert words.encode(text) == encode_ids(encoder.encode(text, add_special_tokens=False))


_tables: dict[int, Any] = {}


def find_words_once(encoder: PromptEncoder) -> Any:
    return _tables.setdefault(id(encoder), _tables.get(id(encoder)) or find_words(encoder))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", [""]),
        ("a", ["a"]),
        ("a b", ["a", " b"]),
        ("a  b", ["a  b"]),
        (" a b ", [" a", " b "]),
        ("a\n b c", ["a\n b", " c"]),
        ("a \nb", ["a \nb"]),
    ],
)
def test_cuts_are_before_single_spaces_between_two_others(text: str, words: list[str]) -> None:
    assert split_words(text) == words


@pytest.mark.parametrize(
    "encoder",
    [
        make(merges=[*MERGES, ("d", "Ġ")]),  # an entry lies across a space
        make(pre_tokenizers.ByteLevel(add_prefix_space=True)),
        make(pre_tokenizers.Metaspace()),
        make(normalizer=normalizers.Strip()),
        make(added=AddedToken("<|im_start|>", special=True, normalized=False, lstrip=True)),
        make(added=AddedToken("<a b>", special=True, normalized=False)),
    ],
)
def test_a_tokenizer_whose_words_may_depend_on_their_neighbours_gets_no_table(encoder: PromptEncoder) -> None:
    assert find_words(encoder) is None


def test_a_tokenizer_that_only_a_trial_tells_apart_gets_no_table() -> None:
    class Odd(PromptEncoder):
        def encode(self, text: str, *, add_special_tokens: bool, limit: int | None = None) -> list[int]:
            return [7, *super().encode(text, add_special_tokens=add_special_tokens)]  # one more for each text

    assert find_words(Odd({"tokenizer.json": KINDS["gpt2"].tokenizer.to_str().encode()})) is None
