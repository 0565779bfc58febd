"""The calls of a report: those whose executions took longest, why the tree did not know them, and what helps."""

import re
import sqlite3
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from proxy.control.call_titles import stored_title
from proxy.control.reasons import MEANINGS, Reason
from proxy.control.views.report import SlowCall
from proxy.storage.records import same_calls
from proxy.storage.schema import is_whole
from proxy.tree.rollout import Outcome

_MOST = 20
"""Calls that a report names."""
_MENDS: tuple[tuple[str, str], ...] = (
    (r"\bgit\b.*\b(commit|merge|rebase|tag|am|stash)\b", "Set GIT_AUTHOR_DATE and GIT_COMMITTER_DATE"),
    (r"\$\{?RANDOM|urandom|\buuid|\bmktemp\b|\bshuf\b|\brandom\b", "Give the program a seed, or a fixed name"),
    (r"\b(python[0-9.]*|pytest|pip|tox|nox)\b", "Set PYTHONDONTWRITEBYTECODE=1 and PYTHONHASHSEED=0"),
    (r"\b(tar|zip|gzip|make|cmake|cargo|npm|docker|sphinx-build|date)\b", "Set SOURCE_DATE_EPOCH"),
)
"""What a call's text has, and what makes equal runs of it equal. The first that matches counts."""
_COLUMNS = (
    "executed", "saved", "executed_s", "saved_s", "executed_cpu_s", "saved_cpu_s", "peak_bytes", "states", "differing",
)  # fmt: skip


def slowest_calls(
    connection: sqlite3.Connection, where: str, values: Mapping[str, Any], executed: Collection[Outcome]
) -> list[SlowCall]:
    """Return the calls whose executions took longest, of rollouts `r` that a condition chooses. Blocking."""
    outcomes = ", ".join(str(outcome.value) for outcome in executed)
    # Two executions in one state differ by their answers, or by the states that they lead to. Where processes run, a
    # state has no digest, and only answers count.
    sql = f"""
WITH made AS MATERIALIZED (
    SELECT g.task, g.executed, g.calls - g.executed AS saved, c.*, n.exact FROM (
        SELECT r.task, s.record, COUNT(*) AS calls, SUM(s.outcome IN ({outcomes})) AS executed
        FROM rollouts r JOIN steps s ON s.rollout = r.id WHERE {where} AND {is_whole("steps", "s")} GROUP BY 1, 2
    ) g JOIN records c ON c.id = g.record LEFT JOIN nodes n ON n.id = c.target WHERE {is_whole("records", "c")}
), used AS MATERIALIZED (
    SELECT task, same AS call, upload, source, answer, exact, executed, saved, seconds, cpu_s, peak_bytes, quarantined,
        private FROM made JOIN ({same_calls("SELECT call FROM made")}) asks ON asks.id = made.call
), states AS (
    SELECT task, call, upload, COUNT(DISTINCT answer) > 1 OR COUNT(DISTINCT exact) > 1 AS differs
    FROM used WHERE executed GROUP BY task, call, upload, source
)
SELECT u.*, (SELECT COUNT(*) FROM states s WHERE (s.task, s.call, s.upload) = (u.task, u.call, u.upload)),
    (SELECT SUM(s.differs) FROM states s WHERE (s.task, s.call, s.upload) = (u.task, u.call, u.upload))
FROM (
    SELECT task, call, upload, MAX(quarantined), MIN(private), SUM(executed), SUM(saved), SUM(executed * seconds),
        SUM(saved * seconds), SUM(executed * cpu_s), SUM(saved * cpu_s), MAX(peak_bytes)
    FROM used GROUP BY 1, 2, 3 HAVING SUM(executed) ORDER BY 8 DESC LIMIT {_MOST}
) u"""
    calls = []
    for task, call, upload, quarantined, private, *sums in connection.execute(sql, values).fetchall():
        text, counts = stored_title(connection, call, upload), dict(zip(_COLUMNS, sums, strict=True))
        # What a damaged call took is in the totals.
        if text is not None:
            reason, remedy = _why(text, counts, quarantined=bool(quarantined), private=bool(private))
            calls.append(SlowCall(task=task, title=text, reason=reason, remedy=remedy, **counts))
    return slowest(calls)


def slowest(calls: Iterable[SlowCall]) -> list[SlowCall]:
    """Return the calls that a report names, in its order."""
    return sorted(calls, key=lambda call: -call.executed_s)[:_MOST]


def _why(text: str, counts: Mapping[str, Any], *, quarantined: bool, private: bool) -> tuple[Any, str]:
    mend = next((mend for pattern, mend in _MENDS if re.search(pattern, text)), "")
    if counts["differing"]:
        return "differs", f"{mend or 'Find what differs: a clock, chance or a name'}, in the call or the task's `env`."
    known: Reason = "other-state" if counts["states"] > 1 else "new-call"
    known = "quarantined" if quarantined else "private" if private else known
    return known, MEANINGS[known][1]
