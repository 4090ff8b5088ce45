"""`radixfleet-runtime`, from its command line to its exit code. Called by `__main__`; loads neither torch nor an HTTP library."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Final

import msgspec

from fleet_contract import names
from fleet_contract.launch import BadFlag, RuntimeLaunch
from fleet_contract.logs import facts, set_up_logging
from fleet_contract.worker import StartFailure
from fleet_runtime.errors import StartError
from fleet_runtime.supervisor.children import MODULES
from fleet_runtime.supervisor.loop import Signals, Supervisor
from fleet_runtime.supervisor.prepare import prepare

log = logging.getLogger(__name__)

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2


def run(argv: Sequence[str], env: Mapping[str, str], modules: Mapping[str, str] = MODULES) -> int:
    """Runs a worker until it ends; returns its exit code. Tests give other `modules` for its children."""
    if "--help" in argv or "-h" in argv:
        print(RuntimeLaunch.help())
        return 0
    if "--version" in argv:
        print(f"radixfleet-runtime {metadata.version('radixfleet')}")
        return 0
    signals = Signals()
    try:
        flags = RuntimeLaunch.from_argv(argv)
    except BadFlag as e:
        print(f"radixfleet-runtime: {e}", file=sys.stderr)
        write_termination(env, StartFailure("BadFlag", str(e)))
        return EXIT_USAGE
    set_up_logging("supervisor", flags.log_level)
    prepared = None
    try:
        prepared = prepare(flags, env)
        if signals.stops:
            return 0
        return Supervisor(prepared, signals, env, modules).run()
    except StartError as e:
        log.error("the worker gives up", extra=facts(reason=e.reason, message=e.message))
        write_termination(env, StartFailure(e.reason, e.message))
        return EXIT_FAILED
    except Exception as e:  # the process's border: say why in the pod's status, then fail
        log.exception("the supervisor failed")
        write_termination(env, StartFailure("Internal", f"{type(e).__name__}: {e}"))
        return EXIT_FAILED
    finally:
        if prepared is not None:
            prepared.close()


def write_termination(env: Mapping[str, str], failure: StartFailure) -> None:
    """Writes the cause where the kubelet looks for it. Outside a pod there is no such file, and none is made."""
    override = env.get(names.ENV_TERMINATION_LOG)
    path = Path(override or names.TERMINATION_LOG)
    if override is None and not path.is_file():
        return
    try:
        path.write_bytes(msgspec.json.encode(failure)[:4096])
    except OSError as e:
        log.error("cannot write the termination message", extra=facts(path=str(path), error=str(e)))
