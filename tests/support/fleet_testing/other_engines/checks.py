"""What is checked against a real vLLM, one function a line of the table. Each returns a few words, and raises Miss for what is not so."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from fleet_testing.engines.server import said_text
from fleet_testing.other_engines.prompts import CHAT, COMPLETIONS, MESSAGES, PLAIN, RESPONSES, TOOLED, Bodies
from fleet_testing.other_engines.proxy import CutProxy
from fleet_testing.other_engines.stage import ADAPTER, KEY_VARIABLE, MODEL, Stage, Vllm
from fleet_testing.router_process import until_async

PLAIN_WORDS: Final = " ".join(f"beta{n}" for n in range(120))
NIXL_TRANSFERS: Final = "vllm:nixl_num_descriptors_sum"
ABORT_S: Final = 10.0  # vLLM sees a closed connection, then ends its step; on a busy machine both take time
CHATS: Final = 6
Check = Callable[[Stage], Awaitable[str]]


class Miss(Exception):
    """Something is not as it has to be."""


def expect(is_so: bool, *, otherwise: object) -> None:
    """Raises Miss."""
    if not is_so:
        raise Miss(str(otherwise))


def limited(path: str, tokens: int) -> dict[str, Any]:
    """The body's field for the length of the answer."""
    return {"max_output_tokens" if path == RESPONSES else "max_tokens": tokens, "temperature": 0}


def told(path: str, answer: Any) -> tuple[int, int]:
    """Tokens of the prompt, and of those the cached, as vLLM tells them."""
    usage = answer["usage"]
    if path == MESSAGES:
        cached = usage["cache_read_input_tokens"]
        return usage["input_tokens"] + usage["cache_creation_input_tokens"] + cached, cached
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return usage.get("prompt_tokens") or usage["input_tokens"], details.get("cached_tokens") or 0


async def record(stage: Stage) -> str:
    """What the router learns of a worker."""
    (worker,) = await stage.workers()
    expect(worker["state"] == "ready" and worker["kvCapacity"] > 10_000, otherwise=worker)
    return f"{worker['kvCapacity']} tokens of KV, events {worker['events']['trust']}"


async def answers(stage: Stage) -> str:
    """The router adds nothing to an answer and takes nothing away: the same text as from vLLM itself, at temperature 0."""
    for path, body in (
        (CHAT, {"messages": [{"role": "user", "content": "Count to five."}]}),
        (COMPLETIONS, {"prompt": "One, two, three,"}),  # as ids through the router, as text to vLLM itself
        (COMPLETIONS, {"prompt": [1000, 1001, 1002, 1003]}),
    ):
        whole = body | limited(path, 8)
        ours, its = (await stage.ask(path, whole)).json(), (await stage.ask_itself(stage.plain, path, whole)).json()
        for answer in (ours, its):
            del answer["id"], answer["created"]
            answer["usage"].pop("prompt_tokens_details")
        expect(ours == its, otherwise=f"{path}: {ours} is not {its}")
    return "chat, completions of text and ids"


async def streams(stage: Stage) -> str:
    """Whole streams, with the usage for whoever asked."""
    body = {"messages": [{"role": "user", "content": "Count to five."}], "stream": True} | limited(CHAT, 8)
    plain = (await stage.ask(CHAT, body)).content
    asked = (await stage.ask(CHAT, body | {"stream_options": {"include_usage": True}})).content
    its = (await stage.ask_itself(stage.plain, CHAT, body)).content
    expect(said_text(plain) == said_text(asked) == said_text(its) != "", otherwise=(plain, its))
    expect(plain.count(b"\n\n") == its.count(b"\n\n") and plain.endswith(b"data: [DONE]\n\n"), otherwise=plain)
    expect(b'"usage":{' not in plain and b'"usage":{' in asked, otherwise="the usage is not told as the client asked")
    for path, more, end in ((MESSAGES, {"messages": body["messages"]}, b"message_stop"), (RESPONSES, {"input": "Hi"}, b"response.completed")):
        got = (await stage.ask(path, more | {"stream": True} | limited(path, 4))).content
        expect(end in got.rsplit(b"event:", 1)[-1], otherwise=f"{path} ends with {got[-200:]!r}")
    return "chat, messages, responses"


async def prompts_of(stage: Stage, bodies: Bodies) -> str:
    """Each body twice: tokens counted, and predicted and actual cached tokens, are the same."""
    wrong = []
    for name, (path, body) in bodies.items():
        whole = body | limited(path, 1)
        routed = await stage.explain(whole, path)
        seen = []
        for _ in range(2):
            answer = await stage.ask(path, whole)
            if answer.status_code != 200:
                wrong.append(f"{name}: {answer.status_code} {answer.text[:200]}")
                break
            tokens, cached = told(path, answer.json())
            seen.append((routed.get("promptTokens"), int(answer.headers["x-router-hit-tokens"]), tokens, cached))
        if any(ours[:2] != ours[2:] for ours in seen) or (seen and seen[-1][3] == 0) or not routed.get("tokenized"):
            wrong.append(f"{name}: (prompt, predicted, of vLLM: prompt, cached) are {seen}")
    expect(not wrong, otherwise="; ".join(wrong))
    return f"{len(bodies)} bodies"


async def prompts(stage: Stage) -> str:
    """See `prompts_of`."""
    return await prompts_of(stage, PLAIN)


async def errors(stage: Stage) -> str:
    """Refusals arrive in the words and the shape of the API."""
    message = [{"role": "user", "content": "x"}]
    for path, body, status, type_ in (
        (CHAT, {"messages": message, "max_tokens": 10**6}, 400, "BadRequestError"),
        (CHAT, {"messages": message, "temperature": -1, "stream": True}, 400, "BadRequestError"),
        (COMPLETIONS, {"prompt": "word " * 6000, "stream": True}, 400, "BadRequestError"),
        (CHAT, {"messages": message, "model": "nobody"}, 404, "not_found_error"),
        ("/v1/embeddings", {"input": "x"}, 404, "not_found_error"),
        ("/v1/score", {"text_1": "a", "text_2": "b"}, 404, "not_found_error"),
        (MESSAGES, {"messages": [{"role": "user", "content": "word " * 6000}], "max_tokens": 1}, 400, "invalid_request_error"),
    ):
        answer = await stage.ask(path, body)
        said = answer.json()
        expect(answer.status_code == status and said.get("error", {}).get("type") == type_, otherwise=f"{path}: {answer.status_code} {answer.text}")
        expect(bool(said["error"].get("message")), otherwise=f"{path}: {said}")
    (worker,) = await stage.workers()
    expect(worker["breaker"] == "closed", otherwise="refusals opened the breaker")
    return "400, 404, streams; embeddings of a model without"


async def aborts(stage: Stage) -> str:
    """A client that leaves ends vLLM's work."""
    slowest = 0.0
    for path, body in ((CHAT, {"messages": [{"role": "user", "content": "Tell a story."}]}), (RESPONSES, {"input": "Tell a story."})):
        for stream in (True, False):
            asking = asyncio.create_task(stage.ask(path, body | {"stream": stream, "ignore_eos": True} | limited(path, 3000)))
            await until_async(lambda: _runs(stage, stage.plain, 1), "vLLM works")
            asking.cancel()
            left = time.monotonic()
            await until_async(lambda: _runs(stage, stage.plain, 0), "vLLM has stopped", ABORT_S)
            slowest = max(slowest, time.monotonic() - left)
            with contextlib.suppress(asyncio.CancelledError):
                await asking
    assert stage.router is not None
    await stage.router.until_idle()
    return f"within {slowest:.2f} s"


async def _runs(stage: Stage, worker: Vllm, number: int) -> bool:
    return await stage.running(worker) == number


async def load(stage: Stage) -> str:
    """What others ask of vLLM is seen, and forgotten."""
    body = {"prompt": "Once upon", "ignore_eos": True} | limited(COMPLETIONS, 3000)
    others = [asyncio.create_task(stage.ask_itself(stage.plain, COMPLETIONS, body)) for _ in range(3)]

    async def sees(number: int) -> bool:
        (worker,) = await stage.workers()
        return bool(worker["run"] == number)

    try:
        await until_async(lambda: sees(3), "the router sees three requests of others")
    finally:
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)
    await until_async(lambda: sees(0), "the router sees that they are gone")
    return "three requests of others"


async def _hits(stage: Stage, prompt: list[int]) -> tuple[int, int]:
    """Predicted and actual cached tokens of a prompt that is asked now."""
    answer = await stage.ask(COMPLETIONS, {"prompt": prompt} | limited(COMPLETIONS, 1))
    expect(answer.status_code == 200, otherwise=answer.text)
    return int(answer.headers["x-router-hit-tokens"]), told(COMPLETIONS, answer.json())[1]


def _prompt(number: int) -> list[int]:
    """Three hundred tokens that no other number shares."""
    return [10_000 + number, *range(20_000, 20_299)]


async def router_restarts(stage: Stage) -> str:
    """A new router knows by the replay what the old one knew."""
    await _hits(stage, _prompt(1))
    await stage.front(stage.plain.target(service="plain"))
    found = await _hits(stage, _prompt(1))
    expect(found[0] == found[1] > 0, otherwise=f"predicted and cached are {found}")
    return f"{found[0]} tokens are known"


async def gaps(stage: Stage) -> str:
    """Events that were lost are fetched by the replay."""
    proxy = await CutProxy.start(stage.plain.events)
    try:
        await stage.front(stage.plain.target(service="plain", events=proxy.port))
        await _hits(stage, _prompt(10))
        proxy.cut()
        await stage.ask_itself(stage.plain, COMPLETIONS, {"prompt": _prompt(11)} | limited(COMPLETIONS, 1))
        await proxy.mend()
        number = 12

        async def repaired() -> bool:
            nonlocal number
            await stage.ask_itself(stage.plain, COMPLETIONS, {"prompt": _prompt(number)} | limited(COMPLETIONS, 1))
            number += 1
            (worker,) = await stage.workers()
            return bool(worker["events"]["gaps"] >= 1 and worker["events"]["trust"] == "live")

        await until_async(repaired, "the gap is found and filled")
        found = await _hits(stage, _prompt(11))
    finally:
        await proxy.close()
    expect(found[0] == found[1] > 0, otherwise=f"predicted and cached are {found}")
    return f"{found[0]} tokens of the lost event are known"


async def engine_restarts(stage: Stage) -> str:
    """A vLLM that comes back at the same ports has forgotten, and counts its events from 0."""
    await stage.front(stage.plain.target(service="plain"))
    expect((await _hits(stage, _prompt(1)))[0] > 0, otherwise="nothing is known before the restart")
    await asyncio.to_thread(stage.plain.stop)
    stage.plain.start()
    await stage.plain.until_up()
    assert stage.router is not None
    await stage.router.until_workers(1)
    await stage.until_live()
    found = [await _hits(stage, _prompt(1)) for _ in range(2)]
    expect(found[0] == (0, 0) and found[1][0] == found[1][1] > 0, otherwise=f"predicted and cached are {found}")
    return "nothing of the old life, all of the new one"


async def keys(stage: Stage) -> str:
    """A vLLM with an API key serves with it, and says what is wrong without."""
    assert stage.router is not None
    router = await stage.front(stage.tooled.target(service="tooled", tokenizer=""), ready=0)

    async def refused() -> bool:
        return any("401" in entry["reason"] for entry in (await router.get("/workers"))["workers"])

    await until_async(refused, "the router says that its key is refused")
    await stage.front(stage.tooled.target(service="tooled", key_env=KEY_VARIABLE))
    expect((await _hits(stage, _prompt(1)))[0] == 0, otherwise="it knows a prompt that nobody has asked")
    return "401 is named as the reason"


async def tool_prompts(stage: Stage) -> str:
    """See `prompts_of`; of the vLLM with a key and a template that knows tools."""
    await stage.front(stage.tooled.target(service="tooled", tokenizer=stage.with_tools, key_env=KEY_VARIABLE))
    return await prompts_of(stage, TOOLED)


async def adapters(stage: Stage) -> str:
    """What a LoRA adapter has computed is its own; only the vLLM that has it is asked for it."""
    await stage.front(stage.plain.target(service="both"), stage.tooled.target(service="both", key_env=KEY_VARIABLE))
    body = {"prompt": _prompt(20)} | limited(COMPLETIONS, 1)
    for model, homes in ((MODEL, None), (ADAPTER, {f"127.0.0.1:{stage.tooled.port}"})):
        seen = []
        for _ in range(2):
            answer = await stage.ask(COMPLETIONS, body | {"model": model})
            expect(answer.status_code == 200, otherwise=answer.text)
            expect(homes is None or answer.headers["x-router-worker"] in homes, otherwise=f"{model} went to {answer.headers['x-router-worker']}")
            seen.append((int(answer.headers["x-router-hit-tokens"]), told(COMPLETIONS, answer.json())[1]))
        expect(seen[0] == (0, 0) and seen[1][0] == seen[1][1] > 0, otherwise=f"predicted and cached of {model} are {seen}")
    return "its prefixes are its own"


async def flush(stage: Stage) -> str:
    """A flushed vLLM has forgotten, and its events say so."""
    router = await stage.front(stage.tooled.target(service="tooled", key_env=KEY_VARIABLE))
    await _hits(stage, _prompt(30))
    said = await stage.http.post(f"{router.control}/flush_cache", json={"model": MODEL})
    expect([w["ok"] for w in said.json()["workers"].values()] == [True], otherwise=said.text)

    # vLLM publishes what has changed with its next step.
    await stage.ask_itself(stage.tooled, COMPLETIONS, {"prompt": _prompt(31)} | limited(COMPLETIONS, 1))

    async def forgotten() -> bool:
        told_now = await stage.explain({"prompt": _prompt(30)}, COMPLETIONS)
        return all(w["hitTokens"] == 0 for w in told_now["workers"])

    await until_async(forgotten, "the index forgets")
    found = await _hits(stage, _prompt(30))
    expect(found == (0, 0), otherwise=f"predicted and cached are {found}")
    return "events say that all is cleared"


async def two_workers(stage: Stage) -> str:
    """Each conversation goes to the worker that holds it, whoever has asked that worker before."""
    await stage.front(stage.plain.target(service="both"), stage.tooled.target(service="both", key_env=KEY_VARIABLE))
    homes = {chat: (stage.plain, stage.tooled)[chat % 2] for chat in range(CHATS)}
    for turn in range(3):
        for chat, home in homes.items():
            body = {"prompt": [30_000 + chat, *range(31_000, 31_300 + 130 * turn)]} | limited(COMPLETIONS, 1)
            if turn == 0:
                await stage.ask_itself(home, COMPLETIONS, body)
                continue
            answer = await stage.ask(COMPLETIONS, body)
            expect(answer.status_code == 200, otherwise=answer.text)
            worker, hit = answer.headers["x-router-worker"], int(answer.headers["x-router-hit-tokens"])
            cached = told(COMPLETIONS, answer.json())[1]
            expect(worker == f"127.0.0.1:{home.port}", otherwise=f"turn {turn} of chat {chat} went to {worker}, its cache is at {home.port}")
            expect(hit == cached > 0, otherwise=f"turn {turn} of chat {chat}: predicted {hit}, cached {cached}")
    return f"{CHATS} conversations of 3 turns"


async def pairs(stage: Stage) -> str:
    """Prefill and decode over NIXL: the text of one server alone, the prompt computed by the prefill, and nothing pinned afterwards."""
    if stage.pair is None:
        return "left out: NIXL cannot be had here"
    for one in (stage.plain, stage.tooled):  # memory is for two
        await asyncio.to_thread(one.stop)
    prefill, decode = stage.pair
    for one in stage.pair:
        one.start()
        await one.until_up()
    await stage.front(prefill.target(role="prefill"), decode.target(role="decode"))
    asked = [
        (CHAT, {"messages": [{"role": "user", "content": f"Count to five. {PLAIN_WORDS}"}]} | limited(CHAT, 8)),
        (COMPLETIONS, {"prompt": f"One, two, three, {PLAIN_WORDS}"} | limited(COMPLETIONS, 8)),
    ]
    for path, body in asked:
        before = await stage.metric(decode, NIXL_TRANSFERS)
        ours = await stage.ask(path, body)
        expect(ours.status_code == 200, otherwise=ours.text)
        after = await stage.metric(decode, NIXL_TRANSFERS)
        expect(after > before, otherwise="the decode has fetched nothing from the prefill")
        streamed = (await stage.ask(path, body | {"stream": True})).content
        its = (await stage.ask_itself(decode, path, body)).json()
        text, got = (a["choices"][0].get("text") or a["choices"][0]["message"]["content"] for a in (its, ours.json()))
        expect(got == said_text(streamed) == text, otherwise=f"{path}: {got!r}, streamed {said_text(streamed)!r}, of one server {text!r}")
    refused = await stage.ask(COMPLETIONS, {"prompt": "x", "n": 2})
    expect((refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_by_pair"), otherwise=refused.text)
    for delay_s in (0.0, 0.02, 0.1, 0.5):
        body = {"prompt": [40_000 + int(1000 * delay_s), *range(20_000, 22_000)], "stream": True, "ignore_eos": True} | limited(COMPLETIONS, 1000)
        leaving = asyncio.create_task(stage.ask(COMPLETIONS, body))
        await asyncio.sleep(delay_s)  # at some phase of the hand-over
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)

    async def freed() -> bool:
        return not any([await stage.running(one) or await stage.metric(one, "vllm:kv_cache_usage_perc") for one in stage.pair or ()])

    await until_async(freed, "both have ended, and no KV is pinned")
    assert stage.router is not None
    await stage.router.until_idle()
    return "as one server alone; nothing is left of clients that go"


CHECKS: Final[dict[str, Check]] = {
    "record": record,
    "answers": answers,
    "streams": streams,
    "prompts": prompts,
    "errors": errors,
    "aborts": aborts,
    "load": load,
    "router-restarts": router_restarts,
    "gaps": gaps,
    "engine-restarts": engine_restarts,
    "keys": keys,
    "tool-prompts": tool_prompts,
    "two-workers": two_workers,
    "adapters": adapters,
    "flush": flush,
    "pairs": pairs,
}
