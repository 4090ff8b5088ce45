"""One terminal message per choice, counts that end with the stop, and nothing left behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from fleet_runtime import messages as m
from fleet_runtime.detokenizer.choices import Choices
from fleet_runtime.detokenizer.stops import StopFilter
from fleet_runtime.models.simulated_tokenizer import SIMULATED_VOCAB_SIZE, simulated_tokenizer_files

TOKENIZER = Tokenizer.from_buffer(simulated_tokenizer_files()["tokenizer.json"])


def decode(ids: Sequence[int]) -> str:
    return str(TOKENIZER.decode(list(ids), skip_special_tokens=False))


def choices() -> Choices:
    return Choices(decode, range(256, SIMULATED_VOCAB_SIZE))


def sampled(text: bytes, done: int, finish: str | None = None, *, stop: list[str] | None = None, first: bool = False) -> m.Sampled:
    opened = m.OpenText(prompt_tail=[256], stop=stop or [], prompt_tokens=7, serial=3) if first else None
    return m.Sampled(rid="r", index=0, ids=list(text), completion_tokens=done, finish=finish, cached_tokens=0, open=opened)


def test_the_first_token_is_announced_even_without_text() -> None:
    out = choices().push([sampled(b"\xe4", 1, first=True)])
    assert [t.text for t in out.texts] == [""]


def test_a_stop_ends_the_choice_here_and_counts_up_to_its_token() -> None:
    c = choices()
    c.push([sampled(b"ab", 2, stop=["cd"], first=True)])
    out = c.push([sampled(b"xcdyz", 7)])
    assert [(t.text, t.finish, t.completion_tokens, bytes(t.ids)) for t in out.texts] == [("x", "stop", 5, b"xcd")]
    assert [(s.rid, s.index) for s in out.stopped] == [("r", 0)]
    assert len(c) == 0
    assert c.push([sampled(b"late", 11)]).texts == []
    assert c.late == 1


@pytest.mark.parametrize("theirs", ["finish", "other"])
def test_a_rid_is_free_again_when_the_scheduler_has_ended_it_too(theirs: str) -> None:
    """The scheduler's own end is no second one for http; the next request of that rid is answered, also one that fails before its first token."""
    c = choices()
    [stopped] = c.push([sampled(b"stop", 4, stop=["stop"], first=True)]).stopped
    assert (stopped.rid, stopped.index, stopped.serial) == ("r", 0, 3)
    if theirs == "finish":
        assert c.push([sampled(b"", 4, "stop")]).texts == []
    else:
        assert not c.end("r", 0)
    assert c.end("r", 0), "the failure of the next one passes"
    c.push([sampled(b"a", 1, first=True)])
    assert [t.finish for t in c.push([sampled(b"b", 2, "length")]).texts] == ["length"]


def test_a_stop_in_the_last_tokens_needs_no_word_to_the_scheduler() -> None:
    out = choices().push([sampled(b"abSTOP", 6, "length", stop=["STOP"], first=True)])
    assert [(t.text, t.finish) for t in out.texts] == [("ab", "stop")]
    assert out.stopped == []


def test_held_text_comes_with_the_end() -> None:
    c = choices()
    c.push([sampled(b"abST", 4, stop=["STOP"], first=True)])
    out = c.push([sampled(b"\xe4", 5, "length")])
    assert [(t.text, t.finish) for t in out.texts] == [("ST\ufffd", "length")]
    assert len(c) == 0


def test_a_failure_before_the_first_token_passes() -> None:
    assert choices().end("never opened", 0)


@given(st.lists(st.tuples(st.sampled_from("pqr"), st.sampled_from(["more", "finish", "fail"]), st.binary(max_size=4)), max_size=60))
def test_each_choice_ends_once_and_its_rid_comes_again(events: list[tuple[str, str, bytes]]) -> None:
    """What a scheduler may say: first tokens open a choice, more follow, one terminal message ends it; an end before the first token is possible."""
    c, there, ended = choices(), dict[str, int](), set[str]()  # at the scheduler with so many tokens; of those, ended for http
    for rid, kind, ids in events:
        opens = rid not in there
        done = there[rid] = there.get(rid, 0) + len(ids)
        if kind == "fail":
            assert c.end(rid, 0) == (rid not in ended), "http hears of an end just once"
        else:
            opened = m.OpenText(prompt_tail=[], stop=["a", "bb"], prompt_tokens=1) if opens else None
            finish = "length" if kind == "finish" else None
            out = c.push([m.Sampled(rid=rid, index=0, ids=list(ids), completion_tokens=done, finish=finish, open=opened)])
            ends = [t for t in out.texts if t.finish]
            assert len(ends) == (rid not in ended) if finish else len(ends) <= (rid not in ended)
            ended |= {rid} if ends else set()
        if kind != "more":
            del there[rid]
            ended.discard(rid)
        assert len(c) <= len(there.keys() - ended)
        c.check_integrity()
    for rid in there:
        c.end(rid, 0)
    assert len(c) == 0 and c.is_empty()


def test_ids_of_held_text_come_with_the_next_text() -> None:
    c = choices()
    sent = [
        t for part in (b"a", b"\xe4", b"\xb8", b"\xad", b"S", b"T", b"b") for t in c.push([sampled(part, 1, stop=["ST!"], first=part == b"a")]).texts
    ]
    sent += c.push([sampled(b"", 9, "stop")]).texts
    assert [(t.text, bytes(t.ids)) for t in sent] == [("a", b"a"), ("中", "中".encode()), ("STb", b"STb"), ("", b"")]


def opened(ids: list[int], finish: str | None = None, *, logprobs: bool = False, stop_id: int = -1, **options: Any) -> m.Sampled:
    """A choice's first message."""
    made = m.Sampled("r", 0, ids, len(ids), finish, 0, m.OpenText([], options.pop("stop", []), 7, **options), stop_id=stop_id)
    made.logprobs = [m.TokenLogprob(i, -1.0) for i in ids] if logprobs else []
    return made


@pytest.mark.parametrize(
    ("text", "stop", "least", "include", "out", "by", "tokens"),
    [
        ("abSTcdST", "ST", 0, False, "ab", "ST", 4),
        ("abSTcdST", "ST", 4, False, "ab", "ST", 4),  # complete with the fourth token: it may end there
        ("abSTcdST", "ST", 5, False, "abSTcd", "ST", 8),
        ("abSTcdST", "ST", 0, True, "abST", "ST", 4),
        ("abSTcdST", "ST", 5, True, "abSTcdST", "ST", 8),
        ("abSTcdST", "ST", 9, False, "abSTcdST", None, 8),
        ("aSSTb", "ST", 0, False, "aS", "ST", 4),
        ("xx", "xx", 2, False, "", "xx", 2),
    ],
)
def test_stops_after_min_tokens_shown_or_not(text: str, stop: str, least: int, include: bool, out: str, by: str | None, tokens: int) -> None:
    for step in (1, 3, len(text)):
        c, got = choices(), []
        for at in range(0, len(text), step):
            ids = list(text.encode())[at : at + step]
            finish = "length" if at + step >= len(text) else None
            first = m.OpenText([], [stop], 7, least, include) if at == 0 else None
            got += c.push([m.Sampled("r", 0, ids, min(at + step, len(text)), finish, 0, first)]).texts
            if got and got[-1].finish:
                break
        assert "".join(t.text for t in got) == out
        assert (got[-1].stopped_by, got[-1].completion_tokens, got[-1].finish) == (by, tokens, "stop" if by else "length")
        assert len(c) == 0


@pytest.mark.parametrize(("keep", "spaces", "text"), [(True, True, "a <s> </s> b <s>"), (True, False, "a <s></s> b <s>"), (False, False, "a b")])
def test_spaces_between_special_tokens_are_left_out_on_request(keep: bool, spaces: bool, text: str) -> None:
    """With a tokenizer that joins its tokens by spaces: one without a decoder."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    c = Choices(lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False)), [2, 3], [2, 3])
    opened = m.OpenText(prompt_tail=[], stop=[], prompt_tokens=1, keep_special=keep, spaces_between_special=spaces)
    out = c.push([m.Sampled("r", 0, [0], 1, open=opened)]).texts
    out += c.push([m.Sampled("r", 0, [2, 3], 3), m.Sampled("r", 0, [1], 4), m.Sampled("r", 0, [2], 5, "stop")]).texts
    assert "".join(t.text for t in out) == text


def test_special_tokens_have_text_only_on_request() -> None:
    ids = [256, 97, 258, 98]
    assert "".join(t.text for t in choices().push([opened(ids, "stop")]).texts) == "ab"
    assert "".join(t.text for t in choices().push([opened(ids, "stop", keep_special=True)]).texts) == decode(ids) == "<|bos|>a<|role|>b"


@given(ids=st.lists(st.integers(0, SIMULATED_VOCAB_SIZE - 1), max_size=60), cut=st.integers(1, 5), keep=st.booleans())
def test_joined_text_is_the_decode_of_the_ids_with_and_without_special_tokens(ids: list[int], cut: int, keep: bool) -> None:
    c, got = choices(), []
    for at in range(0, max(1, len(ids)), cut):
        first = m.OpenText([], [], 7, keep_special=keep) if at == 0 else None
        got += c.push([m.Sampled("r", 0, ids[at : at + cut], at, "length" if at + cut >= len(ids) else None, 0, first)]).texts
    assert "".join(t.text for t in got) == str(TOKENIZER.decode(ids, skip_special_tokens=not keep))
    assert [i for t in got for i in t.ids] == ids


@given(text=st.text(alphabet="aé中😀S", max_size=30), cut=st.integers(1, 5), stop=st.sampled_from(["SS", "é中", "zz"]))
def test_ids_and_logprobs_leave_with_their_text(text: str, cut: int, stop: str) -> None:
    """Whatever is held: one logprob an id, in order, and all of them by the end."""
    ids = list(text.encode())
    c, got = choices(), []
    for at in range(0, max(1, len(ids)), cut):
        new = ids[at : at + cut]
        first = m.OpenText([], [stop], 7) if at == 0 else None
        item = m.Sampled("r", 0, new, at + len(new), "length" if at + cut >= len(ids) else None, 0, first)
        item.logprobs = [m.TokenLogprob(i, -1.0) for i in new]
        got += c.push([item]).texts
        if got and got[-1].finish:
            break
    assert all([p.token for p in t.logprobs] == t.ids for t in got)
    told = [i for t in got for i in t.ids]
    assert told == ids[: len(told)] and len(told) == got[-1].completion_tokens
    assert got[-1].finish == "stop" or told == ids


def test_prompt_logprobs_come_once_with_the_first_text() -> None:
    item = opened([97])
    item.prompt_logprobs = [m.TokenLogprob(5, -2.0)]
    c = choices()
    assert c.push([item]).texts[0].prompt_logprobs == [m.TokenLogprob(5, -2.0)]
    assert c.push([sampled(b"b", 2, "length")]).texts[0].prompt_logprobs is None


@pytest.mark.parametrize(("finish", "stop_id", "by"), [("stop", 257, 257), ("stop", -1, None), ("length", -1, None)])
def test_the_id_that_ended_an_answer_is_named(finish: str, stop_id: int, by: int | None) -> None:
    assert choices().push([opened([97], finish, stop_id=stop_id)]).texts[0].stopped_by == by


@pytest.mark.parametrize("stops", [[], ["a" * 1000 + "b" + "a" * 1000, "aaab"], ["\n\nUser:", "END"]])
def test_a_long_answer_costs_in_proportion_to_its_length(stops: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: ids given to the decoder, and steps of the stops' automata. 8,000 tokens cost twice what 4,000 do."""

    def cost(tokens: int) -> int:
        decoded = 0

        def counting(ids: Sequence[int]) -> str:
            nonlocal decoded
            decoded += len(ids)
            return decode(ids)

        c = Choices(counting, range(256, SIMULATED_VOCAB_SIZE))
        c.push([m.Sampled("r", 0, [], 0, None, 0, m.OpenText([], stops, 7))])
        looked = 0
        automaton = StopFilter._step

        def step(self: StopFilter, char: str, *, armed: bool) -> str | None:
            nonlocal looked
            looked += 1
            return automaton(self, char, armed=armed)

        monkeypatch.setattr(StopFilter, "_step", step)
        for i in range(tokens):
            c.push([m.Sampled("r", 0, [ord("a")] if i % 50 else list("中".encode()), i, None)])
        monkeypatch.setattr(StopFilter, "_step", automaton)
        return decoded + looked

    assert cost(8000) <= 2.1 * cost(4000)
