"""The dashboard, looked at in a real browser; /debug/queue, /debug/overview, and what `radixfleet top` and `route explain` make of them."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from fleet_router.brain.explain import CACHED, CHEAPEST, ELSEWHERE, NEAR_TIE, ONLY, reason
from fleet_router.decide.fleet import Fleet as Deciding
from fleet_router.decide.load import Speed
from fleet_router.decide.rule import Ask, Member, Pool
from fleet_testing.fake_worker import DEFAULT_STREAM, Script
from fleet_testing.router_fleet import MakeWorker
from fleet_testing.router_process import RouterProcess, until, until_async

ARTIFACTS = Path(__file__).parents[2] / "artifacts"
LONG = "many words without a common beginning " * 60  # over 2,000 tokens


def deciding(*pending: int) -> tuple[Deciding, Pool]:
    """Workers that serve alone; each has so many prompt tokens waiting."""
    fleet = Deciding(lambda n: 0)
    for slot, tokens in enumerate(pending):
        load = fleet.add_worker(slot, Speed(10_000.0, 0.02, 0.0, 0.0, 100_000), by_history=True)
        if tokens:
            load.pick(tokens, tokens, tokens, 0.0)
    return fleet, Pool(tuple(Member(slot, f"w{slot}", "unified") for slot in range(len(pending))))


def decided(fleet: Deciding, pool: Pool, *, cached_on: int | None = None) -> tuple[int, str, int]:
    """Chosen slot, reason, equals for a prompt of 6,400 tokens; one worker holds 6,336 of them when named."""
    keys = tuple(range(1000, 1100))
    if cached_on is not None:
        only = Pool(tuple(m for m in pool.alone if m.slot == cached_on))
        first = fleet.decide(only, Ask(6400, 1), keys, 0.0)
        assert first is not None
        taken = fleet.take(first, keys, 0.0)
        fleet.first_token(taken, 0.0)
        fleet.release(taken)
    decision = fleet.decide(pool, Ask(6400, 1), keys, 0.0)
    assert decision is not None
    return (decision.chosen.first, *reason(decision))


def test_the_reason_of_a_decision_names_what_it_was() -> None:
    assert decided(*deciding(0)) == (0, ONLY, 0)
    assert decided(*deciding(0, 0, 0)) == (0, NEAR_TIE, 2)
    assert decided(*deciding(50_000, 0)) == (1, CHEAPEST, 0)
    assert decided(*deciding(0, 0), cached_on=1)[:2] == (1, CACHED)
    assert decided(*deciding(0, 90_000), cached_on=1)[:2] == (0, ELSEWHERE)


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[webdriver.Chrome]:
    """Debian's Chromium without a window; it talks to loopback alone."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no Chromium: `dev/setup browser` installs Debian's (packages chromium, chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (
        "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
        "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--window-size=1500,1100",
        f"--user-data-dir={tmp_path / 'profile'}", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    ):  # fmt: skip
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield chrome
    chrome.quit()


def rows(chrome: webdriver.Chrome, table: str) -> list[list[str]]:
    """Cells of a table's lines, without its head."""
    script = "return [...document.querySelectorAll(`#${arguments[0]} tr`)].slice(1).map(r => [...r.cells].map(c => c.innerText.trim()))"
    return chrome.execute_script(script, table)  # type: ignore[no-any-return, no-untyped-call]


def shown(chrome: webdriver.Chrome, table: str, wanted: Any) -> list[list[str]]:
    """Waits until `wanted(rows)`."""
    try:
        WebDriverWait(chrome, 15, 0.1).until(lambda c: wanted(rows(c, table)))
    except Exception as e:
        raise AssertionError(f"{table} shows {rows(chrome, table)}") from e
    return rows(chrome, table)


async def held(router: RouterProcess, worker: Any) -> tuple[asyncio.Event, asyncio.Task[Any]]:
    """A request whose prompt takes the only worker until the event is set."""
    gate = asyncio.Event()
    worker.scripts.append(Script(wait=gate, pieces=[DEFAULT_STREAM]))
    before = len(worker.legs)
    task = asyncio.create_task(router.chat(f"0 {LONG}", stream=True))
    await until(lambda: len(worker.legs) == before + 1, "the worker has it")
    return gate, task


@pytest.mark.processes
async def test_a_browser_shows_workers_queue_and_decisions_and_says_when_the_router_is_gone(
    make_worker: MakeWorker, make_router: Any, browser: webdriver.Chrome
) -> None:
    worker = await make_worker()
    router: RouterProcess = await make_router("--static", worker.url, "--router-id", "seen-in-a-browser")
    await router.until_workers(1)
    await router.until_reads_prompts()
    await router.chat("hello")
    gate, first = await held(router, worker)
    second = asyncio.create_task(router.chat(f"1 {LONG}"))

    def look() -> None:
        browser.get(router.control + "/")
        assert shown(browser, "workers", lambda r: len(r) == 1)[0][3:6] == ["unified", "ready", "1"]
        assert shown(browser, "services", lambda r: len(r) == 1)[0][:3] == ["demo/tiny", "tiny", "aaaaaaaa"]
        assert shown(browser, "queues", lambda r: len(r) == 1)[0][2] == "1 of 1024"
        assert shown(browser, "decisions", lambda r: len(r) == 2)[0][-1] == ONLY
        assert browser.find_element(By.ID, "state").text == "ready"
        assert "seen-in-a-browser" in browser.title
        ARTIFACTS.mkdir(exist_ok=True)
        assert browser.save_screenshot(str(ARTIFACTS / "dashboard.png"))

    await asyncio.to_thread(look)
    gate.set()
    assert (await first).status_code == 200 and (await second).status_code == 200
    await asyncio.to_thread(shown, browser, "queues", lambda r: r == [])
    wide = "return document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    await asyncio.to_thread(browser.set_window_size, 480, 900)
    assert await asyncio.to_thread(browser.execute_script, wide), "a narrow window scrolls the whole page sideways"
    complaints = [entry["message"] for entry in browser.get_log("browser") if "favicon" not in entry["message"]]  # type: ignore[no-untyped-call]
    assert complaints == []
    await router.stop()
    await asyncio.to_thread(WebDriverWait(browser, 15, 0.1).until, lambda c: "no answer" in c.find_element(By.ID, "state").text)


def radixfleet(*argv: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "fleet_cli", *argv], input=stdin, capture_output=True, text=True, timeout=60)


@pytest.mark.processes
async def test_top_and_explain_show_the_same_in_a_terminal(make_worker: MakeWorker, make_router: Any) -> None:
    worker = await make_worker()
    router: RouterProcess = await make_router("--static", worker.url)
    await router.until_workers(1)
    await router.until_reads_prompts()
    gate, first = await held(router, worker)
    second = asyncio.create_task(router.chat(f"1 {LONG}"))

    async def waits() -> bool:
        return len((await router.get("/debug/queue"))["queues"]) == 1

    await until_async(waits, "a request waits")
    (queue,) = (await router.get("/debug/queue"))["queues"]
    (entry,) = queue["requests"]
    assert (queue["service"], queue["waiting"], entry["class"], entry["promptTokens"] > 2000) == ("demo/tiny", 1, "default", True)
    assert entry["leftSeconds"] > 0 and entry["requestId"].startswith("req-")
    top = await asyncio.to_thread(radixfleet, "top", "--once", "--url", router.control)
    assert top.returncode == 0, top.stderr
    assert "in flight 1" in top.stdout and "1 of 1024" in top.stdout and ONLY in top.stdout and f"127.0.0.1:{worker.port}" in top.stdout
    numbers = await asyncio.to_thread(radixfleet, "top", "--json", "--url", router.control)
    assert json.loads(numbers.stdout)["gauges"]["inflight"] == 1
    explained = await asyncio.to_thread(radixfleet, "route", "explain", "--prompt", "hi", "--url", router.control)
    assert explained.returncode == 0, explained.stderr
    assert f"goes to 127.0.0.1:{worker.port}" in explained.stdout and ONLY in explained.stdout
    body = json.dumps({"model": "nobody", "prompt": "x"})
    refused = await asyncio.to_thread(radixfleet, "route", "explain", "-", "--url", router.control, stdin=body)
    assert refused.returncode == 1 and "model 'nobody' does not exist here; there is: " in refused.stderr
    assert len(worker.legs) == 1, "explaining sent nothing"
    gate.set()
    assert (await first).status_code == 200 and (await second).status_code == 200


@pytest.mark.parametrize("command", [("top", "--once"), ("top",), ("route", "explain", "--prompt", "x")])
def test_without_a_router_the_commands_say_where_they_looked(command: tuple[str, ...]) -> None:
    done = radixfleet(*command, "--url", "http://127.0.0.1:1")
    assert done.returncode == 1 and "http://127.0.0.1:1/debug/overview does not answer" in done.stderr and "--url" in done.stderr
    assert "Traceback" not in done.stderr
