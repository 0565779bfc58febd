"""SkyRL-SQL's tool group through Forkpoint: each query runs once for all rollouts and epochs.

SkyRL runs SQL in the trainer's process, so there is no base URL to change. In `skyrl_gym/envs/sql/env.py`, write
`self.tool_group = ForkpointSQL(db_file_path=self.db_path, url="http://127.0.0.1:8700")`.

`SELECT` and `VALUES` go to the proxy. Other statements stay in the original group, which runs them in a transaction and
rolls it back, so a write leaves no trace. Observations show the columns' names and all rows in the engine's order. The
original drops names and duplicates, and its order changes from run to run.
"""

import itertools
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from skyrl_gym.tools.core import tool
from skyrl_gym.tools.sql import SQLCodeExecutorToolGroup

Send = Callable[[str, str, Any], dict[str, Any]]
"""Sends a request (method, URL, JSON body) and returns the JSON object of its response."""
_READS = re.compile(r"\s*(select|values)\b", re.IGNORECASE)
_COUNT = itertools.count()


def send(method: str, url: str, body: Any) -> dict[str, Any]:
    """Send a request and return the JSON object of its response."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}, method=method
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        return dict(json.load(response))


class ForkpointSQL(SQLCodeExecutorToolGroup):
    """A tool group whose queries run in Forkpoint. A database is a task, and an environment is a rollout."""

    def __init__(self, db_file_path: str, url: str, send: Send = send) -> None:
        self._url, self._send, self._known = url, send, set[str]()
        self._rollout = f"skyrl-{os.getpid()}-{next(_COUNT)}"
        super().__init__(db_file_path)

    @tool
    def sql(self, db_id: str, sql: str | None, turns_left: int, timeout: float = 5) -> str:
        """Return the observation of one query."""
        if sql is None or not _READS.match(sql):
            return str(super().sql(db_id, sql, turns_left, timeout))
        self._declare(db_id)
        url = f"{self._url}/t/{db_id}/r/{self._rollout}/sql/query"
        result = self._send("POST", url, {"sql": sql, "timeout_s": timeout, "max_rows": 100_000, "format": "skyrl"})
        reminder = f"<reminder>You have {turns_left} turns left to complete the task.</reminder>"
        return f"\n\n<observation>{self._text(result, db_id)}\n{reminder}</observation>\n\n"

    def _declare(self, db_id: str) -> None:
        if db_id not in self._known:
            spec = {"driver": "sqlite", "databases": {"main": {"source": self._file(db_id)}}}
            self._send("PUT", f"{self._url}/api/v1/tasks/{db_id}", spec)
            self._known.add(db_id)

    def _file(self, db_id: str) -> str:
        return os.path.abspath(os.path.join(self.db_path, db_id, f"{db_id}.sqlite"))

    def _text(self, result: dict[str, Any], db_id: str) -> str:
        error = result["error"]
        if error is None or error.get("kind") == "timeout":
            return str(result["text"])
        file = os.path.join(self.db_path, db_id, db_id + ".sqlite")
        return f"Error executing SQL: {error['message']}, db file: {file}"
