"""What to do about one stream of KV events: take a message, fill a gap, start over, stop believing. No clock, no sockets.

A stream is believed while it is complete: without a gap since a snapshot, a replay from 0, or a clear. After a gap the ladder is

    replay from where we are -> snapshot -> replay from 0     one try
    three tries, the pause before each longer                 one round
    history (our own picks tell what the worker holds), and a round again after a pause that doubles

Meanwhile live messages stay unread. What a doubtful stream claims is dropped DOUBT_S after the gap was seen, also while a try goes on.

A replay begins one message before the gap, and that message has to be the one that we know: so a restarted engine whose numbers happen to
fit is found out. Whoever drives this looks at `asking` and `reads_live` after each call (levels, not edges) and does what they say.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from fleet_contract.kv_events import SNAPSHOT_START

PAUSES_S: Final = (0.0, 0.25, 1.0)  # before the first, second and third try
GIVEN_UP_S: Final = 30.0  # in history until the next round; doubles up to:
MAX_GIVEN_UP_S: Final = 300.0
FORGIVEN_S: Final = 30.0  # complete for so long: the tries begin anew
DOUBT_S: Final = 1.0
ANSWER_S: Final = 5.0  # a question without any answer for so long has failed: a worker may be in a long step
SILENT_S: Final = 3.0  # of a stream with a heartbeat each second: its hits count half
DEAD_S: Final = 10.0  # its content is dropped, its worker is asked how it is
OLD_MAIL_S: Final = 2.0  # after a question, messages that it brought already may still be in the socket
KNOWN_MARKS: Final = 512

# How far a stream is believed. NONE: the worker publishes no events.
NONE, WARMING, LIVE, REPAIRING, SILENT, HISTORY = TRUST = ("none", "warming", "live", "repairing", "silent", "history")

# What to do with a message.
APPLY: Final = "apply"
DROP: Final = "drop"
HOLD: Final = "hold"  # judge it again when live messages are read again
LOOK: Final = "look"  # not believed; but if it tells that all is cleared, call `cleared`, and apply what follows that


class Content(Protocol):
    """What the index holds of this worker."""

    def begin(self) -> None:
        """Events build a new content beside the present one."""

    def commit(self) -> None:
        """The new content takes the place of the present one; the worker is judged by its events."""

    def drop(self) -> None:
        """The new content is thrown away."""

    def forget(self) -> None:
        """From nothing, by our own picks."""

    def doubt(self, *, doubted: bool) -> None:
        """Whether hits count half."""


@dataclass(frozen=True, slots=True)
class Question:
    """One request to the replay port. Each is a new object."""

    number: int
    start: int


REPLAY, SNAPSHOT, FROM_0 = "replay", "snapshot", "from 0"


class Follower:
    """See the module. `count(name)` is told of gaps, restarts, replays, snapshots, rounds given up; `probe()` asks for a look at the worker."""

    def __init__(self, content: Content, *, can_ask: bool, count: Callable[[str], None], probe: Callable[[], None]) -> None:
        self.asking: Question | None = None
        self.next = 0  # sequence expected
        self.gaps = 0
        self.beats = False  # it sends heartbeats: silence says something
        self._content = content
        self._can_ask = can_ask
        self._count = count
        self._probe = probe
        self._began = False  # it was believed once
        self._believed = False  # the index holds what events have told
        self._other_life = False  # it is another incarnation than the one we know; discovery will tell
        self._given_up = not can_ask
        self._silent = False
        self._died = False
        self._rung = ""
        self._answers = 0  # to the open question
        self._barrier = 0  # of a snapshot
        self._questions = 0
        self._tries = 0
        self._try_at = math.inf  # the next try, or round
        self._gave_up_s = GIVEN_UP_S
        self._missed: int | None = None  # a sequence that the repair has to reach
        self._marks: OrderedDict[int, int] = OrderedDict()  # of the last messages: sequence -> mark
        self._heard_at = 0.0
        self._answered_at = 0.0
        self._doubt_at = math.inf  # when the present content has to go
        self._whole_since = 0.0
        self._old_mail_until = 0.0

    # -- what the driver looks at

    @property
    def reads_live(self) -> bool:
        """Live messages may be judged now. Else they are left where they are."""
        return self.asking is None and (self._given_up or self._try_at == math.inf)

    @property
    def trust(self) -> str:
        """One of TRUST."""
        if not self._believed:
            return HISTORY if self._given_up or self._began or self._other_life else WARMING
        if self._silent:
            return SILENT
        return LIVE if self.reads_live else REPAIRING

    @property
    def settled(self) -> bool:
        """The first round is over, well or not."""
        return self._believed or self._given_up or self._other_life

    # -- inputs

    def start(self, now: float) -> None:
        """The subscription is made."""
        self._heard_at = self._whole_since = now
        if self._can_ask:
            self._try_at = now
            self.tick(now)

    def judge(self, sequence: int, mark: int, now: float) -> str:
        """A live message; `mark` tells two messages of one number apart. Only while `reads_live`."""
        quiet, self._heard_at = now - self._heard_at, now
        if self._other_life:
            return DROP
        if not self._believed:
            return self._judge_in_history(sequence, mark, quiet, now)
        if self._silent:
            self._silent = False
            self._content.doubt(doubted=False)
        if sequence == self.next:
            self._old_mail_until = 0.0
            self._take(sequence, mark)
            return APPLY
        if sequence > self.next:
            self._gap(sequence, now)
            return HOLD
        known = self._marks.get(sequence)
        if known == mark or (known is None and now < self._old_mail_until):
            return DROP
        self._count("event_restarts_total")
        self._forget()
        if sequence == 0:
            return self._adopt(0, mark, now)
        self._missed = sequence
        self._broken(now)
        return HOLD if self.asking is not None or not self.reads_live else LOOK

    def cleared(self, sequence: int, mark: int, now: float) -> None:
        """A message that was to be looked at says that all is cleared: what follows is complete."""
        self._adopt(sequence, mark, now)

    def judge_answer(self, sequence: int, mark: int, now: float) -> str:
        """An answer to the open question: APPLY or DROP. It may end the question."""
        self._answered_at = now
        self._answers += 1
        if self._rung == SNAPSHOT:
            if self._answers > 1 and sequence != self._barrier:
                self._next_rung(now)
                return DROP
            self._barrier = sequence
            return APPLY
        if self._rung == REPLAY and self._answers == 1 and self.next > 0:
            if sequence == self.next - 1 and mark == self._marks.get(sequence):
                return DROP  # the message we know: the same life, and nothing is lost
            if sequence == self.next - 1:
                self._count("event_restarts_total")
                self._forget()
            self._next_rung(now)
            return DROP
        if sequence != self.next:
            self._next_rung(now)
            return DROP
        self._take(sequence, mark)
        return APPLY

    def answers_end(self, now: float) -> None:
        """The open question is answered, and all that it brought is applied."""
        if self._rung == SNAPSHOT:
            if not self._answers or (self._missed is not None and self._barrier < self._missed):
                self._next_rung(now)
                return
            self._marks.clear()
            self.next = self._barrier + 1
        elif self._missed is not None and self.next <= self._missed:
            self._next_rung(now)  # it ended too soon
            return
        if self._rung != REPLAY:
            self._content.commit()
            self._believed = True
        self._count("event_snapshots_total" if self._rung == SNAPSHOT else "event_replays_total")
        self.asking, self._rung, self._missed = None, "", None
        self._whole(now)
        self._old_mail_until = now + OLD_MAIL_S

    def wrong(self, now: float) -> None:
        """The content cannot be: more blocks than the worker has. It goes at once."""
        self._forget()
        if self.asking is not None:
            self._fail(now)
        else:
            self._broken(now)

    def other_life(self) -> None:
        """An event of another incarnation: the worker has restarted. Nothing is believed any more; discovery brings the new one."""
        if not self._other_life:
            self._count("event_restarts_total")
            self._other_life = True
            self._hang_up()
            self._forget()
            self._try_at = math.inf
            self._probe()

    def tick(self, now: float) -> None:
        """What only time changes; to be called every tenth of a second or so."""
        if self._other_life:
            return
        if self._believed and now >= self._doubt_at:
            self._forget()
            if self._rung == REPLAY:
                self._next_rung(now)
        if self.asking is not None and now - self._answered_at >= ANSWER_S:
            self._fail(now)
        if self.asking is None and now >= self._try_at:
            self._try(now)
        elif self.asking is None and self._believed and self._try_at == math.inf:
            self._watch(now)

    # -- inside

    def _judge_in_history(self, sequence: int, mark: int, quiet: float, now: float) -> str:
        if sequence == 0:
            return self._adopt(0, mark, now)
        if self._died and quiet > SILENT_S:  # it is back: no need to wait for the next round
            self._died, self._try_at = False, now
        return LOOK

    def _adopt(self, sequence: int, mark: int, now: float) -> str:
        """A message after which we know all that is held."""
        self._content.begin()
        self._content.commit()
        self._believed, self._given_up, self._try_at = True, False, math.inf
        self._marks.clear()
        self._take(sequence, mark)
        self._missed = None
        self._whole(now)
        self._old_mail_until = 0.0
        return APPLY

    def _take(self, sequence: int, mark: int) -> None:
        self._marks[sequence] = mark
        if len(self._marks) > KNOWN_MARKS:
            self._marks.popitem(last=False)
        self.next = sequence + 1

    def _whole(self, now: float) -> None:
        self._doubt_at = math.inf
        self._try_at = math.inf
        self._given_up = False
        self._whole_since = self._heard_at = now
        if not self._began:
            self._began, self._tries = True, 0

    def _gap(self, sequence: int, now: float) -> None:
        self.gaps += 1
        self._count("event_gaps_total")
        self._missed = sequence
        self._doubt_at = now + DOUBT_S
        self._broken(now)

    def _broken(self, now: float) -> None:
        """A stream that was whole is not any more."""
        if now - self._whole_since >= FORGIVEN_S:
            self._tries, self._gave_up_s = 0, GIVEN_UP_S
        self._again(now)

    def _again(self, now: float) -> None:
        """The next try, at once or after its pause."""
        if not self._can_ask or self._tries >= len(PAUSES_S):
            self._give_up(now)
            return
        self._try_at = now + PAUSES_S[self._tries]
        if self._try_at <= now:
            self._try(now)

    def _try(self, now: float) -> None:
        if self._given_up:  # a round of tries after a long pause
            self._given_up, self._tries = False, 0
        self._tries += 1
        self._try_at = math.inf
        can_go_on = self._believed and (self.next == 0 or self.next - 1 in self._marks)
        self._ask(REPLAY if can_go_on else SNAPSHOT, now)

    def _ask(self, rung: str, now: float) -> None:
        self._rung, self._answers, self._answered_at = rung, 0, now
        self._questions += 1
        start = {REPLAY: max(0, self.next - 1), SNAPSHOT: SNAPSHOT_START, FROM_0: 0}[rung]
        self.asking = Question(self._questions, start)
        if rung != REPLAY:
            self._content.begin()
            if rung == FROM_0:
                self._marks.clear()
                self.next = 0

    def _next_rung(self, now: float) -> None:
        """The open question did not help."""
        rung, answered = self._rung, self._answers > 0
        self._hang_up()
        if rung == REPLAY:
            self._ask(SNAPSHOT, now)
        elif rung == SNAPSHOT and not answered:
            self._ask(FROM_0, now)  # a publisher without snapshots
        else:
            self._fail(now)

    def _fail(self, now: float) -> None:
        """A try is over, in vain."""
        in_place = self._rung == REPLAY
        self._hang_up()
        if in_place:
            self._doubt_at = min(self._doubt_at, now)  # half a replay is in it
            self._forget()
        self._again(now)

    def _give_up(self, now: float) -> None:
        self._hang_up()
        self._forget()
        self._given_up = True
        self._missed = None
        if self._can_ask:
            self._count("event_rounds_given_up_total")
            self._try_at = now + self._gave_up_s
            self._gave_up_s = min(MAX_GIVEN_UP_S, 2 * self._gave_up_s)

    def _hang_up(self) -> None:
        if self._rung in (SNAPSHOT, FROM_0):
            self._content.drop()
        self.asking, self._rung = None, ""

    def _forget(self) -> None:
        """Nothing is claimed any more. A content that is being built stays."""
        self._doubt_at = math.inf
        if self._silent:
            self._silent = False
            self._content.doubt(doubted=False)
        if self._believed:
            self._believed = False
            self._content.forget()

    def _watch(self, now: float) -> None:
        """Silence of a stream that should not be silent."""
        quiet = now - self._heard_at if self.beats else 0.0
        if quiet > DEAD_S:
            self._count("event_streams_died_total")
            self._died = True
            self._forget()
            self._probe()
            self._broken(now)
        elif quiet > SILENT_S and not self._silent:
            self._silent = True
            self._content.doubt(doubted=True)
