"""A prompt far over the context is refused before it is tokenized, and never one that fits."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_testing.tiny_bpe import tiny_bpe
from fleet_text.bounds import PromptTooLong, longest_token
from fleet_text.prompt import PromptEncoder

TOKENIZER = tiny_bpe()
ENCODER = PromptEncoder({"tokenizer.json": TOKENIZER.to_str().encode()})


@given(st.text(alphabet=st.sampled_from("the smal12 \u00e9\u65e5\U0001f600<|end>"), max_size=200))
def test_a_text_that_fits_is_never_refused(text: str) -> None:
    ids = ENCODER.encode(text, add_special_tokens=False)
    assert ENCODER.encode(text, add_special_tokens=False, limit=len(ids)) == ids


def test_a_text_far_over_the_limit_is_refused_with_how_many_tokens_it_has_at_least() -> None:
    with pytest.raises(PromptTooLong) as e:
        ENCODER.encode("the " * 100_000, add_special_tokens=False, limit=100)
    assert 100 < e.value.least <= len(ENCODER.encode("the " * 100_000, add_special_tokens=False))


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "NFC"}},
        {"pre_tokenizer": {"type": "WhitespaceSplit"}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Split", "behavior": "Removed"}, {"type": "ByteLevel"}]}},
        {"added_tokens": [{"content": "<x>", "lstrip": True}]},
        {"model": {"type": "BPE", "unk_token": "<unk>", "vocab": {}}},
        {"model": {"type": "Unigram", "vocab": []}},
    ],
    ids=["normalizer", "spaces go", "pieces go", "strips", "unknown token", "another kind"],
)
def test_a_tokenizer_whose_tokens_may_cover_more_has_no_bound(change: dict[str, object]) -> None:
    whole = json.loads(TOKENIZER.to_str())
    assert longest_token(whole) > 1 and longest_token(whole | change) == 0
