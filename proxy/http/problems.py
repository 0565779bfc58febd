"""Errors as HTTP responses: RFC 9457 problem details. Only this module maps exceptions to statuses."""

import sqlite3
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from proxy.execution.errors import RolloutGoneError, StateLostError
from proxy.refusals import Problem, RefusalError
from proxy.storage.errors import StoreError
from proxy.telemetry.counters import Counters
from proxy.tree.keys import UncanonicalArgumentsError
from sandboxes.errors import ForbiddenSourceError, SandboxError, ServerError, SpecError
from sandboxes.pool.pool import OverloadedError

log = structlog.get_logger()

FORESEEN = (
    RefusalError,
    UncanonicalArgumentsError,
    SpecError,
    RolloutGoneError,
    StateLostError,
    OverloadedError,
    SandboxError,
    StoreError,
    sqlite3.Error,
    OSError,
    MemoryError,
)
"""Exceptions that have a status of their own; every other exception is a defect of the proxy."""

_TITLES = {
    400: "Bad request",
    401: "Authentication required",
    403: "Forbidden",
    404: "Not found",
    405: "Method not allowed",
    409: "Conflict",
    410: "Rollout ended",
    413: "Request too large",
    422: "Unprocessable request",
    429: "Too many requests",
    501: "Not implemented",
    503: "Service unavailable",
}
"""Titles of refused requests; conventional, because people search the web for them."""


def problem_of(error: BaseException) -> Problem:
    """Return the problem details of an exception; 500 for one that is not `FORESEEN`."""
    text = str(error) or type(error).__name__
    match error:
        case RefusalError():
            retry = 1 if error.status in (429, 503) else None
            title = _TITLES.get(error.status, "Request refused")
            return Problem(error.status, error.slug, title, text, retry_after_s=retry, code=error.code)
        case UncanonicalArgumentsError():
            return Problem(422, "uncanonical-arguments", _TITLES[422], text)
        case SpecError():
            return _of_spec(error)
        case RolloutGoneError():
            return Problem(410, "rollout-gone", _TITLES[410], text)
        case StateLostError():
            return Problem(409, "state-lost", "State lost", text)
        case OverloadedError():
            return Problem(503, "overloaded", "All sandboxes are busy", text, retry_after_s=5)
        case SandboxError():
            status, slug, title = _of_sandbox(error)
            return Problem(status, slug, title, text, retry_after_s=1, infrastructure=True)
        case StoreError() | sqlite3.Error():
            return Problem(507, "store", "Store unavailable", text, infrastructure=True)
        case OSError() | MemoryError():
            detail = f"{text}. Check free disk space, memory and file descriptors (ulimit -n) on the proxy's machine."
            return Problem(503, "machine", "Insufficient resources", detail, retry_after_s=1, infrastructure=True)
        case _:
            return Problem(500, "defect", "Internal error", "See the proxy's log.", infrastructure=True)


def count_problem(counters: Counters, problem: Problem) -> None:
    """Count a problem: as a failure of the infrastructure, or as a refused request."""
    if problem.infrastructure:
        counters.failure(problem.slug)
    else:
        counters.refusals[problem.slug] += 1


def failed_call(scope: Mapping[str, Any], error: Exception, count: Callable[[Problem], None]) -> Problem:
    """Count the error of a call, log it if its status is 500 or above, and return it as a problem."""
    problem = problem_of(error)
    count(problem)
    if problem.status >= 500:
        # Only a defect of the proxy gets a stack trace: other errors have their cause outside this code.
        trace = error if problem.slug == "defect" else None
        log.error("call failed", path=scope["path"], problem=problem.slug, error=repr(error), exc_info=trace)
    return problem


def _of_spec(error: SpecError) -> Problem:
    if isinstance(error, ForbiddenSourceError):
        return Problem(403, "source", _TITLES[403], str(error))
    return Problem(422, "spec", "Invalid environment", str(error))


def _of_sandbox(error: SandboxError) -> tuple[int, str, str]:
    if isinstance(error, ServerError):
        # A retry runs in another sandbox, so it may succeed.
        if error.status:
            return error.status, "tool-server", "Tool server error"
        return (
            (504, "tool-server", "Tool server timeout") if error.silent else (502, "tool-server", "Tool server failed")
        )
    return 503, "sandbox", "Sandbox failed"
