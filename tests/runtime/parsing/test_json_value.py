"""The incremental JSON reader against the standard library's."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_runtime.server.parsing.json_value import JsonValue

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


def read(text: str, cuts: list[int]) -> tuple[int, bool, bool]:
    value, pos = JsonValue(), 0
    for end in [*sorted(cuts), len(text)]:
        if end < pos:
            continue
        pos = value.feed(text[:end], pos)
    return pos, value.done, value.failed


@given(JSON, st.booleans(), st.sampled_from([None, 1]), st.lists(st.integers(0, 60), max_size=5))
def test_a_value_ends_where_it_ends_however_it_is_cut(value: object, ascii_only: bool, indent: int | None, cuts: list[int]) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    assert read(text + " ]x", [c for c in cuts if c <= len(text)]) == (len(text), True, False)


@given(st.text(alphabet='{}[]",:\\u0123456789abcdefnrtl.-+E \n\x01é', max_size=14))
def test_what_it_calls_whole_is_what_the_standard_library_reads(text: str) -> None:
    pos, done, failed = read(text + "\x00", [])
    bare = text[:pos]
    try:
        json.loads(text, parse_constant=lambda _: 1 / 0)
        valid = True
    except (ValueError, ZeroDivisionError):
        valid = False
    if valid and text[:1] not in " \n":
        assert done and text[pos:].strip(" \n") == ""
    if done:
        json.loads(bare)
    assert done or failed


@pytest.mark.parametrize(
    ("text", "pos"),
    [
        ("01", None), ("1.x", 2), ("-x", 1), ("1e+,", 3), ('"a\nb"', 2), ('"\\x"', 2), ('"\\u12g4"', 5), ("[1,]", 3), ('{"a":1,}', 7),
        ("{a:1}", 1), ('{"a" 1}', 5), ("[1 2]", 3), ("[1}", 2), ("nul,", 3), ("NaN", 0), ("]", 0),
    ],
)  # fmt: skip
def test_what_is_no_json_fails_at_its_character(text: str, pos: int | None) -> None:
    at, done, failed = read(text, [])
    assert (at, done, failed) == ((1, True, False) if pos is None else (pos, False, True))


def test_depth_needs_no_recursion() -> None:
    text = "[" * 100_000 + "]" * 100_000
    assert read(text, [5, 70_000]) == (200_000, True, False)
