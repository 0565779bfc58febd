"""How errors of the web framework become problems."""

import io
import threading
from pathlib import Path

import pytest
import structlog
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from proxy import control_app
from proxy.control_app import _refused
from proxy.http.problems import problem_of
from proxy.refusals import RefusalError
from snapshots.store import SnapshotStore
from tests.proxy.serving import serving


@pytest.mark.parametrize(
    ("error", "status", "detail"),
    [
        (HTTPException(405, "Method Not Allowed"), 405, "Method Not Allowed"),
        (
            RequestValidationError([{"loc": ("query", "limit"), "msg": "not a number"}]),
            422,
            "query.limit: not a number",
        ),
        (RefusalError(409, "conflict", "the name is taken"), 409, "the name is taken"),
    ],
)
def test_framework_errors_are_problems(error: Exception, status: int, detail: str) -> None:
    problem = problem_of(_refused(error))
    assert (problem.status, problem.detail) == (status, detail)


def test_slow_start_says_what_it_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a kill, reading back takes a while: a line says so while the start still runs."""
    said, opening, lines = threading.Event(), SnapshotStore.open, list[str]()

    class Written(io.StringIO):
        def write(self, text: str) -> int:
            lines.append(text)
            said.set()
            return len(text)

    def slow(store: SnapshotStore) -> int:
        assert said.wait(30)
        return opening(store)

    monkeypatch.setattr(control_app, "_SLOW_START_S", 0)
    monkeypatch.setattr(SnapshotStore, "open", slow)
    # An earlier test may have left another level.
    structlog.reset_defaults()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(Written()))
    try:
        with serving(tmp_path):
            assert "still starting" in lines[0]
    finally:
        structlog.reset_defaults()
