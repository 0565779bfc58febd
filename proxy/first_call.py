"""The call that a proxy suggests when it starts: one of a driver that it has."""

import json
from collections.abc import Collection

SPECS: dict[str, dict[str, object]] = {
    "local": {"driver": "local"},
    "sqlite": {"driver": "sqlite", "databases": {"main": {"source": "/path/to/database.sqlite"}}},
    "postgres": {"driver": "postgres", "databases": {"main": {"dsn": "postgresql://user@host", "source": "name"}}},
    "video": {"driver": "video", "video": {"source": "/path/to/video.mp4"}},
    "http": {"driver": "http", "servers": {"tools": {"upstream": "http://127.0.0.1:8000"}}},
}
"""A spec of each driver of ours, with a placeholder for what only the reader knows."""


def first_call(url: str, default_driver: str, drivers: Collection[str], *, needs_token: bool) -> str:
    """Return a command for a first call: in a shell if that is the default, else about a task of the first driver."""
    curl = "curl -s" + (' -H "x-forkpoint-token: $FORKPOINT_TOKEN"' if needs_token else "")
    if default_driver == "local" and "local" in drivers:
        return f'try: {curl} {url}/t/demo/r/1/shell/exec -d \'{{"command": "uname -a"}}\''
    known = next((name for name in drivers if name in SPECS), None)
    if known is None:
        return f"describe a task: PUT {url}/api/v1/tasks/demo, see {url}/docs"
    described = json.dumps(SPECS[known])
    return (
        f"describe a task: {curl} -X PUT {url}/api/v1/tasks/demo -H 'content-type: application/json' -d '{described}'"
    )
