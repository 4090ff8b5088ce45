"""One terminal message per choice, counts that end with the stop, and nothing left behind."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from fleet_runtime import messages as m
from fleet_runtime.detokenizer.choices import Choices
from fleet_runtime.models.simulated_tokenizer import simulated_tokenizer_files

TOKENIZER = Tokenizer.from_buffer(simulated_tokenizer_files()["tokenizer.json"])


def choices() -> Choices:
    return Choices(lambda ids: str(TOKENIZER.decode(list(ids), skip_special_tokens=True)), range(256, 262))


def sampled(text: bytes, done: int, finish: str | None = None, *, stop: list[str] | None = None, first: bool = False) -> m.Sampled:
    opened = m.OpenText(prompt_tail=[256], stop=stop or [], prompt_tokens=7) if first else None
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
    assert not c.end("r", 0), "the scheduler's own ending crossed ours: it must not become a second one"
    assert c.end("r", 0), "but the rid is free again"
    assert c.late == 2


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


@given(st.lists(st.tuples(st.sampled_from("pqr"), st.sampled_from(["open", "more", "finish", "fail"]), st.binary(max_size=4)), max_size=60))
def test_each_open_choice_ends_at_most_once(events: list[tuple[str, str, bytes]]) -> None:
    c, open_now, done = choices(), set(), dict.fromkeys("pqr", 0)
    for rid, kind, ids in events:
        done[rid] += len(ids)
        if kind == "fail":
            forwarded = c.end(rid, 0)
            assert forwarded or rid not in open_now
            open_now.discard(rid)
        else:
            opened = m.OpenText(prompt_tail=[], stop=["a", "bb"], prompt_tokens=1) if kind == "open" else None
            finish = "length" if kind == "finish" else None
            out = c.push([m.Sampled(rid=rid, index=0, ids=list(ids), completion_tokens=done[rid], finish=finish, open=opened)])
            if kind == "open":
                open_now.add(rid)
            ended = [t for t in out.texts if t.finish]
            assert len(ended) <= (1 if rid in open_now else 0)
            if ended:
                open_now.discard(rid)
        assert len(c) == len(open_now)
        c.check_integrity()
