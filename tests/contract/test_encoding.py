"""Token ids of a text: those of the tokenizer's own `encode`, and other threads run while a long text is read."""

from __future__ import annotations

import threading
import time

from hypothesis import given
from hypothesis import strategies as st

from fleet_testing.tiny_bpe import tiny_bpe
from fleet_text.prompt import PromptEncoder

TOKENIZER = tiny_bpe()
ENCODER = PromptEncoder({"tokenizer.json": TOKENIZER.to_str().encode()})


@given(st.text(max_size=300), st.booleans())
def test_ids_are_those_of_the_tokenizer(text: str, special: bool) -> None:
    assert ENCODER.encode(text, add_special_tokens=special) == TOKENIZER.encode(text, add_special_tokens=special).ids


def test_other_threads_run_while_a_long_text_is_read() -> None:
    """An event loop whose texts are read in a thread must go on. Seen red with `Tokenizer.encode`: it keeps the interpreter's lock."""
    took: list[float] = []

    def read(text: str) -> None:
        begin = time.perf_counter()
        ENCODER.encode(text, add_special_tokens=False)
        took.append(time.perf_counter() - begin)

    reader = threading.Thread(target=read, args=("the small text " * 200_000,))
    longest, last = 0.0, time.perf_counter()
    reader.start()
    while reader.is_alive():
        reader.join(0.001)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    assert longest < took[0] / 3, f"of {took[0]:.2f} s nobody else ran for {longest:.2f} s"
