"""A small byte-level BPE tokenizer, trained here: like those of real models, and gone through in no time."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEXTS = ["a small text to learn from", "the the the    spaces and 12345 digits", "caf\u00e9 na\u00efve \u65e5\u672c \U0001f600"]


def tiny_bpe() -> Tokenizer:
    """Every byte has a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 20, trainer)
    return tokenizer
