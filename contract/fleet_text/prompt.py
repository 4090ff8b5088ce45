"""From messages or a prompt to token ids: chat template (sandboxed jinja2) and tokenizer of one model.

Source of the files: a model folder, or the zip of a worker's `GET /tokenizer`. Called by the runtime's http process and by the
router's edge; knows nothing of HTTP.
"""

from __future__ import annotations

import io
import json
import os
import secrets
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeVar

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from fleet_text.bounds import PromptTooLong as PromptTooLong  # callers get it from here
from fleet_text.bounds import longest_token
from fleet_text.chat import OURS, ChatInputs, Habits, normalised
from fleet_text.chat import PromptError as PromptError  # callers get it from here
from fleet_text.files import TOKENIZER_FILES as TOKENIZER_FILES  # callers get it from here
from fleet_text.outlines import Outlines
from fleet_text.watched import Looked, WatchingEnvironment

MAX_TOKENIZER_ZIP_BYTES: Final = 256 << 20
_TEMPLATE_FILE: Final = "<template>"  # jinja2's name of a template that was no file
_Environment = TypeVar("_Environment", bound=ImmutableSandboxedEnvironment)
_PARTS: Final = ("first-part", "second-part")

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one text at a time: a pool of threads would only cost the way to it


class TokenizerFilesError(ValueError):
    """The model's tokenizer files are missing or broken."""


class PromptEncoder:
    """Tokenizer and chat template of one model. Immutable but for its count of texts; `encode` releases the GIL and may run in a thread."""

    def __init__(self, files: Mapping[str, bytes], habits: Habits = OURS) -> None:
        """Args: files: by name, of TOKENIZER_FILES. habits: of the server whose prompts are made. Raises TokenizerFilesError."""
        if "tokenizer.json" not in files:
            raise TokenizerFilesError("tokenizer.json is missing; the model folder needs it")
        try:
            self.tokenizer: Tokenizer = Tokenizer.from_buffer(files["tokenizer.json"])
        except Exception as e:  # the library raises bare Exception
            raise TokenizerFilesError(f"tokenizer.json cannot be read: {e}") from e
        self.texts_encoded = 0  # for metrics
        config = _json_object(files, "tokenizer_config.json")
        generation = _json_object(files, "generation_config.json")
        model = _json_object(files, "config.json")
        self.special_tokens: dict[str, str] = {
            k: text for k in ("bos_token", "eos_token", "unk_token", "pad_token") if (text := _token_text(config.get(k))) is not None
        }
        self.eos_ids: tuple[int, ...] = self._eos_ids(generation, model)
        source = files["chat_template.jinja"].decode() if "chat_template.jinja" in files else config.get("chat_template")
        named = _named_templates(source)
        self.template_source: str | None = named.get("default")
        self.template = _compile(self.template_source) if self.template_source is not None else None
        self._watched = _compile_watching(self.template_source) if self.template_source is not None else None
        self._tool_template = _compile(named["tool_use"]) if "tool_use" in named else self.template
        self._knows_developer = any("developer" in text for text in named.values())
        self._outlines = [  # without and with a generation prompt
            Outlines(partial(self._render_undated, self.template, g), partial(self._render_undated, self._watched, g)) for g in (False, True)
        ]
        # A template that goes through the parts of a message itself puts nothing between them.
        self.habits = replace(habits, part_break="") if habits.part_break and self.takes_parts else habits

    @classmethod
    def from_folder(cls, folder: Path, habits: Habits = OURS) -> PromptEncoder:
        """Reads a Hugging Face model folder."""
        return cls(read_folder(folder), habits)

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

    @cached_property
    def takes_parts(self) -> bool:
        """Whether the chat template reads a message's content as a list of parts; else it takes one text."""
        parts = [{"type": "text", "text": word} for word in _PARTS]
        try:
            text = self.render_chat(ChatInputs([{"role": "user", "content": parts}]))
        except PromptError:
            return False
        return all(word in text for word in _PARTS) and "'type'" not in text and '"type"' not in text

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt text of plain messages. Raises PromptError."""
        return self.render_chat(ChatInputs(normalised(messages)))

    def render_chat(self, chat: ChatInputs, now: datetime | None = None) -> str:
        """The prompt text of a chat.

        With `continue_final` it ends with exactly the last message's text, also where the template trims or ends messages (only space at
        its begin is the template's).
        Args: now: the date that the template may ask for, the same wherever it asks; default: UTC now.
        Raises PromptError, with the template's line where it is the template that refuses.
        """
        if chat.tools is None and not chat.variables and not chat.continue_final:
            text = self._outlines[chat.add_generation_prompt].fill(chat.messages)
            if text is not None:
                return text
        if self.template is None or self._tool_template is None:
            raise PromptError("this model has no chat template; use /v1/completions")
        template = self.template if chat.tools is None else self._tool_template
        messages = self._known_roles(chat.messages)
        mark = ""
        if chat.continued is not None:
            mark = f"\ue000{secrets.token_hex(8)}\ue000"  # nobody can have it in a message
            messages = [*messages[:-1], {**messages[-1], "content": chat.continued + mark}]
        now = datetime.now(UTC) if now is None else now
        try:
            text = self._render(template, chat.variables, messages, chat.tools, chat.add_generation_prompt, now.strftime)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as e:
            line = _template_line(e.__traceback__)
            where = f" (line {line} of the template)" if line is not None else ""
            raise PromptError(f"the model's chat template refuses these messages: {e}{where}") from e
        return text if chat.continued is None else _cut_at(text, mark, chat)

    def _render(
        self, template: jinja2.Template, variables: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], tools: list[Any] | None,
        generation: bool, strftime: Callable[[str], str],
    ) -> str:  # fmt: skip
        return template.render(
            {
                **variables, **self.special_tokens, "messages": messages, "tools": tools, "documents": None,
                "add_generation_prompt": generation, "strftime_now": strftime,
            }
        )  # fmt: skip

    def _render_undated(self, template: jinja2.Template | None, generation: bool, messages: list[Mapping[str, Any]]) -> str:
        """For an outline. Raises Looked when the template asks for the date."""
        if template is None:
            raise Looked
        return self._render(template, {}, self._known_roles(messages), None, generation, _no_date)

    def _known_roles(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """A template that does not know OpenAI's newer name of the system role would leave such a message out in silence."""
        return messages if self._knows_developer else [_as_system(m) for m in messages]

    @cached_property
    def _longest_token(self) -> int:
        """Of `bounds`. Looked for with the first text that may need it: a large vocabulary takes a moment."""
        return longest_token(json.loads(self.tokenizer.to_str()))

    def encode(self, text: str, *, add_special_tokens: bool, limit: int | None = None) -> list[int]:
        """Token ids of a text. A rendered chat already holds its special tokens: pass False there.

        Raises PromptTooLong when it can be told without tokenizing that there are more than `limit`; fewer than that may still be too many.
        """
        if limit is not None and len(text) > limit and self._longest_token and (least := -(-len(text) // self._longest_token)) > limit:
            raise PromptTooLong(least)
        self.texts_encoded += 1
        return self._encode([text], add_special_tokens)[0]

    def encode_all(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each of some texts without special tokens added."""
        self.texts_encoded += len(texts)
        return self._encode(texts, False)

    def _encode(self, texts: list[str], special: bool) -> list[list[int]]:
        # Tokenizer.encode keeps all threads of Python waiting, for seconds with a long text. This does not, and makes no offsets.
        return [list(e.ids) for e in self.tokenizer.encode_batch_fast(texts, add_special_tokens=special)]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Render and encode plain messages. Raises PromptError."""
        return self.encode(self.render(messages), add_special_tokens=False)

    def encode_inputs(self, chat: ChatInputs, limit: int | None = None) -> list[int]:
        """Render and encode what `chat_inputs` made of a body. Raises PromptError, PromptTooLong."""
        return self.encode(self.render_chat(chat), add_special_tokens=False, limit=limit)

    def _eos_ids(self, generation: dict[str, Any], model: dict[str, Any]) -> tuple[int, ...]:
        """All ids that end an answer: generation config, model config, tokenizer."""
        found: list[int] = []
        for value in (generation.get("eos_token_id"), model.get("eos_token_id")):
            found += value if isinstance(value, list) else [value] if isinstance(value, int) else []
        if (text := self.special_tokens.get("eos_token")) is not None and (token := self.tokenizer.token_to_id(text)) is not None:
            found.append(token)
        return tuple(sorted({token for token in found if token >= 0}))  # some configs say -1 for none


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


def _named_templates(source: Any) -> dict[str, str]:
    """A model has one template, or several with names, of which `tool_use` is for chats with tools."""
    if isinstance(source, list):
        pairs = [(t.get("name"), t.get("template")) for t in source if isinstance(t, dict)]
        return {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}
    return {"default": source} if isinstance(source, str) else {}


def _as_system(message: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**message, "role": "system"} if message["role"] == "developer" else message


def _cut_at(text: str, mark: str, chat: ChatInputs) -> str:
    """The prompt up to the mark behind the last message's text."""
    end = text.rfind(mark)
    path = f"messages[{len(chat.messages) - 1}].content"
    if end < 0:
        raise PromptError("the model's chat template leaves out the end of the last message, so it cannot be continued", path)
    text = text[:end]
    if not text.endswith((chat.continued or "").lstrip()):  # templates trim a message's begin
        raise PromptError("the model's chat template changes the last message's text, so it cannot be continued", path)
    return text


def _template_line(trace: TracebackType | None) -> int | None:
    """The innermost line of the template that an exception went through: jinja2 rewrites tracebacks to the template's lines."""
    line = None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == _TEMPLATE_FILE:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _no_date(pattern: str) -> str:
    raise Looked


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _GenerationBlocks(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks, for training, what the assistant wrote; here its body stands for itself."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _compile(source: str) -> jinja2.Template:
    """Raises TokenizerFilesError."""
    try:
        return _furnished(ImmutableSandboxedEnvironment).from_string(source)
    except jinja2.TemplateSyntaxError as e:
        raise TokenizerFilesError(f"the chat template does not compile, line {e.lineno}: {e.message}") from e


def _compile_watching(source: str) -> jinja2.Template | None:
    """None when the template does what cannot be watched."""
    env = _furnished(WatchingEnvironment)
    env.watch()
    try:
        return env.compile_watching(source)
    except Looked:
        return None


def _furnished(kind: type[_Environment]) -> _Environment:
    """The environment that Hugging Face chat templates expect: trimmed blocks, loop controls, tojson, raise_exception, strftime_now."""
    env = kind(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlocks])
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    return env
