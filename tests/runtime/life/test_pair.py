"""A prefill and a decode worker, asked as a router asks: both legs at once on the internal ports."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from fleet_testing.runtime import HTTP, Runtime, wait_for

pytestmark = pytest.mark.processes

COMP = "/v1/completions"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Runtime, Runtime]]:
    folder = tmp_path_factory.mktemp("pair")
    with (
        Runtime(folder / "p", "--role=prefill", "--debug-checks=true") as prefill,
        Runtime(folder / "d", "--role=decode", "--debug-checks=true") as decode,
    ):
        yield prefill.wait_ready(), decode.wait_ready()


def legs(pair: tuple[Runtime, Runtime]) -> tuple[str, dict[str, str], dict[str, str]]:
    """Rid and headers of both legs."""
    record = pair[0].record()
    rid, room = os.urandom(16).hex(), str(int.from_bytes(os.urandom(8), "big") >> 1)
    both = {"X-Radixfleet-Rid": rid, "X-Radixfleet-Room": room, "X-Radixfleet-Prefill-Incarnation": record["incarnation"]}
    decode = {**both, "X-Radixfleet-Leg": "decode", "X-Radixfleet-Bootstrap": f"127.0.0.1:{record['ports']['bootstrap']}"}
    return rid, {**both, "X-Radixfleet-Leg": "prefill"}, decode


def ask(pair: tuple[Runtime, Runtime], **body: Any) -> tuple[httpx.Response, httpx.Response]:
    """Answers of prefill and decode."""
    body = {"model": "simulated", "prompt": "a prompt of some pages " * 8, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **body}
    _, for_prefill, for_decode = legs(pair)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(httpx.post, pair[0].internal + COMP, json=body, headers=for_prefill, timeout=30)
        second = pool.submit(httpx.post, pair[1].internal + COMP, json=body, headers=for_decode, timeout=30)
        return first.result(), second.result()


def idle(runtime: Runtime) -> bool:
    values = runtime.metrics()
    return values["radixfleet_runtime_pages_request"] == values["radixfleet_runtime_http_open_requests"] == 0


def test_both_legs_make_one_answer_and_decode_computes_no_prompt(pair: tuple[Runtime, Runtime]) -> None:
    prefill, decode = ask(pair)
    assert (prefill.status_code, decode.status_code) == (200, 200), (prefill.text, decode.text)
    assert prefill.json()["prompt_tokens"] == decode.json()["usage"]["prompt_tokens"] == 184
    assert decode.json()["usage"]["completion_tokens"] == 12
    assert pair[1].metrics()["radixfleet_runtime_prefilled_tokens_total"] == 0, "not even to warm up"
    assert pair[0].metrics()["radixfleet_runtime_prefilled_tokens_total"] > 0
    again = ask(pair, seed=decode.json()["choices"][0]["seed"])[1].json()
    assert again["choices"] == decode.json()["choices"]
    wait_for(lambda: idle(pair[0]) and idle(pair[1]), "all pages are back")


def test_the_seed_that_a_pair_tells_gives_the_same_answer_again(pair: tuple[Runtime, Runtime]) -> None:
    """Both legs mint the same one: prefill draws the first token, decode the others."""
    first = ask(pair, temperature=1, n=1)[1].json()["choices"][0]
    assert ask(pair, temperature=1, seed=first["seed"])[1].json()["choices"][0] == first
    assert ask(pair, temperature=1)[1].json()["choices"][0]["text"] != first["text"]


def test_16_pairs_at_once_end_well(pair: tuple[Runtime, Runtime]) -> None:
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda n: ask(pair, prompt=f"{n} " * 50), range(16)))
    assert [(p.status_code, d.status_code) for p, d in answers] == [(200, 200)] * 16
    wait_for(lambda: idle(pair[0]) and idle(pair[1]), "all pages are back")


def test_a_leg_that_http_refuses_frees_the_other_at_once(pair: tuple[Runtime, Runtime]) -> None:
    _, for_prefill, for_decode = legs(pair)
    body = {"model": "simulated", "prompt": "x" * 100, "max_tokens": 4}
    waiting: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: waiting.append(httpx.post(pair[1].internal + COMP, json=body, headers=for_decode, timeout=30)))
    thread.start()
    refused = httpx.post(pair[0].internal + COMP, json={**body, "temperature": 99}, headers=for_prefill, timeout=30)
    assert refused.status_code == 400
    thread.join(5)
    assert waiting and waiting[0].status_code >= 400
    wait_for(lambda: idle(pair[0]) and idle(pair[1]), "all pages are back")


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_leg_of_the_wrong_role_is_stale(pair: tuple[Runtime, Runtime], wrong: int) -> None:
    _, for_prefill, for_decode = legs(pair)
    headers = (for_decode, for_prefill)[wrong]
    answer = httpx.post(pair[wrong].internal + COMP, json={"model": "simulated", "prompt": "x"}, headers=headers, timeout=60)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "stale_worker")


def test_an_abort_of_both_legs_frees_both(pair: tuple[Runtime, Runtime]) -> None:
    rid, for_prefill, for_decode = legs(pair)
    body = {"model": "simulated", "prompt": "x" * 100, "max_tokens": 3000, "ignore_eos": True, "stream": True}
    threads = [
        threading.Thread(target=lambda r=r, h=h: httpx.post(r.internal + COMP, json=body, headers=h, timeout=30))
        for r, h in ((pair[0], for_prefill), (pair[1], for_decode))
    ]
    for thread in threads:
        thread.start()
    wait_for(lambda: pair[1].metrics()["radixfleet_runtime_running_requests"] == 1, "decode runs")
    for runtime in pair:
        assert HTTP.post(runtime.internal + "/abort_request", json={"rid": rid}).json()["state"] in ("aborted", "finished")
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    wait_for(lambda: idle(pair[0]) and idle(pair[1]), "all pages are back", 5)
