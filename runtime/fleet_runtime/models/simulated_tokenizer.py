"""The byte tokenizer of `simulated://`: one id per byte, a few special tokens, no model files.

Read by the runtime's http process and detokenizer (through `files.load_text_files`) and by the simulated executor (the constants).
Ids 0..255 are the bytes themselves, so any sequence of them decodes; ids from 256 are special tokens.
"""

from __future__ import annotations

import json
from typing import Any, Final

BOS_ID: Final = 256
EOS_ID: Final = 257
# Begin of a text, end of a message or answer, and the two marks around a role's name.
_SPECIALS: Final = ("<|bos|>", "<|end|>", "<|role|>", "<|text|>")
SIMULATED_VOCAB_SIZE: Final = 256 + len(_SPECIALS)

_CHAT_TEMPLATE: Final = """{{ bos_token }}
{%- if tools -%}
  {{ '<|role|>tools<|text|>' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ eos_token }}
{%- endif -%}
{%- for message in messages -%}
  {{ '<|role|>' + message['role'] + '<|text|>' + (message['content'] or '') }}
  {%- for call in message['tool_calls'] or [] -%}
    {{ '<tool_call>' }}{{ {'name': call['function']['name'], 'arguments': call['function']['arguments']} | tojson }}{{ '</tool_call>' }}
  {%- endfor -%}
  {{ eos_token }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|role|>assistant<|text|>' }}{% endif -%}"""


def simulated_tokenizer_files() -> dict[str, bytes]:
    """The files of a Hugging Face folder that text needs, by name; the same bytes each time."""
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": 256 + i, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
            for i, text in enumerate(_SPECIALS)
        ],
        "normalizer": None,
        "pre_tokenizer": _BYTE_LEVEL,
        "post_processor": None,
        "decoder": _BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {char: byte for byte, char in enumerate(_byte_characters())},
            "merges": [],
        },
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _SPECIALS[0],
        "eos_token": _SPECIALS[1],
        "clean_up_tokenization_spaces": False,
    }
    generation = {"bos_token_id": BOS_ID, "eos_token_id": [EOS_ID]}
    return {
        "tokenizer.json": _json(tokenizer),
        "tokenizer_config.json": _json(config),
        "chat_template.jinja": _CHAT_TEMPLATE.encode(),
        "generation_config.json": _json(generation),
    }


_BYTE_LEVEL: Final[dict[str, Any]] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def _byte_characters() -> list[str]:
    """The character that stands for each byte in a byte-level BPE: itself where it prints in Latin-1, else the next one from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()
