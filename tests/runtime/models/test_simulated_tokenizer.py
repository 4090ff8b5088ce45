"""The byte tokenizer: any text is its bytes, any bytes decode, chats render, the zip is the same each time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fleet_runtime.models.simulated_tokenizer import BOS_ID, EOS_ID, SIMULATED_VOCAB_SIZE, simulated_tokenizer_files
from fleet_text.prompt import PromptEncoder, zip_files

ENCODER = PromptEncoder(simulated_tokenizer_files())


@given(text=st.text().filter(lambda t: "<|" not in t))
def test_a_text_is_its_utf8_bytes_and_back(text: str) -> None:
    ids = ENCODER.encode(text, add_special_tokens=True)
    assert ids == list(text.encode()) and ENCODER.tokenizer.decode(ids) == text


@given(data=st.binary())
def test_any_sequence_of_bytes_decodes(data: bytes) -> None:
    assert ENCODER.tokenizer.decode(list(data)) == data.decode(errors="replace")


def test_the_vocabulary_is_bytes_and_four_special_tokens() -> None:
    assert ENCODER.vocab_size == SIMULATED_VOCAB_SIZE == 260
    assert ENCODER.eos_ids == (EOS_ID,)
    assert ENCODER.encode("<|bos|>a<|end|>", add_special_tokens=False) == [BOS_ID, 97, EOS_ID]
    assert ENCODER.tokenizer.decode([BOS_ID, 97, EOS_ID], skip_special_tokens=True) == "a"


def test_a_chat_renders_with_roles_and_ends_where_the_answer_begins() -> None:
    text = ENCODER.render([{"role": "system", "content": "be brief"}, {"role": "user", "content": "hé\n"}])
    assert text == "<|bos|><|role|>system<|text|>be brief<|end|><|role|>user<|text|>hé\n<|end|><|role|>assistant<|text|>"
    assert len(ENCODER.encode_chat([{"role": "user", "content": "x"}])) == 1 + (1 + 4 + 1 + 1 + 1) + (1 + 9 + 1)


def test_the_zip_is_the_same_each_time_and_reads_back() -> None:
    data = zip_files(simulated_tokenizer_files())
    assert data == zip_files(simulated_tokenizer_files())
    assert PromptEncoder.from_zip(data).encode("é", add_special_tokens=False) == [0xC3, 0xA9]
