"""What a request may ask for beside plain tokens: grammars, logprobs, embeddings, min_tokens, timeouts, queue limits, priorities."""

from __future__ import annotations

import json
import random
import threading

import msgspec
import numpy as np
import pytest

from fleet_runtime import messages as m
from fleet_runtime.engine.base import Sampling, StepOutput, greedy
from fleet_runtime.models.simulated_tokenizer import EOS_ID
from fleet_runtime.scheduler.batch import StepRow
from fleet_runtime.scheduler.grammar import MAX_BYTES, GrammarRun, Grammars
from fleet_runtime.scheduler.logprobs import decode_logprobs, encode_logprobs, token_logprobs
from fleet_runtime.scheduler.request import Request
from fleet_runtime.scheduler.sampling import TokenCounts, sampling_of
from fleet_testing.fake_engine import VOCAB, expected, hidden_of, logits_of, top_logprobs
from fleet_testing.scheduler_harness import Answer, Clock, FakeWorker, admit, rid_of


def prompt(n: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(256), k=n)


# Grammars.

SCHEMA = json.dumps({
    "type": "object",
    "properties": {"name": {"enum": ["ab", "cd"]}, "on": {"type": "boolean"}},
    "required": ["name", "on"],
    "additionalProperties": False,
})  # fmt: skip


def asked(kind: str, text: str, worker: FakeWorker | None = None, max_new: int = 200, **fields: object) -> Answer:
    worker = worker or FakeWorker()
    after = fields.pop("after_ids", [])
    answer = worker.admit(rid_of(len(worker.inbox.answers) + 1), prompt(30), max_new, grammar=m.Grammar(kind, text, after), **fields)  # type: ignore[arg-type]
    worker.run()
    return answer


@pytest.mark.parametrize("overlap", [True, False])
def test_an_answer_follows_its_schema_and_ends_when_it_is_complete(overlap: bool) -> None:
    worker = FakeWorker(overlap=overlap)
    answer = asked("json_schema", SCHEMA, worker)
    assert answer.end == "stop" and set(json.loads(bytes(answer.ids))) == {"name", "on"}
    assert worker.scheduler.counters()["grammar_rows_total"] >= len(answer.ids)
    worker.assert_idle()


@pytest.mark.parametrize(
    ("kind", "text", "right"),
    [
        ("regex", "(yes|no)!", {b"yes!", b"no!"}),
        ("choice", '["red", "green", "blue"]', {b"red", b"green", b"blue"}),
        ("lark", 'start: "a" "b"', {b"ab"}),
    ],
)
def test_each_kind_of_grammar_binds_the_answer(kind: str, text: str, right: set[bytes]) -> None:
    answer = asked(kind, text)
    assert answer.end == "stop" and bytes(answer.ids) in right


def test_a_stop_id_is_drawn_only_where_the_answer_is_complete() -> None:
    """An answer of the pattern may end after each `ab`: with a bias for the end, it does so at the first, and not before."""
    answer = asked("regex", "(ab)+", stop_ids=[EOS_ID, 256], logit_bias={EOS_ID: 50.0, 256: 49.0})
    assert (bytes(answer.ids), answer.end, answer.stop_id) == (b"ab", "stop", EOS_ID)


def test_the_length_comes_before_the_end_of_the_grammar() -> None:
    assert asked("regex", "abc", max_new=3).end == "length"
    assert asked("regex", "abc", max_new=2).end == "length"


def test_a_grammar_starts_behind_the_end_of_reasoning() -> None:
    after = expected(prompt(30), 6)[3:5]
    answer = asked("regex", "xyz", after_ids=after)
    assert answer.ids[:5] == expected(prompt(30), 5) and bytes(answer.ids[5:]) == b"xyz" and answer.end == "stop"


@pytest.mark.parametrize(
    ("kind", "text", "word"),
    [
        ("regex", "(a|b", "unclosed group"),
        ("json_schema", '{"type": "foo"}', "foo"),
        ("json_schema", "{", "line 1 column 2"),
        ("lark", "start: (", "Expected"),
        ("choice", "[]", "one text or more"),
        ("basic", "x", "no kind of grammar"),
        ("regex", "a" * (MAX_BYTES + 1), "at most"),
        ("json_schema", '{"$ref": "#"}', "nothing may come first"),
        ("json_schema", '{"anyOf": [{"$ref": "#"}]}', "nothing may come first"),
        ("json_schema", '{"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1, "$defs": {"a": {"$ref": "#/$defs/a"}}}', "dead end"),
        ("lark", 'start: "a" start', "too hard to follow"),
    ],
)
def test_a_bad_grammar_fails_its_own_request_with_the_reason(kind: str, text: str, word: str) -> None:
    worker = FakeWorker()
    other = worker.admit(rid_of(100), prompt(20), 5)
    bad = asked(kind, text, worker)
    assert (bad.failed.status, bad.failed.code) == (400, "invalid_grammar") and word in bad.failed.message
    assert other.end == "length"
    assert asked(kind, text, worker).failed.message == bad.failed.message
    worker.assert_idle()


def test_an_exception_in_a_matcher_ends_only_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    for method in ("fill", "accept"):
        worker = FakeWorker()
        bad = worker.admit(rid_of(1), prompt(20), 40, grammar=m.Grammar("regex", "[a-z]*"))
        good = worker.admit(rid_of(2), prompt(20), 40, grammar=m.Grammar("regex", "[A-Z]*"))
        for _ in range(3):
            worker.scheduler.iterate()
        broken = worker.book.requests[rid_of(1), 0].grammar
        original = getattr(GrammarRun, method)

        def boom(self: object, *args: object, broken: object = broken, original: object = original) -> object:
            if self is broken:
                raise RuntimeError("boom")
            return original(self, *args)  # type: ignore[operator]

        with monkeypatch.context() as patch:
            patch.setattr(GrammarRun, method, boom)
            worker.run()
        assert (bad.failed.status, bad.failed.code) == (500, "internal") and "boom" in bad.failed.message
        assert good.end in ("length", "stop") and bytes(good.ids).isupper()
        worker.assert_idle()


def _grammars(clock: Clock, jobs: list[object]) -> Grammars:
    return Grammars(lambda g: _Matcher(), timeout_s=5, clock=clock, spawn=jobs.append)


class _Matcher:
    def deep_copy(self) -> _Matcher:
        return self


def _request(n: int, grammar: m.Grammar) -> Request:
    return Request.from_admit(admit(rid_of(n), [1], grammar=grammar), 0.0)


def test_a_grammar_that_does_not_compile_in_time_is_refused_and_remembered() -> None:
    clock, jobs = Clock(), list[object]()
    grammars = _grammars(clock, jobs)
    slow = m.Grammar("regex", "slow")
    assert grammars.start(first := _request(1, slow)) is None and grammars.start(_request(2, slow)) is None
    assert len(jobs) == 1 and grammars.poll() == [] and grammars.waiting == 2
    clock.advance(5)
    (request, error), _ = grammars.poll()
    assert request is first and error is not None and error.status == 400 and "--grammar-timeout" in error.message
    assert grammars.start(_request(3, slow)) is error and len(jobs) == 1
    jobs[0]()  # type: ignore[operator]  # it ends at last: from now on it is known
    assert grammars.start(_request(4, m.Grammar("regex", "other"))) is None
    assert grammars.poll() == [] and grammars.start(waiting := _request(5, slow)) is None
    assert [(r, e) for r, e in grammars.poll()] == [(waiting, None)] and waiting.grammar is not None


def test_a_grammar_that_came_too_late_is_good_the_next_time_even_if_no_other_was_asked_for() -> None:
    """The first one pays for the tokenizer, too. Seen red with a `poll` that looked at nothing while no request waited: refused for ever."""
    clock, jobs = Clock(), list[object]()
    grammars = _grammars(clock, jobs)
    slow = m.Grammar("regex", "slow")
    assert grammars.start(_request(1, slow)) is None
    clock.advance(5)
    assert grammars.poll()[0][1] is not None and not grammars.waiting
    jobs[0]()  # type: ignore[operator]
    assert grammars.poll() == []
    assert grammars.start(second := _request(2, slow)) is None
    assert grammars.poll() == [(second, None)] and len(jobs) == 1


def test_grammars_compile_beside_the_loop() -> None:
    """The loop goes on while a compilation takes as long as it likes."""
    clock, go, woken = Clock(), threading.Event(), threading.Event()

    def slow(grammar: m.Grammar) -> _Matcher:
        go.wait(20)
        return _Matcher()

    grammars = Grammars(slow, timeout_s=60, clock=clock, wake=woken.set)
    request = _request(1, m.Grammar("regex", "x"))
    assert grammars.start(request) is None and grammars.poll() == []
    go.set()
    assert woken.wait(20)
    assert grammars.poll() == [(request, None)] and grammars.waiting == 0


def test_an_abort_while_its_grammar_compiles_is_answered_at_once() -> None:
    worker = FakeWorker()
    jobs: list[object] = []
    worker.book.grammars._spawn = jobs.append
    answer = worker.admit(rid_of(1), prompt(20), 5, grammar=m.Grammar("regex", "abc"))
    worker.run()
    worker.scheduler.handle(m.Abort(rid=rid_of(1)))
    assert answer.failed.code == "aborted" and worker.book.grammars.waiting == 0
    jobs[0]()  # type: ignore[operator]
    worker.run()
    worker.assert_idle()


# Logprobs.


@pytest.mark.parametrize("step_tokens", [16, 48, 512])
@pytest.mark.parametrize("overlap", [True, False])
def test_logprobs_of_prompt_and_answer_are_exact_in_any_chunks(step_tokens: int, overlap: bool) -> None:
    worker = FakeWorker(max_step_tokens=step_tokens, overlap=overlap)
    ids = prompt(70)
    worker.answer(ids, 5)  # the prefix cache has it: it must not swallow places
    answer = worker.admit(rid_of(1), ids, 10, logprobs=3, prompt_logprobs=2)
    worker.run()
    everything = np.array(ids + answer.ids, dtype=np.int32)

    def right(places: range, k: int) -> list[m.TokenLogprob]:
        return token_logprobs(
            everything[list(places)].tolist(), top_logprobs(everything[list(places)], [logits_of(everything[:p]) for p in places], k)
        )

    assert answer.ids == expected(ids, 10) and answer.cached_tokens == 0
    assert answer.prompt_logprobs == right(range(1, 70), 2)
    assert answer.logprobs == right(range(70, 80), 3)


def test_a_request_for_logprobs_that_the_executor_cannot_give_is_the_users_error() -> None:
    worker = FakeWorker()
    sample = worker.engine.sample

    def without(sampling: Sampling) -> StepOutput:
        out = sample(sampling)
        out.logprobs.clear()
        return out

    worker.engine.sample = without  # type: ignore[method-assign]
    bad, good = worker.admit(rid_of(1), prompt(20), 5, logprobs=1), worker.admit(rid_of(2), prompt(20), 5)
    worker.run()
    assert good.end == "length"
    assert (bad.failed.status, bad.failed.code) == (400, "no_logprobs")


def test_logprobs_survive_a_hand_over() -> None:
    first, rest = m.TokenLogprob(5, -0.5, [5, 6], [-0.5, -1.0]), [m.TokenLogprob(1, -2.0)]
    assert decode_logprobs(encode_logprobs(first, rest)) == (first, rest)
    assert encode_logprobs(None, None) == b"" and decode_logprobs(b"") == (None, None)


# Embeddings.


@pytest.mark.parametrize("step_tokens", [16, 48, 512])
@pytest.mark.parametrize("how", ["mean", "last"])
def test_an_embedding_is_the_same_in_any_chunks_and_from_the_cache(step_tokens: int, how: str) -> None:
    worker = FakeWorker(max_step_tokens=step_tokens)
    ids = prompt(70)
    worker.answer(ids, 5)
    answer = worker.admit(rid_of(1), ids, 0, embed=how)
    busy = worker.admit(rid_of(2), prompt(20, seed=2), 10)
    worker.run()
    states = [hidden_of(token, at) for at, token in enumerate(ids)]
    right = states[-1] if how == "last" else np.mean(states, axis=0)
    assert isinstance(answer.end, m.Embedded) and answer.end.prompt_tokens == 70
    assert answer.end.cached_tokens == (64 if how == "last" else 0)
    assert np.allclose(np.frombuffer(answer.end.vector, dtype="<f4"), right)
    assert busy.end == "length"
    worker.assert_idle()


def test_an_executor_without_hidden_states_refuses_embeddings() -> None:
    worker = FakeWorker()
    worker.engine.hidden_size = 0
    assert worker.admit(rid_of(1), [1, 2], 0, embed="last").failed.code == "no_embeddings"


# Sampling arrays.


def drawing(request: Request, place: int) -> StepRow:
    """A row that draws the token of that place."""
    return StepRow(request, place - 1, 1, place, prefill=False)


def test_the_arrays_of_a_step_say_what_each_request_asked() -> None:
    plain = Request.from_admit(admit(rid_of(1), [1, 2], 5, temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, seed=9), 0.0)
    rich = Request.from_admit(
        admit(rid_of(2), [7, 8, 7], 5, logit_bias={4: 1.5}, min_tokens=2, stop_ids=[EOS_ID], frequency_penalty=0.5, logprobs=4), 0.0
    )
    rich.counts = TokenCounts(rich.ids[:3])
    for token in (8, 9, 9):
        rich.counts.add(token)
    out = sampling_of([drawing(plain, 2), drawing(rich, 4)])
    assert out.temperature.tolist() == [0.5, 0.0] and out.top_k.tolist() == [3, 0] and out.seed.tolist() == [9, 0]
    assert out.top_p.tolist() == pytest.approx([0.9, 1.0]) and out.min_p.tolist() == pytest.approx([0.1, 0.0])
    assert out.logprobs is not None and out.logprobs.tolist() == [-1, 4]
    assert out.bias_starts is not None and out.bias_starts.tolist() == [0, 0, 2]
    assert out.bias_ids is not None and out.bias_ids.tolist() == [4, EOS_ID]
    assert out.bias_values is not None and out.bias_values.tolist() == [1.5, float("-inf")]
    assert out.count_starts is not None and out.count_starts.tolist() == [0, 0, 3]
    assert dict(zip(out.count_ids.tolist(), out.counts.tolist(), strict=True)) == {7: 0, 8: 1, 9: 2}  # type: ignore[union-attr]
    late = sampling_of([drawing(rich, 5)])
    assert late.bias_ids is not None and late.bias_ids.tolist() == [4], "two tokens are drawn: the stop id is allowed"
    bare = sampling_of([drawing(plain, 2)])
    assert bare.logprobs is bare.bias_ids is bare.counts is bare.masks is None


def test_counts_of_many_tokens_equal_a_plain_count() -> None:
    ids = prompt(50)
    counts, plain = TokenCounts(np.array(ids, dtype=np.int32)), dict.fromkeys(ids, 0)
    for token in random.Random(3).choices(range(5000), k=2000):
        counts.add(token)
        plain[token] = plain.get(token, 0) + 1
    assert dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)) == plain


def test_no_stop_id_comes_before_min_tokens() -> None:
    worker = FakeWorker()
    answer = worker.admit(rid_of(1), prompt(20), 40, stop_ids=list(range(VOCAB // 2)), min_tokens=12)
    worker.run()
    assert len(answer.ids) >= 12 and answer.end == "stop" and all(token >= VOCAB // 2 for token in answer.ids[:12])
    assert greedy(1).bias_ids is None


# Limits.


def test_a_request_that_runs_too_long_is_ended() -> None:
    worker = FakeWorker(running_timeout=2, max_rows=1)
    long = worker.admit(rid_of(1), prompt(20), 800)
    waiting = worker.admit(rid_of(2), prompt(20), 3)
    for _ in range(5):
        worker.scheduler.iterate()
    worker.clock.advance(2)
    worker.run()
    assert (long.failed.status, long.failed.code) == (504, "running_timeout") and "--running-timeout" in long.failed.message
    assert waiting.end == "length", "its time begins with its row"
    worker.assert_idle()


def test_the_queue_has_a_limit_of_tokens_but_takes_one_prompt_of_any_length() -> None:
    worker = FakeWorker(max_queue_tokens=100, max_rows=1)
    running = worker.admit(rid_of(0), prompt(200), 30)
    worker.scheduler.iterate()
    first = worker.admit(rid_of(1), prompt(150), 3)
    full = worker.admit(rid_of(2), prompt(10), 3)
    assert (full.failed.status, full.failed.code) == (429, "queue_full") and "--max-queue-tokens" in full.failed.message
    assert worker.scheduler.counters()["waiting_tokens"] == 150
    worker.run()
    assert running.end == first.end == "length"


@pytest.mark.parametrize("limit", [{"max_queue": 3}, {"max_queue_tokens": 50}])
def test_the_choices_of_one_request_enter_all_or_none(limit: dict[str, int]) -> None:
    """Seen red with a limit that counts a request's own choices: one of more choices than --max-queue was told to try again, for ever."""
    worker = FakeWorker(max_rows=1, **limit)
    running = worker.admit(rid_of(0), prompt(20), 30)
    worker.scheduler.iterate()

    def ask(n: int) -> list[Answer]:
        for index in range(6):
            worker.scheduler.handle(admit(rid_of(n), prompt(20, seed=n), 3, index=index))
        return [worker.inbox.of(rid_of(n), index) for index in range(6)]

    many, more = ask(1), ask(2)
    assert all((a.failed.status, a.failed.code) == (429, "queue_full") for a in more)
    worker.run()
    assert running.end == "length" and all(a.ids == expected(prompt(20, seed=1), 3) for a in many)
    worker.assert_idle()


def test_namespaces_share_no_prefix() -> None:
    worker = FakeWorker()
    ids = prompt(64)
    worker.answer(ids, 2, salt="a")
    for fields, cached in (({"salt": "a"}, 48), ({"salt": "b"}, 0), ({"lora": "a"}, 0), ({}, 0)):
        answer = worker.admit(rid_of(cached + len(fields) * 10 + len(worker.inbox.answers)), ids, 2, **fields)
        worker.run()
        assert answer.cached_tokens == cached, fields


def test_replies_are_json() -> None:
    worker = FakeWorker()
    assert msgspec.json.decode(worker.control("internals").data)["running"] == 0  # type: ignore[union-attr]
