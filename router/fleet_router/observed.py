"""What discovery tells the brain: services, worker and router pods, as plain facts. msgspec, because it crosses the link between processes.

Whole snapshots, never differences: a restarted reader needs only the last one.
"""

from __future__ import annotations

from msgspec import Struct, field


class ServiceFacts(Struct, frozen=True):
    """One InferenceService."""

    namespace: str
    name: str
    uid: str = ""
    created: str = ""  # RFC 3339: sorts by time
    generation: int = 0
    model_name: str = ""  # served short name
    aliases: list[str] = field(default_factory=list)  # further served names (static mode)
    traffic: list[tuple[str, int]] = field(default_factory=list)  # status.traffic: revision, weight
    is_off: bool = False  # the spec asks for no workers

    @property
    def key(self) -> tuple[str, str]:
        return (self.namespace, self.name)


class PodFacts(Struct, frozen=True):
    """One worker pod."""

    uid: str
    name: str
    namespace: str
    service: str
    role: str
    revision: str
    ip: str = ""
    ready: bool = False
    deleting: bool = False
    terminal: bool = False  # phase Succeeded or Failed
    drain_deadline: str | None = None  # the draining annotation, as written


class RouterFacts(Struct, frozen=True):
    """One router pod, ourselves included."""

    uid: str
    ip: str = ""
    terminal: bool = False


class Observed(Struct, frozen=True):
    """Everything discovery knows."""

    services: list[ServiceFacts] = field(default_factory=list)
    pods: list[PodFacts] = field(default_factory=list)
    routers: list[RouterFacts] = field(default_factory=list)
