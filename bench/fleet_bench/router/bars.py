"""What is promised of the router. The source of the bars is docs/performance.md."""

from __future__ import annotations

from typing import Final

from fleet_bench.peers.bars import Bar

PEER: Final = "sglang-router"


def _chats(key: str, what: str) -> tuple[Bar, ...]:
    return (
        Bar(f"{key}-rate", f"{what}: rate", "/s", 2.5, peer=PEER),
        Bar(f"{key}-p50", f"{what}: p50", "us", 0.5, peer=PEER, least=False),
        Bar(f"{key}-p99", f"{what}: p99", "us", 0.5, peer=PEER, least=False),
        Bar(f"{key}-cpu", f"{what}: processor", "us", 0.5, peer=PEER, least=False, binding=False),
        Bar(f"{key}-rate", f"{what}: rate", "/s", 1.0, peer="smg", binding=False),
        Bar(f"{key}-p50", f"{what}: p50", "us", 1.0, peer="smg", least=False, binding=False),
        Bar(f"{key}-rate", f"{what}: rate, of a proxy that routes nothing", "/s", 1.0, peer="nginx", binding=False),
    )


BARS: Final = (
    *_chats("chats", "2.8 KB chats, with token ids"),
    *_chats("chats-bytes", "2.8 KB chats, no tokenizer"),
    Bar("chunks", "processor time of a streamed chunk", "us", 0.7, peer=PEER, least=False),
    Bar("chunks", "processor time of a streamed chunk", "us", 1.0, peer="smg", least=False, binding=False),
    Bar("turns", "48 KB chats, ten turns, token ids: added", "us", 0.5, peer=PEER, least=False),
    Bar("turns", "48 KB chats, ten turns, token ids: added", "us", 1.0, peer="smg", least=False, binding=False),
    Bar("turns-bytes", "48 KB chats, ten turns, no tokenizer: added", "us", 0.5, peer=PEER, least=False),
    Bar("turns-bytes", "48 KB chats, ten turns, no tokenizer: added", "us", 1.0, peer="smg", least=False, binding=False),
    Bar("memory", "memory after 200,000 requests", "MiB", 0.5, peer=PEER, least=False),
    Bar("memory", "memory after 200,000 requests", "MiB", 1.0, peer="smg", least=False, binding=False),
    Bar("memory-slope", "growth over 100,000 more", "MiB", 4.0, peer=None, least=False),
    Bar("idle-streams", "memory of an open idle stream", "KiB", 64, peer=None, least=False, strict=True),
    Bar("choice-32", "choice, 32 workers x 192 blocks", "us", 40, peer=None, least=False, strict=True),
    Bar("choice-1000", "choice, 1,000 workers x 192 blocks", "us", 150, peer=None, least=False, strict=True),
    Bar("idle-workers", "100 idle workers, of one core", "%", 1.0, peer=None, least=False, strict=True),
)
# Which bars each scenario decides.
BAR_KEYS: Final = {
    "chats": ("chats-rate", "chats-p50", "chats-p99", "chats-cpu"),
    "chats-bytes": ("chats-bytes-rate", "chats-bytes-p50", "chats-bytes-p99", "chats-bytes-cpu"),
    "memory": ("memory", "memory-slope"),
    "choice": ("choice-32", "choice-1000"),
}
