"""Tokenizers by model revision, fetched from workers when they appear. Until one is here requests go as plain JSON."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Final

from fleet_contract import names
from fleet_contract.errors import ApiError
from fleet_contract.worker import WorkerRecord
from fleet_router.decide.keys import STRIDE
from fleet_router.engines.kinds import engine_of
from fleet_router.http.client import Pool, fetch
from fleet_text.chains import MAX_BYTES, ChatChains, find_cut
from fleet_text.prompt import MAX_TOKENIZER_ZIP_BYTES, PromptEncoder, TokenizerFilesError
from fleet_text.words import find_words

log = logging.getLogger(__name__)

FETCH_TIMEOUT_S: Final = 30.0
RETRY_S: Final = 5.0
MAX_KEPT: Final = 16


class Encoders:
    """At most one fetch per revision at a time."""

    def __init__(self, pool: Pool, *, chat_bytes: int = MAX_BYTES) -> None:
        """Args: chat_bytes: how much is kept of each model's chats."""
        self._pool = pool
        self._chat_bytes = chat_bytes
        self._ready: dict[str, tuple[PromptEncoder, ChatChains | None]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def get(self, model_revision: str) -> PromptEncoder | None:
        """The encoder, or None while it is not here."""
        ready = self._ready.get(model_revision)
        return ready[0] if ready is not None else None

    def chains(self, model_revision: str) -> ChatChains | None:
        """What is kept of its chats; None where there is no encoder, or none whose chats can be cut."""
        ready = self._ready.get(model_revision)
        return ready[1] if ready is not None else None

    def want(self, record: WorkerRecord, host: str) -> None:
        """A worker is ready: the tokenizer of its model will be fetched unless it is here. Other engines give none: theirs is a folder."""
        revision = record.model_revision
        if not revision or revision in self._ready or revision in self._tasks or (record.engine != names.ENGINE_OURS and not record.tokenizer):
            return
        task = asyncio.get_running_loop().create_task(self._fetch(record, host))
        self._tasks[revision] = task
        task.add_done_callback(lambda _: self._tasks.pop(revision, None))

    def put(self, model_revision: str, encoder: PromptEncoder, chains: ChatChains | None) -> None:
        """An encoder that was made elsewhere, or just here."""
        while len(self._ready) >= MAX_KEPT:
            self._ready.pop(next(iter(self._ready)))
        self._ready[model_revision] = encoder, chains

    async def close(self) -> None:
        """Ends fetches under way."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _fetch(self, record: WorkerRecord, host: str) -> None:
        model_revision = record.model_revision
        try:
            if record.engine != names.ENGINE_OURS:
                habits = engine_of(record.engine).habits
                folder = Path(record.tokenizer)
                encoder, chains = await asyncio.to_thread(lambda: with_chains(PromptEncoder.from_folder(folder, habits), self._chat_bytes))
            else:
                port = record.ports.internal
                status, data = await fetch(
                    self._pool, host, port, "GET", "/tokenizer", timeout_s=FETCH_TIMEOUT_S, limit_bytes=MAX_TOKENIZER_ZIP_BYTES
                )
                if status != 200:
                    raise TokenizerFilesError(f"GET /tokenizer answers {status}")
                encoder, chains = await asyncio.to_thread(lambda: with_chains(PromptEncoder.from_zip(data), self._chat_bytes))
        except (ApiError, TokenizerFilesError, OSError) as e:
            log.warning("no tokenizer for model revision %s yet: %s", model_revision, e)
            await asyncio.sleep(RETRY_S)  # the next poll of a ready worker asks again
            return
        self.put(model_revision, encoder, chains)
        log.info("tokenizer of model revision %s is here", model_revision, extra={"chats_are_kept": chains is not None})


def with_chains(encoder: PromptEncoder, chat_bytes: int = MAX_BYTES) -> tuple[PromptEncoder, ChatChains | None]:
    cut = find_cut(encoder)
    if cut is None:
        return encoder, None
    return encoder, ChatChains(encoder, cut, stride=STRIDE, max_bytes=chat_bytes, words=find_words(encoder))
