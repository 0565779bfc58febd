"""No request causes a server error, whether or not the OpenAPI description allows it."""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

from proxy.control.api_description import operations
from tests.proxy.serving import Running, serving

ENDLESS = "/api/v1/events"
"""Streams end when their client disconnects, or after as many events as it asks for."""
KNOWN = {"task": "0", "rollout": "r", "node": "n2", "a": "n1", "b": "n2", "record": 1}
"""What the proxy has: a random name is nearly always unknown, and the request ends there."""


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("data")) as running:
        running.exec("r", "echo 1 > f", task="0")
        yield running


def test_no_request_causes_a_server_error(proxy: Running) -> None:
    schema = schemathesis.openapi.from_url(f"{proxy.client.base_url}/openapi.json")
    tried = []
    for loaded in schema.get_all_operations():
        operation = loaded.ok()
        tried.append(operation.label)
        for mode in schemathesis.GenerationMode:
            # An operation before this one may have deleted it.
            proxy.exec("r", "echo 1 > f", task="0")
            attempt(operation, mode)
    assert len(tried) == len(list(operations(proxy.client.get("/openapi.json").json())))


def attempt(operation: Any, mode: schemathesis.GenerationMode) -> None:
    """Send what the description allows (positive) or forbids (negative)."""

    @settings(max_examples=5, suppress_health_check=list(HealthCheck))
    @given(operation.as_strategy(generation_mode=mode), st.booleans())
    def send(case: schemathesis.Case[Any], known: bool) -> None:
        if known and case.path_parameters:
            case.path_parameters = {name: KNOWN.get(name, value) for name, value in case.path_parameters.items()}
        if case.operation.path == ENDLESS and mode is schemathesis.GenerationMode.POSITIVE:
            case.query = {**(case.query or {}), "limit": "1"}
        answer = case.call(timeout=30)
        case.validate_response(
            answer, checks=[not_a_server_error, content_type_conformance, response_schema_conformance]
        )

    try:
        send()
    except Unsatisfiable:
        # Some operations leave nothing to get wrong.
        assert mode is schemathesis.GenerationMode.NEGATIVE
