"""A tree as columns of numbers: what a page draws of 50,000 nodes, in one answer of some megabytes or in its news.

Reading a tree of that size takes a tenth of a second, in which no hit would be answered; so it is read in slices, and
what happens between two of them is what a page that asked a moment later would have seen.
"""

import asyncio
import itertools
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from enum import IntFlag
from typing import Any

from pydantic import BaseModel, Field

from proxy.tree.tree import Node, Tree

_SLICE = 300
"""Nodes and records that are read at once: some 0.3 ms."""


class Mark(IntFlag):
    """What is special about a node."""

    SNAPSHOT = 1
    PINNED = 2
    DIVERGED = 4
    UNREPRODUCIBLE = 8
    PRIVATE = 16
    UNFREEZABLE = 32


class Columns(BaseModel):
    """One list for each thing that is known of a node, all of one length. Numbers of nodes are those of their names.

    parent: 0 for the root. seconds, hits: of the call that led there. saved: seconds that answers from it, and from its
    observations, saved. seen, seen_hits: observations, and answers given from them. effect: the bits of `Effect`.
    marks: the bits of `Mark`. passes: rollouts that stepped onto it.
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
    """The nodes after a node, in the order in which they were made. more: there are others after these.

    nodes: how many the tree has; a page that counts others has missed that some were forgotten. meets: records that
    lead from a node to one that was known already, as pairs of numbers. standing: the rollouts at each node, by its
    number; warm: nodes with warm forks; sandboxes: nodes at which a sandbox stands.
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


async def columns_of(tree: Tree, after: int, limit: int) -> tuple[Columns, list[tuple[int, int]], bool]:
    """Return up to limit nodes made after a node, the meetings among them, and whether there are more."""
    chosen, more = _after(tree, after, limit)
    columns, meets = Columns(), []
    read = 0
    for node in chosen:
        if node.detached:
            continue
        meets += _append(columns, node)
        read += 1 + len(node.records)
        if read >= _SLICE:
            read = 0
            await asyncio.sleep(0)
    return columns, meets, more


def _after(tree: Tree, after: int, limit: int) -> tuple[list[Node], bool]:
    """Ids grow with time and nodes are kept in that order, so what is new is found from the end: O(limit) for news."""
    newest = itertools.takewhile(lambda node: node.id > after, reversed(tree.nodes.values()))
    new = list(itertools.islice(newest, limit + 1))
    if len(new) <= limit:
        return new[::-1], False
    ids = list(tree.nodes)
    start = bisect_right(ids, after)
    return [tree.nodes[number] for number in ids[start : start + limit]], True


def _append(columns: Columns, node: Node) -> list[tuple[int, int]]:
    """Add a node; return the meetings that its records make."""
    origin = node.origin
    seen = seen_hits = 0
    saved = 0.0 if origin is None else origin.hits * origin.seconds
    meets = []
    for record in node.records.values():
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
    task: str, tree: Tree, found: tuple[Columns, list[tuple[int, int]], bool], standing: Mapping[int, list[str]],
    sandboxes: Iterable[tuple[int, bool]],
) -> dict[str, Any]:  # fmt: skip
    """Return an `TreeColumns` as plain values: validating a hundred thousand numbers would take longer than reading
    them.
    """
    columns, meets, more = found
    places = list(sandboxes)
    return {
        "task": task,
        "root": tree.root.id,
        "nodes": len(tree.nodes),
        "more": more,
        "columns": vars(columns),
        "meets": meets,
        "standing": {str(node): sorted(names) for node, names in standing.items()},
        "warm": sorted({node for node, warm in places if warm}),
        "sandboxes": sorted({node for node, _ in places}),
    }
