"""Names of a model folder's files that make its prompts. Apart from `prompt`, so that who only names them loads no tokenizer."""

from __future__ import annotations

from typing import Final

TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "config.json")
