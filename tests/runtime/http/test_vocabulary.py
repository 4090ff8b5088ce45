"""A tokenizer with more ids than its model: the model can read and draw none of those, so they are refused, or left out where they are ours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from fleet_runtime.messages import Grammar
from fleet_runtime.models.simulated_tokenizer import EOS_ID, simulated_tokenizer_files
from fleet_runtime.scheduler.grammar import GrammarRun, LlguidanceCompiler
from fleet_testing.http_cases import CHAT, COMP, body, post, refused
from fleet_testing.runtime import Runtime

VOCAB = 256  # the tokenizer has 260


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    folder = tmp_path_factory.mktemp("vocabulary")
    with Runtime(folder, "--served-model-name=tiny", "--context-length=512", fake=True, env={"FAKE_SCHEDULER_VOCAB": str(VOCAB)}) as runtime:
        yield runtime.wait_ready()


@pytest.mark.parametrize(
    ("path", "options", "param", "word"),
    [
        (COMP, {"prompt": [1, VOCAB]}, "prompt[1]", "is 256"),
        (COMP, {"prompt": [[1], [259]]}, "prompt[1][0]", "is 259"),
        (COMP, {"prompt": "a<|bos|>b"}, "prompt", "token id 256 of prompt"),
        (COMP, {"prompt": ["a", "<|text|>"]}, "prompt[1]", "token id 259 of prompt[1]"),
        (CHAT, {}, "messages", "token id 259 of messages"),
        (COMP, {"logit_bias": {"256": 1}}, "logit_bias", "names 256"),
        (COMP, {"stop_token_ids": [3, 258]}, "stop_token_ids[1]", "is 258"),
        ("/v1/embeddings", {"input": [257], "prompt": None, "max_tokens": None}, "input[0]", "is 257"),
        ("/v1/embeddings", {"input": ["<|bos|>"], "prompt": None, "max_tokens": None}, "input", "token id 256 of input"),
    ],
)  # fmt: skip
def test_an_id_that_only_the_tokenizer_has_is_refused_with_a_sentence(
    runtime: Runtime, path: str, options: dict[str, Any], param: str, word: str
) -> None:
    error = refused(post(runtime, path, body(path, **options)), word, "from 0 to 255", param=param)
    assert error["code"] == "token_out_of_vocabulary"


def test_an_end_of_text_that_the_model_cannot_draw_is_no_stop_id(runtime: Runtime) -> None:
    assert post(runtime, COMP, body(COMP, stop_token_ids=[7], min_tokens=2)).status_code == 200
    assert runtime.sent("Admit")[-1]["stop_ids"] == [7]


def test_a_grammar_compiles_for_a_model_with_fewer_ids_than_its_tokenizer() -> None:
    compiler = LlguidanceCompiler(lambda: (simulated_tokenizer_files()["tokenizer.json"].decode(), [EOS_ID]), VOCAB)
    run = GrammarRun(compiler(Grammar(kind="regex", text="ab")), stop_ids=frozenset([7]), after_ids=[])
    allowed = []
    for token in b"ab":
        mask = np.zeros(VOCAB // 32, dtype=np.uint32)
        run.fill(mask)
        allowed += np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        ended = run.accept(token)
    assert (bytes(allowed), ended) == (b"ab", True)
