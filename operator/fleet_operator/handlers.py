"""kopf as event source, and nothing more: low-level event handlers that hand each event to the inbox. The only module beside `__main__`
that knows kopf.

No create, update, delete or timer handlers: those bring finalizers, annotations and a state of their own.
"""

from __future__ import annotations

import logging
from typing import Any, Final

import kopf

from fleet_contract import names
from fleet_operator.loops import Inbox
from fleet_operator.settings import Settings

_OWNED: Final = (("apps", "v1", "statefulsets"), ("apps", "v1", "controllerrevisions"), ("", "v1", "services"), ("", "v1", "configmaps"))
_POD_SELECTOR: Final = f"{names.LABEL_NAME}={names.APP_NAME},{names.LABEL_COMPONENT} in ({names.COMPONENT_ROUTER},{names.COMPONENT_WORKER})"


def build_registry(inbox: Inbox, settings: Settings) -> kopf.OperatorRegistry:
    """Handlers of the service's kind, of every kind that we make, and of pods."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    def login(settings: kopf.OperatorSettings, **_: Any) -> Any:
        return kopf.login_with_service_account(settings=settings) or kopf.login_with_kubeconfig(settings=settings)

    @kopf.on.event(names.API_GROUP, names.API_VERSION, names.PLURAL, registry=registry)
    async def on_service(event: Any, **_: Any) -> None:
        inbox.service(event["object"], is_deleted=event["type"] == "DELETED")

    async def on_child(event: Any, **_: Any) -> None:
        meta = event["object"]["metadata"]
        if service := (meta.get("labels") or {}).get(names.LABEL_SERVICE):
            inbox.child(meta["namespace"], service)

    async def on_pod(event: Any, **_: Any) -> None:
        labels = event["object"]["metadata"].get("labels") or {}
        if labels.get(names.LABEL_COMPONENT) == names.COMPONENT_ROUTER:
            inbox.router()
        else:
            await on_child(event)

    for group, version, plural in _OWNED:
        kopf.on.event(group, version, plural, registry=registry, id=f"on_{plural}")(on_child)
    kopf.on.event("", "v1", "pods", registry=registry, id="on_pods")(on_pod)
    return registry


def build_settings() -> kopf.OperatorSettings:
    """kopf without anything that writes: it posts no events, keeps no progress, and never falls silent for long."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.peering.standalone = True
    settings.watching.inactivity_timeout = 70
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 330
    settings.watching.connect_timeout = 10
    settings.watching.chunk_size = 200
    settings.networking.connect_timeout = 10
    settings.networking.request_timeout = 60
    settings.queueing.worker_limit = 64
    settings.execution.max_workers = 2
    settings.persistence.finalizer = f"{names.API_GROUP}/finalizer"
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=f"kopf.{names.API_GROUP}")
    settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=f"kopf.{names.API_GROUP}")
    selector = f"{names.LABEL_MANAGED_BY}={names.MANAGED_BY}"
    for group, version, plural in _OWNED:
        settings.watching.label_selectors[group, version, plural] = selector
    settings.watching.label_selectors["", "v1", "pods"] = _POD_SELECTOR
    return settings


async def watch(inbox: Inbox, settings: Settings) -> None:
    """Runs kopf until a signal asks the process to stop, or a watch fails for good."""
    logging.getLogger("kopf").setLevel(logging.WARNING)
    await kopf.operator(
        registry=build_registry(inbox, settings),
        settings=build_settings(),
        standalone=True,
        clusterwide=not settings.watch_namespaces,
        namespaces=settings.watch_namespaces,
    )
