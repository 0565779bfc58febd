"""Records the examples of the OpenAPI description from a proxy: `python -m tests.proxy.control.record_examples`."""

import tempfile
from pathlib import Path
from typing import Any

import orjson

from proxy.control import api_description
from proxy.control.api_description import operations
from tests.proxy.serving import Running, serving

_SHELL = {"command": "pytest -q"}
BODIES: dict[str, Any] = {
    "put_task": {"driver": "local", "setup": ["git init -q"]}, "warm_task": {"count": 8},
    "begin_rollout": {"rollout": "8", "labels": {"run": "r7", "step": 3}}, "fork_rollout": {"name": "variant"},
    "change_labels": {"reward": 1.0}, "pin_node": {"pinned": True}, "fork_at_node": {"name": "other"},
    "execute_at_node": {"command": "ls"}, "start_audit": {"sample": 100}, "put_masks": {"masks": ["dates"]},
    "make_image": {"name": "demo:fixed"},
    "execute": _SHELL, "execute_by_headers": _SHELL,
}  # fmt: skip
"""Bodies of requests, by operation."""
_SENT = {"put_task": {"driver": "memory", "setup": ["mkdir work"]}}
"""Bodies that are sent instead, because the recording proxy has only the in-memory driver."""
_QUERIES: dict[str, Any] = {
    "search_calls": {"q": "echo"},
    "get_titles": {"nodes": "2"},
    "list_children": {},
    "get_timeline": {"span_s": 10},
}
_ORDER = {"get": 0, "put": 2, "post": 1, "patch": 1, "delete": 3}


def record() -> dict[str, dict[str, Any]]:
    """Return examples of the JSON bodies of all operations."""
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as proxy:
        schema = proxy.client.get("/openapi.json").json()
        for rollout in ("6", "7"):
            for command in ("mkdir src", "echo 'print(1)' > src/a.py", "cat src/a.py"):
                proxy.exec(rollout, command, task="demo").raise_for_status()
        record_number = proxy.client.get("/api/v1/tasks/demo/rollouts/7").json()["steps"]["items"][1]["record"]
        names = {
            "task": "demo",
            "rollout": "7",
            "node": "n3",
            "a": "n2",
            "b": "n3",
            "record": record_number,
            "path": "a",
        }
        examples = {}
        for method, path, operation in sorted(operations(schema), key=lambda each: (_ORDER[each[0]], -len(each[1]))):
            if operation["operationId"] != "stream_events":
                root = {"path": "root"} if operation["operationId"] == "read_node_file" else {}
                examples[operation["operationId"]] = _example(proxy, method, path.format(**names | root), operation)
    return {name: example for name, example in sorted(examples.items()) if example}


def _example(proxy: Running, method: str, path: str, operation: dict[str, Any]) -> dict[str, Any]:
    name = operation["operationId"]
    body = BODIES.get(name)
    headers = {"x-forkpoint-task": "demo", "x-forkpoint-rollout": "9"}
    if name == "import_task":
        tree = proxy.client.get("/api/v1/tasks/demo/export").content
        response = proxy.client.post("/api/v1/tasks/copy/import", content=tree)
    else:
        response = proxy.client.request(
            method, path, json=_SENT.get(name, body), params=_QUERIES.get(name), headers=headers, timeout=30
        )
    example = {} if body is None else {"request": body}
    if response.content and response.is_success and response.headers.get("content-type") == "application/json":
        example[str(response.status_code)] = response.json()
    return example


if __name__ == "__main__":
    text = orjson.dumps(record(), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    api_description._EXAMPLES.write_bytes(text)
