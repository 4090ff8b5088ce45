"""Incremental text against the full decode, for byte-level and SentencePiece-like tokenizers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from fleet_runtime.detokenizer.incremental import REPLACEMENT, IncrementalText
from fleet_runtime.models.simulated_tokenizer import SIMULATED_VOCAB_SIZE, simulated_tokenizer_files

BYTES = Tokenizer.from_buffer(simulated_tokenizer_files()["tokenizer.json"])


def sentencepiece_like() -> Tokenizer:
    """Llama's old tokenizer in small: U+2581 for spaces, bytes as <0xNN>, the first space stripped."""
    words = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁Hello", "Hello", "▁world", "lo", "▁", "中", "文", "é", "."]
    vocab = {w: i for i, w in enumerate(dict.fromkeys(words))}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)])
    tokenizer.add_special_tokens([AddedToken("<unk>", special=True)])
    return tokenizer


PIECES = sentencepiece_like()


def decode_bytes(ids: Sequence[int]) -> str:
    return str(BYTES.decode(list(ids), skip_special_tokens=True))


def decode_pieces(ids: Sequence[int]) -> str:
    return str(PIECES.decode(list(ids), skip_special_tokens=True))


def run(decode, ids: Sequence[int], tail: Sequence[int] = (), sizes: Sequence[int] = ()) -> list[str]:
    text = IncrementalText(decode, tail)
    out, at = [], 0
    for size in [*sizes, len(ids)]:
        out.append(text.push(ids[at : at + size]))
        at += size
    return [*out, text.flush()]


texts = st.text(alphabet=st.sampled_from(list("ab é中文한글😀👩\u200d🇫🇷ď\n\ufffd")), max_size=30)
sizes = st.lists(st.integers(0, 5), max_size=20)


@given(ids=st.lists(st.integers(0, 299), max_size=120), cuts=sizes)
def test_random_bytes_join_to_the_full_decode(ids: list[int], cuts: list[int]) -> None:
    ids = [i for i in ids if i < 256 or i >= SIMULATED_VOCAB_SIZE]  # specials never come here: `Choices` drops them
    assert "".join(run(decode_bytes, ids, sizes=cuts)) == decode_bytes(ids)


@given(text=texts, prompt=texts, cuts=sizes)
def test_text_behind_a_prompt_joins_to_the_text(text: str, prompt: str, cuts: list[int]) -> None:
    pieces = run(decode_bytes, list(text.encode()), list(prompt.encode()), cuts)
    assert "".join(pieces) == text
    assert all("\ufffd" not in p for p in pieces) or "\ufffd" in text


@given(text=texts.filter(lambda text: "\ufffd" not in text))  # what may be a piece of a character is held, also when it is not
def test_each_character_comes_with_its_last_byte(text: str) -> None:
    incremental = IncrementalText(decode_bytes)
    for char in text:
        data = char.encode()
        assert incremental.push(data[:-1]) == ""
        assert incremental.push(data[-1:]) == ("" if char == REPLACEMENT else char) or REPLACEMENT in text


@given(data=st.lists(st.sampled_from([0xE4, 0xB8, 0xAD, 0xF0, 0x9F, 0x98, 0x80, 0x41]), min_size=100, max_size=200))
def test_long_runs_of_broken_characters_join_to_the_full_decode(data: list[int]) -> None:
    assert "".join(run(decode_bytes, data)) == decode_bytes(data)


def test_a_long_run_of_open_characters_costs_linear_time() -> None:
    calls = 0

    def counting(ids: Sequence[int]) -> str:
        nonlocal calls
        calls += len(ids)
        return decode_bytes(ids)

    run(counting, [0xE4] * 4000)
    assert calls < 4000 * 250


def spell(text: str) -> list[int]:
    """Ids of a text in PIECES: whole pieces where they are, bytes elsewhere."""
    ids: list[int] = []
    for char in text.replace(" ", "▁"):
        piece = PIECES.token_to_id(char)
        ids += [piece] if piece is not None else [PIECES.token_to_id(f"<0x{b:02X}>") for b in char.encode()]
    return ids


@given(text=texts.map(lambda t: t.replace("\ufffd", "")), cuts=sizes)
def test_byte_fallback_joins_to_the_full_decode(text: str, cuts: list[int]) -> None:
    ids = spell(text)
    pieces = run(decode_pieces, ids, sizes=cuts)
    assert "".join(pieces) == decode_pieces(ids)
    assert not any("\ufffd" in p for p in pieces)


def test_the_first_word_behind_a_prompt_keeps_its_space() -> None:
    hello, world = PIECES.token_to_id("▁Hello"), PIECES.token_to_id("▁world")
    assert "".join(run(decode_pieces, [world, world], [hello])) == " world world"
    assert "".join(run(decode_pieces, [hello, world])) == "Hello world"


def test_a_broken_byte_behind_a_whole_character_repeats_nothing() -> None:
    ids = [*spell("😀"), PIECES.token_to_id("<0xE4>"), *spell("Hello") * 4]
    text = "".join(run(decode_pieces, ids))
    assert text.startswith("😀") and text.count("😀") == 1


@pytest.mark.parametrize(("data", "out"), [(b"ab\xe4", ["ab", "\ufffd"]), (b"\xf0\x9f\x98", ["", "\ufffd"]), (b"", ["", ""])])
def test_an_unfinished_character_shows_at_the_end_only(data: bytes, out: list[str]) -> None:
    assert run(decode_bytes, list(data)) == out


def test_a_character_that_the_prompt_began_is_completed() -> None:
    assert run(decode_bytes, [0xAD, 0x41], [0xE4, 0xB8]) == ["中A", ""]
    assert "".join(run(decode_bytes, [0xB8, 0xAD], [0xE4])) == "中"
