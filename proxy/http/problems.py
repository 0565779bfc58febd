"""What goes wrong, as HTTP answers: RFC 9457 problem details that say what to do. The one place that maps errors."""

import sqlite3

from proxy.execution.errors import RolloutGoneError, StateLostError
from proxy.refusals import Problem, RefusalError
from proxy.storage.errors import StoreError
from proxy.telemetry.counters import Counters
from proxy.tree.keys import UncanonicalArgumentsError
from sandboxes.errors import SandboxError, ServerError, SpecError
from sandboxes.pool.pool import OverloadedError

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
)
"""What `problem_of` has an answer of its own for."""

_TITLES = {
    400: "The request cannot be read",
    401: "Nothing says who asks",
    403: "This may not be asked from there",
    404: "There is nothing under this name",
    405: "This tool has no such method",
    409: "That is not possible in the present state",
    410: "The rollout has ended",
    413: "The request is too large",
    422: "The request cannot be carried out as written",
    429: "Too many requests",
}


def problem_of(error: BaseException) -> Problem:
    """Return the answer for an error, a 500 for one that nobody foresaw."""
    text = str(error) or type(error).__name__
    match error:
        case RefusalError():
            retry = 1 if error.status == 429 else None
            title = _TITLES.get(error.status, "RefusalError")
            return Problem(error.status, error.slug, title, text, retry_after_s=retry, code=error.code)
        case UncanonicalArgumentsError():
            return Problem(422, "uncanonical-arguments", _TITLES[422], text)
        case SpecError():
            return Problem(422, "spec", "The task's environment cannot be built", text)
        case RolloutGoneError():
            return Problem(410, "rollout-gone", _TITLES[410], text)
        case StateLostError():
            return Problem(409, "state-lost", "The state of this rollout cannot be rebuilt", text)
        case OverloadedError():
            return Problem(503, "overloaded", "All sandboxes are busy", text, retry_after_s=5)
        case SandboxError():
            status, slug, title = _of_sandbox(error)
            return Problem(status, slug, title, text, retry_after_s=1, infrastructure=True)
        case StoreError() | sqlite3.Error():
            return Problem(507, "store", "The store cannot be written", text, infrastructure=True)
        case OSError():
            detail = f"{text}. Look at free disk space, memory and file descriptors (ulimit -n) on the proxy's machine."
            return Problem(503, "machine", "The proxy's machine refused", detail, retry_after_s=1, infrastructure=True)
        case _:
            return Problem(500, "defect", "Forkpoint has a defect", "See the proxy's log.", infrastructure=True)


def count_problem(counters: Counters, problem: Problem) -> None:
    """Count a problem: as a failure of the infrastructure, or as a refused request."""
    if problem.infrastructure:
        counters.failure(problem.slug)
    else:
        counters.refusals[problem.slug] += 1


def _of_sandbox(error: SandboxError) -> tuple[int, str, str]:
    if isinstance(error, ServerError):
        # The next attempt begins with another sandbox.
        if error.status:
            return error.status, "tool-server", "The tool server says that it failed"
        told = (504, "The tool server says nothing") if error.silent else (502, "The tool server failed")
        return told[0], "tool-server", told[1]
    return 503, "sandbox", "The sandbox failed"
