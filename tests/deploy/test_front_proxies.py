"""The examples of nginx and Envoy before a cluster bring all requests of a task to one member, each of them once."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

EXAMPLES = Path(__file__).parents[2] / "examples"
NGINX = (EXAMPLES / "cluster_nginx.conf").read_text()
ENVOY: dict[str, Any] = yaml.safe_load((EXAMPLES / "cluster_envoy.yaml").read_text())["static_resources"]


def envoy_task(path: str, headers: dict[str, str]) -> str | None:
    """Return what Envoy hashes of a request: the first route that matches has the rule."""
    (connections,) = ENVOY["listeners"][0]["filter_chains"][0]["filters"]
    (host,) = connections["typed_config"]["route_config"]["virtual_hosts"]
    for route in host["routes"]:
        match = route["match"]
        # Envoy matches the whole path, without the query.
        if path.startswith(match.get("prefix", "?")) or re.fullmatch(
            match.get("safe_regex", {}).get("regex", ""), path
        ):
            (policy,) = route["route"]["hash_policy"]
            value = {":path": f"{path}?query", **headers}.get(policy["header"]["header_name"])
            rewrite = policy["header"].get("regex_rewrite")
            if value is None or rewrite is None:
                return value
            return re.sub(rewrite["pattern"]["regex"], rewrite["substitution"], value)
    raise AssertionError(path)


def nginx_task(path: str, headers: dict[str, str]) -> str | None:
    """Return what nginx hashes of a request; None for its number, which is another one each time."""
    (pattern,) = re.findall(r'"~(\^/\(\?:t.+?)"', NGINX)
    match = re.match(pattern.replace("(?<", "(?P<"), path)
    return headers.get("x-forkpoint-task") if match is None else match[1]


@pytest.mark.parametrize("task_of", [envoy_task, nginx_task])
@pytest.mark.parametrize(
    ("path", "headers", "task"),
    [
        ("/t/demo/r/1/shell/exec", {}, "demo"),
        ("/t/demo/docker/v1.43/info", {"x-forkpoint-task": "other"}, "demo"),
        ("/api/v1/tasks/demo", {}, "demo"),
        ("/api/v1/tasks/demo/rollouts/1", {}, "demo"),
        ("/e/shell/exec", {"x-forkpoint-task": "demo"}, "demo"),
        ("/api/v1/tasks", {}, None),
        ("/healthz", {}, None),
    ],
)
def test_the_task_is_hashed(task_of: Any, path: str, headers: dict[str, str], task: str | None) -> None:
    assert task_of(path, headers) == task


def test_envoy_makes_no_call_twice_and_cuts_none_off() -> None:
    """By hand, Envoy 1.40 takes the file, and sends the requests of 40 tasks as the test above says."""
    (listener,), (cluster,) = ENVOY["listeners"], ENVOY["clusters"]
    options = listener["filter_chains"][0]["filters"][0]["typed_config"]
    (host,) = options["route_config"]["virtual_hosts"]
    for each in (host, *host["routes"], *(route["route"] for route in host["routes"])):
        assert "retry_policy" not in each
    assert {route["route"]["timeout"] for route in host["routes"]} == {options["stream_idle_timeout"]} == {"0s"}
    assert {each["upgrade_type"] for each in options["upgrade_configs"]} == {"websocket", "tcp"}
    assert {route["route"]["cluster"] for route in host["routes"]} == {cluster["name"]}
    assert cluster["lb_policy"] == "RING_HASH"
    # A tool's own errors say nothing of its member.
    assert cluster["outlier_detection"]["enforcing_consecutive_5xx"] == 0
    assert min(cluster["circuit_breakers"]["thresholds"][0].values()) > 10_000
