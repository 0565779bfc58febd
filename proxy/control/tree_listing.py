"""The trees of a task, one for each root state that its rollouts began in: what is known of each without opening it."""

import sqlite3
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from proxy.control.views.resources import NodeName
from proxy.storage.trees import OF_TASK
from sandboxes.spec import SERVER_DRIVERS, EnvironmentSpec

_TITLE_CHARS = 120
_NAMED = 3
_PLACE = frozenset({"driver", "image", "base", "workdir"})
_ALL = frozenset({"databases", "servers"})
"""Members of a spec that a title has in words of their own; and those that are all that some drivers have."""


class TreeSummary(BaseModel):
    """A tree of a task. root: its first node, by which it is named. current: that of the task's spec as it is now.

    title: what its environment is, and what that says beyond the defaults. template: the E2B template of this
    environment. base: of driver local. calls: recorded ones. rollouts, running: of this task, that began in it.
    """

    root: NodeName
    current: bool
    title: str
    driver: str
    image: str | None
    template: str | None
    base: str | None
    shared: bool
    created_at: float
    nodes: int
    calls: int
    rollouts: int
    running: int


def summaries(
    connection: sqlite3.Connection,
    task: str,
    shared_owner: str,
    current: int,
    default: EnvironmentSpec,
    templates: Mapping[str, EnvironmentSpec],
    *,
    offset: int,
    limit: int,
) -> list[TreeSummary]:
    """Return a task's trees, the current one first, then those with most calls. For a thread: it counts them.

    shared_owner: see `TreeStore.shared_owner`. default: the spec of tasks that were given none.
    """
    sql = (
        "SELECT t.id, t.root, t.spec, t.created_at, (SELECT COUNT(*) FROM nodes WHERE tree = t.id) AS nodes, "
        "(SELECT COUNT(*) FROM records WHERE tree = t.id) AS calls, "
        "(SELECT COUNT(*) FROM rollouts WHERE tree = t.id AND task = :task) AS rollouts, "
        "(SELECT COUNT(*) FROM rollouts WHERE tree = t.id AND task = :task AND finished = 0) AS running "
        f"FROM trees t WHERE {OF_TASK} ORDER BY t.id = :current DESC, calls DESC, t.id DESC LIMIT :limit OFFSET :offset"
    )
    values = {"task": task, "shared_owner": shared_owner, "current": current, "limit": limit, "offset": offset}
    cursor = connection.execute(sql, values)
    names = [column[0] for column in cursor.description]
    rows = [dict(zip(names, row, strict=True)) for row in cursor]
    return [_summary(row, row["id"] == current, default, templates) for row in rows]


def _summary(
    row: Mapping[str, Any], current: bool, default: EnvironmentSpec, templates: Mapping[str, EnvironmentSpec]
) -> TreeSummary:
    spec = EnvironmentSpec.model_validate_json(row["spec"])
    template = next((name for name, told in templates.items() if told == spec), None)
    counts = {name: row[name] for name in ("nodes", "calls", "rollouts", "running", "created_at")}
    return TreeSummary(
        root=f"n{row['root']}",
        current=current,
        title=title_of(spec, default, template),
        driver=spec.driver,
        image=spec.image,
        template=template,
        base=spec.base if spec.driver == "local" else None,
        shared=spec.shared,
        **counts,
    )


def title_of(spec: EnvironmentSpec, default: EnvironmentSpec, template: str | None = None) -> str:
    """Return in at most 120 characters what a tree's environment is (pure).

    Of variables and files only names are told: their values may be secrets, and long.
    """
    base = spec.image or (spec.base if spec.driver == "local" else ", ".join([*spec.databases, *spec.upstreams]))
    placed = _PLACE if spec.driver in SERVER_DRIVERS else _PLACE | _ALL
    parts = [template or "", f"{spec.driver} {base}".strip()]
    parts += [f"workdir {spec.workdir}"] if spec.workdir not in {"/", default.workdir} else []
    for name in EnvironmentSpec.model_fields:
        value, usual = getattr(spec, name), getattr(default, name)
        if value and value != usual and name not in placed:
            parts.append(_said(name.replace("_", " "), value))
    text = " · ".join(part for part in parts if part)
    return text if len(text) <= _TITLE_CHARS else text[: _TITLE_CHARS - 1] + "…"


def _said(name: str, value: object) -> str:
    if isinstance(value, dict):
        more = f" and {len(value) - _NAMED} more" if len(value) > _NAMED else ""
        return f"{name} {', '.join(list(value)[:_NAMED])}{more}"
    return f"{name} {value}" if isinstance(value, str) else name
