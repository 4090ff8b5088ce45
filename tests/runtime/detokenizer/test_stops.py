"""Stop strings against a character-by-character model, for every way to cut the text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_runtime.detokenizer.stops import StopFilter


def model(text: str, stops: list[str]) -> tuple[str, bool]:
    """Character by character: the stop that is complete first; of those, the longest."""
    for end in range(1, len(text) + 1):
        ended = [s for s in stops if text[:end].endswith(s)]
        if ended:
            return text[: end - max(map(len, ended))], True
    return text, False


small = st.text(alphabet="abc", max_size=12)


@given(text=st.text(alphabet="abc", max_size=40), stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=3), data=st.data())
def test_any_cut_of_the_text_gives_the_model_s_answer(text: str, stops: list[str], data: st.DataObject) -> None:
    out, met, at, f = "", None, 0, StopFilter(stops)
    while at < len(text) and not met:
        size = data.draw(st.integers(1, 6))
        piece, met = f.push(text[at : at + size])
        at += size
        out += piece
        if not met:
            held = text[:at][len(out) :]
            assert all(s not in out for s in stops)
            assert held == "" or any(s.startswith(held) for s in stops), "only a possible beginning of a stop is held"
    if not met:
        out += f.flush()
    assert (out, met is not None) == model(text, stops)


@pytest.mark.parametrize(
    ("pieces", "stops", "out", "met"),
    [
        (["Hello\nUs", "er: hi"], ["\nUser:"], "Hello", True),
        (["abc"], ["c", "abcd"], "ab", True),
        (["x" * 1999], ["x" * 2000], "x" * 1999, False),
        (["a", "a", "a", "b"], ["aab"], "a", True),
        (["no stop"], [], "no stop", False),
        (["中", "文"], ["中文"], "", True),
    ],
)
def test_known_cases(pieces: list[str], stops: list[str], out: str, met: bool) -> None:
    f = StopFilter(stops)
    got, hit = "", None
    for piece in pieces:
        text, hit = f.push(piece)
        got += text
        if hit:
            break
    assert (got + ("" if hit else f.flush()), hit is not None) == (out, met)


def test_a_hopeless_beginning_is_let_go_at_once() -> None:
    f = StopFilter(["STOP"])
    assert f.push("ST") == ("", None)
    assert f.push("A") == ("STA", None)


def naive(text: str, stops: list[str], armed_from: int) -> tuple[str, bool]:
    """The model with stops that may end the answer only at or after the character `armed_from` (counted from 1)."""
    for end in range(1, len(text) + 1):
        ended = [s for s in stops if text[:end].endswith(s)]
        if ended and end >= armed_from:
            return text[: end - max(map(len, ended))], True
    return text, False


@given(text=small, stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3), armed_from=st.integers(0, 12))
def test_a_stop_before_its_time_is_text(text: str, stops: list[str], armed_from: int) -> None:
    f, out, met = StopFilter(stops), "", None
    for n, char in enumerate(text, 1):
        passed, met = f.push(char, armed=n >= armed_from)
        out += passed
        if met is not None:
            break
    assert (out + ("" if met else f.flush()), met is not None) == naive(text, stops, armed_from)


@given(text=small, stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3), size=st.integers(1, 5))
def test_a_stop_that_is_included_ends_the_text(text: str, stops: list[str], size: int) -> None:
    f, out, met = StopFilter(stops, include=True), "", None
    for at in range(0, len(text), size):
        passed, met = f.push(text[at : at + size])
        out += passed
        if met is not None:
            break
    before, hit = model(text, stops)
    assert (met is not None) == hit
    assert out == before + met.stop if met is not None else out + f.flush() == text


def test_a_stop_may_begin_inside_a_token() -> None:
    f = StopFilter(["lo wor"])
    assert f.push("Hello") == ("Hel", None)
    passed, met = f.push(" world")
    assert passed == "" and met is not None and met.stop == "lo wor"
