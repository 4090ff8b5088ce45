"""The page of metrics says what a router tells."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from fleet_router import metrics_page
from fleet_router.metrics import HELP, LABELS
from fleet_testing.fake_worker import FakeWorker
from fleet_testing.router_process import RouterProcess


def test_the_page_is_made_of_the_code() -> None:
    assert metrics_page.PAGE.read_text() == metrics_page.page(), "run: python -m fleet_router.metrics_page"
    assert LABELS.keys() <= HELP.keys()


@pytest.mark.processes
async def test_what_a_router_tells_is_on_the_page(
    make_worker: Callable[..., Awaitable[FakeWorker]], make_router: Callable[..., Awaitable[RouterProcess]]
) -> None:
    worker = await make_worker()
    router = await make_router("--static", worker.url, "--workers", "2")
    body: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    assert (await router.http.post(f"{router.url}/v1/chat/completions", json=body)).status_code == 200
    text = (await router.http.get(f"{router.control}/metrics")).text
    told = dict(re.findall(r"^# TYPE radixfleet_router_(\w+) (\w+)$", text, re.M))
    assert {"picks_total", "workers", "first_byte_seconds", "up"} <= told.keys() <= HELP.keys()
    assert all(kind == metrics_page.kind(name) for name, kind in told.items())
    for name, labels in re.findall(r"^radixfleet_router_(\w+)\{(.*?)\}", text, re.M):
        if "first_byte" not in name:
            assert tuple(re.findall(r'(\w+)="', labels)) == LABELS[name]
