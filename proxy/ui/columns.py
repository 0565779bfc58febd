"""A tree as columns of numbers: the page draws 50,000 nodes from one response of a few megabytes, or from updates.

Reading such a tree would delay every hit, so it is read in slices, and calls are answered between two slices. A change
between them looks as if the page had requested the tree a moment later.
"""

import asyncio
import itertools
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from enum import IntFlag
from typing import Any

from pydantic import BaseModel, Field

from proxy.control.browsing import OwnPart
from proxy.tree.tree import Node, Tree

_SLICE = 300
"""Nodes and records that are read between two turns of the event loop: about 0.3 ms."""


class Mark(IntFlag):
    """Properties of a node, as bits."""

    SNAPSHOT = 1
    PINNED = 2
    DIVERGED = 4
    UNREPRODUCIBLE = 8
    PRIVATE = 16
    UNFREEZABLE = 32


class Columns(BaseModel):
    """Lists of equal length, with one entry for each node.

    Attributes:
        id: Number of the node: 12 for `n12`.
        parent: Number of its parent; 0 for the root.
        saved: Seconds of tool time that hits of the call and of the observations saved.
        seen_hits: Number of hits that the observations have answered.
        effect: What the call changed: the bits of `Effect`.
        marks: The bits of `Mark`.
    """

    id: list[int] = Field(default_factory=list)
    parent: list[int] = Field(default_factory=list)
    seconds: list[float] = Field(default_factory=list)
    hits: list[int] = Field(default_factory=list)
    saved: list[float] = Field(default_factory=list)
    seen: list[int] = Field(default_factory=list)
    seen_hits: list[int] = Field(default_factory=list)
    effect: list[int] = Field(default_factory=list)
    marks: list[int] = Field(default_factory=list)
    passes: list[int] = Field(default_factory=list)


class TreeColumns(BaseModel):
    """A page of a tree's nodes, in the order of their creation.

    Attributes:
        nodes: Number of all nodes. A client that has another number missed that a subtree was forgotten.
        meets: Records that lead to a node with another parent, as pairs of node numbers.
        standing: Names of the running rollouts, by node number.
    """

    task: str
    root: int
    nodes: int
    more: bool
    columns: Columns
    meets: list[tuple[int, int]]
    standing: dict[str, list[str]]
    warm: list[int]
    sandboxes: list[int]


async def columns_of(
    tree: Tree, after: int, limit: int, own: OwnPart | None = None
) -> tuple[Columns, list[tuple[int, int]], bool]:
    """Return the columns and `meets` of nodes after a number (0 for all), and whether there are more.

    With `own`, other nodes and observations are left out.
    """
    chosen, more = _after(tree, after, limit)
    columns, meets = Columns(), []
    read = 0
    for node in chosen:
        if node.detached or (own is not None and node.id not in own.nodes):
            continue
        meets += _append(columns, node, own)
        read += 1 + len(node.records)
        if read >= _SLICE:
            read = 0
            await asyncio.sleep(0)
    return columns, meets, more


def _after(tree: Tree, after: int, limit: int) -> tuple[list[Node], bool]:
    """Return the nodes after a number, from the end, because numbers grow, and whether there are more."""
    newest = itertools.takewhile(lambda node: node.id > after, reversed(tree.nodes.values()))
    new = list(itertools.islice(newest, limit + 1))
    if len(new) <= limit:
        return new[::-1], False
    ids = list(tree.nodes)
    start = bisect_right(ids, after)
    return [tree.nodes[number] for number in ids[start : start + limit]], True


def _append(columns: Columns, node: Node, own: OwnPart | None) -> list[tuple[int, int]]:
    """Append a node to the columns, and return its `meets`."""
    origin = node.origin
    seen = seen_hits = 0
    saved = 0.0 if origin is None else origin.hits * origin.seconds
    meets = []
    for record in node.records.values():
        if own is not None and record.id not in own.records:
            continue
        if record.target is node:
            seen += 1
            seen_hits += record.hits
            saved += record.hits * record.seconds
        elif record.target.origin is not record:
            meets.append((node.id, record.target.id))
    columns.id.append(node.id)
    columns.parent.append(0 if origin is None else origin.source.id)
    columns.seconds.append(0.0 if origin is None else round(origin.seconds, 4))
    columns.hits.append(0 if origin is None else origin.hits)
    columns.saved.append(round(saved, 4))
    columns.seen.append(seen)
    columns.seen_hits.append(seen_hits)
    columns.effect.append(0 if origin is None else origin.effect.value)
    columns.marks.append(_marks(node))
    columns.passes.append(node.visits)
    return meets


def _marks(node: Node) -> int:
    origin = node.origin
    return int(
        (Mark.SNAPSHOT if node.snapshot is not None else 0)
        | (Mark.PINNED if node.pinned else 0)
        | (Mark.DIVERGED if node.diverged else 0)
        | (Mark.UNREPRODUCIBLE if origin is not None and not origin.reproducible else 0)
        | (Mark.PRIVATE if origin is not None and origin.private else 0)
        | (Mark.UNFREEZABLE if node.unfreezable else 0)
    )


def tree_columns(
    task: str, tree: Tree, read: tuple[Columns, list[tuple[int, int]], bool], standing: Mapping[int, list[str]],
    sandboxes: Iterable[tuple[int, bool]], nodes: int,
) -> dict[str, Any]:  # fmt: skip
    """Return a `TreeColumns`, from the result of `columns_of`, without validation, which takes longer than reading.

    `nodes` counts all nodes of the tree or of its part. Each of the `sandboxes` is the number of its node, and whether
    it is a warm fork.
    """
    columns, meets, more = read
    positions = list(sandboxes)
    return {
        "task": task,
        "root": tree.root.id,
        "nodes": nodes,
        "more": more,
        "columns": vars(columns),
        "meets": meets,
        "standing": {str(node): sorted(names) for node, names in standing.items()},
        "warm": sorted({node for node, warm in positions if warm}),
        "sandboxes": sorted({node for node, _ in positions}),
    }
