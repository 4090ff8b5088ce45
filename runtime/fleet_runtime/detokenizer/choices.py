"""All choices whose text is being made: Sampled in, Text out. Pure but for the clock that forgets old endings; called by `process`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from fleet_runtime import messages as m
from fleet_runtime.detokenizer.incremental import Decode, IncrementalText
from fleet_runtime.detokenizer.stops import StopFilter

Key = tuple[str, int]  # rid, index
_REMEMBERED_STOPS: Final = 4096


@dataclass(slots=True)
class _Choice:
    text: IncrementalText
    stops: StopFilter
    has_stops: bool
    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(slots=True)
class Output:
    """What one step gave: texts for http, and the choices that ended here by a stop string, for the scheduler."""

    texts: list[m.Text]
    stopped: list[m.Stopped]


class Choices:
    """State of every open choice. A choice opens with its first Sampled, and is dropped with its terminal message."""

    def __init__(self, decode: Decode, special_ids: Collection[int]) -> None:
        """Args: special_ids: ids without text; they are skipped before decoding, because a decoder treats what follows them as a start."""
        self._decode = decode
        self._special = frozenset(special_ids)
        self._open: dict[Key, _Choice] = {}
        self._stopped: OrderedDict[Key, None] = OrderedDict()  # ended here: the scheduler may not know yet
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
        """Failed or HandedOver passes by: drops the choice. False when it had ended here already, then the message must not go on."""
        self._open.pop((rid, index), None)
        if self._stopped.pop((rid, index), 0) is None:
            self.late += 1
            return False
        return True

    def clear(self) -> None:
        """Scheduler or http died: nothing of what is open has an addressee."""
        self._open.clear()
        self._stopped.clear()

    def check_integrity(self) -> None:
        """No choice is both open and ended."""
        assert not self._open.keys() & self._stopped.keys()
        assert len(self._stopped) <= _REMEMBERED_STOPS

    def _push_one(self, item: m.Sampled, out: Output) -> None:
        key = (item.rid, item.index)
        if item.open is not None:
            tail = [i for i in item.open.prompt_tail if i not in self._special]
            text = IncrementalText(self._decode, tail)
            self._open[key] = _Choice(text, StopFilter(item.open.stop), bool(item.open.stop), item.open.prompt_tokens)
            self._stopped.pop(key, None)
        choice = self._open.get(key)
        if choice is None:
            self.late += 1
            return
        first = item.open is not None
        choice.cached_tokens = max(choice.cached_tokens, item.cached_tokens)
        pieces: list[str] = []
        for n, token in enumerate(item.ids, 1):
            new = choice.text.push((token,)) if token not in self._special else ""
            passed, met = choice.stops.push(new)
            pieces.append(passed)
            if met:
                self._stop(key, choice, item, n, "".join(pieces), out)
                return
        choice.completion_tokens = item.completion_tokens
        if item.finish is not None:
            passed, met = choice.stops.push(choice.text.flush())
            pieces += [passed] if met else [passed, choice.stops.flush()]
            del self._open[key]
            out.texts.append(self._text(item, choice, "".join(pieces), item.ids, "stop" if met else item.finish))
        elif first or any(pieces):
            out.texts.append(self._text(item, choice, "".join(pieces), item.ids, None))

    def _stop(self, key: Key, choice: _Choice, item: m.Sampled, used: int, text: str, out: Output) -> None:
        """A stop string is complete with the `used`-th id of `item`: that id is the last that counts."""
        choice.completion_tokens += used
        del self._open[key]
        out.texts.append(self._text(item, choice, text, item.ids[:used], "stop"))
        if item.finish is None:
            self._stopped[key] = None
            if len(self._stopped) > _REMEMBERED_STOPS:
                self._stopped.popitem(last=False)
            out.stopped.append(m.Stopped(rid=item.rid, index=item.index))

    @staticmethod
    def _text(item: m.Sampled, choice: _Choice, text: str, ids: list[int], finish: str | None) -> m.Text:
        return m.Text(
            rid=item.rid,
            index=item.index,
            text=text,
            ids=ids,
            prompt_tokens=choice.prompt_tokens,
            completion_tokens=choice.completion_tokens,
            cached_tokens=choice.cached_tokens,
            finish=finish,
        )
