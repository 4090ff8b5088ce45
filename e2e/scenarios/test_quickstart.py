"""The whole path with the real model: apply, Available, an answer that is right, and what the workers did for it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from fleet_testing.fleet import Fleet, wait_for
from fleet_testing.oracle import BFLOAT16_MARGIN, Agreement, teacher_forced
from fleet_text.prompt import PromptEncoder

pytestmark = [pytest.mark.e2e, pytest.mark.model]

NAME, NAMESPACE, MODEL = "chat", "default", "smollm2"
QUESTIONS = ["What is the capital of France?", "Write one sentence about rivers.", "Count from one to ten.", "Name three colours."]


def ask(fleet: Fleet, messages: list[dict[str, str]], *, model: str = MODEL, max_tokens: int = 24) -> dict[str, Any]:
    """A greedy plain chat that also returns token ids."""
    body = {"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True}
    answer = httpx.post(f"{fleet.url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def agree(folder: Path, asked: list[tuple[list[dict[str, str]], dict[str, Any]]]) -> None:
    """Teacher-forced in f32: our greedy token, of bfloat16 weights, is the argmax wherever the top two logits differ by more than the margin."""
    encoder = PromptEncoder.from_folder(folder)
    found: list[Agreement] = []
    for messages, answer in asked:
        ids = answer["choices"][0]["token_ids"]
        assert ids, answer
        found.append(teacher_forced(folder, encoder.encode_chat(messages), ids, margin=BFLOAT16_MARGIN))
    compared, within = sum(f.compared for f in found), sum(f.within_margin for f in found)
    print(f"compared {compared} positions, {within} within the margin")
    assert [f.mismatches for f in found if f.mismatches] == []
    assert compared >= 0.4 * (compared + within)


def role(fleet: Fleet, name: str) -> dict[str, float]:
    """Metrics of a role's workers, summed."""
    out: dict[str, float] = {}
    for pod in fleet.ready_pods(NAME, NAMESPACE, name):
        for metric, value in fleet.metrics(pod).items():
            out[metric] = out.get(metric, 0) + value
    return out


def test_the_official_client_gets_a_streamed_and_a_plain_answer_and_both_roles_did_their_part(fleet: Fleet, quickstart: None) -> None:
    before_prefill, before_decode = role(fleet, "prefill"), role(fleet, "decode")
    client = fleet.client()
    messages: Any = user("What is the capital of France?")
    plain = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=24, temperature=0)
    stream = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=24, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == plain.choices[0].message.content
    assert "Paris" in text
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == plain.usage.completion_tokens  # type: ignore[union-attr]
    prefill, decode = role(fleet, "prefill"), role(fleet, "decode")
    prompt = plain.usage.prompt_tokens  # type: ignore[union-attr]
    assert prefill["prefilled_tokens_total"] > before_prefill["prefilled_tokens_total"]
    assert prefill["transfer_pages_total"] > before_prefill["transfer_pages_total"]
    assert decode["prefilled_tokens_total"] == 0, "a decode leg ran a prompt"
    assert decode["received_tokens_total"] >= before_decode["received_tokens_total"] + prompt // 2
    assert decode["transfer_checksum_failures_total"] == 0


def test_greedy_answers_are_the_argmax_of_transformers_in_f32(fleet: Fleet, quickstart: None, model_folder: Path) -> None:
    agree(model_folder, [(user(q), ask(fleet, user(q))) for q in QUESTIONS])


def test_a_pair_and_a_unified_worker_give_exactly_the_same_tokens(fleet: Fleet, quickstart: None, unified: str) -> None:
    for text in ("Tell me about the sea.", "What is a prime number? " * 12, "List the planets. " * 120):
        pair, one = (ask(fleet, user(text), model=m, max_tokens=16)["choices"][0] for m in (MODEL, unified))
        assert pair["token_ids"] == one["token_ids"], text[:40]


def test_the_same_long_prompt_again_is_cached(fleet: Fleet, quickstart: None) -> None:
    text = "The quick brown fox jumps over the lazy dog, and the dog does not mind. " * 20
    first = ask(fleet, user(text), max_tokens=4)["usage"]
    again = ask(fleet, user(text), max_tokens=4)["usage"]
    assert again["prompt_tokens"] == first["prompt_tokens"] > 256
    assert first["prompt_tokens_details"]["cached_tokens"] < 64
    assert again["prompt_tokens_details"]["cached_tokens"] >= first["prompt_tokens"] - 17


def test_32_streams_at_once_all_complete_and_are_right(fleet: Fleet, quickstart: None, model_folder: Path) -> None:
    asked = [user(f"{QUESTIONS[i % len(QUESTIONS)]} Answer number {i}.") for i in range(32)]
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda messages: streamed(fleet, messages), asked))
    agree(model_folder, list(zip(asked, answers, strict=True)))


def streamed(fleet: Fleet, messages: Any) -> dict[str, Any]:
    """A streamed chat by the official client, put together as a plain answer."""
    ids: list[int] = []
    finish = None
    stream = fleet.client(timeout_s=200).chat.completions.create(
        model=MODEL, messages=messages, max_tokens=12, temperature=0, stream=True, extra_body={"return_token_ids": True}
    )
    for chunk in stream:
        for choice in chunk.choices:
            ids += (choice.model_extra or {}).get("token_ids") or []
            finish = choice.finish_reason or finish
    assert finish in ("stop", "length")
    return {"choices": [{"token_ids": ids}]}


def test_a_client_that_hangs_up_gives_everything_back(fleet: Fleet, quickstart: None) -> None:
    def held() -> dict[str, float]:
        return {
            f"{name}.{metric}": role(fleet, name)[metric]
            for name in ("prefill", "decode")
            for metric in ("pages_request", "running_requests", "waiting_requests")
        }

    wait_for(lambda: not any(held().values()), within_s=10, what="an idle start")
    body = {"model": MODEL, "messages": user("Tell me a very long story. " * 20), "max_tokens": 600, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{fleet.url}/v1/chat/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        while "content" not in next(lines):
            pass
        assert fleet.inflight(NAME, NAMESPACE) > 0
        assert held()["decode.pages_request"] > 0
    wait_for(lambda: not any(held().values()), within_s=2.5, what="pages and rows back after the hang-up")
    assert fleet.inflight(NAME, NAMESPACE) == 0


def test_of_two_prefill_workers_the_one_with_the_prefix_gets_the_prompt(fleet: Fleet, quickstart: None) -> None:
    fleet.kubectl("patch", "infsvc", NAME, "-n", NAMESPACE, "--type=merge", "-p", '{"spec":{"prefill":{"replicas":2}}}')
    try:
        fleet.wait_ready(NAME, NAMESPACE)
        for i in range(3):
            text = f"Prompt family {i}. " + "All work and no play makes Jack a dull boy. " * 20
            first, *rest = [ask(fleet, user(text), max_tokens=2)["usage"] for _ in range(3)]
            assert all(u["prompt_tokens_details"]["cached_tokens"] >= first["prompt_tokens"] - 17 for u in rest), (first, rest)
    finally:
        fleet.kubectl("patch", "infsvc", NAME, "-n", NAMESPACE, "--type=merge", "-p", '{"spec":{"prefill":{"replicas":1}}}')
        fleet.wait_ready(NAME, NAMESPACE)
