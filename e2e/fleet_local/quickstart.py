"""What `make up` does after the set-up: cluster, chart, the quickstart's service, and one streamed chat through the router.

Each part looks first, so a second run changes nothing. `python -m fleet_local.quickstart [--state DIR]`.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from fleet_contract.cache_folder import cache_folder
from fleet_contract.names import API_GROUP, LABEL_SERVICE, PLURAL
from fleet_local import binaries
from fleet_local.api import ClusterClient
from fleet_local.cluster import LocalCluster
from fleet_local.errors import ClusterError
from fleet_local.install import checkout, explain_pods, install_chart, local_values
from fleet_local.layout import default_state
from fleet_local.locks import one_at_a_time
from fleet_local.steps import Outcome, Progress

NAMESPACE: Final = "default"
SERVICE: Final = "chat"
QUESTION: Final = "What is the capital of France?"
_AVAILABLE_LIMIT_S: Final = 600.0
_CHAT_LIMIT_S: Final = 120.0


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 answered, 1 something failed (said in the last lines), 130 interrupted."""
    parser = argparse.ArgumentParser(prog="make up", description="A cluster, the chart, one service, one chat.")
    parser.add_argument("--state", type=Path, default=default_state())
    options = parser.parse_args(argv)
    try:
        run(LocalCluster(options.state))
    except ClusterError as e:
        print(f"make up: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("make up: interrupted; run it again and it goes on", file=sys.stderr)
        return 130
    return 0


def run(cluster: LocalCluster) -> None:
    """Brings everything up and asks. Raises ClusterError."""
    progress = Progress(lambda text: print(text, flush=True))

    def timed(name: str, work: Callable[[], str | None]) -> None:
        started = time.monotonic()
        note = work()
        progress.step(Outcome(name, time.monotonic() - started, note))

    root = checkout()
    lock = cache_folder() / "locks" / f"make-up-{cluster.layout.id}"
    with one_at_a_time(lock, lambda: progress.say("another `make up` works on this cluster; waiting for it")):
        cluster.up()
        timed("helm", lambda: _helm(progress))
        timed("chart", lambda: "installed" if install_chart(cluster, root, local_values()) else None)
        timed("service", lambda: _apply(cluster, root / "examples" / "quickstart.yaml"))
        timed("available", lambda: wait_available(cluster, NAMESPACE, SERVICE, progress.say))
    print(f"\n> {QUESTION}\n", flush=True)
    asked = time.monotonic()
    answered = ask(cluster.router_url, f"{NAMESPACE}/{SERVICE}", QUESTION, lambda text: print(text, end="", flush=True))
    print(f"\n\n({answered} chunks in {time.monotonic() - asked:.1f} s)\n\n{_what_next(cluster)}", flush=True)


def _helm(progress: Progress) -> str | None:
    binaries.ensure("helm", lambda text: progress.say(f"  {text}"))
    return None


def _apply(cluster: ClusterClient, path: Path) -> str | None:
    said = cluster.kubectl("apply", "-f", str(path)).stdout.splitlines()
    changed = [line for line in said if not line.endswith(" unchanged")]
    return ", ".join(changed) or None


def wait_available(
    cluster: ClusterClient, namespace: str, name: str, say: Callable[[str], None], *, limit_s: float = _AVAILABLE_LIMIT_S
) -> str | None:
    """Waits until the service is Available for its present generation, and tells when the reason changes. Raises ClusterError with the causes."""
    started, told = time.monotonic(), ""
    while True:
        service = cluster.get(f"{PLURAL}.{API_GROUP}", name, "-n", namespace)
        reason = why_not_available(service)
        if reason is None:
            return None if not told else "Available"
        if reason != told:
            say(f"  … {reason}")
            told = reason
        if time.monotonic() - started > limit_s:
            causes = explain(cluster, service)
            raise ClusterError(f"the service {namespace}/{name} is not Available after {limit_s:.0f} s\n{causes}")
        time.sleep(0.3)


def why_not_available(service: Mapping[str, Any]) -> str | None:
    """None when the service is Available; else the most telling condition in words. Pure."""
    generation = service["metadata"].get("generation")
    conditions = {c["type"]: c for c in service.get("status", {}).get("conditions") or []}
    available = conditions.get("Available")
    if available is None:
        return "the operator has not looked at it yet"
    if available.get("observedGeneration", generation) != generation:
        return "the operator has not looked at the newest change yet"
    if available["status"] == "True":
        return None
    return f"{available.get('reason', '')}: {available.get('message', '')}"


def explain(cluster: ClusterClient, service: Mapping[str, Any]) -> str:
    """All conditions and what the service's pods say."""
    meta = service["metadata"]
    conditions = service.get("status", {}).get("conditions") or []
    lines = [f"  {c['type']}={c['status']} {c.get('reason', '')}: {c.get('message', '')}" for c in conditions]
    return "\n".join([*lines, explain_pods(cluster, meta["namespace"], f"{LABEL_SERVICE}={meta['name']}")])


def ask(url: str, model: str, question: str, write: Callable[[str], None]) -> int:
    """One streamed chat; writes the text as it comes and returns the number of chunks with text. Raises ClusterError."""
    body = {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": 48, "temperature": 0, "stream": True}
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port, timeout=_CHAT_LIMIT_S)
    chunks = 0
    try:
        connection.request("POST", f"{parts.path}/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise ClusterError(f"the chat was answered with {response.status}: {response.read(2000).decode(errors='replace')}")
        for event in events(response):
            if error := event.get("error"):
                raise ClusterError(f"the stream ended with an error: {error.get('message')}")
            for choice in event.get("choices", []):
                if text := choice.get("delta", {}).get("content"):
                    chunks += 1
                    write(text)
    except (OSError, http.client.HTTPException) as e:
        raise ClusterError(
            f"the chat at {url} broke: {e!r}; see `radixfleet local kubectl logs -n radixfleet-system deploy/radixfleet-router`"
        ) from e
    finally:
        connection.close()
    if not chunks:
        raise ClusterError(f"the chat at {url} brought no text")
    return chunks


def events(lines: Iterator[bytes] | http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON events of a server-sent stream. Raises ClusterError when it ends without [DONE], unless an error event came first."""
    failed = False
    for line in lines:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        event: dict[str, Any] = json.loads(data)
        failed = failed or "error" in event
        yield event
    if not failed:
        raise ClusterError("the stream ended without [DONE]")


def _what_next(cluster: LocalCluster) -> str:
    kubeconfig, url = cluster.kubeconfig, cluster.router_url
    state = "" if cluster.layout.state == default_state() else f" --state {cluster.layout.state}"
    local = f".venv/bin/radixfleet local{state}"
    return f"""endpoint   {url}
kubectl    {local} kubectl get infsvc,pods     (or: export KUBECONFIG={kubeconfig})

What to try next:
  curl {url}/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "{NAMESPACE}/{SERVICE}", "messages": [{{"role": "user", "content": "Name three colours."}}], "temperature": 0, "stream": true}}'
  {local} kubectl explain infsvc.spec
  {local} kubectl patch infsvc {SERVICE} --type merge -p '{{"spec":{{"decode":{{"replicas":2}}}}}}'
  {local} kubectl logs -n radixfleet-system deploy/radixfleet-router
  {local} status          {"make" if not state else local} down"""


if __name__ == "__main__":
    sys.exit(main())
