"""A prompt as bytes that stay the same however often a client sends it again: what prefixes are made of where a prompt has no token ids. Pure.

The bytes of a chat are a prefix of those of its next turn. Texts are UTF-8, and what is no text is JSON without spaces, so that a client's
spaces and escapes change nothing. Between them stand bytes that are in no UTF-8: no text can look like two. Fields that templates put in
front of the messages, tools among them, come first and stay as the client wrote them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import xxhash
from msgspec import Struct

_MESSAGE: Final = b"\xff"  # begins a message: its role follows
_VALUE: Final = b"\xfe"  # begins what has just been named
_FIELD: Final = b"\xfd"  # begins a field: its name follows
_PART: Final = b"\xfc"  # between the parts of a content
_NOTHING: Final = (b"null", b"[]", b"{}", b'""')
_TEXTS: Final = ("text", "input_text", "output_text", None)  # types of a part that is its text
_MEDIA: Final = ("image", "audio", "video", "file", "document")  # in the types of parts that are none
_IGNORED: Final = "cache_control"  # a mark that clients move from turn to turn; it is not in the prompt
MEDIA_BYTES: Final = 2304  # what an image or the like stands for, whatever its size: 576 tokens of four bytes each
_MAX_DEPTH: Final = 3  # of contents in contents: a tool's result in a message
_decode: Final = msgspec.json.Decoder().decode
_encode: Final = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the bodies of a path hold their prompt."""

    prompt: tuple[str, ...] = ("messages",)  # names of the field; the first that is there
    head: tuple[str, ...] = ()  # fields that stand in front of it in the prompt
    system: str = ""  # the field of the first message, where that has a field of its own
    is_chat: bool = True  # else the field is the text itself, without a template


class Canonical(Struct, frozen=True):
    """The bytes of a prompt."""

    data: bytes
    is_text: bool  # no images and the like: its length tells its tokens


def canonical(layout: Layout, fields: Mapping[str, msgspec.Raw]) -> Canonical | None:
    """The bytes of a body's prompt; None when it has none. Raises ValueError or RecursionError for what is no JSON."""
    name = next((n for n in layout.prompt if n in fields), "")
    prompt = _decode(fields[name]) if name else None
    if not prompt:
        return None
    if not layout.is_chat:
        only = prompt[0] if isinstance(prompt, list) and len(prompt) == 1 else prompt
        return Canonical(only.encode(), True) if isinstance(only, str) else None
    out: list[bytes] = []
    media = 0
    for name in layout.head:
        if (raw := fields.get(name)) is not None and (told := bytes(raw)) not in _NOTHING:
            out += (_FIELD, name.encode(), _VALUE, told)
    if layout.system and layout.system in fields and (system := _decode(fields[layout.system])):
        out += (_MESSAGE, b"system", _VALUE)
        media += _content(out, system, 1)
    for message in prompt if isinstance(prompt, list) else ({"role": "user", "content": prompt},):
        media += _message(out, message)
    return Canonical(b"".join(out), not media)


def _message(out: list[bytes], message: Any) -> int:
    """Writes one message; returns how many images and the like it has."""
    if not isinstance(message, dict):
        out += (_MESSAGE, _VALUE, _encode(message))
        return 0
    role, content = message.get("role"), message.get("content")
    out += (_MESSAGE, role.encode() if isinstance(role, str) else b"", _VALUE)
    if isinstance(content, str):
        out.append(content.encode())
        if len(message) == 2:
            return 0
        media = 0
    else:
        media = _content(out, content, 1)
    for name, value in message.items():
        if name != "role" and name != "content":
            _field(out, name, value)
    return media


def _content(out: list[bytes], content: Any, depth: int) -> int:
    """A text, or a list of parts: one part of text is what the text alone is."""
    if isinstance(content, str):
        out.append(content.encode())
        return 0
    if not isinstance(content, list) or depth > _MAX_DEPTH:
        out.append(_encode(content) if content else b"")
        return 0
    media = 0
    for n, part in enumerate(content):
        if n:
            out.append(_PART)
        media += _part(out, part, depth)
    return media


def _part(out: list[bytes], part: Any, depth: int) -> int:
    """One part of a content."""
    if not isinstance(part, dict):
        return _content(out, part, _MAX_DEPTH + 1)
    kind, text = part.get("type"), part.get("text")
    if isinstance(text, str) and kind in _TEXTS:
        out.append(text.encode())
        return 0
    if isinstance(kind, str) and any(word in kind for word in _MEDIA) and not _is_text(part.get("source")):
        digest = xxhash.xxh3_128_hexdigest(_encode({name: value for name, value in part.items() if name != _IGNORED})).encode()
        out.append(digest * (MEDIA_BYTES // len(digest)))
        return 1
    media = 0
    for name, value in part.items():
        if name == "content":
            out += (_FIELD, b"content", _VALUE)
            media += _content(out, value, depth + 1)
        else:
            _field(out, name, value)
    return media


def _is_text(source: Any) -> bool:
    """Of a document that is written out."""
    return isinstance(source, dict) and source.get("type") in ("text", "content")


def _field(out: list[bytes], name: str, value: Any) -> None:
    """A named value; those that say nothing are left out, since clients add and drop them."""
    if name != _IGNORED and value is not None and value != [] and value != {} and value != "":
        out += (_FIELD, name.encode(), _VALUE, _encode(value))
