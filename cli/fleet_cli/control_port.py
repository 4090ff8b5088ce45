"""Asks a router's control port: what `top` and `route explain` show comes from there."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any, Final

from fleet_contract import names

DEFAULT_URL: Final = f"http://127.0.0.1:{names.ROUTER_CONTROL_PORT}"
URL_HELP: Final = (
    f"control port of a router (default {DEFAULT_URL}; in a cluster first: "
    f"kubectl -n NAMESPACE port-forward deploy/radixfleet-router {names.ROUTER_CONTROL_PORT})"
)
TIMEOUT_S: Final = 10.0


class ControlError(Exception):
    """The router does not answer, or refuses; the message says why and what to do."""


def ask(url: str, path: str, body: bytes | None = None) -> Any:
    """GET, or POST with a body; the JSON of the answer. Raises ControlError."""
    where = url.rstrip("/") + path
    try:
        request = urllib.request.Request(where, data=body, headers={"Content-Type": "application/json"} if body is not None else {})
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as e:
        said = _message(e.read())
        if e.code == 404 and path in said:  # the path itself is not there: the data port, or a worker
            raise ControlError(f"{url} is no control port of a router: it has no {path}; --url takes the {URL_HELP}") from e
        raise ControlError(f"{where} answers {e.code}: {said}") from e
    except ValueError as e:
        raise ControlError(f"{where} gives no JSON ({e}): is --url the control port of a radixfleet router?") from e
    except OSError as e:
        reason = getattr(e, "reason", e)
        raise ControlError(f"{where} does not answer: {reason}; --url takes the {URL_HELP}") from e


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")


def table(head: Sequence[str], rows: Sequence[Sequence[object]], *, width: int = 0) -> list[str]:
    """Lines of a plain table; columns whose title starts with `>` are aligned to the right. `width` 0: as wide as it gets."""
    right = [title.startswith(">") for title in head]
    cells = [[title.lstrip(">") for title in head], *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = ["  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)).rstrip() for row in cells]
    return [line[:width] if width else line for line in lines]


def seconds(value: float | None) -> str:
    """A time for people."""
    if value is None:
        return "-"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"
