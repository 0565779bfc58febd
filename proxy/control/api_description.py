"""What the OpenAPI description has besides the routes: tags, stable names of operations, and examples."""

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from proxy.control.dataplane_openapi import data_plane_paths

TAGS: list[dict[str, Any]] = [
    {"name": "tasks", "description": "Tasks and their environments."},
    {"name": "rollouts", "description": "Rollouts: begin, list, label, fork and finish them."},
    {"name": "trees", "description": "What rollouts recorded: trees, nodes, calls and answers."},
    {"name": "scratch forks", "description": "Look into the state of a node without changing its tree."},
    {"name": "resources", "description": "Snapshots, sandboxes, totals, and garbage collection."},
    {"name": "activity", "description": "What the proxy does: events, the last hour, and reports."},
    {"name": "audits", "description": "Recorded calls that run again and are compared."},
    {"name": "data", "description": "Trees as files, backups, and training data."},
    {"name": "shell", "description": "Calls of rollouts at the endpoint `shell`."},
    {"name": "sql", "description": "Calls of rollouts at the endpoint `sql`, of tasks with databases."},
    {"name": "video", "description": "Calls of rollouts at the endpoint `video`, of tasks with videos."},
    {"name": "health", "description": "Probes of service managers, and metrics."},
    {"name": "page", "description": "Routes that the web page needs. They may change without notice."},
]
"""The groups of operations, in the order of the documentation."""
METHODS = ("get", "put", "post", "patch", "delete")
_EXAMPLES = Path(__file__).with_name("api_examples.json")


def operations(schema: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield method, path and description of every operation of an OpenAPI description."""
    for path, item in schema["paths"].items():
        for method in METHODS:
            if method in item:
                yield method, path, item[method]


def completed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return FastAPI's description with the data plane and the examples."""
    schema["paths"] |= data_plane_paths()
    recorded = _examples()
    for _, _, operation in operations(schema):
        for place, example in recorded.get(operation["operationId"], {}).items():
            media = operation["requestBody"] if place == "request" else operation["responses"][place]
            media["content"]["application/json"]["example"] = example
    return schema


@functools.cache
def _examples() -> dict[str, dict[str, Any]]:
    """Return examples by operation, each by response status or "request"; they were recorded from a proxy."""
    examples: dict[str, dict[str, Any]] = orjson.loads(_EXAMPLES.read_bytes())
    return examples
