"""SkyRL-SQL's tool group over Forkpoint: each query is run once for all rollouts and epochs.

SkyRL runs SQL in the trainer's process, so no base URL can be changed. In `skyrl_gym/envs/sql/env.py`, say
`self.tool_group = ForkpointSQL(db_file_path=self.db_path, url="http://127.0.0.1:8700")`.

The original runs each query in a transaction that it rolls back, so one that writes leaves no trace; such queries stay
with it. What begins as a query goes to the proxy. Its observations show the columns' names, and all rows in the
engine's order, where the original drops names and duplicates and shuffles the rest.
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

Ask = Callable[[str, str, Any], dict[str, Any]]
_READS = re.compile(r"\s*(select|values)\b", re.IGNORECASE)
_COUNT = itertools.count()


def asked(method: str, url: str, body: Any) -> dict[str, Any]:
    """Send a request; return the JSON object that answers it."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}, method=method
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        return dict(json.load(answer))


class ForkpointSQL(SQLCodeExecutorToolGroup):
    """See `SQLCodeExecutorToolGroup`. A database is a task, and an environment a rollout, which only reads."""

    def __init__(self, db_file_path: str, url: str, ask: Ask = asked) -> None:
        self._url, self._ask, self._known = url, ask, set[str]()
        self._rollout = f"skyrl-{os.getpid()}-{next(_COUNT)}"
        super().__init__(db_file_path)

    @tool
    def sql(self, db_id: str, sql: str | None, turns_left: int, timeout: float = 5) -> str:
        """Return the observation of one query."""
        if sql is None or not _READS.match(sql):
            return str(super().sql(db_id, sql, turns_left, timeout))
        self._declare(db_id)
        url = f"{self._url}/t/{db_id}/r/{self._rollout}/sql/query"
        told = self._ask("POST", url, {"sql": sql, "timeout_s": timeout, "max_rows": 100_000, "format": "skyrl"})
        reminder = f"<reminder>You have {turns_left} turns left to complete the task.</reminder>"
        return f"\n\n<observation>{self._text(told, db_id)}\n{reminder}</observation>\n\n"

    def _declare(self, db_id: str) -> None:
        if db_id not in self._known:
            spec = {"driver": "sqlite", "databases": {"main": {"source": self._file(db_id)}}}
            self._ask("PUT", f"{self._url}/api/v1/tasks/{db_id}", spec)
            self._known.add(db_id)

    def _file(self, db_id: str) -> str:
        return os.path.abspath(os.path.join(self.db_path, db_id, f"{db_id}.sqlite"))

    def _text(self, told: dict[str, Any], db_id: str) -> str:
        error = told["error"]
        if error is None:
            return str(told["text"])
        if error.get("kind") == "timeout":
            return str(told["text"])
        file = os.path.join(self.db_path, db_id, db_id + ".sqlite")
        return f"Error executing SQL: {error['message']}, db file: {file}"
