"""Trees of any size, one page at a time: children with the totals below them, search, and past rollouts."""

import sqlite3
from typing import NamedTuple

from pydantic import BaseModel

from proxy.control.call_titles import Titles, title
from proxy.control.paging import ListQuery, Order, Page
from proxy.control.subtree_totals import NodeTotals, SummedTree
from proxy.control.views.nodes import NodeFacts, PassedRollout, node_facts
from proxy.storage.schema import is_whole
from proxy.storage.store import Store
from proxy.tree.tree import Node, Record, Tree, children

_ROLLOUTS_NAMED = 5
"""Rollouts that a node's line names; `standing` has the number of all."""


class NodeBrief(NodeFacts):
    """A node in one line, with at most five names of rollouts and the number of those `standing` here."""

    title: str
    observations: int
    standing: int


class Chain(BaseModel):
    """A chain: a child node and its only descendants, the first `fold` of them in `nodes`, and their `last`."""

    nodes: list[NodeBrief]
    length: int
    last: NodeBrief
    below: NodeTotals


class ChildrenView(Page[Chain]):
    """One page of a node's children, each with the chain that it begins; `below` are totals of the subtree."""

    task: str
    node: NodeBrief
    below: NodeTotals


class SearchMatch(BaseModel):
    """A call that matches a search, and the node that it leads to; for an observation its own."""

    record: int
    node: str
    observation: bool
    title: str
    hits: int


class SearchView(BaseModel):
    """A page of the calls that match a search, by record; `total` is null if there are more than it has."""

    items: list[SearchMatch]
    total: int | None
    next: str | None


class Browser:
    """Makes the views of large trees, one page at a time."""

    def __init__(self, store: Store) -> None:
        self._titles, self._store = Titles(store.records), store

    def brief(self, node: Node, standing: dict[Node, list[str]]) -> NodeBrief:
        """Return a node in one line."""
        origin, names = node.origin, standing.get(node, [])
        text, code = ("", None) if origin is None else self._titles.of(origin)
        return NodeBrief(
            **node_facts(node),
            title=text,
            exit_code=code,
            observations=sum(record.observation for record in node.records.values()),
            rollouts=sorted(names)[:_ROLLOUTS_NAMED],
            standing=len(names),
        )

    def children(
        self,
        task: str,
        node: Node,
        summed: SummedTree,
        standing: dict[Node, list[str]],
        wanted: ListQuery,
        *,
        fold: int,
    ) -> ChildrenView:
        """Return one page of a node's children, by `recorded` or a subtree total; chains show `fold` nodes at most."""

        def order(child: Node) -> Order:
            return (child.id,) if wanted.key == "recorded" else (getattr(summed.of(child), wanted.key), child.id)

        page = wanted.sorted_part(children(node), order).page(lambda child: self._chain(child, summed, standing, fold))
        return ChildrenView(task=task, node=self.brief(node, standing), below=summed.of(node), **vars(page))

    def _chain(self, first: Node, summed: SummedTree, standing: dict[Node, list[str]], fold: int) -> Chain:
        run = [first]
        while len(following := children(run[-1])) == 1:
            run.append(following[0])
        shown = [self.brief(node, standing) for node in run[:fold]]
        last = shown[-1] if len(run) <= fold else self.brief(run[-1], standing)
        return Chain(nodes=shown, length=len(run), last=last, below=summed.of(first))

    def search(self, tree: Tree, query: str, rows: list[tuple[int, int, int]], wanted: ListQuery) -> SearchView:
        """Return a page of those candidates of `matching` whose title contains a text, ignoring case."""
        matches: list[SearchMatch] = []
        needle = query.casefold()
        for record_id, source, target in rows:
            node = tree.nodes.get(source)
            records = node.records.values() if node is not None else ()
            record = next((r for r in records if r.id == record_id), None)
            if record is None or needle not in title(self._store.records.call(record)).casefold():
                continue
            matches.append(self._match(record, target))
            if len(matches) > wanted.limit:
                break
        part = wanted.part(matches, len(matches), lambda match: (match.record,))
        whole = part.next is None and wanted.after is None
        return SearchView(items=part.entries, total=part.total if whole else None, next=part.next)

    def _match(self, record: Record, target: int) -> SearchMatch:
        text = self._titles.of(record).text
        return SearchMatch(
            record=record.id, node=f"n{target}", observation=record.observation, title=text, hits=record.hits
        )


def matching(
    connection: sqlite3.Connection, tree: int, query: str, wanted: ListQuery, most: int
) -> list[tuple[int, int, int]]:
    """Return the record, the node and the destination of each call of a tree that may contain a text.

    Compressed calls are always among them, because SQL cannot read them. Call it in a thread: it visits all calls.
    """
    # Calls are stored as JSON, and LIKE ignores the case of ASCII letters only. So every character that JSON may escape
    # and every character outside ASCII becomes a wildcard.
    pattern = "".join(c if c.isascii() and c.isprintable() and c not in '\\"%_' else "%" for c in query)
    sql = (
        "SELECT r.id, r.source, r.target FROM records r JOIN blobs b ON b.id = r.call "
        "WHERE r.tree = :tree AND r.private = 0 AND (b.packed = 1 OR CAST(b.data AS TEXT) LIKE :pattern)"
    )
    end, values = wanted.sql("r.id")
    chosen = {"tree": tree, "pattern": f"%{pattern}%"}
    return connection.execute(sql + end, {**values, **chosen, "limit": most}).fetchall()


class OwnPart(NamedTuple):
    """What one task's rollouts did in a tree that tasks share: the numbers of nodes and of records."""

    nodes: set[int]
    records: set[int]


def own_part(tree: Tree, rows: list[tuple[int | None, int]]) -> OwnPart:
    """Return what `own_rows` found, with the nodes on the ways to where the rollouts were."""
    part = OwnPart({tree.root.id}, set())
    for record, target in rows:
        if record is not None:
            part.records.add(record)
        node = tree.nodes.get(target)
        while node is not None and node.id not in part.nodes:
            part.nodes.add(node.id)
            node = None if node.origin is None else node.origin.source
    return part


def own_rows(connection: sqlite3.Connection, task: str, tree: int) -> list[tuple[int | None, int]]:
    """Return the records that answered a task's rollouts, each with its target, and where these began. In a thread."""
    chosen = f"r.task = :task AND r.tree = :tree AND {is_whole('rollouts', 'r')}"
    sql = (
        f"SELECT NULL, r.start FROM rollouts r WHERE {chosen} UNION SELECT c.id, c.target FROM rollouts r "
        "JOIN steps s ON s.rollout = r.id JOIN records c ON c.id = s.record "
        f"WHERE {chosen} AND {is_whole('steps', 's')} AND {is_whole('records', 'c')}"
    )
    return connection.execute(sql, {"task": task, "tree": tree}).fetchall()


def rollouts_through(rows: list[tuple[int, str, str, int, int]], wanted: ListQuery) -> Page[PassedRollout]:
    """Return a page of what `passed` found; the sort key is when the rollouts began."""
    part = wanted.sorted_part(rows, lambda row: (row[0],))
    return part.page(lambda row: PassedRollout(task=row[1], rollout=row[2], turn=row[3], finished=bool(row[4])))


def passed(connection: sqlite3.Connection, tree: int, node: int) -> list[tuple[int, str, str, int, int]]:
    """Return number, task, name, turn and end of rollouts that reached a node. In a thread: it reads all steps."""
    sql = (
        "SELECT r.id, r.task, r.name, MIN(s.turn), r.finished FROM rollouts r CROSS JOIN steps s ON s.rollout = r.id "
        f"WHERE r.tree = ? AND {is_whole('rollouts', 'r')} AND {is_whole('steps', 's')} AND s.record IN "
        f"(SELECT id FROM records WHERE tree = ? AND target = ? AND source <> target AND {is_whole('records')}) "
        "GROUP BY r.id"
    )
    return connection.execute(sql, (tree, tree, node)).fetchall()
