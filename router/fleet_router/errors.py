"""The router's own answers that are errors: each says what was wrong, what is allowed and how to go on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from fleet_contract import errors
from fleet_contract.errors import ApiError

CODE_WORKER_TIMEOUT: Final = "worker_timeout"
OUT_OF_FILES: Final = "out_of_files"
CODE_WORKER_SHAPE: Final = "worker_error_shape"  # a worker's error that is no error of the API
UNDECODABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # what decoding raises for what others wrote; deep nesting too
NOT_TO_SHOW: Final = ("bad_worker_answer", CODE_WORKER_SHAPE)  # a client gets our words for it, not the worker's


def unknown_model(model: str, known: Iterable[str]) -> ApiError:
    there = ", ".join(sorted(known)) or "none yet"
    return ApiError(
        404, f"model {model[:200]!r} does not exist here; there is: {there}", type=errors.NOT_FOUND, code="model_not_found", param="model"
    )


def no_ready_worker(service: str, waited_s: float) -> ApiError:
    return ApiError(
        503,
        f"service {service} has no ready worker (waited {waited_s:.0f} s); try again, or look at `kubectl describe infsvc` or the router's log",
        type=errors.OVERLOADED,
        code="no_ready_worker",
        retry_after_s=2,
    )


def scaled_to_zero(service: str) -> ApiError:
    return ApiError(
        503,
        f"service {service} is scaled to 0 workers; set replicas above 0 to serve (kubectl edit infsvc)",
        type=errors.OVERLOADED,
        code="scaled_to_zero",
    )


def queue_full(service: str, limit: int) -> ApiError:
    return ApiError(
        503,
        f"service {service} has no ready worker and {limit} requests wait for one already (--max-queue); try again",
        type=errors.OVERLOADED,
        code="queue_full",
        retry_after_s=2,
    )


def busy_queue_full(service: str, limit: int, *, of_tenant: bool) -> ApiError:
    """429: the client's own share of the queue is full; 503: the whole queue is."""
    if of_tenant:
        text = f"{limit} of your requests to service {service} wait already; send the next when some are answered"
        return ApiError(429, text, type=errors.RATE_LIMIT, code="too_many_waiting", retry_after_s=2)
    text = f"all workers of service {service} are busy and {limit} requests wait already (--max-queue); try again, or add workers"
    return ApiError(503, text, type=errors.OVERLOADED, code="queue_full", retry_after_s=2)


def all_busy(service: str, waited_s: float, wait_s: float) -> ApiError:
    """Its turn did not come in time."""
    text = (
        f"all workers of service {service} were busy for {waited_s:.0f} s (--busy-timeout); "
        f"what waits now needs about {wait_s:.0f} s: try again then, or add workers"
    )
    return ApiError(503, text, type=errors.OVERLOADED, code="all_busy", retry_after_s=max(1, min(600, round(wait_s))))


def worker_unreachable(worker: str, why: str) -> ApiError:
    return ApiError(502, f"worker {worker} could not be reached: {why}", type=errors.SERVER, code="worker_unreachable")


def out_of_files() -> ApiError:
    return ApiError(
        503,
        "this router has as many files open as it may (ulimit -n); try again, or run more routers",
        type=errors.OVERLOADED,
        code=OUT_OF_FILES,
        retry_after_s=1,
    )


def worker_lost(worker: str, why: str) -> ApiError:
    return ApiError(502, f"worker {worker} ended the connection before its answer was complete: {why}", type=errors.SERVER, code="worker_lost")


def worker_timeout(worker: str, what: str, limit_s: float, flag: str) -> ApiError:
    return ApiError(504, f"worker {worker} {what} within {limit_s:g} s ({flag})", type=errors.TIMEOUT, code=CODE_WORKER_TIMEOUT)


def aborted() -> ApiError:
    return ApiError(409, "this request was ended by POST /abort_request on the router's control port", code="request_aborted")


def internal() -> ApiError:
    return ApiError(500, "the router failed on this request; its log has the cause under this request id", type=errors.SERVER, code="internal")
