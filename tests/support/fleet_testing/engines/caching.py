"""A scripted vLLM that really keeps a prefix cache: of token ids, in whole blocks, told by KV events. What it had cached is known afterwards."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any

from fleet_testing.engines.kv_publisher import KvPublisher
from fleet_testing.engines.server import BLOCK_TOKENS, Output
from fleet_testing.engines.vllm import FakeVllm
from fleet_testing.fake_worker import Received


@dataclass(eq=False)
class CachingVllm(FakeVllm):
    """Completions of token ids alone; nothing is ever evicted."""

    events: KvPublisher = field(default_factory=lambda: KvPublisher(maps=True))
    served_prompts: list[tuple[tuple[int, ...], int]] = field(default_factory=list)  # each prompt, and how much of it was cached
    _hashes: dict[tuple[int, ...], int] = field(default_factory=dict)

    @property
    def target(self) -> str:
        """For --static, without a tokenizer."""
        return self.url(events=self.events.port, replay=self.events.replay_port)

    def cached(self, prompt: tuple[int, ...]) -> int:
        """Tokens that it would find; the last one is computed always."""
        tokens = 0
        for end in range(BLOCK_TOKENS, len(prompt), BLOCK_TOKENS):
            if prompt[:end] not in self._hashes:
                break
            tokens = end
        return tokens

    async def work(self, body: dict[str, Any], request: Received, out: Output) -> None:
        prompt = tuple(body["prompt"])
        held = self.cached(prompt)
        self.served_prompts.append((prompt, held))
        await self.phase("prefill", self.timing.prefill_s * (len(prompt) - held))
        ends = [end for end in range(BLOCK_TOKENS, len(prompt) + 1, BLOCK_TOKENS) if prompt[:end] not in self._hashes]
        if ends:
            begin = ends[0] - BLOCK_TOKENS
            parent = self._hashes[prompt[:begin]] if begin else None
            for end in ends:
                self._hashes[prompt[:end]] = secrets.randbits(64)
            new: list[int | bytes] = [self._hashes[prompt[:end]] for end in ends]
            await self.events.publish(self.events.stored(new, list(prompt[begin : ends[-1]]), parent=parent))
        await out.say(str(prompt), cached=held)

    async def stop(self) -> None:
        await super().stop()
        await self.events.close()
