"""The loop on its engine thread over the torch executor: the same answers with overlap and without, with options and without."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from fleet_runtime.scheduler.runner import ThreadRunner
from fleet_testing.executors import torch_executor
from fleet_testing.scheduler_harness import Answer, VirtualScheduler, flags_of, rid_of, wait_for
from fleet_testing.tiny_llama import make_llama

OPTIONS: list[dict[str, object]] = [
    {},
    {"temperature": 0.8, "seed": 4},
    {"frequency_penalty": 0.6, "repetition_penalty": 1.2},
    {"logprobs": 2, "prompt_logprobs": 1},
    {"stop_ids": [3, 5, 7], "min_tokens": 4},
    {"embed": "mean"},
]


def _answers(folder: Path, *, overlap: bool) -> list[Answer]:
    executor = torch_executor(folder)
    runner = ThreadRunner(executor)
    flags = flags_of(executor.layout.num_pages, overlap=overlap, max_step_tokens=512, max_rows=min(8, executor.slots))
    worker = VirtualScheduler(flags, executor=executor, clock=time.monotonic, runner=runner)  # type: ignore[arg-type]
    answers: list[Answer] = []

    def ended() -> bool:
        worker.scheduler.iterate()
        return answers[-1].end is not None

    try:
        for n, fields in enumerate(OPTIONS):  # one at a time: torch's results depend on the batch by rounding
            ids = random.Random(n).choices(range(40), k=30)
            answers.append(worker.admit(rid_of(n), ids, 0 if "embed" in fields else 12, **fields))
            wait_for(ended, "it ends")
        wait_for(lambda: not worker.scheduler.iterate() and not worker.scheduler.outstanding, "all has landed")
        worker.book.check_integrity()
        assert not worker.book.requests and worker.scheduler.counters()["pages_request"] == 0
        return answers
    finally:
        runner.close()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_llama(folder)
    return folder


def test_the_torch_executor_gives_the_same_answers_with_overlap_and_without(tiny: Path) -> None:
    one, other = _answers(tiny, overlap=True), _answers(tiny, overlap=False)
    for a, b in zip(one, other, strict=True):
        assert a.ids == b.ids and a.end == b.end
        assert [t.token for t in a.logprobs] == [t.token for t in b.logprobs] == (a.ids if a.logprobs else [])
        assert [t.token for t in a.prompt_logprobs or []] == [t.token for t in b.prompt_logprobs or []]
    assert len(one[3].prompt_logprobs or []) == 29 and len(one[3].logprobs) == 12
