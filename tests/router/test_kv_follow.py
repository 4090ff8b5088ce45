"""R4: one stream of KV events against a model engine, on a clock of its own: dropped, doubled and swapped messages, restarts, bad replays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fleet_contract.kv_events import (
    SNAPSHOT_START,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Cleared,
    Event,
    EventBatch,
    decode_batch,
    encode_batch,
    epoch_of,
)  # fmt: skip
from fleet_contract.prefix import chain_hashes, namespace_hash
from fleet_contract.worker import WorkerRecord
from fleet_router.decide.events import EventBook
from fleet_router.decide.index import PrefixIndex
from fleet_router.decide.keys import STRIDE
from fleet_router.kv_feed import follow
from fleet_router.kv_feed.apply import Content, Writer
from fleet_router.kv_feed.follow import Follower

STEP_S = 0.1
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
NS = namespace_hash("model")
PROMPTS = tuple(tuple(p) for p in ((1,), (1, 2), (1, 2, 3), (1, 4), (5,), (5, 6)))  # names of 64-token blocks
Message = tuple[int, bytes]


def ids(prompt: tuple[int, ...]) -> list[int]:
    return [block for block in prompt for _ in range(64)]


CHAINS = {p: chain_hashes(ids(p), NS) for p in PROMPTS}


@dataclass
class Engine:
    """Holds prompts as a tree, tells of each change; `ours` says epochs, takes snapshots and beats."""

    life: int = 1
    ours: bool = True
    kept: int = 1000  # messages that a replay may bring
    held: set[tuple[int, ...]] = field(default_factory=set)
    log: list[Message] = field(default_factory=list)
    first: int = 0

    def publish(self, *events: Event) -> Message:
        message = (self.first + len(self.log), encode_batch(EventBatch(self.life + len(self.log) / 1e4, list(events))))
        self.log.append(message)
        return message

    def store(self, prompt: tuple[int, ...]) -> Message | None:
        """Its last block, if what is before it is held."""
        if prompt in self.held or (len(prompt) > 1 and prompt[:-1] not in self.held):
            return None
        self.held.add(prompt)
        hashes = CHAINS[prompt][-STRIDE:]
        parent = CHAINS[prompt][-STRIDE - 1] if len(prompt) > 1 else None
        return self.publish(
            BlockStored(
                block_hashes=hashes, parent_block_hash=parent, token_ids=ids(prompt)[-64:], block_size=16, medium="GPU", lora_name=None,
                seq_hashes=hashes, base_block_idx=STRIDE * (len(prompt) - 1), epoch=self.life,
            )
        )  # fmt: skip

    def evict(self, prompt: tuple[int, ...]) -> Message | None:
        if prompt not in self.held or any(p[:-1] == prompt for p in self.held):
            return None
        self.held.remove(prompt)
        return self.publish(BlockRemoved(block_hashes=CHAINS[prompt][-STRIDE:], medium="GPU", epoch=self.life))

    def clear(self) -> Message:
        self.held.clear()
        return self.publish(AllBlocksCleared(epoch=self.life))

    def answer(self, start: int) -> list[Message]:
        """What the replay port would send."""
        if start != SNAPSHOT_START:
            return [m for m in self.log[-self.kept :] if m[0] >= start]
        if not self.ours:
            return []
        copy = Engine(self.life)
        for prompt in sorted(self.held):
            copy.store(prompt)
        return [(self.log[-1][0], payload) for _, payload in copy.log or [(0, encode_batch(EventBatch(0.0, [])))]]


class World:
    """An engine, the network, and a driver of the follower as the reader is one."""

    def __init__(self, *, ours: bool = True, can_ask: bool = True, kept: int = 1000) -> None:
        self.now = 0.0
        self.engine = Engine(ours=ours, kept=kept)
        self.index = PrefixIndex()
        self.index.add_slot(0, 1 << 16, by_history=True)
        self.book = EventBook(self.index)
        self.socket: list[Message] = []  # live messages that wait to be read
        self.answering: Callable[[int], Iterator[Message | None]] = lambda start: iter([*self.engine.answer(start), None])
        self.can_ask = can_ask
        self.questions = self.probes = 0
        self.counts: dict[str, int] = {}
        self.quiet = 0.0  # since the engine's last message
        self.false: dict[tuple[int, ...], tuple[float, float | None]] = {}  # claimed and not held: since when, and when a message came then
        self.known_at = 1e9  # discovery knows the present life then
        self.engine.clear()
        self.meet()

    def meet(self) -> None:
        """Discovery tells of the engine's present life."""
        self.index.clear(0)
        self.index.set_by_history(0, by_history=True)
        self.book.forget(0)
        self.content = Content(self.index, self.book, 0)
        record = WorkerRecord(incarnation=f"{self.engine.life:016x}" if self.engine.ours else "", model_revision="model")
        assert not record.incarnation or epoch_of(record.incarnation) == self.engine.life
        self.writer = Writer(self.book, 0, record, lambda reason: None)
        self.follower = Follower(self.content, can_ask=self.can_ask, count=self.count, probe=self.probe)
        self.held: Message | None = None
        self.open: Any = None
        self.socket.clear()
        self.follower.start(self.now)

    def count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1

    def probe(self) -> None:
        self.probes += 1
        if self.known_at < 1e9:
            self.known_at = min(self.known_at, self.now + 0.5)

    def restart(self) -> None:
        self.engine = Engine(self.engine.life + 1, self.engine.ours, self.engine.kept)
        self.engine.clear()
        self.known_at = min(self.known_at, self.now + 1.5)  # a second restart does not put off the news of the first

    def send(self, message: Message | None, *, copies: int = 1, swap: bool = False) -> None:
        """A live message on its way; no copies: it is lost."""
        if message is None:
            return
        self.quiet = 0.0
        self.check()
        for _ in range(copies):
            self.socket.append(message)
            self.false = {p: (since, told_at if told_at is not None else self.now) for p, (since, told_at) in self.false.items()}
        if swap and len(self.socket) > 1:
            self.socket[-1], self.socket[-2] = self.socket[-2], self.socket[-1]

    def apply(self, payload: bytes) -> None:
        batch = decode_batch(payload)
        assert not batch.faults
        self.follower.beats = self.follower.beats or not batch.events
        if self.writer.is_of_another_life(batch):
            self.follower.other_life()
            return
        for _ in self.writer.write(batch, self.now):
            pass
        if self.writer.overflow:
            self.writer.overflow = False
            self.follower.wrong(self.now)

    def pump(self) -> None:
        """All that can be done now."""
        for _ in range(10_000):
            asking = self.follower.asking
            if asking is not self.open_question():
                self.open = None
                if asking is not None:
                    self.questions += 1
                    self.open = (asking, self.answering(asking.start))
            if self.open is not None:
                answer = next(self.open[1], "nothing")
                if answer == "nothing":
                    return
                if answer is None:
                    self.follower.answers_end(self.now)
                elif self.follower.judge_answer(answer[0], hash(answer[1]), self.now) == follow.APPLY:
                    self.apply(answer[1])
            elif self.follower.reads_live and (self.held or self.socket):
                message, self.held = self.held or self.socket.pop(0), None
                verdict = self.follower.judge(message[0], hash(message[1]), self.now)
                if verdict == follow.HOLD:
                    self.held = message
                elif verdict == follow.APPLY:
                    self.apply(message[1])
                elif verdict == follow.LOOK and any(isinstance(e, Cleared) for e in decode_batch(message[1]).events):
                    self.follower.cleared(message[0], hash(message[1]), self.now)
                    self.apply(message[1])
            else:
                return
        raise AssertionError("it never comes to rest")

    def open_question(self) -> object:
        return self.open[0] if self.open is not None else None

    def pass_time(self, seconds: float, *, beats: bool = True) -> None:
        for _ in range(round(seconds / STEP_S)):
            self.now += STEP_S
            self.quiet += STEP_S
            if beats and self.engine.ours and self.quiet >= 1.0:
                self.send(self.engine.publish())
            if self.now >= self.known_at:
                self.known_at = 1e9
                self.meet()
            self.follower.tick(self.now)
            self.pump()
            self.check()

    def claimed(self) -> set[tuple[int, ...]]:
        return {p for p in PROMPTS if self.index.hit_blocks(0, CHAINS[p][STRIDE - 1 :: STRIDE]) == len(p)}

    def check(self) -> None:
        """What is claimed and not held is gone 2 s after the next message that came, and at last when the stream counts as dead."""
        false = self.claimed() - self.engine.held
        self.false = {p: self.false.get(p, (self.now, None)) for p in false}
        for prompt, (since, told_at) in self.false.items():
            assert told_at is None or self.now - told_at < 2.0 + 1.5 * STEP_S, f"{prompt} is claimed since {since:.1f}, now {self.now:.1f}"
            assert self.now - since <= follow.DEAD_S + 2.0 or not self.engine.ours


class StreamMachine(RuleBasedStateMachine):
    """Any faults in any order; what is claimed wrongly is gone 2 s after the next message, and when the faults end all is whole again."""

    ours = True

    def __init__(self) -> None:
        super().__init__()
        self.world = World(ours=self.ours, kept=8)
        self.world.pump()

    FATE = st.sampled_from(["arrives"] * 6 + ["lost", "lost", "twice", "swapped"])

    def send(self, message: Message | None, fate: str) -> None:
        self.world.send(message, copies={"lost": 0, "twice": 2}.get(fate, 1), swap=fate == "swapped")

    @rule(pick=st.integers(0, 5), fates=st.lists(FATE, min_size=1, max_size=4))
    def change(self, pick: int, fates: list[str]) -> None:
        """Stores what can be stored, or evicts what can be evicted."""
        engine = self.world.engine
        for n, fate in enumerate(fates, pick):
            prompt = PROMPTS[n % len(PROMPTS)]
            self.send(engine.store(prompt) or engine.evict(prompt), fate)

    @rule(fate=FATE)
    def clear(self, fate: str) -> None:
        self.send(self.world.engine.clear(), fate)

    @rule()
    def restart(self) -> None:
        self.world.restart()

    @rule(how=st.sampled_from(["whole", "half", "nothing", "snapshots only", "replays only", "end at once"]))
    def answers(self, how: str) -> None:
        world = self.world

        def answer(start: int) -> Iterator[Message | None]:
            found = world.engine.answer(start)
            is_snapshot = start == SNAPSHOT_START
            match how:
                case "half":
                    return iter([*found[: len(found) // 2], None] if not is_snapshot else [*found[: len(found) // 2]])
                case "nothing":
                    return iter(())
                case "snapshots only":
                    return iter([*found, None] if is_snapshot else [None])
                case "replays only":
                    return iter([None] if is_snapshot else [*found, None])
                case "end at once":
                    return iter([None])
            return iter([*found, None])

        world.answering = answer

    @rule(seconds=st.sampled_from([0.1, 0.1, 0.5, 1.5, 4.0, 15.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @invariant()
    def the_index_adds_up(self) -> None:
        self.world.pump()
        self.world.index.check_integrity()

    def teardown(self) -> None:
        self.answers("whole")
        world = self.world
        for _ in range(int(3 * follow.MAX_GIVEN_UP_S // 50)):  # some rounds may be in vain
            world.pass_time(50.0)  # also when it is believed now: what was lost last has yet to be told
            if world.follower.trust == follow.LIVE:
                break
        world.pass_time(2.0)
        assert world.follower.trust == follow.LIVE, world.follower.trust
        assert world.claimed() == world.engine.held


StreamMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=25, deadline=None, phases=PHASES)
TestOurStream: Any = StreamMachine.TestCase


class ForeignMachine(StreamMachine):
    """An engine without epochs, heartbeats and snapshots."""

    ours = False

    def teardown(self) -> None:
        """Its end cannot be waited for: only a message after the faults shows what was lost, and half of its history may be gone."""
        self.answers("whole")
        self.world.pass_time(2.0)
        self.world.send(self.world.engine.clear())
        for prompt in PROMPTS:
            self.world.send(self.world.engine.store(prompt))
        for _ in range(int(3 * follow.MAX_GIVEN_UP_S // 50)):  # some rounds may be in vain
            self.world.pass_time(50.0)
            if self.world.follower.trust == follow.LIVE:
                break
            self.world.send(self.world.engine.clear())
        assert self.world.follower.trust == follow.LIVE
        assert self.world.claimed() == self.world.engine.held


ForeignMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=25, deadline=None, phases=PHASES)
TestForeignStream: Any = ForeignMachine.TestCase


# -- one by one


def test_a_new_worker_is_warm_at_once_by_a_snapshot() -> None:
    world = World()
    for prompt in PROMPTS:
        world.engine.store(prompt)
    world.pump()
    assert world.follower.trust == follow.LIVE and world.claimed() == set(PROMPTS) and world.questions == 1


def test_an_engine_without_snapshots_is_read_from_its_first_message() -> None:
    world = World(ours=False)
    for prompt in PROMPTS:
        world.engine.store(prompt)
    world.pump()
    assert world.follower.trust == follow.LIVE and world.claimed() == set(PROMPTS) and world.questions == 2


def test_an_engine_whose_first_messages_are_gone_is_not_believed_until_it_clears() -> None:
    world = World(ours=False, kept=2)
    for prompt in PROMPTS:
        world.engine.store(prompt)
    world.pass_time(10)
    assert world.follower.trust == follow.HISTORY and not world.claimed()
    world.send(world.engine.clear())
    world.send(world.engine.store((5,)))
    world.pump()
    assert world.follower.trust == follow.LIVE and world.claimed() == {(5,)}


@pytest.mark.parametrize("first", [0, 1])
def test_an_engine_without_a_replay_port_is_believed_from_its_first_message_on(first: int) -> None:
    world = World(ours=False, can_ask=False)
    for message in [*world.engine.log, world.engine.store((1,))][first:]:
        world.send(message)
    world.pump()
    assert world.follower.trust == (follow.HISTORY if first else follow.LIVE) and world.claimed() == (set() if first else {(1,)})


@pytest.mark.rule("R4")
def test_a_lost_message_is_brought_by_a_replay_and_nothing_is_read_twice() -> None:
    world = World()
    world.pump()
    world.send(world.engine.store((1,)))
    world.pump()
    world.engine.store((1, 2))  # lost
    world.send(world.engine.store((5,)))
    world.pump()
    assert world.claimed() == {(1,), (1, 2), (5,)} and world.follower.trust == follow.LIVE
    assert (world.follower.gaps, world.questions, world.counts["event_replays_total"]) == (1, 2, 1)


@pytest.mark.rule("R4")
def test_what_a_gap_left_wrong_is_forgotten_in_time_though_nobody_answers() -> None:
    world = World()
    world.engine.store((1,))
    world.pump()
    world.answering = lambda start: iter(())
    world.engine.evict((1,))  # lost
    world.send(world.engine.store((5,)))
    world.pass_time(0.9)
    assert world.claimed() == {(1,)} and world.follower.trust == follow.REPAIRING
    world.pass_time(0.3)
    assert not world.claimed() and world.follower.trust == follow.HISTORY


def test_a_replay_that_lost_its_beginning_makes_a_snapshot() -> None:
    world = World()
    world.pump()
    world.send(world.engine.store((1,)))
    world.pump()
    world.engine.kept = 2
    for prompt in PROMPTS[1:]:
        message = world.engine.store(prompt)
    world.send(message)
    world.pump()
    assert world.claimed() == set(PROMPTS) and world.counts["event_snapshots_total"] == 2


@pytest.mark.rule("R4")
def test_a_restarted_engine_is_found_out_by_its_last_message_though_its_numbers_fit() -> None:
    world = World(ours=False)
    world.pump()
    world.send(world.engine.store((1,)))
    world.pump()
    assert world.claimed() == {(1,)}
    world.restart()
    world.known_at = 1e9  # nobody else notices
    for prompt in PROMPTS:
        message = world.engine.store(prompt)  # all lost but the last
    world.send(message)
    world.pump()
    assert world.counts["event_restarts_total"] == 1
    assert world.claimed() == world.engine.held and world.follower.trust == follow.LIVE


@pytest.mark.rule("R4")
def test_a_restart_is_a_clear_at_once_even_while_nothing_can_be_asked() -> None:
    world = World()
    world.pump()
    world.send(world.engine.store((1,)))
    world.pump()
    world.answering = lambda start: iter(())
    world.restart()
    world.send(world.engine.log[0])
    world.pump()
    assert not world.claimed() and world.probes == 1 and world.follower.trust == follow.HISTORY


def test_silence_halves_the_hits_then_drops_them_and_the_worker_is_looked_at() -> None:
    world = World()
    world.pump()
    world.send(world.engine.store((1,)))
    world.send(world.engine.publish())
    world.pump()
    prompt = CHAINS[(1,)][STRIDE - 1 :: STRIDE]
    world.pass_time(2.9, beats=False)
    assert world.follower.trust == follow.LIVE and world.index.hits(prompt, 1)[0][0] == 64
    world.pass_time(0.3, beats=False)
    assert world.follower.trust == follow.SILENT and world.index.hits(prompt, 1)[0][0] == 32
    world.answering = lambda start: iter(())
    world.pass_time(8, beats=False)
    assert world.follower.trust == follow.HISTORY and world.probes == 1 and not world.claimed()
    world.answering = lambda start: iter([*world.engine.answer(start), None])
    world.pass_time(20, beats=False)  # its three tries are over by now
    world.send(world.engine.publish())
    world.pass_time(0.2)
    assert world.follower.trust == follow.LIVE and world.claimed() == {(1,)}, "a worker that is back is read again at once"


def test_a_short_silence_costs_nothing() -> None:
    world = World()
    world.pump()
    world.send(world.engine.publish())
    world.pass_time(5, beats=False)
    assert world.follower.trust == follow.SILENT
    world.send(world.engine.store((1,)))
    world.pump()
    assert world.follower.trust == follow.LIVE and world.questions == 1
    assert world.index.hits(CHAINS[(1,)][STRIDE - 1 :: STRIDE], 1)[0][0] == 64


@pytest.mark.rule("R4")
@pytest.mark.parametrize("answering", ["whole", "nothing"])
def test_an_endless_gap_costs_a_bounded_number_of_questions(answering: str) -> None:
    world = World()
    world.pump()
    if answering == "nothing":
        world.answering = lambda start: iter(())
    for second in range(1200):
        world.engine.publish()  # lost
        world.send(world.engine.publish())
        if second % 10 == 0:
            world.send(world.engine.store((1,)) or world.engine.evict((1,)))
        world.pass_time(1.0, beats=False)
    assert world.questions <= 2 * 3 * 8, "three tries of at most two questions, after 30, 60, 120, 240, 300 ... seconds"
    assert world.follower.trust == follow.HISTORY


def test_more_blocks_than_the_worker_has_is_no_stream_to_believe() -> None:
    world = World()
    world.index.remove_slot(0)
    world.index.add_slot(0, 1 << 16, by_history=True, engine_blocks=4)
    world.meet()
    world.pump()
    for prompt in PROMPTS:
        world.send(world.engine.store(prompt))
    world.pump()
    assert not world.claimed() and world.follower.trust == follow.HISTORY and world.questions == 2
