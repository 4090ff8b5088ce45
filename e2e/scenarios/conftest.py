"""Fixtures of the scenarios: the installed product, the quickstart's service, services to hurt."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import yaml

from fleet_testing.fleet import RESOURCES, Fleet, manifest, simulated

ROOT = Path(__file__).resolve().parents[2]
BUNDLED = "smollm2-135m-instruct"


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The bundled model on this machine."""
    folder = Path(os.environ.get("RADIXFLEET_MODELS", Path.home() / ".cache/radixfleet/models")) / BUNDLED
    assert folder.is_dir(), f"{folder} is missing; run `make setup`"
    return folder


@pytest.fixture(scope="session")
def quickstart(fleet: Fleet) -> Iterator[None]:
    """The service of examples/quickstart.yaml, Ready."""
    text = (ROOT / "examples/quickstart.yaml").read_text()
    fleet.kubectl("apply", "-f", "-", input=text)
    fleet.wait_ready("chat", "default", within_s=300)
    yield
    fleet.kubectl("delete", "infsvc", "chat", "-n", "default", "--timeout=60s")


@pytest.fixture(scope="session")
def unified(fleet: Fleet) -> Iterator[str]:
    """The bundled model on one unified worker with the quickstart's engine; the model name to ask for."""
    engine = next(d for d in yaml.safe_load_all((ROOT / "examples/quickstart.yaml").read_text()) if d["kind"] == "InferenceService")["spec"]["engine"]
    fleet.apply(manifest("alone", "default", model={"uri": f"bundled://{BUNDLED}"}, engine=engine, unified={"replicas": 1, "resources": RESOURCES}))
    fleet.wait_ready("alone", "default", within_s=300)
    yield "default/alone"
    fleet.kubectl("delete", "infsvc", "alone", "-n", "default", "--timeout=60s")


def _namespace(fleet: Fleet, name: str) -> Iterator[str]:
    fleet.kubectl("create", "namespace", name)
    yield name
    fleet.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture
def other_namespace(fleet: Fleet, namespace: str) -> Iterator[str]:
    """A second namespace for one test."""
    yield from _namespace(fleet, f"{namespace}-b")


@pytest.fixture(scope="module")
def victims(fleet: Fleet) -> Iterator[str]:
    """A namespace with a slow simulated service `victim`, one prefill and one decode, for tests that hurt it."""
    for name in _namespace(fleet, "victims"):
        fleet.apply(simulated("victim", name, prefill=1, decode=1, args={"simulated-step-base-ms": "20"}))
        fleet.wait_ready("victim", name)
        yield name


@pytest.fixture
def freeze_router(fleet: Fleet) -> Callable[[signal.Signals], AbstractContextManager[None]]:
    """Stops all processes of the routers for a while, as a hung node would."""

    @contextmanager
    def frozen(number: signal.Signals) -> Iterator[None]:
        assert number == signal.SIGSTOP
        pods = fleet.routers()
        script = "for d in /proc/[0-9]*; do p=${d#/proc/}; [ $p != 1 ] && [ $p != $$ ] && kill -%s $p; done; true"
        for pod in pods:
            fleet.kubectl("exec", "-n", pod["metadata"]["namespace"], pod["metadata"]["name"], "--", "sh", "-c", script % "STOP")
        try:
            yield
        finally:
            for pod in pods:
                fleet.kubectl("exec", "-n", pod["metadata"]["namespace"], pod["metadata"]["name"], "--", "sh", "-c", script % "CONT")

    return frozen
