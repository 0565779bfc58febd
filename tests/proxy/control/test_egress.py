"""Requests of sandboxes to hosts outside, as people see them."""

from dataclasses import replace
from pathlib import Path

from sandboxes.calls import EgressExchange, Execution, ToolCall
from sandboxes.listener import Listener
from sandboxes.spec import EnvironmentSpec
from tests.proxy.serving import serving
from tests.sandboxes.memory_driver import MemoryDriver, MemorySandbox

URL = "http://example.org/<script>"


class Requesting(MemorySandbox):
    async def execute(self, call: ToolCall, listener: Listener | None = None) -> Execution:
        exchange = EgressExchange("GET", URL, "recorded", 200, 5)
        return replace(await super().execute(call, listener), exchanges=(exchange,))


def test_requests_are_listed_by_task_and_counted(tmp_path: Path) -> None:
    drivers = {"requesting": MemoryDriver(sandbox=Requesting)}
    with serving(tmp_path, drivers=drivers, default_spec=EnvironmentSpec(driver="requesting")) as proxy:
        for task, rollout in (("a", "1"), ("a", "2"), ("b", "3")):
            proxy.exec(rollout, "ls", task=task).raise_for_status()
        # The second one of task a was a hit.
        page = proxy.client.get("/api/v1/egress").json()
        assert [(item["task"], item["rollout"]) for item in page["items"]] == [("b", "3"), ("a", "1")]
        (item,) = proxy.client.get("/api/v1/egress", params={"task": "a"}).json()["items"]
        del item["at"]
        assert item == {
            "task": "a", "rollout": "1", "node": "n1", "method": "GET", "url": URL, "outcome": "recorded",
            "status": 200, "size_bytes": 5, "detail": "",
        }  # fmt: skip
        metrics = proxy.client.get("/metrics").text
        assert 'forkpoint_egress_requests_total{outcome="recorded"} 2.0' in metrics
        assert 'forkpoint_egress_bytes_total{outcome="recorded"} 10.0' in metrics
