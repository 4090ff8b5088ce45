"""Makes the executor that `--executor` names. Called once by the scheduler process at its start.

Executors are back ends: each is imported only when it is chosen, so that `simulated` and `native` never load torch.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final, Protocol

from fleet_contract.launch import RuntimeLaunch
from fleet_runtime.engine.base import Executor, Progress
from fleet_runtime.engine.memory import pages_in
from fleet_runtime.errors import StartError
from fleet_runtime.models.files import executor_of

_log = logging.getLogger(__name__)


class Maker(Protocol):
    """Makes one kind of executor."""

    def __call__(self, flags: RuntimeLaunch, model_folder: Path | None, threads: int, progress: Progress) -> Executor: ...


def make_executor(flags: RuntimeLaunch, model_folder: str | Path | None, threads: int, progress: Progress) -> Executor:
    """A ready executor: weights loaded, pages reserved, warmed up.

    Args: model_folder: of `models.files.resolve_model`; empty or None for simulated://. threads: for arithmetic. progress: percent and words.
    Raises StartError(ModelInvalid | OutOfMemory | BadFlag).
    """
    return EXECUTORS[executor_of(flags)](flags, Path(model_folder) if model_folder else None, threads, progress)


def _make_simulated(flags: RuntimeLaunch, model_folder: Path | None, threads: int, progress: Progress) -> Executor:
    from fleet_runtime.engine.simulated import SimulatedExecutor

    del model_folder, threads
    executor = SimulatedExecutor.from_flags(flags, progress)
    pages_in(flags.kv_cache_memory, executor.layout.page_bytes, flags.context_length)
    return executor


def _make_auto(flags: RuntimeLaunch, model_folder: Path | None, threads: int, progress: Progress) -> Executor:
    """`native` where this CPU and model allow it, else `torch`; the log says why."""
    from fleet_runtime.engine.native_executor import NoLibrary, load_native_executor, refusal_of
    from fleet_runtime.models.families import spec_of
    from fleet_runtime.models.files import read_config

    assert model_folder is not None
    if flags.dtype in ("float32", "float16"):
        why: str | None = f"--dtype is {flags.dtype}, the native executor computes in bfloat16"
    else:
        try:
            why = refusal_of(spec_of(model_folder, read_config(model_folder)))
        except StartError as e:
            why = e.message
    if why is None:
        try:
            return load_native_executor(flags, model_folder, threads, progress)
        except NoLibrary as e:
            why = str(e)
    if flags.weight_dtype == "int8":
        raise StartError("BadFlag", f"--weight-dtype int8 needs the native executor: {why}; leave --weight-dtype out")
    _log.warning("the torch executor is taken, which is several times slower than native: %s", why)
    return _make_torch(flags, model_folder, threads, progress)


def _make_native(flags: RuntimeLaunch, model_folder: Path | None, threads: int, progress: Progress) -> Executor:
    from fleet_runtime.engine.native_executor import NoLibrary, load_native_executor

    assert model_folder is not None
    if flags.dtype in ("float32", "float16"):
        raise StartError("BadFlag", f"--dtype is {flags.dtype}: the native executor computes in bfloat16; leave --dtype out or take --executor torch")
    try:
        return load_native_executor(flags, model_folder, threads, progress)
    except NoLibrary as e:
        raise StartError("BadFlag", f"--executor is native: {e}") from e


def _make_torch(flags: RuntimeLaunch, model_folder: Path | None, threads: int, progress: Progress) -> Executor:
    from fleet_runtime.engine.torch_executor import load_torch_executor

    if flags.weight_dtype == "int8":
        raise StartError("BadFlag", "--weight-dtype int8 needs the native executor, --executor is torch; leave one of them out")
    assert model_folder is not None
    return load_torch_executor(flags, model_folder, threads, progress)


EXECUTORS: Final[dict[str, Maker]] = {"auto": _make_auto, "native": _make_native, "torch": _make_torch, "simulated": _make_simulated}
