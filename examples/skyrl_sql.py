"""SkyRL-SQL's tool group through Forkpoint: each query runs once for all rollouts and epochs.

SkyRL runs SQL in the trainer's process, so there is no base URL to change. In `skyrl_gym/envs/sql/env.py`, write
`self.tool_group = ForkpointSQL(db_file_path=self.db_path, url="http://127.0.0.1:8700")`.

`SELECT` and `VALUES` go to the proxy. Other statements stay in the original group, which runs them in a transaction and
rolls it back, so a write leaves no trace. Observations show the columns' names and all rows in the engine's order. The
original drops names and duplicates, and its order changes from run to run.
"""

import os
import re

from skyrl_gym.tools.core import tool
from skyrl_gym.tools.sql import SQLCodeExecutorToolGroup

from forkpoint import Client
from forkpoint.client import Rollout
from forkpoint.results import SqlResult

_READS = re.compile(r"\s*(select|values)\b", re.IGNORECASE)


class ForkpointSQL(SQLCodeExecutorToolGroup):
    """A tool group whose queries run in Forkpoint. A database is a task, and an environment is a rollout."""

    def __init__(self, db_file_path: str, url: str) -> None:
        self._client, self._rollouts = Client(url), dict[str, Rollout]()
        super().__init__(db_file_path)

    @tool
    def sql(self, db_id: str, sql: str | None, turns_left: int, timeout: float = 5) -> str:
        """Return the observation of one query."""
        if sql is None or not _READS.match(sql):
            return str(super().sql(db_id, sql, turns_left, timeout))
        result = self._rollout(db_id).sql(sql, timeout_s=timeout, max_rows=100_000, format="skyrl")
        reminder = f"<reminder>You have {turns_left} turns left to complete the task.</reminder>"
        return f"\n\n<observation>{self._text(result, db_id)}\n{reminder}</observation>\n\n"

    def _rollout(self, db_id: str) -> Rollout:
        if db_id not in self._rollouts:
            task = self._client.task(db_id)
            task.put({"driver": "sqlite", "databases": {"main": {"source": self._file(db_id)}}})
            self._rollouts[db_id] = task.rollout()
        return self._rollouts[db_id]

    def _file(self, db_id: str) -> str:
        return os.path.abspath(os.path.join(self.db_path, db_id, f"{db_id}.sqlite"))

    def _text(self, result: SqlResult, db_id: str) -> str:
        error = result.error
        if error is None or error.get("kind") == "timeout":
            return result.text
        return f"Error executing SQL: {error['message']}, db file: {self._file(db_id)}"
