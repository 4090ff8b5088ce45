"""A chat's next turn tokenizes only what it adds, and what was kept of the turns before gives the ids of the whole (rule R3)."""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from fleet_contract.prefix import chain_hashes
from fleet_contract.wire import decode_ids, encode_ids
from fleet_text.chains import ChatChains, cut_text, find_cut, random_chat
from fleet_text.prompt import PromptEncoder

CHATML = """\
{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
HEADERS = """\
<s>{% for m in messages %}<|head|>{{ m.role }}<|/head|>

{{ m.content | trim }}<|eot|>{% endfor %}{% if add_generation_prompt %}<|head|>assistant<|/head|>

{% endif %}"""
BARE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
STRIDE = 4
ANSWER = "<|im_start|>assistant\n"


class Counting(PromptEncoder):
    """Remembers every text that was tokenized."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        super().__init__(files)
        self.texts: list[str] = []

    def encode(self, text: str, *, add_special_tokens: bool, limit: int | None = None) -> list[int]:
        self.texts.append(text)
        return super().encode(text, add_special_tokens=add_special_tokens, limit=limit)


def make(template: str, *added: AddedToken) -> Counting:
    """A byte-level tokenizer with a few merges."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("w", "o"), ("r", "d"), ("wo", "rd"), ("Ġ", "word"), ("Ġ", "Ġ"), ("Ċ", "Ċ"), ("1", "2"), ("<", "|")]
    vocabulary = {text: n for n, text in enumerate([*letters, *("".join(m) for m in merges)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(list(added))
    return Counting({"tokenizer.json": tokenizer.to_str().encode(), "chat_template.jinja": template.encode()})


def token(text: str, **options: bool) -> AddedToken:
    return AddedToken(text, special=True, normalized=False, **options)


CHATML_TOKENS = (token("<|im_start|>"), token("<|im_end|>"))
HEADER_TOKENS = (token("<s>"), token("<|head|>"), token("<|/head|>"), token("<|eot|>"))


def turns(count: int) -> list[Mapping[str, Any]]:
    return [{"role": ("user", "assistant")[n % 2], "content": f"turn {n} word word 12"} for n in range(count)]


@pytest.mark.parametrize(("template", "added", "cut"), [(CHATML, CHATML_TOKENS, "<|im_start|>"), (HEADERS, HEADER_TOKENS, "<|head|>")])
def test_chats_are_cut_at_the_token_that_begins_each_message(template: str, added: tuple[AddedToken, ...], cut: str) -> None:
    assert find_cut(make(template, *added)) == cut


@pytest.mark.parametrize(
    ("template", "added"),
    [
        (BARE, CHATML_TOKENS),  # the template uses none
        (CHATML, ()),  # the marks are plain text to this tokenizer
        (CHATML, (token("<|im_start|>", lstrip=True), token("<|im_end|>", lstrip=True))),  # it takes spaces of the message before
    ],
)
def test_where_pieces_may_depend_on_their_neighbours_nothing_is_cut(template: str, added: tuple[AddedToken, ...]) -> None:
    assert find_cut(make(template, *added)) is None


def test_a_token_into_which_another_may_reach_is_no_place_to_cut() -> None:
    assert find_cut(make(CHATML, *CHATML_TOKENS, token("word<|im_"))) is None


def test_a_tokenizer_that_shortens_texts_is_not_cut() -> None:
    encoder = make(CHATML, *CHATML_TOKENS)
    encoder.tokenizer.enable_truncation(1000)
    assert find_cut(encoder) is None


def test_a_tokenizer_whose_pieces_differ_from_the_whole_is_found_out() -> None:
    class Odd(Counting):
        def encode(self, text: str, *, add_special_tokens: bool, limit: int | None = None) -> list[int]:
            return [7, *super().encode(text, add_special_tokens=add_special_tokens)]  # one more for each text

    plain = make(CHATML, *CHATML_TOKENS)
    odd = Odd({"tokenizer.json": plain.tokenizer.to_str().encode(), "chat_template.jinja": CHATML.encode()})
    assert find_cut(odd) is None


@pytest.mark.rule("R3")
def test_each_turn_of_a_chat_tokenizes_the_last_turn_only() -> None:
    encoder = make(CHATML, *CHATML_TOKENS)
    chains = ChatChains(encoder, "<|im_start|>", stride=STRIDE)
    for n in range(1, 20, 2):
        encoder.texts.clear()
        chains.read(chains.look(encoder.render(turns(n)), 5))
        new = encoder.render(turns(n)[max(0, n - 2) :])
        assert new.startswith("".join(encoder.texts)) and len(new) - len("".join(encoder.texts)) <= len(ANSWER)


@pytest.mark.rule("R3")
@pytest.mark.parametrize(("template", "added"), [(CHATML, CHATML_TOKENS), (HEADERS, HEADER_TOKENS)])
@pytest.mark.parametrize("max_bytes", [1 << 20, 4_000])
def test_kept_ids_and_keys_are_those_of_the_whole_text(template: str, added: tuple[AddedToken, ...], max_bytes: int) -> None:
    encoder = make(template, *added)
    cut = find_cut(encoder)
    assert cut is not None
    chains = ChatChains(encoder, cut, stride=STRIDE, max_bytes=max_bytes)
    rng = random.Random(3)
    chats: list[list[Mapping[str, Any]]] = []
    for n in range(300):
        chat = [*rng.choice(chats), *random_chat(rng, cut)] if chats and n % 3 else random_chat(rng, cut)
        chats.append(chat[:40])
        namespace = rng.choice((0, 5, 2**64 - 1))
        text = encoder.render(chats[-1])
        ids, keys = chains.read(chains.look(text, namespace))
        whole = encoder.encode(text, add_special_tokens=False)
        assert decode_ids(ids) == whole
        assert list(keys) == chain_hashes(whole, namespace)[STRIDE - 1 :: STRIDE]
        chains.check_integrity()


def test_namespaces_share_nothing() -> None:
    encoder = make(CHATML, *CHATML_TOKENS)
    chains = ChatChains(encoder, "<|im_start|>", stride=STRIDE)
    text = encoder.render(turns(3))
    first = chains.read(chains.look(text, 1))
    assert chains.look(text, 2).missing_chars == len(text) and chains.look(text, 1).missing_chars == len(ANSWER)
    assert chains.read(chains.look(text, 2))[0] == first[0]


def test_the_longest_unused_pieces_go_first() -> None:
    encoder = make(CHATML, *CHATML_TOKENS)
    chains = ChatChains(encoder, "<|im_start|>", stride=STRIDE, max_bytes=6_000)
    often, once = encoder.render([{"role": "user", "content": "often"}]), encoder.render([{"role": "user", "content": "once"}])
    chains.read(chains.look(once, 1))
    for n in range(50):
        chains.read(chains.look(often, 1))
        chains.read(chains.look(encoder.render([{"role": "user", "content": f"other {n}"}]), 1))
        chains.check_integrity()
    assert chains.look(often, 1).missing_chars == len(ANSWER) and chains.look(once, 1).missing_chars == len(once)


def test_threads_that_read_the_same_chats_get_the_same_ids() -> None:
    encoder = make(CHATML, *CHATML_TOKENS)
    chains = ChatChains(encoder, "<|im_start|>", stride=STRIDE, max_bytes=20_000)
    texts = [encoder.render([*turns(n), {"role": "user", "content": f"end {n}"}]) for n in range(0, 30, 2)]
    right = {text: encode_ids(encoder.encode(text, add_special_tokens=False)) for text in texts}
    wrong: list[str] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        wrong.extend(text for text in rng.choices(texts, k=150) if chains.read(chains.look(text, 1))[0] != right[text])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    chains.check_integrity()


@pytest.mark.parametrize("text", ["", "a", "<c>", "a<c>", "<c>a<c><c>b", "<c><c>", "a<c>b<c"])
def test_pieces_make_up_the_text(text: str) -> None:
    pieces = cut_text(text, "<c>")
    assert "".join(pieces) == text and all(p.startswith("<c>") for p in pieces[1:]) and all(p.count("<c>") <= 1 for p in pieces)
