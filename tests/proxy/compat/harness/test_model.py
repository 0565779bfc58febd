"""Requests to a rollout's model."""

import asyncio
from typing import Any

import pytest

from proxy.compat.harness.model import Model

PLAIN = {"method": "POST", "target": "/v1/messages", "headers": [], "body": "{}"}


@pytest.mark.parametrize(
    "part",
    [{"target": "/a/../v1/messages"}, {"target": "http://elsewhere/v1/messages"}, {"headers": [["x-name", "\x01"]]}],
    ids=str,
)
def test_request_that_cannot_be_sent_is_answered(part: dict[str, Any]) -> None:
    """A program of the agent may send anything, and the rollout would end each time at the same request."""
    response = asyncio.run(Model("http://127.0.0.1:1", {}).respond({**PLAIN, **part}))
    assert (response.status, response.media_type) == (400, "text/plain")
