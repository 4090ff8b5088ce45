"""All choices whose text is being made: Sampled in, Text out. Pure; called by `process`.

A token's id, its logprobs and its text leave together: while a token's text is held (an unfinished character, a possible stop), so are its id
and logprobs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from fleet_runtime import messages as m
from fleet_runtime.detokenizer.incremental import Decode, IncrementalText, unspaced
from fleet_runtime.detokenizer.stops import Met, StopFilter

Key = tuple[str, int]  # rid, index


@dataclass(slots=True)
class _Choice:
    text: IncrementalText
    stops: StopFilter
    skipped: frozenset[int]  # ids without text
    prompt_tokens: int
    min_tokens: int
    serial: int
    tokens: int = 0  # that came here
    completion_tokens: int = 0
    cached_tokens: int = 0
    unsent_ids: list[int] = field(default_factory=list)
    unsent_logprobs: list[m.TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[m.TokenLogprob] | None = None


@dataclass(slots=True)
class Output:
    """What one step gave: texts for http, and the choices that ended here by a stop string, for the scheduler."""

    texts: list[m.Text]
    stopped: list[m.Stopped]


class Choices:
    """State of every open choice. A choice opens with its first Sampled, and is dropped with the scheduler's terminal message, which comes for
    every one: that of a choice which a stop string ended here is the sign that nothing more of it comes, and goes no further."""

    def __init__(self, decode: Decode, special_ids: Collection[int], added_ids: Collection[int] = ()) -> None:
        """Args: decode: with the text of special tokens. special_ids: those that have text only in choices that ask for it; the others skip
        them before decoding. added_ids: those that a tokenizer may write a space between, which a choice may not want."""
        self._decode = decode
        self._unspaced = unspaced(decode, frozenset(added_ids))
        self._special = frozenset(special_ids)
        self._open: dict[Key, _Choice] = {}
        self._stopped: set[Key] = set()  # ended here: the scheduler's terminal message is still to come
        self.late = 0

    def __len__(self) -> int:
        return len(self._open)

    def push(self, items: Sequence[m.Sampled]) -> Output:
        """New tokens of one step."""
        out = Output([], [])
        for item in items:
            self._push_one(item, out)
        return out

    def end(self, rid: str, index: int) -> bool:
        """Another terminal message passes by: drops the choice. False when it had ended here already, then the message must not go on."""
        key = (rid, index)
        self._open.pop(key, None)
        if key in self._stopped:
            self._stopped.discard(key)
            return False
        return True

    def clear(self) -> None:
        """Scheduler or http died: nothing of what is open has an addressee."""
        self._open.clear()
        self._stopped.clear()

    def is_empty(self) -> bool:
        """No choice is known."""
        return not self._open and not self._stopped

    def check_integrity(self) -> None:
        """No choice is both open and ended."""
        assert not self._open.keys() & self._stopped

    def _push_one(self, item: m.Sampled, out: Output) -> None:
        key = (item.rid, item.index)
        if item.open is not None:
            self._open[key] = self._opened(item.open)
            self._stopped.discard(key)
        choice = self._open.get(key)
        if choice is None:
            self.late += 1
            if item.finish is not None:
                self._stopped.discard(key)
            return
        choice.cached_tokens = max(choice.cached_tokens, item.cached_tokens)
        if item.prompt_logprobs is not None:
            choice.prompt_logprobs = item.prompt_logprobs
        pieces: list[str] = []
        for n, token in enumerate(item.ids):
            passed, met = _push_token(choice, token)
            pieces.append(passed)
            choice.unsent_logprobs += item.logprobs[n : n + 1]
            if met is not None:
                self._stop(key, choice, item, n + 1, "".join(pieces), met, out)
                return
        choice.completion_tokens = item.completion_tokens
        if item.finish is not None:
            self._finish(key, choice, item, pieces, out)
        elif item.open is not None or any(pieces):
            out.texts.append(_text(item, choice, "".join(pieces)))

    def _opened(self, asked: m.OpenText) -> _Choice:
        skipped = frozenset[int]() if asked.keep_special else self._special
        decode = self._unspaced if asked.keep_special and not asked.spaces_between_special else self._decode
        text = IncrementalText(decode, [i for i in asked.prompt_tail if i not in skipped])
        return _Choice(text, StopFilter(asked.stop, include=asked.include_stop), skipped, asked.prompt_tokens, asked.min_tokens, asked.serial)

    def _finish(self, key: Key, choice: _Choice, item: m.Sampled, pieces: list[str], out: Output) -> None:
        """The scheduler ended it; what is held comes out, and may complete a stop."""
        passed, met = choice.stops.push(choice.text.flush(), armed=choice.tokens >= choice.min_tokens)
        pieces += [passed] if met is not None else [passed, choice.stops.flush()]
        del self._open[key]
        stopped_by: str | int | None = met.stop if met is not None else item.stop_id if item.finish == "stop" and item.stop_id >= 0 else None
        out.texts.append(_text(item, choice, "".join(pieces), "stop" if met is not None else item.finish, stopped_by))

    def _stop(self, key: Key, choice: _Choice, item: m.Sampled, used: int, text: str, met: Met, out: Output) -> None:
        """A stop string is complete with the `used`-th id of `item`: that id is the last that counts."""
        choice.completion_tokens += used
        del self._open[key]
        out.texts.append(_text(item, choice, text, "stop", met.stop))
        if item.finish is None:
            self._stopped.add(key)
            out.stopped.append(m.Stopped(rid=item.rid, index=item.index, serial=choice.serial))


def _push_token(choice: _Choice, token: int) -> tuple[str, Met | None]:
    choice.tokens += 1
    choice.unsent_ids.append(token)
    new = choice.text.push((token,)) if token not in choice.skipped else ""
    return choice.stops.push(new, armed=choice.tokens >= choice.min_tokens)


def _text(item: m.Sampled, choice: _Choice, text: str, finish: str | None = None, stopped_by: str | int | None = None) -> m.Text:
    ids, choice.unsent_ids = choice.unsent_ids, []
    logprobs, choice.unsent_logprobs = choice.unsent_logprobs, []
    prompt_logprobs, choice.prompt_logprobs = choice.prompt_logprobs, None
    return m.Text(
        rid=item.rid,
        index=item.index,
        text=text,
        ids=ids,
        prompt_tokens=choice.prompt_tokens,
        completion_tokens=choice.completion_tokens,
        cached_tokens=choice.cached_tokens,
        finish=finish,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        stopped_by=stopped_by,
        queued_s=item.queued_s,
        prefill_s=item.prefill_s,
    )
