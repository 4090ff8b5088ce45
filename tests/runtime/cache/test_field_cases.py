"""Faults met in the field, part runtime-cache. Each test was seen red with the fault of its last line put in."""

from __future__ import annotations

import json
import random
from pathlib import Path

import httpx
import pytest

from fleet_contract.names import PAGE_SIZE
from fleet_contract.prefix import chain_hashes, namespace_hash
from fleet_runtime.cache import pages as owners
from fleet_testing.kv_reader import Follower, Reader, Shadow
from fleet_testing.runtime import Runtime, wait_for
from fleet_testing.scheduler_harness import SchedulerProcess, VirtualScheduler, flags_of, rid_of

VOCABULARY = range(97, 122)


def prompt(rng: random.Random, tokens: int) -> list[int]:
    return rng.choices(VOCABULARY, k=tokens)


def assert_idle_and_whole(worker: VirtualScheduler) -> None:
    """Nothing is held by a request; free pages and those of the tree are all there are."""
    memory = worker.book.memory
    pages = memory.pages
    assert not worker.book.requests
    assert pages.count(owners.REQUEST) == 0 and pages.count(owners.FREE) + pages.count(owners.TREE) == pages.num_pages
    assert memory.tree.protected == 0 and memory.tree.evictable == pages.count(owners.TREE) == sum(len(n.pages) for n in memory.tree.nodes())
    worker.book.check_integrity()


@pytest.mark.case("C100")
@pytest.mark.parametrize("seed", range(3))
def test_pages_add_up_after_shared_prefixes_aborts_and_evictions(seed: int) -> None:
    """256 requests over 64 pages; a third is aborted, at any moment.

    Fault: `KvMemory.commit` does not free the copies of pages that the tree had already.
    """
    rng = random.Random(seed)
    worker = VirtualScheduler(flags_of(64, max_queue=1000, max_step_tokens=64))
    shared = [prompt(rng, n * PAGE_SIZE + 5) for n in (2, 4, 7)]
    for n in range(256):
        worker.admit(rid_of(n), rng.choice(shared) + prompt(rng, rng.randrange(1, 80)), rng.randrange(1, 30))
        for _ in range(rng.randrange(3)):
            worker.scheduler.iterate()
        if rng.random() < 0.33:
            worker.book.abort(rid_of(rng.randrange(n + 1)), "client gone")
    worker.run()
    assert_idle_and_whole(worker)
    assert worker.book.memory.tree.evictable > 32, "the cache must have been full for this to say anything"


@pytest.mark.case("C101")
@pytest.mark.parametrize("chunk", [16, 64, 512])
def test_a_greedy_prompt_has_the_same_text_cold_warm_and_in_company(chunk: int) -> None:
    """30 prompts: cold, warm, and warm among 8 others; the simulated executor derives each token from what it
    reads back from the pages, so a page of another prefix changes the text.

    Fault: `RadixTree._next` says that a node of several pages is shared whole when its first page is.
    """
    rng = random.Random(chunk)
    worker = VirtualScheduler(flags_of(128, max_step_tokens=chunk))
    base = prompt(rng, 70)
    prompts = [base[: rng.randrange(1, 70)] + prompt(rng, rng.randrange(1, 90)) for _ in range(30)]
    cold = [VirtualScheduler(flags_of(128, max_step_tokens=chunk)).answer(p, 20) for p in prompts]
    first = [worker.answer(p, 20) for p in prompts]
    warm = [worker.answer(p, 20) for p in prompts]
    company = []
    for n, p in enumerate(prompts):
        answer = worker.admit(rid_of(1000 + n), p, 20)
        for k in range(8):
            worker.admit(rid_of(10_000 + 10 * n + k), rng.choice(prompts)[: rng.randrange(1, 60)] + prompt(rng, 9), 9)
        worker.run()
        company.append(answer.ids)
    assert cold == first == warm == company


@pytest.mark.case("C106")
def test_an_abort_before_the_start_leaves_nothing_locked() -> None:
    """A warm prefix of half the pool, 50 requests on it, every second one aborted while it waits.

    Fault: `KvMemory.admit` keeps its lock on the prefix when there are too few pages for the rest.
    """
    rng = random.Random(6)
    worker = VirtualScheduler(flags_of(64, max_queue=1000, max_step_tokens=32))
    prefix = prompt(rng, 32 * PAGE_SIZE)
    worker.answer([*prefix, 97], 1)
    for n in range(50):
        worker.admit(rid_of(n), prefix + prompt(rng, 40), 100)
        worker.scheduler.iterate()
    for n in range(0, 50, 2):
        worker.book.abort(rid_of(n), "client gone")
    worker.run()
    assert_idle_and_whole(worker)
    assert len(worker.answer([*prefix, 98], 3)) > 0


@pytest.mark.case("C104")
def test_another_model_shares_no_key_with_this_one() -> None:
    """Fault: `namespace_hash` leaves the model's revision out."""
    ids = list(range(64))
    keys = [set(chain_hashes(ids, namespace_hash(revision))) for revision in ("0123456789abcdef", "0123456789abcdee")]
    assert not keys[0] & keys[1]


@pytest.mark.case("C104")
@pytest.mark.processes
def test_a_worker_that_comes_back_with_another_model_has_nothing_cached_and_says_so(tmp_path: Path) -> None:
    """The same folder, the same prompt: the first life's cache is void for it, and for those who read its events.

    Fault: `epoch_of` gives every incarnation the same epoch.
    """
    ids = prompt(random.Random(1), 200)
    seen = []
    for revision in ("0123456789abcdef", "fedcba9876543210"):
        worker = SchedulerProcess(tmp_path, flags_of(64), model_revision=revision).start()
        try:
            with Reader(worker.info.events_port, worker.info.replay_port, f"kv@pod@{revision}".encode()) as reader:
                answer = worker.admit(rid_of(1), ids, 4)
                worker.wait_end(answer)
                assert answer.cached_tokens == 0
                shadow = Shadow(revision)
                Follower(reader, shadow).begin()
                assert len(shadow.blocks) == 12
                seen.append((set(shadow.blocks), shadow.epochs))
        finally:
            worker.stop()
    assert not seen[0][0] & seen[1][0] and not seen[0][1] & seen[1][1]


@pytest.mark.case("C107")
@pytest.mark.processes
def test_cached_tokens_are_what_was_not_computed(tmp_path: Path) -> None:
    """256 ids twice, then with another last id, then with another first id; the worker's counters agree. Streamed and not.

    Fault: `Request.prefix_limit` lets a prompt match whole, so that the last token counts as cached.
    """
    with Runtime(tmp_path) as runtime:
        runtime.wait_ready()
        for stream in (False, True):
            ids = prompt(random.Random(7 + stream), 256)
            asked = [ids, ids, [*ids[:-1], 96], [96, *ids[1:]]]
            before = counters(runtime)
            cached = [cached_tokens(runtime, p, stream=stream) for p in asked]
            assert cached == [0, 240, 240, 0]
            expected = (before[0] + sum(cached), before[1] + 4 * 256 - sum(cached))
            wait_for(lambda: counters(runtime) == expected, f"the counters say {expected}")  # noqa: B023


def counters(runtime: Runtime) -> tuple[float, float]:
    """Cached and computed prompt tokens so far."""
    found = runtime.metrics()
    return tuple(next(v for k, v in found.items() if word in k) for word in ("cached_tokens_total", "prefilled_tokens_total"))  # type: ignore[return-value]


def cached_tokens(runtime: Runtime, ids: list[int], *, stream: bool) -> int:
    body = {"model": "simulated", "prompt": ids, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    if not stream:
        return httpx.post(f"{runtime.data}/v1/completions", json=body, timeout=30).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    lines = httpx.post(f"{runtime.data}/v1/completions", json=body, timeout=30).text.splitlines()
    (usage,) = [chunk["usage"] for line in lines if line.startswith("data: {") and (chunk := json.loads(line[6:])).get("usage")]
    return usage["prompt_tokens_details"]["cached_tokens"]
