"""No request causes a server error, whether or not the OpenAPI description allows it."""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

from tests.proxy.serving import Running, serving

ENDLESS = ("/api/v1/events",)
"""Streams end only when their client disconnects; other tests read them."""


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("data")) as running:
        running.exec("r", "echo 1 > f", task="0")
        yield running


def test_no_request_causes_a_server_error(proxy: Running) -> None:
    schema = schemathesis.openapi.from_url(f"{proxy.client.base_url}/openapi.json")
    tried = []
    for loaded in schema.get_all_operations():
        operation = loaded.ok()  # type: ignore[union-attr]
        if operation.path in ENDLESS:
            continue
        tried.append(operation.label)
        for mode in schemathesis.GenerationMode:
            attempt(operation, mode)
    assert len(tried) > 25


def attempt(operation: Any, mode: schemathesis.GenerationMode) -> None:
    """Send what the description allows (positive) or forbids (negative)."""

    @settings(max_examples=15, suppress_health_check=list(HealthCheck))
    @given(operation.as_strategy(generation_mode=mode))
    def send(case: schemathesis.Case[Any]) -> None:
        answer = case.call(timeout=30)
        case.validate_response(
            answer, checks=[not_a_server_error, content_type_conformance, response_schema_conformance]
        )

    try:
        send()
    except Unsatisfiable:
        # Some operations leave nothing to get wrong.
        assert mode is schemathesis.GenerationMode.NEGATIVE
