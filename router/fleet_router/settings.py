"""The flags of `radixfleet-router`, read once into one frozen object that every process gets."""

from __future__ import annotations

import argparse
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from msgspec import Struct

from fleet_contract import names
from fleet_contract.access import check_tls_files, parse_keys, parse_origins
from fleet_contract.cpus import find_threads
from fleet_contract.memory import memory_limit_bytes
from fleet_contract.otlp import check_otlp_endpoint
from fleet_router.target import BadTarget, Target, parse_target

MAX_QUEUE_TIMEOUT_S = 30.0
MAX_WORKERS = 64
# A pod's defaults: kube-proxy and load balancers learn late that it ends, and streams may be long (the chart's grace is 300 s).
POD_DRAIN_DELAY_S = 3.0
POD_DRAIN_TIMEOUT_S = 280.0


class BadFlag(ValueError):
    """The command line is wrong; the message says which flag, what it got, what is allowed."""


class Settings(Struct, frozen=True):
    """Resolved settings. Times in seconds."""

    router_id: str = "router"
    kubernetes: bool = False
    kubeconfig: str = ""
    static: tuple[str, ...] = ()
    host: str = "0.0.0.0"
    data_port: int = names.ROUTER_DATA_PORT
    control_host: str = "0.0.0.0"
    control_port: int = names.ROUTER_CONTROL_PORT
    max_body_bytes: int = 64 << 20
    max_held_bytes: int = 1 << 30  # of all edges together
    max_head_bytes: int = 32 << 10
    head_timeout: float = 15.0
    body_timeout: float = 30.0
    idle_timeout: float = 75.0
    write_timeout: float = 60.0
    queue_timeout: float = 4.0
    busy_timeout: float = 60.0
    max_queue: int = 1024
    first_token_timeout: float = 120.0
    silence_timeout: float = 60.0
    answer_timeout: float = 3600.0
    drain_timeout: float = 60.0
    drain_delay: float = 0.0
    poll_interval: float = 1.0
    relist_interval: float = 300.0
    api_key_file: str = ""
    tls_cert_file: str = ""
    tls_key_file: str = ""
    cors_origins: str = ""
    otlp_endpoint: str = ""
    workers: int = 1
    peer_port: int = -1  # below 0: there are no other routers
    peers: tuple[str, ...] = ()
    hang_timeout: float = 20.0
    announce: str = ""
    log_level: str = "info"


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.05 <= value <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} given; seconds between 0.05 and 86400 are allowed")
    return value


def _delay(text: str) -> float:
    return 0.0 if text in ("0", "0.0") else _seconds(text)


def _queue_seconds(text: str) -> float:
    value = 0.0 if text in ("0", "0.0") else _seconds(text)
    if value > MAX_QUEUE_TIMEOUT_S:
        raise argparse.ArgumentTypeError(f"{text!r} given; at most {MAX_QUEUE_TIMEOUT_S:g} seconds are allowed")
    return value


def _count(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit()) or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text!r} given; a number between {low} and {high} is allowed")
        return int(text)

    return parse


def _workers(text: str) -> int:
    if text == "auto":
        return min(MAX_WORKERS, find_threads(0))
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text) <= MAX_WORKERS:
        raise argparse.ArgumentTypeError(f"{text!r} given; a number between 1 and {MAX_WORKERS}, or auto, is allowed")
    return int(text)


# Flag, how it is read, what it means. Grouped as --help shows them; defaults are those of Settings.
_FLAGS: Final[dict[str, tuple[tuple[str, Callable[[str], object], str, str], ...]]] = {
    "addresses (port 0: any free one, see --announce)": (
        ("host", str, "ADDRESS", "address of the data port"),
        ("data_port", _count(0, 65535), "PORT", "OpenAI API"),
        ("control_host", str, "ADDRESS", "address of the control port"),
        ("control_port", _count(0, 65535), "PORT", "health, metrics, tables"),
    ),
    "limits": (
        ("max_body_bytes", _count(1024, 1 << 30), "BYTES", "largest request body"),
        ("max_held_bytes", _count(0, 1 << 40), "BYTES", "request bodies held at once, by all --workers together; 0: a quarter of the memory"),
        ("max_head_bytes", _count(1024, 1 << 20), "BYTES", "longest request head"),
        ("head_timeout", _seconds, "SECONDS", "for a request's head"),
        ("body_timeout", _seconds, "SECONDS", "for a request's body"),
        ("idle_timeout", _seconds, "SECONDS", "for the next request of a connection"),
        ("write_timeout", _seconds, "SECONDS", "that a client may leave an answer unread"),
        ("queue_timeout", _queue_seconds, "SECONDS", "that a request waits for a ready worker; at most 30"),
        ("busy_timeout", _seconds, "SECONDS", "that a request waits while all ready workers are busy"),
        ("max_queue", _count(0, 1_000_000), "N", "requests that wait so, per service"),
        ("first_token_timeout", _seconds, "SECONDS", "until a worker's first token"),
        ("silence_timeout", _seconds, "SECONDS", "between two parts of a worker's stream"),
        ("answer_timeout", _seconds, "SECONDS", "for the whole of an answer that comes in one piece, while its worker is well"),
    ),
    "who may call the data port (files are read again when they change)": (
        ("api_key_file", str, "FILE", "API keys, one a line: plain, sha256:<hex>, or a JSON object with limits; empty: none is asked for"),
        ("tls_cert_file", str, "FILE", "PEM certificate; with --tls-key-file the port speaks TLS"),
        ("tls_key_file", str, "FILE", "PEM key of that certificate"),
        ("cors_origins", str, "ORIGINS", "origins of browser pages that may call, with commas between; * for all"),
    ),
    "traces": (("otlp_endpoint", str, "URL", "OpenTelemetry collector that gets a trace of each request, like http://127.0.0.1:4318; empty: none"),),
    "life": (
        ("workers", _workers, "N", "processes that speak HTTP; more than 1: one more decides for all; auto: one per CPU"),
        ("drain_timeout", _seconds, "SECONDS", "for running requests after SIGTERM"),
        ("drain_delay", _delay, "SECONDS", "after SIGTERM not ready but accepting, until no request has come for so long (load balancers know)"),
        ("hang_timeout", _delay, "SECONDS", "after which a process of the router that could run and does not react is replaced; 0: never"),
        ("poll_interval", _seconds, "SECONDS", "between two health checks of a worker"),
        ("relist_interval", _seconds, "SECONDS", "between two full lists from the API server"),
    ),
}


_FROM_MACHINE: Final = ("max_held_bytes",)  # 0, the default, is resolved in `parse`
_POD_DEFAULTS: Final = {"drain_delay": POD_DRAIN_DELAY_S, "drain_timeout": POD_DRAIN_TIMEOUT_S}


def split_url(url: str) -> Target:
    """A static worker. Raises BadFlag."""
    try:
        return parse_target(url)
    except BadTarget as e:
        raise BadFlag(f"--static has {e}") from e


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise BadFlag(f"{message}; see radixfleet-router --help")


def build_parser() -> argparse.ArgumentParser:
    """All flags with their help."""
    d = Settings()
    about_us = "One OpenAI endpoint for a fleet of workers, chosen by cached prefix and load."
    p = _Parser("radixfleet-router", description=about_us, allow_abbrev=False)
    where = p.add_argument_group("where workers come from (one of)")
    where.add_argument("--kubernetes", action="store_true", help="InferenceServices and worker pods of the cluster")
    where.add_argument("--kubeconfig", default="", metavar="FILE", help="with --kubernetes: this file instead of the pod's service account")
    where.add_argument(
        "--static",
        action="append",
        default=[],
        metavar="URL[,URL...]",
        help="internal URLs of runtimes, or vllm+http://HOST:PORT and sglang+http://HOST:PORT; may be repeated; '': see POST /workers",
    )
    peers = p.add_argument_group("other routers in front of the same workers: each counts what the others do")
    default_port = f"where they are told (default {names.ROUTER_PEER_PORT} with --kubernetes or --peers)"
    peers.add_argument("--peer-port", type=_count(0, 65535), metavar="PORT", help=default_port)
    peers.add_argument(
        "--peers", action="append", default=[], metavar="HOST:PORT[,HOST:PORT...]", help="with --static: their peer ports; our own may be among them"
    )
    for title, flags in _FLAGS.items():
        group = p.add_argument_group(title)
        for name, read, unit, text in flags:
            default = getattr(d, name)
            shown = f"{default}, with --kubernetes {_POD_DEFAULTS[name]}" if name in _POD_DEFAULTS else default
            used = None if name in _POD_DEFAULTS else default
            if name in _FROM_MACHINE:
                used = shown = 0
            group.add_argument(
                "--" + name.replace("_", "-"), type=read, default=used, metavar=unit, help=text if shown == "" else f"{text} (default {shown})"
            )
    about = p.add_argument_group("about this process")
    about.add_argument("--announce", default="", metavar="FILE", help='gets {"dataPort", "controlPort", "pid"} once both ports are bound')
    about.add_argument("--router-id", default="", metavar="ID", help=f"name of this router (default ${names.ENV_POD_NAME}, else random)")
    levels = ("debug", "info", "warning", "error")
    about.add_argument("--log-level", choices=levels, default=d.log_level, help=f"least level that is logged (default {d.log_level})")
    return p


def _check_access(api_key_file: str, tls_cert_file: str, tls_key_file: str, cors_origins: str, otlp_endpoint: str) -> None:
    """What the edge will read at its start. Raises BadFlag."""
    try:
        check_tls_files(tls_cert_file, tls_key_file)
        parse_origins(cors_origins)
        if otlp_endpoint:
            check_otlp_endpoint(otlp_endpoint)
    except ValueError as e:
        raise BadFlag(str(e)) from e
    if api_key_file:
        try:
            parse_keys(Path(api_key_file).read_text())
        except (OSError, ValueError) as e:
            raise BadFlag(f"--api-key-file {api_key_file}: {e}") from e


def _held_bytes(given: int, max_body_bytes: int, workers: int) -> int:
    """Of all edges together. Raises BadFlag when that is less than one body for each."""
    least = max_body_bytes * workers
    if not given:
        return max(least, (memory_limit_bytes() or 4 * Settings().max_held_bytes) // 4)
    if given < least:
        raise BadFlag(f"--max-held-bytes is {given}; at least --max-body-bytes times --workers, {least}, is needed: each holds one body at least")
    return given


def _peers(given: list[str], port: int | None, *, in_cluster: bool) -> tuple[tuple[str, ...], int]:
    """Addresses of other routers, and our port for them; -1: none. Raises BadFlag."""
    peers = tuple(dict.fromkeys(a.strip() for part in given for a in part.split(",") if a.strip()))
    if peers and in_cluster:
        raise BadFlag("--peers needs --static: with --kubernetes the other routers are found")
    if in_cluster and port == 0:
        raise BadFlag("--peer-port 0 with --kubernetes: the other routers could not find it; give a port between 1 and 65535")
    for address in peers:
        host, _, number = address.rpartition(":")
        if not host or not (number.isascii() and number.isdigit() and 1 <= int(number) <= 65535) or (":" in host and host[0] + host[-1] != "[]"):
            raise BadFlag(f"--peers has {address!r}; HOST:PORT is needed, like router-1:{names.ROUTER_PEER_PORT} or [fd00::1]:8002")
    return peers, (names.ROUTER_PEER_PORT if in_cluster or peers else -1) if port is None else port


def parse(argv: Sequence[str]) -> Settings:
    """Reads the command line. Raises BadFlag with a sentence; `--help` prints and exits."""
    a = vars(build_parser().parse_args(argv))
    static = a.pop("static")
    urls = tuple(dict.fromkeys(u.strip() for part in static for u in part.split(",") if u.strip()))
    if a["kubernetes"] == bool(static):
        raise BadFlag("give one of --kubernetes and --static URL[,URL...]: where do workers come from?")
    if a["kubernetes"] and not a["kubeconfig"] and "KUBERNETES_SERVICE_HOST" not in os.environ:
        raise BadFlag("--kubernetes without --kubeconfig is for a pod with a service account; outside a cluster give --kubeconfig FILE")
    if a["kubeconfig"] and not a["kubernetes"]:
        raise BadFlag("--kubeconfig needs --kubernetes")
    keys = [split_url(url).key for url in urls]
    if twice := [key for key in dict.fromkeys(keys) if keys.count(key) > 1]:
        raise BadFlag(f"--static names {', '.join(twice)} more than once")
    a["peers"], a["peer_port"] = _peers(a["peers"], a["peer_port"], in_cluster=a["kubernetes"])
    for name, in_pod in _POD_DEFAULTS.items():
        if a[name] is None:
            a[name] = in_pod if a["kubernetes"] else getattr(Settings(), name)
    a["max_held_bytes"] = _held_bytes(a["max_held_bytes"], a["max_body_bytes"], a["workers"])
    _check_access(a["api_key_file"], a["tls_cert_file"], a["tls_key_file"], a["cors_origins"], a["otlp_endpoint"])
    router_id = a.pop("router_id") or os.environ.get(names.ENV_POD_NAME, "") or f"router-{secrets.token_hex(4)}"
    if len(router_id) > 100 or not all(c.isascii() and (c.isalnum() or c in "-._") for c in router_id):
        raise BadFlag(f"--router-id is {router_id[:100]!r}; up to 100 letters, digits and -._ are allowed")
    return Settings(router_id=router_id, static=urls, **a)
