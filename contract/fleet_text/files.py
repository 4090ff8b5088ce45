"""Names of the files that tell how a model's text becomes tokens. Loads nothing."""

from __future__ import annotations

from typing import Final

TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "config.json")
