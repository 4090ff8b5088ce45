"""The real bundled model: its tokenizer, its weights, and greedy answers judged by transformers in float32."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Tokenizer

from fleet_contract.launch import RuntimeLaunch
from fleet_runtime.engine.base import Executor
from fleet_runtime.engine.factory import make_executor
from fleet_runtime.engine.torch_executor import TorchExecutor
from fleet_runtime.errors import StartError
from fleet_runtime.models.files import resolve_model
from fleet_testing.oracle import MARGIN, oracle_logits, teacher_forced
from fleet_testing.tiny_llama import Row, make_batch, make_step
from fleet_text.prompt import PromptEncoder

pytestmark = pytest.mark.model
URI = "bundled://smollm2-135m-instruct"
QUESTIONS = [
    "What is the capital of France?",
    "Write three lines about the sea.",
    "List the first five prime numbers, and say why 1 is not one of them.",
    "Translate 'good morning' to Spanish, German and Italian.",
]
TEXTS = [
    "Hello, world!", " leading", "trailing ", "", " ", "  ", "\n", "\n\n\n", "\t\ttabs\t", "a  b   c    d", "x\n  y\r\n", "don't we'll I'VE it's",
    "1", "12", "1234567890", "3.14159", "in 2024, 10%", "a1b22c333", "日本語のテキスト", "中文", "한국어", "Ünïcödé", "عربى", "עברית", "ไทย",
    "😀", "👩‍👩‍👧‍👦", "🇫🇷🇩🇪", "e\u0301", "\u00a0nbsp", "\u200bzero", "½ ² Ⅷ ١٢٣", "def f(x):\n    return x ** 2\n", "{\"a\": [1, 2]}", "<b>&amp;</b>",
    "<|im_start|>user\nhi<|im_end|>\n", "<|endoftext|>", "<|im_start", "https://example.com/?q=1&r=2", "ALL CAPS and CamelCase", "\\x00 \x00 \x7f",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        found = resolve_model(URI).folder
    except StartError as e:
        pytest.skip(e.message)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def encoder(folder: Path) -> PromptEncoder:
    return PromptEncoder.from_folder(folder)


@pytest.fixture(scope="module")
def executor(folder: Path) -> Executor:
    flags = RuntimeLaunch(model=URI, kv_cache_memory=256 << 20, context_length=2048)
    return make_executor(flags, folder, 2, lambda _p, _t: None)


@pytest.fixture(scope="module")
def byte_level(folder: Path) -> tuple[Tokenizer, Tokenizer]:
    """(ours, one built here from the vocabulary alone by transformers' class of GPT-2 tokenizers, with the digits split as SmolLM does)."""
    ours = Tokenizer.from_file(str(folder / "tokenizer.json"))
    raw = json.loads((folder / "tokenizer.json").read_text())
    theirs = GPT2Tokenizer(vocab=raw["model"]["vocab"], merges=[tuple(m) for m in raw["model"]["merges"]], add_prefix_space=False)
    theirs.add_special_tokens({"additional_special_tokens": [t["content"] for t in raw["added_tokens"]]})
    backend = theirs.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer])
    return ours, backend


def test_texts_of_all_kinds_have_the_ids_of_transformers_tokenizer(folder: Path, byte_level: tuple[Tokenizer, Tokenizer]) -> None:
    ours, theirs = byte_level
    auto = AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ids == theirs.encode(text, add_special_tokens=False).ids == auto(text, add_special_tokens=False)["input_ids"], text
        assert ours.encode(text).ids == ids  # no special token is added to a plain prompt


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_has_the_ids_of_transformers_tokenizer(byte_level: tuple[Tokenizer, Tokenizer], text: str) -> None:
    ours, theirs = byte_level
    assert ours.encode(text).ids == theirs.encode(text, add_special_tokens=False).ids


def test_the_chat_template_and_the_ends_are_those_of_the_model(encoder: PromptEncoder) -> None:
    text = encoder.render([{"role": "user", "content": "Hi"}])
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert encoder.encode(text, add_special_tokens=False)[0] == 1 and encoder.eos_ids == (2,) and encoder.vocab_size == 49152


def test_it_resolves_in_a_moment_and_all_may_read_it(folder: Path) -> None:
    start = time.process_time()
    resolve_model(URI)
    assert time.process_time() - start < 3  # no weights are read
    assert all(p.stat().st_mode & 0o044 == 0o044 for p in folder.iterdir())


def greedy(executor: Executor, prompts: list[list[int]], *, chunk: int, tokens: int) -> list[list[int]]:
    """Greedy answers of all prompts in one batch; prompts are fed `chunk` tokens a step."""
    pages = -(-(max(map(len, prompts)) + tokens) // 16)
    tables = [list(range(i * pages, (i + 1) * pages)) for i in range(len(prompts))]
    texts, done = [list(p) for p in prompts], [0] * len(prompts)
    while any(len(t) < len(p) + tokens for t, p in zip(texts, prompts, strict=True)):
        live = [i for i, t in enumerate(texts) if len(t) < len(prompts[i]) + tokens]
        ends = {i: min(len(texts[i]), done[i] + chunk) for i in live}
        out = executor.step(*make_step([Row(texts[i], tables[i], done[i], ends[i], sample=ends[i] == len(texts[i])) for i in live]))
        for n, i in enumerate(live):
            if ends[i] == len(texts[i]):
                texts[i].append(int(out.tokens[n]))
            done[i] = ends[i]
    return [t[len(p) :] for t, p in zip(texts, prompts, strict=True)]


@pytest.mark.parametrize(("batch", "chunk"), [(1, 512), (4, 512), (4, 16)])
def test_greedy_answers_are_transformers_outside_the_margin(executor: Executor, encoder: PromptEncoder, folder: Path, batch: int, chunk: int) -> None:
    prompts = [encoder.encode_chat([{"role": "user", "content": q}]) for q in QUESTIONS]
    answers = [a for i in range(0, 4, batch) for a in greedy(executor, prompts[i : i + batch], chunk=chunk, tokens=24)]
    found = [teacher_forced(folder, p, a) for p, a in zip(prompts, answers, strict=True)]
    compared, left_out = sum(f.compared for f in found), sum(f.within_margin for f in found)
    print(f"batch {batch}, chunk {chunk}: compared {compared} positions, {left_out} within the margin of {MARGIN}")
    assert [f.mismatches for f in found] == [[]] * 4
    assert compared >= 0.95 * (compared + left_out)
    assert "Paris" in encoder.tokenizer.decode(answers[0])


def test_logits_differ_from_transformers_by_far_less_than_the_margin(executor: TorchExecutor, encoder: PromptEncoder, folder: Path) -> None:
    ids = encoder.encode("The quick brown fox jumps over the lazy dog. " * 30, add_special_tokens=False)
    expected = oracle_logits(folder, ids).numpy()
    pages, worst = list(range(-(-len(ids) // 16))), 0.0
    for start, end in [(0, 128), (128, 144), (144, 145), (145, 160), (160, len(ids))]:
        got = executor.logits(make_batch([Row(ids, pages, start, end)]))[0]
        worst = max(worst, float(np.abs(got - expected[end - 1]).max()))
    print(f"largest difference of a logit: {worst:.1e}")
    assert worst < MARGIN / 4


def test_transformers_answers_in_sensible_english(folder: Path) -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert type(model).__name__ == "LlamaForCausalLM" and model.config.tie_word_embeddings
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTIONS[0]}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = model.generate(**chat, max_new_tokens=16, do_sample=False)
    assert tokenizer.decode(out[0][chat["input_ids"].shape[1] :]) == "The capital of France is Paris.<|im_end|>"
