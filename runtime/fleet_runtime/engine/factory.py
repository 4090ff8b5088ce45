"""Makes the executor that `--executor` names. Called once by the scheduler process at its start.

Executors are back ends: each is imported only when it is chosen, so that `simulated` never loads torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Protocol

from fleet_contract.launch import RuntimeLaunch
from fleet_runtime.engine.base import Executor, Progress
from fleet_runtime.engine.memory import pages_in
from fleet_runtime.errors import StartError
from fleet_runtime.models.files import SIMULATED


class Maker(Protocol):
    """Makes one kind of executor."""

    def __call__(self, flags: RuntimeLaunch, model_folder: Path | None, threads: int, progress: Progress) -> Executor: ...


def make_executor(flags: RuntimeLaunch, model_folder: str | Path | None, threads: int, progress: Progress) -> Executor:
    """A ready executor: weights loaded, pages reserved, warmed up.

    Args: model_folder: of `models.files.resolve_model`; empty or None for simulated://. threads: for arithmetic. progress: percent and words.
    Raises StartError(ModelInvalid | OutOfMemory | BadFlag).
    """
    simulated = flags.model.startswith(SIMULATED)
    name = flags.executor if flags.executor != "auto" else "simulated" if simulated else "torch"
    if (name == "simulated") != simulated:
        raise StartError(
            "BadFlag",
            f"--executor is {flags.executor!r} and --model is {flags.model!r}: the simulated executor goes with simulated:// and only with it",
        )
    return EXECUTORS[name](flags, Path(model_folder) if model_folder else None, threads, progress)


def _make_simulated(flags: RuntimeLaunch, model_folder: Path | None, threads: int, progress: Progress) -> Executor:
    from fleet_runtime.engine.simulated import SimulatedExecutor

    del model_folder, threads
    executor = SimulatedExecutor.from_flags(flags, progress)
    pages_in(flags.kv_cache_memory, executor.layout.page_bytes, flags.context_length)
    return executor


def _make_torch(flags: RuntimeLaunch, model_folder: Path | None, threads: int, progress: Progress) -> Executor:
    from fleet_runtime.engine.torch_executor import load_torch_executor

    assert model_folder is not None
    return load_torch_executor(flags, model_folder, threads, progress)


EXECUTORS: Final[dict[str, Maker]] = {"torch": _make_torch, "simulated": _make_simulated}
