"""The router reads its workers' KV events: warm starts, gaps, restarts, silence, foreign dialects, bounded work (R4-R8, R15, R33, R34)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleet_contract.kv_events import Batch, Stored
from fleet_contract.prefix import chain_hashes, namespace_hash
from fleet_contract.worker import WorkerRecord
from fleet_router.brain import reports
from fleet_router.brain.brain import Brain
from fleet_router.counters import Counters
from fleet_router.decide.events import EventBook
from fleet_router.decide.index import PrefixIndex
from fleet_router.decide.keys import STRIDE
from fleet_router.kv_feed import apply, reader
from fleet_router.kv_feed.apply import Writer
from fleet_router.settings import Settings
from fleet_testing.fake_events import DIALECTS, OURS, SGLANG, FakePublisher
from fleet_testing.fake_worker import FakeWorker
from fleet_testing.router_fleet import Fleet, MakeFleet, MakeWorker
from fleet_testing.router_process import until
from fleet_testing.runtime import Runtime

PROMPT = list(range(1000, 1640))  # ten blocks of the index
MakePublisher = Callable[..., Awaitable[FakePublisher]]


@pytest.fixture
async def publisher(make_worker: MakeWorker) -> AsyncIterator[MakePublisher]:
    """A worker that tells its KV events."""
    started: list[FakePublisher] = []

    async def make(dialect: str = OURS, **options: Any) -> FakePublisher:
        started.append(await FakePublisher(await make_worker(), dialect, **options).start())
        return started[-1]

    yield make
    for one in started:
        await one.stop()


def stream(fleet: Fleet, n: int = 0) -> dict[str, Any]:
    events: dict[str, Any] = fleet.told()[n]["events"]
    return events


def held(fleet: Fleet, worker: FakeWorker, prompt: list[int] = PROMPT) -> int:
    """Blocks of a prompt that a lookup promises on a worker."""
    slot = next(w.slot for w in fleet.brain.workers if w.port == worker.port and not w.removed)
    keys = chain_hashes(prompt, namespace_hash(worker.record.model_revision))[STRIDE - 1 :: STRIDE]
    return int(fleet.brain.index.hit_blocks(slot, keys))


async def until_live(fleet: Fleet) -> None:
    await until(lambda: all(w["events"]["trust"] == "live" for w in fleet.told()), "all streams are believed")


@pytest.mark.rule("R5")
@pytest.mark.parametrize("block_size", [16, 64, 128])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_r5_what_an_engine_held_before_and_tells_then_is_known(
    dialect: str, block_size: int, publisher: MakePublisher, make_fleet: MakeFleet
) -> None:
    engine = await publisher(dialect, block_size=block_size)
    await engine.store(PROMPT)
    fleet = await make_fleet(engine.worker)
    await until_live(fleet)
    assert held(fleet, engine.worker) == 10
    second = [7, *PROMPT]
    while not held(fleet, engine.worker, second):  # what was sent before the subscription reached the engine comes by the next gap's replay
        await engine.store(second)
        await asyncio.sleep(0.02)
    await engine.publish(engine.removed(PROMPT), ["NoSuchEvent", 1], {"type": "BlockStored", "block_hashes": [1.5]})
    await until(lambda: held(fleet, engine.worker) == 0, "the removal arrives")
    assert held(fleet, engine.worker, second) == 10
    assert fleet.counter("bad_events_total") == 2 and stream(fleet)["trust"] == "live"
    await fleet.idle()


@pytest.mark.rule("R4")
async def test_r4_lost_messages_are_fetched(publisher: MakePublisher, make_fleet: MakeFleet) -> None:
    engine = await publisher()
    fleet = await make_fleet(engine.worker)
    await until_live(fleet)
    await until(lambda: stream(fleet)["lagSeconds"] is not None, "the subscription works")
    engine.lose = 2
    await engine.store(PROMPT)
    await engine.store([7, *PROMPT])
    await engine.store([8, *PROMPT])
    await until(lambda: held(fleet, engine.worker) == 10 and held(fleet, engine.worker, [8, *PROMPT]) == 10, "the gap is closed")
    assert stream(fleet)["gaps"] >= 1 and fleet.counter("event_gaps_total") >= 1
    await until_live(fleet)


@pytest.mark.rule("R7")
async def test_r7_nothing_of_an_engine_s_old_life_is_believed_after_its_restart(publisher: MakePublisher, make_fleet: MakeFleet) -> None:
    engine = await publisher()
    await engine.store(PROMPT)
    fleet = await make_fleet(engine.worker)
    await until(lambda: held(fleet, engine.worker) == 10, "the snapshot is read")
    await engine.restart()
    await until(lambda: held(fleet, engine.worker) == 0, "the restart is seen")
    await engine.store([7, *PROMPT])
    await until(lambda: held(fleet, engine.worker, [7, *PROMPT]) == 10, "the new life is read")
    assert held(fleet, engine.worker) == 0
    await fleet.idle()


@pytest.mark.rule("R33")
@pytest.mark.rule("R32")
async def test_r33_r32_a_new_router_knows_what_the_old_one_knew(publisher: MakePublisher, make_fleet: MakeFleet) -> None:
    engines = [await publisher(), await publisher(SGLANG)]
    fleet = await make_fleet(*(e.worker for e in engines))
    for n in range(40):
        await engines[n % 2].store([n, *PROMPT])
    await until(lambda: [w["indexedTokens"] for w in fleet.told()] == [20 * 640] * 2, "everything is known")
    new = await make_fleet(*(e.worker for e in engines))
    await until_live(new)
    assert new.brain.synced
    assert [w["indexedTokens"] for w in new.told()] == [20 * 640] * 2
    body = msgspec.json.encode({"model": "tiny", "prompt": [3, *PROMPT], "max_tokens": 5})
    told = [(await f.edge.service.explain(body))["workers"] for f in (fleet, new)]
    seen = [sorted((w["worker"], w["hitTokens"], w["costSeconds"]) for w in workers) for workers in told]
    assert seen[0] == seen[1] and sorted(hit for _, hit, _ in seen[0]) == [0, 640], "two routers decide alike"


@pytest.mark.rule("R34")
async def test_r34_a_publisher_that_stops_is_seen_and_its_worker_serves_on(publisher: MakePublisher, make_fleet: MakeFleet) -> None:
    engines = [await publisher(), await publisher()]
    fleet = await make_fleet(*(e.worker for e in engines))
    await until(lambda: reports.streams(fleet.brain) == {"expected": 2, "live": 2}, "both are believed")
    engines[0].silent = True
    await until(lambda: reports.streams(fleet.brain) == {"expected": 2, "live": 1}, "its silence is seen", 5.0)
    assert sorted(w["events"]["trust"] for w in fleet.told()) == ["live", "silent"]
    gauges = {(name, *labels): value for name, labels, value in reports.snapshot(fleet.brain, 0).gauges}
    assert gauges[("event_streams", ("trust", "silent"))] == 1
    assert (await fleet.chat()).status_code == 200 and fleet.ready() == 2


async def test_a_router_that_was_frozen_reads_what_has_come_before_it_calls_a_stream_dead(
    publisher: MakePublisher, make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red before: after ten seconds on a paused machine all that the index held was dropped, with the heartbeats in the socket."""
    monkeypatch.setattr("fleet_router.kv_feed.follow.SILENT_S", 0.8)
    monkeypatch.setattr("fleet_router.kv_feed.follow.DEAD_S", 1.0)
    engine = await publisher()
    fleet = await make_fleet(engine.worker)
    await until_live(fleet)
    (feed,) = fleet.edge.host.kv_reader._feeds.values()  # type: ignore[union-attr]
    await until(lambda: feed.follower.beats, "it is known to send heartbeats")
    time.sleep(1.5)  # noqa: ASYNC251 the whole process stands still
    deadline = time.monotonic() + 0.7
    while time.monotonic() < deadline:
        assert stream(fleet)["trust"] == "live"
        await asyncio.sleep(0.005)
    assert fleet.counter("event_streams_died_total") == 0


async def test_an_engine_without_events_is_judged_by_history(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    fleet = await make_fleet(await make_worker())
    assert stream(fleet) == {"trust": "none", "sequence": None, "lagSeconds": None, "gaps": 0}
    assert fleet.brain.index.is_by_history(0) and reports.streams(fleet.brain) == {"expected": 0, "live": 0}


async def test_an_events_port_that_nobody_listens_on_ends_in_history_and_stops_nothing(
    publisher: MakePublisher, make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleet_router.kv_feed.follow.ANSWER_S", 0.1)
    engine = await publisher()
    await engine.stop()
    fleet = await make_fleet(engine.worker)
    await until(lambda: stream(fleet)["trust"] == "history", "three tries are over")
    await until(lambda: fleet.counter("event_rounds_given_up_total") == 1, "it is counted")
    assert (await fleet.chat("one prompt " * 40)).status_code == 200
    assert fleet.told()[0]["indexedTokens"] > 0


async def test_a_large_snapshot_is_applied_in_slices_between_which_the_loop_runs(
    publisher: MakePublisher, make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "TURN_S", 0.0)
    engine = await publisher()
    engine.worker.record = msgspec.structs.replace(engine.worker.record, kv_capacity_tokens=1 << 20)
    for n in range(8):
        await engine.store([n, *range(4 * 16 * apply.PIECE_BLOCKS)])
    fleet = await make_fleet(engine.worker, wait=False)
    turns = 0
    while not fleet.told() or stream(fleet)["trust"] != "live":
        turns += 1
        await asyncio.sleep(0)
    assert fleet.told()[0]["indexedTokens"] == 8 * 4 * 16 * apply.PIECE_BLOCKS
    assert turns >= 8 * 4, "the loop ran between the pieces"


def test_a_batch_is_written_in_pieces_however_long_its_events_are() -> None:
    index = PrefixIndex()
    index.add_slot(0, 1 << 22, by_history=False)
    writer = Writer(EventBook(index), 0, WorkerRecord(model_revision="m"), lambda reason: None)
    tokens = list(range(100_000))
    batch = Batch(0.0, 0, [Stored(list(range(6250)), None, tokens, 16, "GPU")])
    assert sum(1 for _ in writer.write(batch, 0.0)) == -(-6250 // apply.PIECE_BLOCKS)
    assert index.hit_blocks(0, chain_hashes(tokens, namespace_hash("m"))[STRIDE - 1 :: STRIDE]) == 6250 // STRIDE


@pytest.mark.rule("R5")
@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (Stored([1], None, [0] * 16, 16, "TAPE"), "medium"),
        (Stored([1], None, [0] * 16, 16, "GPU", spec_kind="sliding_window"), "group"),
        (Stored([1], None, [0] * 16, 16, "GPU", opaque=True), "opaque"),
        (Stored([1], None, [0] * 17, 16, "GPU"), "malformed"),
        (Stored([1], None, [0] * 8, 8, "GPU"), "unsupported"),
        (Stored([1], None, [], 16, "CPU"), "unknown"),
    ],
)
def test_r5_an_event_that_cannot_be_used_costs_itself_and_is_counted_by_its_reason(event: Stored, reason: str) -> None:
    index, counted = PrefixIndex(), list[str]()
    index.add_slot(0, 1 << 16, by_history=False)
    writer = Writer(EventBook(index), 0, WorkerRecord(model_revision="m"), counted.append)
    good = Stored([2], None, [5] * 64, 64, "GPU")
    for _ in writer.write(Batch(0.0, 0, [event, good], ["broken"]), 0.0):
        pass
    assert counted == ["unreadable", reason] and reason in apply.REASONS
    assert index.held_tokens(0) == 64


def test_the_epoch_of_a_stream_is_known_of_our_own_runtime_alone() -> None:
    ours = WorkerRecord(incarnation="00000000000000ff")
    assert Writer(EventBook(PrefixIndex()), 0, ours, print).epoch == 255
    assert Writer(EventBook(PrefixIndex()), 0, msgspec.structs.replace(ours, engine="vllm"), print).epoch is None


@pytest.mark.rule("R15")
async def test_r15_an_idle_stream_costs_one_short_look_per_heartbeat(
    publisher: MakePublisher, make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = [await publisher() for _ in range(20)]
    fleet = await make_fleet(*(e.worker for e in engines))
    await until_live(fleet)
    steps = 0
    real = reader._Feed.step

    def step(feed: reader._Feed) -> bool:
        nonlocal steps
        steps += 1
        return real(feed)

    monkeypatch.setattr(reader._Feed, "step", step)
    before = sum(w["events"]["sequence"] for w in fleet.told())
    await asyncio.sleep(1.0)
    beats = sum(w["events"]["sequence"] for w in fleet.told()) - before
    assert beats > 20 and steps <= 5 * beats


async def test_the_index_follows_a_real_runtime(make_fleet: MakeFleet, tmp_path: Path) -> None:
    with Runtime(tmp_path / "runtime") as runtime:
        runtime.wait_ready()
        fleet = await make_fleet(static=(runtime.internal,), wait=False)
        await until(lambda: fleet.ready() == 1, "the worker is ready", 30)
        await until_live(fleet)
        body = {"model": fleet.brain.table.names and next(iter(fleet.brain.table.names)), "prompt": "one prefix for all " * 40, "max_tokens": 2}
        for _ in range(2):
            answer = await fleet.post("/v1/completions", body)
            assert answer.status_code == 200, answer.text
            await until(lambda: fleet.told()[0]["indexedTokens"] >= 640 and not fleet.inflight(), "its blocks are known")
        worker = fleet.brain.workers[0]
        assert not fleet.brain.index.is_by_history(worker.slot)
        assert fleet.counter("predicted_cached_tokens_total") > 0
        await fleet.idle()


async def test_a_reader_that_never_started_can_be_closed() -> None:
    await reader.KvReader(Brain(Settings(), Counters(), time.monotonic)).close()
