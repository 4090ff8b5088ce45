"""Pure: the status of a service, from what was observed and planned. Every message says the cause and the next step.

Messages hold no times and no counters that grow, so that a service at rest has a status that stays the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from fleet_contract import names
from fleet_operator.facts import Observed, Pod, Trouble, rfc3339
from fleet_operator.plan import Plan, is_counted_ready, routing_address, state_of, told_traffic, was_available
from fleet_operator.rollout import Phase

CONDITIONS: Final = (
    "Available",
    "Progressing",
    "Ready",
    "ModelReady",
    "PrefillReady",
    "DecodeReady",
    "RouterReady",
    "RolloutComplete",
    "Scheduled",
)
MAX_MESSAGE: Final = 1000


@dataclass(frozen=True, slots=True)
class Answer:
    """One condition without its times."""

    status: str  # True | False | Unknown
    reason: str
    message: str

    @property
    def is_true(self) -> bool:
        """The answer is yes."""
        return self.status == "True"


@dataclass(frozen=True, slots=True)
class Hindrance:
    """What kept this look from doing its work: a bad spec, a foreign object, an error of the API server."""

    reason: str
    message: str


def derive(observed: Observed, plan: Plan | None, hindrance: Hindrance | None, *, url: str, now: datetime) -> dict[str, Any]:
    """The whole status. Without a plan (bad spec) what runs already is still judged."""
    facts = _Facts(observed, plan, hindrance, url)
    answers = facts.answers()
    previous = {c.get("type"): c for c in observed.status.get("conditions") or ()}
    conditions = [_condition(name, answers[name], previous.get(name), observed.generation, now) for name in CONDITIONS]
    counts = {
        role: {"desired": wanted, "ready": len([p for p in facts.pods(role) if is_counted_ready(p)]), "updated": len(facts.pods(role))}
        for role, wanted in facts.goal.items()
    }
    ready, wanted = sum(c["ready"] for c in counts.values()), sum(c["desired"] for c in counts.values())
    summary = {"ready": f"{ready}/{wanted}"} | {
        role: f"{c['ready']}/{c['desired']}" for role, c in counts.items() if role in (names.ROLE_PREFILL, names.ROLE_DECODE)
    }
    status: dict[str, Any] = {"observedGeneration": observed.generation, "url": url, "summary": summary, "conditions": conditions}
    status |= {"revision": facts.target} if facts.target else {}
    status |= {"roles": counts} if counts else {}
    status["traffic"] = [{"revision": facts.traffic, "weight": 100}] if facts.traffic else []
    return status


def failure(previous: Mapping[str, Any], generation: int, hindrance: Hindrance, now: datetime) -> dict[str, Any]:
    """The status when the cluster could not even be read: what was known, with Ready and Progressing telling the error."""
    known = {c.get("type"): c for c in previous.get("conditions") or ()}
    said = Answer("False", hindrance.reason, hindrance.message)
    unknown = Answer("Unknown", hindrance.reason, "not known: the cluster could not be read")
    conditions = []
    for name in CONDITIONS:
        if name in ("Ready", "Progressing"):
            conditions.append(_condition(name, said, known.get(name), generation, now))
        else:
            conditions.append(known.get(name) or _condition(name, unknown, None, generation, now))
    return {**previous, "conditions": conditions, "observedGeneration": generation}


def _condition(name: str, answer: Answer, previous: Mapping[str, Any] | None, generation: int, now: datetime) -> dict[str, Any]:
    """With the time of its last change, which is kept while the answer stays."""
    is_same = previous is not None and previous.get("status") == answer.status and previous.get("lastTransitionTime")
    return {
        "type": name,
        "status": answer.status,
        "reason": answer.reason,
        "message": answer.message[:MAX_MESSAGE],
        "lastTransitionTime": previous["lastTransitionTime"] if previous is not None and is_same else rfc3339(now),
        "observedGeneration": generation,
    }


class _Facts:
    """The questions behind the conditions, each answered once."""

    def __init__(self, observed: Observed, plan: Plan | None, hindrance: Hindrance | None, url: str) -> None:
        self.observed, self.plan, self.hindrance, self.url = observed, plan, hindrance, url
        self.traffic = plan.traffic if plan is not None else told_traffic(observed)
        self.target = plan.target if plan is not None else str(observed.status.get("revision") or "")
        self.goal: Mapping[str, int] = plan.goal if plan is not None else {}
        self.phase = plan.phase if plan is not None else None

    def pods(self, role: str) -> list[Pod]:
        """Pods of the target revision and role."""
        return self.observed.pods_of(self.target, role)

    def answers(self) -> dict[str, Answer]:
        """All conditions."""
        found = {
            "ModelReady": self.model(),
            "PrefillReady": self.role(names.ROLE_PREFILL),
            "DecodeReady": self.role(names.ROLE_DECODE),
            "RouterReady": self.router(),
            "Scheduled": self.scheduled(),
            "RolloutComplete": self.complete(),
        }
        found["Available"] = self.available(found["RouterReady"])
        found["Progressing"] = self.progressing()
        found["Ready"] = self.ready(found)
        return found

    def trouble(self, roles: Sequence[str] | None = None) -> Trouble | None:
        """The most telling trouble of the target's pods: lasting ones first, then by pod name, so that it stays the same."""
        found: list[tuple[bool, str, Trouble]] = []
        for role in roles if roles is not None else list(self.goal):
            found += [(not p.trouble.is_lasting, p.name, p.trouble) for p in self.pods(role) if p.trouble is not None]
            name = names.workload_name(self.observed.key.name, self.target, role) if self.target else ""
            if text := self.observed.create_errors.get(name):
                found.append((False, "", Trouble(_create_reason(text), f"StatefulSet {name} cannot create its pods: {text}", True)))
        return min(found, key=lambda f: f[:2])[2] if found else None

    def is_off(self) -> bool:
        """The spec asks for no workers."""
        return bool(self.goal) and not any(self.goal.values())

    def model(self) -> Answer:
        """Did a worker load the model?"""
        if any(p.is_ready for role in self.goal for p in self.pods(role)):
            return Answer("True", "Loaded", "a worker of the target revision has loaded the model")
        if self.is_off():
            return _off()
        if (trouble := self.trouble()) is not None and trouble.reason in ("ModelNotFound", "ModelInvalid", "OutOfMemory"):
            return Answer("False", trouble.reason, trouble.message)
        return Answer("False", "Loading", "no worker of the target revision has loaded the model yet")

    def role(self, role: str) -> Answer:
        """Are all workers of the role ready? Unified workers do both, so that both conditions speak of them."""
        used = role if role in self.goal else names.ROLE_UNIFIED
        if used not in self.goal:
            return Answer("Unknown", "NoPlan", "not known: the spec could not be turned into workers")
        wanted, pods = self.goal[used], self.pods(used)
        ready = [p for p in pods if is_counted_ready(p)]
        note = " (unified workers do prefill and decode)" if used == names.ROLE_UNIFIED else ""
        if wanted == 0:
            return _off()
        if len(ready) >= wanted:
            return Answer("True", "AllReady", f"{len(ready)} of {wanted} {used} workers are ready{note}")
        waiting = ", ".join(sorted(p.name for p in pods if not is_counted_ready(p))[:3]) or f"StatefulSet {self._workload(used)} to create pods"
        if (trouble := self.trouble([used])) is not None:
            return Answer("False", trouble.reason, f"{len(ready)} of {wanted} {used} workers are ready{note}: {trouble.message}")
        return Answer("False", "WorkersStarting", f"{len(ready)} of {wanted} {used} workers are ready{note}; waiting for {waiting}")

    def _workload(self, role: str) -> str:
        return names.workload_name(self.observed.key.name, self.target, role)

    def router(self) -> Answer:
        """Is there a router that knows the cluster?"""
        routers = self.observed.routers
        if not routers:
            return Answer(
                "False", "NoRouter", f"no router pod runs; check kubectl get deployment -A -l {names.LABEL_COMPONENT}={names.COMPONENT_ROUTER}"
            )
        good = [r for r in routers if not r.error and r.is_synced]
        bad = "; ".join(f"{r.pod}: {r.error or 'not synced yet'}" for r in routers if r.error or not r.is_synced)
        if not good:
            return Answer("False", "RouterUnreachable", f"no router answers: {bad}; check kubectl logs of the router pods")
        return Answer("True", "Answering", f"{len(good)} of {len(routers)} routers answer" + (f"; {bad}" if bad else ""))

    def scheduled(self) -> Answer:
        """Has every pod of the target a node?"""
        if self.is_off():
            return _off()
        trouble = self.trouble()
        if trouble is not None and trouble.reason in _SCHEDULING:
            return Answer("False", trouble.reason, trouble.message)
        missing = [r for r, n in self.goal.items() if len([p for p in self.pods(r) if p.is_scheduled]) < n]
        if missing or not self.goal:
            return Answer("Unknown", "PodsPending", "not all pods of the target revision have been given a node yet")
        return Answer("True", "AllScheduled", "all pods of the target revision have a node")

    def complete(self) -> Answer:
        """Does the target revision have everything, and is nothing left of others?"""
        if self.phase is Phase.COMPLETE:
            return Answer("True", "Complete", f"only revision {self.target} runs, with all of its workers")
        return Answer("False", self.phase.value if self.phase else "NoPlan", self._phase_text())

    def _phase_text(self) -> str:
        draining = self.plan.draining if self.plan is not None else ()
        if self.phase is Phase.STARTING:
            return f"workers of revision {self.target} are starting"
        if self.phase is Phase.SWITCHING:
            return f"new requests go over to revision {self.target}"
        if self.phase is Phase.DRAINING:
            return "workers that are to go finish their requests" + (f": {', '.join(sorted(draining)[:5])}" if draining else "")
        if self.phase is Phase.COMPLETE:
            return f"revision {self.target} runs as asked for"
        return "the spec could not be turned into workers"

    def progressing(self) -> Answer:
        """Is something changing, or does it need somebody?"""
        if self.hindrance is not None:
            return Answer("False", self.hindrance.reason, self.hindrance.message)
        if self.phase is Phase.COMPLETE:
            return Answer("False", "Complete", self._phase_text())
        trouble = self.trouble()
        if trouble is not None and trouble.is_lasting and self.phase is Phase.STARTING:
            return Answer("False", trouble.reason, trouble.message)
        return Answer("True", self.phase.value if self.phase else "NoPlan", self._phase_text())

    def available(self, router: Answer) -> Answer:
        """Can it be called now: do routers have it, and did a request go through?"""
        if self.traffic is None:
            return self._unavailable()
        state = state_of(self.observed, self.traffic)
        if not state.is_serving:
            return self._unavailable()
        if not router.is_true:
            return Answer("False", router.reason, router.message)
        if routing_address(self.observed, self.traffic) is None:
            text = f"workers of revision {self.traffic} are ready, but no router lists one of each role as ready yet"
            return Answer("False", "WorkersNotRouted", text)
        probe = self.observed.probes.get(self.traffic)
        names_text = f"as model {self._served()}"
        serving = Answer("True", "Serving", f"{self.url} answers {names_text}")
        if probe is None:
            pending = Answer("False", "ProbePending", f"a request through revision {self.traffic} is under way")
            return serving if was_available(self.observed, self.traffic) else pending
        if not probe.is_ok:
            return Answer("False", "ProbeFailed", f"a request through revision {self.traffic} failed: {probe.error}; see the logs of its workers")
        return serving

    def _served(self) -> str:
        key = self.observed.key
        full = f"{key.namespace}/{key.name}"
        if self.observed.name_holder:
            return f"{full} (the short name {self._short()} belongs to the older service {self.observed.name_holder})"
        return f"{self._short()} or {full}"

    def _short(self) -> str:
        return str((self.observed.spec.get("model") or {}).get("name") or self.observed.key.name)

    def _unavailable(self) -> Answer:
        if self.is_off():
            return _off()
        if self.plan is None and self.hindrance is not None:
            return Answer("False", self.hindrance.reason, self.hindrance.message)
        if (trouble := self.trouble()) is not None:
            return Answer("False", trouble.reason, trouble.message)
        return Answer("False", "WorkersStarting", "no revision has a ready worker of each role yet")

    def ready(self, found: Mapping[str, Answer]) -> Answer:
        """Available, and all of the target revision?"""
        if self.hindrance is not None:
            return Answer("False", self.hindrance.reason, self.hindrance.message)
        if self.is_off():
            return _off()
        trouble = self.trouble()
        if not found["Available"].is_true and (self.phase is not Phase.STARTING or trouble is None):
            return Answer("False", found["Available"].reason, found["Available"].message)
        if self.phase is not Phase.COMPLETE:
            answer = found["RolloutComplete"] if trouble is None else Answer("False", trouble.reason, trouble.message)
            if self.phase is Phase.STARTING and found["Available"].is_true and self.traffic != self.target:
                # The counts speak of the new revision; the reason says that this is no outage.
                reason = "RollingOut" if trouble is None else answer.reason
                return Answer("False", reason, f"revision {self.traffic} serves meanwhile; {answer.message}")
            return Answer("False", answer.reason, answer.message)
        if self.observed.name_holder and (self.observed.spec.get("model") or {}).get("name"):
            key = self.observed.key
            text = f"model.name {self._short()} belongs to the older service {self.observed.name_holder}"
            return Answer("False", "NameConflict", f"{text}; choose another, or send {key.namespace}/{key.name} as model")
        return Answer("True", "Ready", found["Available"].message)


_SCHEDULING: Final = ("Unschedulable", "QuotaExceeded", "PodSecurityRefused", "PodsNotCreated")


def _create_reason(text: str) -> str:
    if "exceeded quota" in text:
        return "QuotaExceeded"
    return "PodSecurityRefused" if "violates PodSecurity" in text else "PodsNotCreated"


def _off() -> Answer:
    return Answer("False", "ScaledToZero", "the spec asks for 0 workers; set replicas above 0 to serve")
