"""The vocabulary of a GGUF -> tokenizer.json, tokenizer_config.json and chat_template.jinja. Called by `gguf_folder`.

Byte-level BPE only. Sources: the GGUF specification for the fields; the pre-tokenizers are those of the models' own tokenizer.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

# GGUF token types (llama.cpp's LLAMA_TOKEN_TYPE_*).
_CONTROL: Final = 3
_USER_DEFINED: Final = 4


class TokenizerError(ValueError):
    """The vocabulary cannot be converted; the message says why."""


def _words(digits: str) -> Any:
    """The pattern of GPT-4 and what follows it, with so many digits in one piece; then bytes."""
    pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _gpt2(*first: Any) -> Any:
    return pre_tokenizers.Sequence([*first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])


# Names of `tokenizer.ggml.pre`. smollm: every digit alone, then the GPT-2 pattern.
_PRE: Final[dict[str, Callable[[], Any]]] = {
    "smollm": lambda: _gpt2(pre_tokenizers.Digits(individual_digits=True)),
    "gpt-2": _gpt2,
    "llama-bpe": lambda: _words(r"\p{N}{1,3}"),
    "qwen2": lambda: _words(r"\p{N}"),
}


def write_tokenizer(folder: Path, get: Callable[..., Any], *, context: int) -> None:
    """Writes the three files. get: a field of the GGUF by name, or its default. Raises TokenizerError."""
    kind, pre = get("tokenizer.ggml.model"), get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or pre not in _PRE:
        raise TokenizerError(f"the tokenizer is {kind!r} with pre-tokenizer {pre!r}; can be converted: 'gpt2' with {', '.join(map(repr, _PRE))}")
    tokens: list[str] = get("tokenizer.ggml.tokens")
    merges = [tuple(m.split(" ", 1)) for m in get("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    types: list[int] = get("tokenizer.ggml.token_type")
    special = [t for t, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED])
    bos, eos = int(get("tokenizer.ggml.bos_token_id", -1)), int(get("tokenizer.ggml.eos_token_id"))
    if bos >= 0 and get("tokenizer.ggml.add_bos_token", False):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", pair=f"{tokens[bos]} $A {tokens[bos]} $B", special_tokens=[(tokens[bos], bos)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": bos, "eos_token": eos, "unk_token": get("tokenizer.ggml.unknown_token_id", eos if pre == "smollm" else -1)}
    names["pad_token"] = get("tokenizer.ggml.padding_token_id", eos)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        **{name: tokens[int(i)] for name, i in names.items() if int(i) >= 0},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if template := get("tokenizer.chat_template", ""):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
