"""The list of a task's trees, one for each environment that its rollouts began in. No tree is loaded for it."""

import sqlite3
from collections.abc import Callable, Mapping

import orjson
from pydantic import BaseModel

from proxy.control.paging import ListQuery, Order, Page
from proxy.control.views.resources import NodeName
from proxy.storage.schema import is_whole
from proxy.storage.trees import OF_TASK
from proxy.times import UtcTime
from sandboxes.spec import SERVER_DRIVERS, EnvironmentSpec

_TITLE_CHARS = 120
"""Longest title, in characters."""
_NAMED = 3
"""Names that a title lists of a mapping; it counts the others."""
_MOST_SHARERS = 1000
"""Tasks that the summary of a shared tree names."""
_IN_EVERY_TITLE = frozenset({"driver", "image", "base", "workdir"})
"""Members of a spec that every title starts with, so they are not listed again."""
_IN_OTHER_TITLES = frozenset({"databases", "servers"})
"""Members that the start of a title has too, for drivers that do not run tool servers beside a file system."""


class TreeSummary(BaseModel):
    """A tree of a task.

    Attributes:
        root: Its first node, which names the tree.
        current: Whether it is the tree of the task's current environment, in which new rollouts begin.
        title: Its environment in at most 120 characters.
        image: Image of its containers; null for other drivers.
        template: E2B template of its environment; null if there is none.
        base: Base directory of driver `local`; null for other drivers.
        shared: Whether tasks with the same environment share the tree.
        shared_with: The other tasks that use it, by name; at most 1,000.
        calls: Number of recorded calls.
        rollouts: Number of this task's rollouts that began in it, finished rollouts included.
    """

    root: NodeName
    current: bool
    title: str
    driver: str
    image: str | None
    template: str | None
    base: str | None
    shared: bool
    shared_with: list[str] = []
    created_at: UtcTime
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
    sees: Callable[[str], bool],
    wanted: ListQuery,
) -> Page[TreeSummary]:
    """Return a page of a task's trees. Call it in a thread: it counts nodes and calls of every tree.

    By the key `current`, the current tree is the greatest, then calls count. Other tasks are named if the request
    `sees` them. See `TreeStore.shared_owner`.
    """
    sql = (
        "SELECT t.id, t.root, t.spec, t.created_at, (SELECT COUNT(*) FROM nodes WHERE tree = t.id) AS nodes, "
        "(SELECT COUNT(*) FROM records WHERE tree = t.id) AS calls, "
        "(SELECT COUNT(*) FROM rollouts WHERE tree = t.id AND task = :task) AS rollouts, "
        "(SELECT COUNT(*) FROM rollouts WHERE tree = t.id AND task = :task AND finished = 0) AS running, "
        "(SELECT json_group_array(task) FROM (SELECT task FROM shares WHERE tree = t.id AND task <> :task "
        f"AND {is_whole('shares')} ORDER BY task LIMIT {_MOST_SHARERS})) AS sharers "
        f"FROM trees t WHERE {OF_TASK}"
    )
    connection.row_factory = sqlite3.Row
    rows = connection.execute(sql, {"task": task, "shared_owner": shared_owner})

    def order(row: sqlite3.Row) -> Order:
        return (
            (row["id"] == current, row["calls"], row["id"]) if wanted.key == "current" else (row[wanted.key], row["id"])
        )

    return wanted.sorted_part(rows, order).page(
        lambda row: _summary(row, row["id"] == current, default, templates, sees)
    )


def _summary(
    row: sqlite3.Row,
    current: bool,
    default: EnvironmentSpec,
    templates: Mapping[str, EnvironmentSpec],
    sees: Callable[[str], bool],
) -> TreeSummary:
    spec = EnvironmentSpec.model_validate_json(row["spec"])
    template = next((name for name, environment in templates.items() if environment == spec), None)
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
        shared_with=[name for name in orjson.loads(row["sharers"]) if sees(name)],
        **counts,
    )


def title_of(spec: EnvironmentSpec, default: EnvironmentSpec, template: str | None = None) -> str:
    """Return an environment as a title: what differs from the default, variables and files by name only (pure)."""
    base = spec.image or (spec.base if spec.driver == "local" else ", ".join([*spec.databases, *spec.upstreams]))
    shown = _IN_EVERY_TITLE if spec.driver in SERVER_DRIVERS else _IN_EVERY_TITLE | _IN_OTHER_TITLES
    parts = [template or "", f"{spec.driver} {base}".strip()]
    parts += [f"workdir {spec.directory}"] if spec.directory not in {"/", default.directory} else []
    for name in EnvironmentSpec.model_fields:
        value, usual = getattr(spec, name), getattr(default, name)
        if value and value != usual and name not in shown:
            parts.append(_phrase(name.replace("_", " "), value))
    text = " · ".join(part for part in parts if part)
    return text if len(text) <= _TITLE_CHARS else text[: _TITLE_CHARS - 1] + "…"


def _phrase(name: str, value: object) -> str:
    if isinstance(value, dict):
        more = f" and {len(value) - _NAMED} more" if len(value) > _NAMED else ""
        return f"{name} {', '.join(list(value)[:_NAMED])}{more}"
    return f"{name} {value}" if isinstance(value, str) else name
