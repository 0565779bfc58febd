"""How errors of the web framework become problems."""

import pytest
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from proxy.control_app import _refused
from proxy.http.problems import problem_of
from proxy.refusals import RefusalError


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
