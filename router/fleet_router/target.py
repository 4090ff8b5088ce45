"""A worker that a user names by URL: where it is, what kind of engine, and what it cannot tell itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qsl, urlsplit

from fleet_contract import names

NIXL: Final = "nixl"
MOONCAKE: Final = "mooncake"
TRANSFERS: Final = (NIXL, MOONCAKE)
_PORTS: Final = ("bootstrap", "events", "replay")
_WORDS: Final = ("role", "service", "revision", "transfer", "tokenizer", "key_env")


class BadTarget(ValueError):
    """The URL names no worker; the message says what it got and what is allowed."""


@dataclass(frozen=True, slots=True)
class Target:
    """One worker's address and what the user says of it. Ports: 0 = not there."""

    host: str
    port: int
    engine: str = names.ENGINE_OURS
    role: str = names.ROLE_UNIFIED
    service: str = ""
    revision: str = ""
    transfer: str = ""  # vLLM: how its KV travels
    bootstrap: int = 0
    events: int = 0
    replay: int = 0
    tokenizer: str = ""  # folder on the router's machine
    key_env: str = ""  # environment variable of the router with the worker's API key

    @property
    def key(self) -> str:
        """Names the worker in a router: `host:port`."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_target(url: str) -> Target:
    """Reads `http://HOST:PORT` (our runtime), `vllm+http://HOST:PORT?...` or `sglang+http://HOST:PORT?...`. Raises BadTarget."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        asked = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError as e:
        raise BadTarget(f"{url!r}: {e}") from e
    engine, _, scheme = parts.scheme.rpartition("+")
    engine = engine or names.ENGINE_OURS
    if scheme != "http" or engine not in names.ENGINES or not host or not port or parts.path not in ("", "/") or parts.username or parts.fragment:
        words = ", ".join(f"{w}=" for w in (*_WORDS, *_PORTS))
        ours = "http://HOST:PORT of a runtime's internal port is allowed, as in http://127.0.0.1:40001"
        raise BadTarget(f"{url!r}; {ours}, and for other engines vllm+http://HOST:PORT or sglang+http://HOST:PORT, with ? and {words}")
    values = dict(asked)
    if len(values) != len(asked):
        raise BadTarget(f"{url!r}: a word behind the ? is given twice")
    if values and engine == names.ENGINE_OURS:
        raise BadTarget(f"{url!r}: our runtime tells everything itself; nothing is allowed behind its port")
    return _checked(url, Target(host, port, engine), values)


def _checked(url: str, target: Target, values: dict[str, str]) -> Target:
    words: dict[str, str] = {}
    ports: dict[str, int] = {}
    for name, value in values.items():
        if name in _PORTS:
            if not (value.isascii() and value.isdigit()) or not 1 <= int(value) <= 65535:
                raise BadTarget(f"{url!r}: {name} is {value!r}; a port between 1 and 65535 is allowed")
            ports[name] = int(value)
        elif name in _WORDS:
            words[name] = value
        else:
            raise BadTarget(f"{url!r}: {name!r} is not known; allowed are {', '.join((*_WORDS, *_PORTS))}")
    role = words.get("role", names.ROLE_UNIFIED)
    if role not in names.ROLES:
        raise BadTarget(f"{url!r}: role is {role!r}; allowed are {', '.join(names.ROLES)}")
    transfer = words.get("transfer", "")
    if target.engine == names.ENGINE_VLLM and role != names.ROLE_UNIFIED:
        transfer = transfer or NIXL
    if transfer and (target.engine != names.ENGINE_VLLM or transfer not in TRANSFERS):
        raise BadTarget(f"{url!r}: transfer is {transfer!r}; for vLLM {' or '.join(TRANSFERS)} is allowed, for others nothing")
    if role == names.ROLE_PREFILL and (target.engine == names.ENGINE_SGLANG or transfer == MOONCAKE):
        ports.setdefault("bootstrap", names.RUNTIME_BOOTSTRAP_PORT)
    return Target(
        target.host, target.port, target.engine, role, words.get("service", ""), words.get("revision", ""), transfer,
        ports.get("bootstrap", 0), ports.get("events", 0), ports.get("replay", 0), words.get("tokenizer", ""), words.get("key_env", ""),
    )  # fmt: skip
