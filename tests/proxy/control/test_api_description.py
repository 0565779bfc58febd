"""The OpenAPI description: every operation has a stable name, a group, a sentence and a valid example."""

import subprocess
import sys
from collections.abc import Iterator
from difflib import unified_diff
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from proxy.control.api_description import _EXAMPLES, TAGS, operations
from tests.proxy.serving import Running, serving

PINNED = Path(__file__).with_name("operations.txt")
ENDLESS = "stream_events"
NO_EXAMPLES = {"page", "sql", "video"}
"""Tags of routes without an example: only the web page calls them, or the recorded task has no such tools."""


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("data")) as running:
        for command in ("mkdir a", "mkdir b", "ls"):
            running.exec("r", command, task="demo").raise_for_status()
        yield running


@pytest.fixture(scope="module")
def schema(proxy: Running) -> Any:
    return proxy.client.get("/openapi.json").json()


def test_operations_keep_their_names(schema: Any) -> None:
    """Programs call generated functions by these names. A new operation adds a line to the file."""
    names = {f"{method.upper()} {path} {about['operationId']}" for method, path, about in operations(schema)}
    assert names == set(PINNED.read_text().splitlines())
    assert len({name.rpartition(" ")[2] for name in names}) == len(names)


def test_operations_are_grouped_and_described(schema: Any) -> None:
    groups = [tag["name"] for tag in TAGS]
    for _, path, about in operations(schema):
        assert len(about["tags"]) == 1, path
        assert about["tags"][0] in groups, path
        assert (about.get("description") or about.get("summary", "")).endswith("."), path
    assert {about["tags"][0] for _, _, about in operations(schema)} == set(groups)


def test_examples_are_recorded_anew(tmp_path: Path) -> None:
    """A changed view changes what is recorded. In a process of its own, because time stands still in it."""
    command = ["-m", "tests.proxy.control.record_examples"]
    subprocess.run([sys.executable, *command, tmp_path / "now"], check=True, stdout=subprocess.DEVNULL)
    before, now = _EXAMPLES.read_text().splitlines(), (tmp_path / "now").read_text().splitlines()
    changed = list(unified_diff(before, now, "kept", "recorded", lineterm=""))
    assert not changed, "\n".join([f"run `python {' '.join(command)}`", *changed])


def test_examples_are_valid(schema: Any) -> None:
    for _, path, about in operations(schema):
        bodies = [body for status, body in about["responses"].items() if status[0] == "2"]
        for body in [*bodies, about.get("requestBody", {})]:
            for media in (m for kind, m in body.get("content", {}).items() if kind == "application/json"):
                excused = about["operationId"] == ENDLESS or about["tags"][0] in NO_EXAMPLES or len(bodies) > 1
                assert excused or "example" in media, path
                if "example" in media:
                    jsonschema_rs.validate(media["schema"] | {"components": schema["components"]}, media["example"])


def test_path_leads_from_the_root_to_a_node(proxy: Running) -> None:
    """It comes in pages, and each page names the next one."""
    last = proxy.exec("r", "pwd", task="demo").headers["x-forkpoint-node"]
    url = f"/api/v1/tasks/demo/nodes/{last}/path"
    whole = proxy.client.get(url).json()
    assert [node["call"] and node["call"]["title"] for node in whole["items"]] == [None, "mkdir a", "mkdir b"]
    assert (whole["total"], whole["next"]) == (3, None)
    first = proxy.client.get(url, params={"limit": 2}).json()
    second = proxy.client.get(url, params={"limit": 2, "cursor": first["next"]}).json()
    assert first["items"] + second["items"] == whole["items"]
    assert second["next"] is None
    assert proxy.client.get(url, params={"cursor": "3"}).status_code == 422
