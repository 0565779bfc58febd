"""Trees of any size, a part at a time: children by page with what lies below them, search, who passed."""

import asyncio
import sqlite3
from functools import partial
from typing import Literal

from pydantic import BaseModel

from proxy.control.call_titles import Titles, title
from proxy.control.subtree_totals import NodeTotals, SummedTree
from proxy.control.views.common import Flag, PassedRollout, flags
from proxy.control.views.resources import node_name
from proxy.engine import Engine
from proxy.storage.store import Store
from proxy.tree.tree import Node, Record, Tree, children

Order = Literal["recorded", "hits", "saved", "nodes"]
_ROLLOUTS_NAMED = 5


class Below(BaseModel):
    """Of a node and all that came from it. seconds: of tools when they ran; saved_s: those that answers spared."""

    nodes: int
    hits: int
    seconds: float
    saved_s: float
    rollouts: int
    snapshots: int
    diverged: int


class NodeBrief(BaseModel):
    """A node in a line. title: its call, cut to 200 characters. rollouts: the first five that stand there."""

    id: str
    parent: str | None
    title: str
    effect: list[str]
    seconds: float
    hits: int
    exit_code: int | None
    snapshot: bool
    flags: list[Flag]
    observations: int
    children: int
    rollouts: list[str]
    standing: int


class Chain(BaseModel):
    """A child, and those that follow it one by one: up to where the tree forks, ends, or `fold` nodes are shown.

    length: nodes in the whole run; where it is more than are shown, `last` is its last. below: of the first node.
    """

    nodes: list[NodeBrief]
    length: int
    last: NodeBrief
    below: Below


class ChildrenView(BaseModel):
    """The children of a node, one page of them. below: of the node itself."""

    task: str
    node: NodeBrief
    below: Below
    total: int
    offset: int
    children: list[Chain]


class SearchMatch(BaseModel):
    """A call that matches. node: where it leads, or for one that changed nothing, where it was made."""

    record: int
    node: str
    observation: bool
    title: str
    hits: int


class SearchView(BaseModel):
    task: str
    query: str
    found: list[SearchMatch]
    truncated: bool


def below(found: NodeTotals) -> Below:
    return Below(**{name: getattr(found, name) for name in Below.model_fields})


class Browser:
    """Reads parts of trees."""

    def __init__(self, store: Store) -> None:
        self._titles, self._store = Titles(store.records), store

    def brief(self, node: Node, standing: dict[Node, list[str]]) -> NodeBrief:
        origin, names = node.origin, standing.get(node, [])
        text, code = ("", None) if origin is None else self._titles.of(origin)
        return NodeBrief(
            id=node_name(node),
            parent=None if origin is None else node_name(origin.source),
            title=text,
            effect=[] if origin is None else origin.effect.names,
            seconds=0.0 if origin is None else origin.seconds,
            hits=0 if origin is None else origin.hits,
            exit_code=code,
            snapshot=node.snapshot is not None,
            flags=flags(node),
            observations=sum(record.observation for record in node.records.values()),
            children=len(children(node)),
            rollouts=sorted(names)[:_ROLLOUTS_NAMED],
            standing=len(names),
        )

    def children(
        self,
        task: str,
        node: Node,
        summed: SummedTree,
        standing: dict[Node, list[str]],
        *,
        order: Order,
        offset: int,
        limit: int,
        fold: int,
    ) -> ChildrenView:
        """Return one page of a node's children."""
        listed = _sorted(children(node), summed, order)
        return ChildrenView(
            task=task,
            node=self.brief(node, standing),
            below=below(summed.of(node)),
            total=len(listed),
            offset=offset,
            children=[self._chain(child, summed, standing, fold) for child in listed[offset : offset + limit]],
        )

    def _chain(self, first: Node, summed: SummedTree, standing: dict[Node, list[str]], fold: int) -> Chain:
        run = [first]
        while len(following := children(run[-1])) == 1:
            run.append(following[0])
        shown = [self.brief(node, standing) for node in run[:fold]]
        last = shown[-1] if len(run) <= fold else self.brief(run[-1], standing)
        return Chain(nodes=shown, length=len(run), last=last, below=below(summed.of(first)))

    def search(self, task: str, tree: Tree, query: str, rows: list[tuple[int, int, int]], limit: int) -> SearchView:
        """Return the calls among rows (record, source, target) whose title has query in it, whatever its case."""
        found: list[SearchMatch] = []
        wanted, truncated = query.casefold(), False
        for record_id, source, target in rows:
            node = tree.nodes.get(source)
            there = node.records.values() if node is not None else ()
            record = next((r for r in there if r.id == record_id), None)
            if record is None or wanted not in title(self._store.records.call(record)).casefold():
                continue
            if len(found) == limit:
                truncated = True
                break
            found.append(self._found(record, target))
        return SearchView(task=task, query=query, found=found, truncated=truncated)

    def _found(self, record: Record, target: int) -> SearchMatch:
        text, _ = self._titles.of(record)
        return SearchMatch(
            record=record.id, node=f"n{target}", observation=record.observation, title=text, hits=record.hits
        )


def _sorted(nodes: list[Node], summed: SummedTree, order: Order) -> list[Node]:
    if order == "recorded":
        return nodes
    key = {"hits": "hits", "saved": "saved_s", "nodes": "nodes"}[order]
    return sorted(nodes, key=lambda node: -getattr(summed.of(node), key))


def matching(connection: sqlite3.Connection, tree: int, query: str, most: int) -> list[tuple[int, int, int]]:
    """Return up to most (record, source, target) whose call may have query in it. For a thread: it looks at all calls.

    Calls that were compressed are among them, whatever they hold.
    """
    # As JSON has it, in which calls are kept; LIKE ignores case of ASCII, and what is beyond is looked at later.
    letters = "".join(sign if sign.isascii() and sign.isprintable() and sign not in '\\"%_' else "%" for sign in query)
    sql = (
        "SELECT r.id, r.source, r.target FROM records r JOIN blobs b ON b.id = r.call "
        "WHERE r.tree = ? AND r.private = 0 AND (b.packed = 1 OR CAST(b.data AS TEXT) LIKE ?) ORDER BY r.id LIMIT ?"
    )
    return connection.execute(sql, (tree, f"%{letters}%", most)).fetchall()


async def rollouts_through(engine: Engine, tree: Tree, node: Node, limit: int) -> list[PassedRollout]:
    """Return the latest rollouts that a call led to node."""
    engine.journal.fold()
    read = partial(passed, tree=tree.id, node=node.id, most=limit)
    rows = await asyncio.to_thread(engine.store.database.read_apart, read)
    return [PassedRollout(task=row[0], rollout=row[1], turn=row[2], finished=bool(row[3])) for row in rows]


def passed(connection: sqlite3.Connection, tree: int, node: int, most: int) -> list[tuple[str, str, int, int]]:
    """Return the latest rollouts that came to a node: task, name, turn, finished. For a thread: looks at all steps."""
    sql = (
        "SELECT r.task, r.name, MIN(s.turn), r.finished FROM rollouts r CROSS JOIN steps s ON s.rollout = r.id "
        "WHERE r.tree = ? AND s.record IN (SELECT id FROM records WHERE tree = ? AND target = ? AND source <> target) "
        "GROUP BY r.id ORDER BY r.id DESC LIMIT ?"
    )
    return connection.execute(sql, (tree, tree, node, most)).fetchall()
