"""The modules of the data path as machine code: compiled from this very Python by mypyc, used when a build of exactly these sources is there.

`python -m fleet_router.compile` builds; `make setup` calls it. A build is named by what it is made of, so that a changed source file runs
interpreted until the next build and never beside stale code. Modules whose structures are decoded stay out of it: compiled, they have lost what is
inside their lists. `RADIXFLEET_COMPILED=0` runs all of it interpreted: the same, slower.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Final

from fleet_contract.cache_folder import cache_folder
from fleet_contract.names import COMPILED_DIR, ENV_COMPILED

GROUP: Final = "fleet_router__mypyc"  # the library that holds the code of all modules
MODULES: Final = (
    "fleet_contract.prefix",
    "fleet_contract.wire",
    "fleet_router.alarms",
    "fleet_router.api.body",
    "fleet_router.api.canonical",
    "fleet_router.api.dialects",
    "fleet_router.api.paths",
    "fleet_router.api.sse",
    "fleet_router.brain.brain",
    "fleet_router.brain.desk_server",
    "fleet_router.brain.worker",
    "fleet_router.counters",
    "fleet_router.decide.fleet",
    "fleet_router.decide.history",
    "fleet_router.decide.index",
    "fleet_router.decide.keys",
    "fleet_router.decide.lives",
    "fleet_router.decide.load",
    "fleet_router.decide.queue",
    "fleet_router.decide.retry",
    "fleet_router.decide.rivals",
    "fleet_router.decide.rule",
    "fleet_router.decide.shares",
    "fleet_router.decide.told",
    "fleet_router.desk",
    "fleet_router.edge.access",
    "fleet_router.edge.callers",
    "fleet_router.edge.encoders",
    "fleet_router.edge.handling",
    "fleet_router.edge.quota",
    "fleet_router.edge.relay",
    "fleet_router.edge.remote_desk",
    "fleet_router.edge.running",
    "fleet_router.edge.service",
    "fleet_router.edge.token_rates",
    "fleet_router.edge.trace_context",
    "fleet_router.engines.base",
    "fleet_router.engines.kinds",
    "fleet_router.engines.openai_worker",
    "fleet_router.engines.radixfleet",
    "fleet_router.errors",
    "fleet_router.http.chunk",
    "fleet_router.http.client",
    "fleet_router.http.exchange",
    "fleet_router.http.head",
    "fleet_router.http.held",
    "fleet_router.http.outbox",
    "fleet_router.http.request",
    "fleet_router.http.server",
    "fleet_router.identifiers",
    "fleet_router.link",
    "fleet_router.revisions",
    "fleet_router.table",
    "fleet_text.chains",
    "fleet_text.chat",
    "fleet_text.outlines",
    "fleet_text.words",
)
SUFFIX: Final = importlib.machinery.EXTENSION_SUFFIXES[0]


@cache
def folder_of(package: str) -> Path:
    """Of a package of ours. `fleet_router` and its siblings may lie side by side or in rooms of their own."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations, package
    return Path(spec.submodule_search_locations[0])


def source_of(module: str) -> Path:
    """The file of a module of ours; it is not imported."""
    package, *rest = module.split(".")
    return folder_of(package).joinpath(*rest).with_suffix(".py")


@cache
def key() -> str:
    """Names what a build is made of: the sources and the kind of interpreter. Which compiler made it does not matter."""
    digest = hashlib.sha256(SUFFIX.encode())
    for module in MODULES:
        digest.update(module.encode() + b"\0" + source_of(module).read_bytes())
    return digest.hexdigest()[:16]


def places() -> list[Path]:
    """Where builds are looked for: the image's folder, then this user's cache."""
    return [Path(COMPILED_DIR), cache_folder() / "compiled"]


def find_build() -> Path | None:
    """The folder of the build of these sources; None when there is none."""
    for place in places():
        folder = place / key()
        if (folder / f"{GROUP}{SUFFIX}").is_file():
            return folder
    return None


class _Finder:
    """Gives the compiled form of modules; put before Python's own finders."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names = frozenset((GROUP, *MODULES))

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        if name not in self.names:
            return None
        file = str(self.folder / f"{name}{SUFFIX}")
        return importlib.util.spec_from_file_location(name, file, loader=importlib.machinery.ExtensionFileLoader(name, file))


def use() -> None:
    """From now on the modules are imported compiled, where a build is there. Called before any of them is imported."""
    if os.environ.get(ENV_COMPILED) != "0" and not is_used() and (folder := find_build()) is not None:
        sys.meta_path.insert(0, _Finder(folder))


def is_used() -> bool:
    """Whether this process runs compiled."""
    return any(isinstance(f, _Finder) for f in sys.meta_path)
