"""From messages or a prompt to token ids: chat template (sandboxed jinja2) and tokenizer of one model.

Source of the files: a model folder, or the zip of a worker's `GET /tokenizer`. Called by the runtime's http process and by the
router's edge; knows nothing of HTTP.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "config.json")
MAX_TOKENIZER_ZIP_BYTES: Final = 256 << 20


class PromptError(ValueError):
    """The messages cannot be rendered by this model's template: the user's fault, with the reason."""


class TokenizerFilesError(ValueError):
    """The model's tokenizer files are missing or broken."""


class PromptEncoder:
    """Tokenizer and chat template of one model. Immutable; `encode` releases the GIL and may run in a thread."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        """Args: files: by name, of TOKENIZER_FILES. Raises TokenizerFilesError."""
        if "tokenizer.json" not in files:
            raise TokenizerFilesError("tokenizer.json is missing; the model folder needs it")
        try:
            self.tokenizer: Tokenizer = Tokenizer.from_buffer(files["tokenizer.json"])
        except Exception as e:  # the library raises bare Exception
            raise TokenizerFilesError(f"tokenizer.json cannot be read: {e}") from e
        config = _json_object(files, "tokenizer_config.json")
        generation = _json_object(files, "generation_config.json")
        model = _json_object(files, "config.json")
        self.special_tokens: dict[str, str] = {
            k: text for k in ("bos_token", "eos_token", "unk_token", "pad_token") if (text := _token_text(config.get(k))) is not None
        }
        self.eos_ids: tuple[int, ...] = self._eos_ids(generation, model)
        source = files["chat_template.jinja"].decode() if "chat_template.jinja" in files else config.get("chat_template")
        if isinstance(source, list):  # several named templates: the default one
            source = next((t.get("template") for t in source if t.get("name") == "default"), None)
        self.template = _compile(source) if isinstance(source, str) else None

    @classmethod
    def from_folder(cls, folder: Path) -> PromptEncoder:
        """Reads a Hugging Face model folder."""
        return cls(read_folder(folder))

    @classmethod
    def from_zip(cls, data: bytes) -> PromptEncoder:
        """Reads the answer of a worker's `GET /tokenizer`. Raises TokenizerFilesError also for an oversized or broken zip."""
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as z:
                if sum(i.file_size for i in z.infolist()) > MAX_TOKENIZER_ZIP_BYTES:
                    raise TokenizerFilesError(f"tokenizer zip unpacks to more than {MAX_TOKENIZER_ZIP_BYTES} bytes")
                return cls({n: z.read(n) for n in z.namelist() if n in TOKENIZER_FILES})
        except zipfile.BadZipFile as e:
            raise TokenizerFilesError(f"tokenizer zip cannot be read: {e}") from e

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return int(self.tokenizer.get_vocab_size(with_added_tokens=True))

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt text of a chat. Content parts of kind text are joined. Raises PromptError."""
        if self.template is None:
            raise PromptError("this model has no chat template; use /v1/completions")
        try:
            return self.template.render(
                messages=[{**m, "content": _content_text(m["content"])} for m in messages],
                add_generation_prompt=True, tools=None, documents=None, **self.special_tokens,
            )  # fmt: skip
        except (jinja2.TemplateError, TypeError, KeyError, ValueError) as e:
            raise PromptError(f"the model's chat template refuses these messages: {e}") from e

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text. A rendered chat already holds its special tokens: pass False there."""
        return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Render and encode. Raises PromptError."""
        return self.encode(self.render(messages), add_special_tokens=False)

    def _eos_ids(self, generation: dict[str, Any], model: dict[str, Any]) -> tuple[int, ...]:
        """All ids that end an answer: generation config, model config, tokenizer."""
        found: list[int] = []
        for value in (generation.get("eos_token_id"), model.get("eos_token_id")):
            found += value if isinstance(value, list) else [value] if isinstance(value, int) else []
        if (text := self.special_tokens.get("eos_token")) is not None and (token := self.tokenizer.token_to_id(text)) is not None:
            found.append(token)
        return tuple(sorted(set(found)))


def read_folder(folder: Path) -> dict[str, bytes]:
    """Those of TOKENIZER_FILES that a model folder has, by name."""
    return {n: (folder / n).read_bytes() for n in TOKENIZER_FILES if (folder / n).is_file()}


def zip_files(files: Mapping[str, bytes]) -> bytes:
    """The answer of `GET /tokenizer`: same bytes for the same files. Names that are not of TOKENIZER_FILES are left out."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as z:
        for name in TOKENIZER_FILES:
            if name in files:
                z.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), files[name], zipfile.ZIP_DEFLATED)
    return out.getvalue()


def _json_object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    if name not in files:
        return {}
    try:
        value = json.loads(files[name])
    except ValueError as e:
        raise TokenizerFilesError(f"{name} is not JSON: {e}") from e
    return value if isinstance(value, dict) else {}


def _token_text(value: Any) -> str | None:
    """A special token is written as a string or as an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _content_text(content: Any) -> Any:
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _compile(source: str) -> jinja2.Template:
    """The environment that Hugging Face chat templates expect: trimmed blocks, loop controls, tojson, raise_exception, strftime_now."""
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = lambda fmt: datetime.now(UTC).strftime(fmt)
    try:
        return env.from_string(source)
    except jinja2.TemplateSyntaxError as e:
        raise TokenizerFilesError(f"the chat template does not compile, line {e.lineno}: {e.message}") from e
