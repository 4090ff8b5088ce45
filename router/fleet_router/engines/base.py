"""What kinds of engine differ in, as seen by the router: one protocol for a kind, one for the hand-over between the legs of a pair.

`registry` asks workers by it, `relay` writes requests and reads answers by it. An engine has no state but constants; a hand-over
is made for each attempt. What crosses the network is each engine's own documented API.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from fleet_contract.errors import ApiError
from fleet_contract.worker import WorkerRecord
from fleet_router.api.body import Parsed, Prompt
from fleet_router.desk import Lease, Leg
from fleet_router.errors import UNDECODABLE
from fleet_router.http.client import request_parts
from fleet_router.table import WorkerView
from fleet_router.target import Target
from fleet_text.chat import Habits

_any: Final = msgspec.json.Decoder()

Parts = tuple[bytes, ...]  # the bytes of one HTTP request


class Fetch(Protocol):
    """GET a path of a worker, of another of its ports where one is given: status and body. Raises ApiError."""

    async def __call__(self, path: str, *, port: int = 0) -> tuple[int, bytes]: ...


class Sending:
    """What an attempt knows when it writes to its workers."""

    def __init__(self, lease: Lease, parsed: Parsed, prompt: Prompt, rid: str, request_id: str, deadline_ms: int) -> None:
        self.lease = lease
        self.parsed = parsed
        self.prompt = prompt
        self.rid = rid  # 32 hex, new for each attempt
        self.request_id = request_id
        self.deadline_ms = deadline_ms


@dataclass(frozen=True, slots=True)
class PolledLoad:
    """What an engine without load reports says of its load when asked: all requests, ours among them."""

    running: int = 0
    waiting: int = 0
    used_tokens: int = 0  # of the KV cache, by requests


class HandOver(Protocol):
    """How the legs of one attempt are sent, and how they find each other."""

    patient: bool  # the KV is freed by the transfer alone: once a leg is sent, nothing is ended before the first token
    watches_transfer: bool  # the engines have no limit of their own for the transfer: the router has

    def first(self) -> list[tuple[Leg, Parts]]:
        """The legs that are sent at once. Called once, and kept by nobody."""

    def after_prefill(self, body: bytes, *, left: bool) -> Parts | None:
        """The serving leg, when it waits for the prefill's answer. `left`: the client is gone, only KV has to be freed."""

    def cached(self, body: bytes) -> int | None:
        """Of the prefill's answer: the tokens that it had cached."""

    def release(self, worker: WorkerView) -> Parts | None:
        """A request to a worker like the serving one that frees what the prefill holds, when the serving leg will not."""


class Engine(Protocol):
    """One kind of engine."""

    kind: str
    abort_path: str  # "" where closing the connection is the abort
    flush_path: str  # empties its prefix cache
    wants_usage: bool  # streams tell their usage only when asked
    habits: Habits  # how it makes prompts of bodies

    async def trouble(self, fetch: Fetch) -> str:
        """Why the worker is not healthy; empty when it is. Raises ApiError when it cannot be asked."""

    async def record(self, fetch: Fetch, target: Target, known: WorkerRecord | None, life: str) -> WorkerRecord | None:
        """What it is. `life` changes whenever it was away. Raises ApiError, DecodeError."""

    async def load(self, fetch: Fetch, record: WorkerRecord) -> PolledLoad | None:
        """Its load, where it sends no reports."""

    def hand_over(self, sending: Sending) -> HandOver:
        """The plan of one attempt. Raises ApiError for what the lease's workers cannot do together."""

    def abort_body(self, rid: str) -> bytes:
        """Body for `abort_path`."""

    def error(self, status: int, body: bytes) -> ApiError:
        """An error answer, read."""

    def error_event(self, event: bytes) -> ApiError | None:
        """The error that a stream begins with instead of a token; None when it is none."""


class Alone:
    """One worker does it all: nothing is handed over."""

    patient = False
    watches_transfer = False

    def __init__(self, leg: Leg, parts: Parts) -> None:
        self._unsent = [(leg, parts)]

    def first(self) -> list[tuple[Leg, Parts]]:
        unsent, self._unsent = self._unsent, []  # a stream that runs for minutes keeps no prompt
        return unsent

    def after_prefill(self, body: bytes, *, left: bool) -> Parts | None:
        raise AssertionError("there is no prefill leg")

    def cached(self, body: bytes) -> int | None:
        return None

    def release(self, worker: WorkerView) -> Parts | None:
        return None


def asks_usage(fields: Mapping[str, msgspec.Raw]) -> bool:
    """Whether the client itself wants its stream's usage."""
    try:
        options = _any.decode(fields["stream_options"])
    except (KeyError, *UNDECODABLE):
        return False
    return isinstance(options, dict) and options.get("include_usage") is True


def key_headers(key_env: str) -> list[tuple[str, str]]:
    """The worker's API key, where the user named an environment variable that holds one."""
    key = os.environ.get(key_env, "") if key_env else ""
    return [("Authorization", f"Bearer {key}")] if key else []


def post(leg: Leg, path: str, headers: list[tuple[str, str]], body: bytes, content_type: str = "application/json", behind: bytes = b"") -> Parts:
    """The bytes of a leg's request. Args: behind: the body's second part."""
    return request_parts(leg.worker.host, leg.worker.port, "POST", path, headers, body, content_type, behind)
