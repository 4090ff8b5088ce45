"""Token ids and prefix keys of rendered chats, kept by chain of messages: a chat's next turn tokenizes only what it adds.

Called by the router with the text of `PromptEncoder.render_chat`. The text is cut in front of one added token of the tokenizer that
begins (or ends) each message. Added tokens are taken out of a text before anything else, so the ids of a piece do not depend on its
neighbours; `find_cut` proves it for each tokenizer, and a tokenizer or template that has no such token is not cached.

A piece is known by the very text and the piece before it: nothing is compared by hash alone, so that no two prompts can get each
other's ids. May be used by several threads.
"""

from __future__ import annotations

import random
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, Final

from msgspec import Struct

from fleet_contract.names import PAGE_SIZE
from fleet_contract.prefix import extend_chain
from fleet_contract.wire import encode_ids
from fleet_text.prompt import PromptEncoder, PromptError
from fleet_text.words import WordIds, noise

MAX_BYTES: Final = 64 << 20  # of one tokenizer in one process
NODE_BYTES: Final = 600  # what a kept piece takes beside its text, ids and keys
SHORT_CHARS: Final = 32  # a last piece up to this is no turn but the begin of the answer: only its ids are kept, once
MAX_SHORT: Final = 1024
PROOFS: Final = 48  # random chats and texts that a tokenizer is tried with
_PAGE_BYTES: Final = 4 * PAGE_SIZE


class _Node:
    """A piece behind all pieces before it."""

    __slots__ = ("ids", "keys", "last", "number", "pages", "rest", "size")
    last: int
    pages: int
    rest: bytes

    def __init__(self, number: int, ids: bytes, before: _Node | int, stride: int) -> None:
        """Args: before: the piece before, or the namespace where the chain begins."""
        last: int = before if isinstance(before, int) else before.last
        pages: int = 0 if isinstance(before, int) else before.pages
        rest: bytes = b"" if isinstance(before, int) else before.rest
        data = rest + ids
        hashes = extend_chain(last, data)
        self.number = number
        self.ids = ids  # little-endian u32, of this piece
        self.keys = tuple(hashes[(stride - 1 - pages) % stride :: stride])  # of the blocks that end in this piece
        self.last: int = hashes[-1] if hashes else last
        self.pages: int = pages + len(hashes)
        self.rest: bytes = data[len(hashes) * _PAGE_BYTES :]  # behind the last whole page
        self.size = NODE_BYTES


class Reading(Struct):
    """A text of which some pieces are known. `missing` are to be tokenized, in order, behind `nodes`."""

    namespace: int
    nodes: list[_Node]
    missing: list[str]

    @property
    def missing_chars(self) -> int:
        """How much has to be tokenized."""
        return sum(map(len, self.missing))


class ChatChains:
    """The kept pieces of one tokenizer, of all namespaces; the longest unused go first."""

    def __init__(self, encoder: PromptEncoder, cut: str, *, stride: int, max_bytes: int = MAX_BYTES, words: WordIds | None = None) -> None:
        """Args: cut: of `find_cut`. stride: every how many pages there is a key. words: of `find_words`, where there is one."""
        self._encoder = encoder
        self._words = words
        self._cut = cut
        self._stride = stride
        self._max_bytes = max_bytes
        self._nodes: OrderedDict[tuple[int, str], _Node] = OrderedDict()  # by number of the piece before (root: ~namespace), text
        self._short: dict[str, bytes] = {}
        self._bytes = 0
        self._next = 0
        self._lock = threading.Lock()

    def look(self, text: str, namespace: int) -> Reading:
        """What is known of a text. Cheap."""
        pieces = cut_text(text, self._cut)
        nodes: list[_Node] = []
        before, known = ~namespace, self._nodes
        with self._lock:
            for piece in pieces:
                node = known.get((before, piece))
                if node is None:
                    break
                known.move_to_end((before, piece))
                nodes.append(node)
                before = node.number
        return Reading(namespace, nodes, pieces[len(nodes) :])

    def read(self, reading: Reading) -> tuple[bytes, tuple[int, ...]]:
        """Tokenizes what is missing, keeps it, and gives the whole text's ids (little-endian u32) and keys. Takes time for much text."""
        nodes, last = reading.nodes, len(reading.missing) - 1
        for n, piece in enumerate(reading.missing):
            before = nodes[-1] if nodes else reading.namespace
            if n == last and nodes and len(piece) <= SHORT_CHARS:
                nodes.append(_Node(-1, self._short_ids(piece), before, self._stride))
                continue
            ids = self._encode(piece)
            with self._lock:
                nodes.append(self._keep(before, piece, ids))
        reading.missing = []
        keys: list[int] = []
        for node in nodes:
            keys += node.keys
        return b"".join([node.ids for node in nodes]), tuple(keys)

    def check_integrity(self) -> None:
        """Raises AssertionError when the sizes do not add up or the bound is broken."""
        assert self._bytes == sum(n.size for n in self._nodes.values())
        assert self._bytes <= self._max_bytes or len(self._nodes) == 1

    def __len__(self) -> int:
        return len(self._nodes)

    def _encode(self, piece: str) -> bytes:
        return self._words.encode(piece) if self._words is not None else encode_ids(self._encoder.encode(piece, add_special_tokens=False))

    def _short_ids(self, piece: str) -> bytes:
        ids = self._short.get(piece)
        if ids is None:
            ids = self._encode(piece)
            if len(self._short) >= MAX_SHORT:
                self._short.clear()
            self._short[piece] = ids
        return ids

    def _keep(self, before: _Node | int, piece: str, ids: bytes) -> _Node:
        key = (~before if isinstance(before, int) else before.number, piece)
        node = self._nodes.get(key)
        if node is not None:  # another thread was faster
            return node
        node = _Node(self._next, ids, before, self._stride)
        node.size += sys.getsizeof(piece) + len(ids) + 40 * len(node.keys)
        self._next += 1
        self._nodes[key] = node
        self._bytes += node.size
        while self._bytes > self._max_bytes and len(self._nodes) > 1:
            _, old = self._nodes.popitem(last=False)
            self._bytes -= old.size
        return node


def cut_text(text: str, cut: str) -> list[str]:
    """The text in pieces that each begin with `cut`, but for the first where the text does not."""
    pieces, start, find, step = [], 0, text.find, len(cut)
    at = find(cut, step if text.startswith(cut) else 0)
    while at > 0:
        pieces.append(text[start:at])
        start = at
        at = find(cut, at + step)
    pieces.append(text[start:])
    return pieces


def find_cut(encoder: PromptEncoder) -> str | None:
    """The added token in front of which this model's chats can be cut; None when there is none, or a trial fails."""
    sample = _render(encoder, [{"role": r, "content": f"c{n}"} for n, r in enumerate(("user", "assistant") * 3)])
    tokenizer = encoder.tokenizer
    if sample is None or tokenizer.truncation is not None or tokenizer.padding is not None:
        return None
    added = tokenizer.get_added_tokens_decoder().values()
    contents = [token.content for token in added]
    counts = {
        token.content: (sample.count(token.content), -sample.find(token.content))
        for token in added
        if token.content and not (token.lstrip or token.single_word or token.normalized) and not _overlapped(token.content, contents)
    }
    best = max(counts, key=lambda c: counts[c], default=None)
    if best is None or counts[best][0] < 2 or not _holds(encoder, best):
        return None
    return best


def _overlapped(token: str, others: Iterable[str]) -> bool:
    """True when another added token can begin before this one and reach into it: then it would not be this one that is found."""
    return any(o != token and (token in o or any(o.endswith(token[:n]) for n in range(1, len(token)))) for o in others)


def _holds(encoder: PromptEncoder, cut: str) -> bool:
    """Whether random chats and texts, cut, give the ids of the whole."""
    rng = random.Random(1)
    for n in range(PROOFS):
        text = _render(encoder, random_chat(rng, cut)) if n % 2 else cut.join(noise(rng, cut) for _ in range(4))
        if text is None:
            continue
        parts = [token for piece in cut_text(text, cut) for token in encoder.encode(piece, add_special_tokens=False)]
        if parts != encoder.encode(text, add_special_tokens=False):
            return False
    return True


def random_chat(rng: random.Random, cut: str) -> list[Mapping[str, Any]]:
    """A chat whose texts look for trouble: spaces at their ends, digits, other scripts, the model's own marks, whole and broken."""
    roles = ("user", "assistant") * 4
    return [{"role": role, "content": noise(rng, cut)} for role in roles[: rng.choice((1, 3, 5, 7))]]


def _render(encoder: PromptEncoder, messages: list[Mapping[str, Any]]) -> str | None:
    try:
        return encoder.render(messages)
    except PromptError:
        return None
