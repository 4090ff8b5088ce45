"""The stream of a whole worker: real processes, requests that fill and overflow a small cache, a reader that follows."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from fleet_contract.kv_events import epoch_of
from fleet_testing.kv_reader import Follower, Reader, Shadow
from fleet_testing.runtime import Runtime
from fleet_testing.scheduler_harness import SchedulerProcess, flags_of, rid_of

pytestmark = pytest.mark.processes
REVISION = "0123456789abcdef"


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[SchedulerProcess]:
    made = SchedulerProcess(tmp_path, flags_of(64, simulated_step_base_ms=0.2, max_queue=1000), model_revision=REVISION)
    yield made.start()
    made.stop()


def test_a_scheduler_under_load_tells_all_that_its_cache_holds(worker: SchedulerProcess) -> None:
    """150 requests over 64 pages: prefixes are shared, split and evicted, some requests are aborted; a reader that joins in the middle follows
    to the end, and holds then what a second snapshot says."""
    rng = random.Random(4)
    prefixes = [[rng.randrange(97, 122) for _ in range(16 * n)] for n in (2, 3, 5)]
    answers = []
    with Reader(worker.info.events_port, worker.info.replay_port, f"kv@pod@{REVISION}".encode()) as reader:
        shadow = Shadow(REVISION)
        follower = Follower(reader, shadow)
        for n in range(150):
            prompt = prefixes[n % 3] + [rng.randrange(97, 122) for _ in range(rng.randrange(1, 60))]
            answers.append(worker.admit(rid_of(n), prompt, rng.randrange(1, 24)))
            if n == 50:
                follower.begin()
        for answer in answers:
            worker.wait_end(answer, 30)
        worker.wait_idle()
        barrier, payloads = reader.snapshot()
        follower.until(lambda: follower.next > barrier)
        second = Shadow(REVISION)
        for payload in payloads:
            second.apply(payload)
        assert shadow.blocks == second.blocks and 20 < len(second.blocks) <= 64
        assert len(second.blocks) == worker.counters()["pages_tree"]
        assert shadow.epochs == second.epochs == {epoch_of(worker.incarnation)}
        assert shadow.events > 100, "the cache must have overflowed for this to say anything"


def test_the_record_names_the_ports_and_they_are_bound_when_the_worker_is_ready(tmp_path: Path) -> None:
    with Runtime(tmp_path) as runtime:
        runtime.wait_ready()
        record = httpx.get(f"{runtime.internal}/worker", timeout=60).json()
        with Reader(record["ports"]["events"], record["ports"]["replay"], f"kv@{record['podUid']}@{record['modelRevision']}".encode()) as reader:
            reader.live()
            body = {"model": "simulated", "prompt": "one prefix for all " * 8, "max_tokens": 4, "temperature": 0}
            shadow = Shadow(record["modelRevision"])
            follower = Follower(reader, shadow).begin()
            thread = threading.Thread(target=lambda: httpx.post(f"{runtime.data}/v1/completions", json=body, timeout=20))
            thread.start()
            follower.until(lambda: len(shadow.blocks) >= 9, 20)
            thread.join()
            assert shadow.epochs == {epoch_of(record["incarnation"])}
