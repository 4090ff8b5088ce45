"""The vocabulary of a GGUF -> tokenizer.json, tokenizer_config.json and chat_template.jinja. Called by `gguf_folder`.

Two kinds: byte-level BPE (`gpt2`), and SentencePiece's BPE with byte fallback (`llama`). Sources: the GGUF specification for the fields; the
pre-tokenizers are those of the models' own tokenizer.json; SentencePiece's BPE (Kudo and Richardson, EMNLP 2018, and its documentation) joins,
again and again, the leftmost of the neighbours whose joined piece has the best score.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

# GGUF token types (llama.cpp's LLAMA_TOKEN_TYPE_*).
_NORMAL: Final = 1
_UNKNOWN: Final = 2
_CONTROL: Final = 3
_USER_DEFINED: Final = 4
_BYTE: Final = 6
_SPACE: Final = "\u2581"


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


def _byte_level(tokens: list[str], merges: list[str], pre: str) -> Tokenizer:
    pairs: Any = [tuple(m.split(" ", 1)) for m in merges]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=pairs, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_pieces(tokens: list[str], types: list[int], get: Callable[..., Any]) -> Tokenizer:
    """A piece's score is its place among the merges: each way to join it of two pieces stands there, the best piece first. Bytes stand for
    characters without a piece. A space is put before a text, and behind each special token, as llama.cpp does."""
    scores: list[float] = get("tokenizer.ggml.scores")
    unknown = [t for t, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN]
    if len(unknown) != 1 or types.count(_BYTE) != 256:
        raise TokenizerError(f"its SentencePiece vocabulary has {len(unknown)} unknown and {types.count(_BYTE)} byte tokens; 1 and 256 are needed")
    best = {t: -score for t, kind, score in zip(tokens, types, scores, strict=True) if kind == _NORMAL}
    if len(best) != types.count(_NORMAL):
        raise TokenizerError("its SentencePiece vocabulary names a piece twice")
    pairs = [(rank, n, t[:n], t[n:]) for t, rank in best.items() for n in range(1, len(t)) if t[:n] in best and t[n:] in best]
    merges = [(left, right) for _, _, left, right in sorted(pairs)]
    vocab = {t: i for i, t in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unknown[0], fuse_unk=True, byte_fallback=True))
    prefixed = bool(get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefixed else spaces
    strip = [decoders.Strip(content=" ", left=1, right=0)] if prefixed else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return tokenizer


def write_tokenizer(folder: Path, get: Callable[..., Any], *, context: int) -> None:
    """Writes the three files. get: a field of the GGUF by name, or its default. Raises TokenizerError."""
    model, pre = get("tokenizer.ggml.model"), get("tokenizer.ggml.pre", "default")
    tokens: list[str] = get("tokenizer.ggml.tokens")
    types: list[int] = get("tokenizer.ggml.token_type")
    if model == "gpt2" and pre in _PRE:
        tokenizer = _byte_level(tokens, get("tokenizer.ggml.merges"), pre)
    elif model == "llama":
        tokenizer = _sentence_pieces(tokens, types, get)
    else:
        able = f"'llama', and 'gpt2' with {', '.join(map(repr, _PRE))}"
        raise TokenizerError(f"the tokenizer is {model!r} with pre-tokenizer {pre!r}; can be converted: {able}")
    special = [t for t, kind in zip(tokens, types, strict=True) if kind == _CONTROL or (kind == _UNKNOWN and model == "llama")]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED])
    bos, eos = int(get("tokenizer.ggml.bos_token_id", -1)), int(get("tokenizer.ggml.eos_token_id"))
    if bos >= 0 and get("tokenizer.ggml.add_bos_token", model == "llama"):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", pair=f"{tokens[bos]} $A {tokens[bos]} $B", special_tokens=[(tokens[bos], bos)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    unknown = types.index(_UNKNOWN) if model == "llama" else eos if pre == "smollm" else -1
    names = {"bos_token": bos, "eos_token": eos, "unk_token": get("tokenizer.ggml.unknown_token_id", unknown)}
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
