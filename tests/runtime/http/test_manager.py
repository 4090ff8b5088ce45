"""The TokenizerManager against a scheduler that says anything in any order: every request ends once, nothing is left."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_contract.errors import ApiError
from fleet_contract.wire import RoutedHeaders
from fleet_runtime import messages as m
from fleet_runtime.server.manager import REMEMBER_S, ReqState, TokenizerManager


class Channel:
    def __init__(self) -> None:
        self.peers = {m.SCHEDULER: "s", m.DETOKENIZER: "d"}
        self.sent: list[m.Message] = []
        self.full = False

    def send(self, peer: str, message: m.Message) -> bool:
        if self.full:
            return False
        self.sent.append(message)
        return True


class World:
    def __init__(self) -> None:
        self.now = 1000.0
        self.channel = Channel()
        self.refusal: ApiError | None = None
        self.manager = TokenizerManager(self.channel, lambda: self.refusal, lambda: self.now)

    def admitted(self, rid: str, choices: int = 1) -> ReqState:
        state = self.manager.open(RoutedHeaders(rid=rid))
        self.manager.admit(state, [m.Admit(rid=rid, index=i) for i in range(choices)])
        return state


def text(rid: str, index: int, finish: str | None = None) -> m.TextBatch:
    return m.TextBatch(items=[m.Text(rid, index, "x", [1], 1, 1, 0, finish)])


def failed(rid: str, index: int) -> m.Failed:
    return m.Failed(rid=rid, index=index, status=500, type="server_error", code="x", message="x")


async def test_a_death_ends_all_that_is_admitted_with_its_cause() -> None:
    world = World()
    state, waiting = world.admitted("a"), world.manager.open(RoutedHeaders(rid="b"))
    world.manager.on_message(m.PeerDied(who=m.SCHEDULER, incarnation="s", cause="scheduler was killed by SIGKILL"))
    items = await world.manager.wait(state, world.now + 1)
    assert isinstance(items[0], ApiError) and (items[0].status, items[0].message) == (503, "scheduler was killed by SIGKILL")
    assert not waiting.mailbox, "what is not admitted may still be served by the next scheduler"
    world.manager.release(state)
    world.manager.release(waiting)
    assert len(world.manager) == 0


def test_an_abort_before_admission_sends_nothing() -> None:
    world = World()
    state = world.manager.open(RoutedHeaders(rid="a"))
    assert world.manager.abort("a") == "aborted"
    with pytest.raises(ApiError):
        world.manager.admit(state, [m.Admit(rid="a")])
    world.manager.release(state)
    assert world.channel.sent == [] and world.manager.abort("a") == "finished"


def test_an_unknown_rid_is_remembered_for_60_seconds() -> None:
    world = World()
    assert world.manager.abort("a") == "unknown"
    world.now += REMEMBER_S - 1
    with pytest.raises(ApiError) as e:
        world.manager.open(RoutedHeaders(rid="a", leg="decode", rooms=(7,), bootstrap="h:1"))
    assert e.value.code == "aborted"
    assert isinstance(world.channel.sent[-1], m.RoomRejected)
    world.now += 2
    world.manager.open(RoutedHeaders(rid="a"))


def test_a_full_channel_refuses_instead_of_waiting_for_ever() -> None:
    world = World()
    world.channel.full = True
    state = world.admitted("a")
    assert isinstance(state.mailbox[0], ApiError) and state.mailbox[0].status == 503


def test_memory_of_old_rids_is_bounded() -> None:
    world = World()
    for i in range(20_000):
        world.now += 0.001
        world.manager.abort(f"{i}")
    assert len(world.manager._tombstones) <= 10_000
    world.now += REMEMBER_S
    world.manager.abort("last")
    assert len(world.manager._tombstones) == 1


@settings(max_examples=300)
@given(
    st.lists(
        st.tuples(st.sampled_from("open admit text finish failed abort cancel release died reject".split()), st.integers(0, 2), st.integers(0, 1))
    )
)
def test_any_order_of_events_ends_each_choice_at_most_once(events: list[tuple[str, int, int]]) -> None:
    world = World()
    manager = world.manager
    states: dict[int, ReqState] = {}
    ended: dict[tuple[int, int], int] = {}
    generation = 0
    for kind, n, index in events:
        state = states.get(n)
        rid = state.rid if state else f"unknown{n}"
        if kind == "open" and state is None:
            generation += 1
            states[n] = manager.open(RoutedHeaders(rid=f"r{generation}"))
        elif kind == "admit" and state is not None and not state.admitted and not state.aborted:
            manager.admit(state, [m.Admit(rid=rid, index=0), m.Admit(rid=rid, index=1)])
        elif kind == "text":
            manager.on_message(text(rid, index))
        elif kind in ("finish", "failed"):
            was_open = state is not None and index in state.open
            manager.on_message(text(rid, index, "stop") if kind == "finish" else failed(rid, index))
            assert state is None or index not in state.open
            ended[generation, index] = ended.get((generation, index), 0) + was_open
        elif kind == "abort":
            assert manager.abort(rid) in ("aborted", "finished", "unknown")
        elif kind == "cancel" and state is not None:
            manager.cancel(state, "gone")
        elif kind == "release" and state is not None:
            manager.cancel(state, "gone")
            manager.release(state)
            if not state.open:
                del states[n]
            elif index:  # its terminal messages come
                for i in list(state.open):
                    manager.on_message(failed(rid, i))
                del states[n]
        elif kind == "died":
            manager.on_message(m.PeerDied(who=m.SCHEDULER, incarnation="s", cause="x"))
            for k in [k for k, s in states.items() if s.released]:
                del states[k]
        manager.check_integrity()
    for state in states.values():
        manager.cancel(state, "end")
        manager.release(state)
        for i in list(state.open):
            manager.on_message(failed(state.rid, i))
    assert len(manager) == 0
    admits = [s for s in world.channel.sent if isinstance(s, m.Admit)]
    aborts = [s.rid for s in world.channel.sent if isinstance(s, m.Abort)]
    assert len(aborts) == len(set(aborts)), "one abort a request"
    assert set(aborts) <= {a.rid for a in admits}
