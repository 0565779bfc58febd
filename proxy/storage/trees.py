"""Trees as rows: read back whole, and filed under the task that they belong to or the group that shares them."""

import time
from collections.abc import Callable, Iterable, Iterator

from proxy.storage.database import StoreDatabase
from proxy.storage.errors import DamagedError
from proxy.storage.records import insert_node
from proxy.storage.schema import is_whole
from proxy.storage.tree_reading import TreeReading, node_of
from proxy.tree.tree import Node, Tree, Unread
from sandboxes.spec import EnvironmentSpec

_WHOLE_SHARE = is_whole("shares")
"""A damaged share names another task or another tree. It is left out; a task that opens its tree writes it again."""
TREES_OF = (
    f"SELECT id FROM trees WHERE task = {{task}} UNION SELECT tree FROM shares WHERE task = {{task}} AND {_WHOLE_SHARE}"
)
"""The numbers of the trees that a task uses; the placeholder is formatted in."""
OF_TASK = (
    "(t.task = :task OR (t.task = :shared_owner AND t.id IN "
    f"(SELECT tree FROM shares WHERE task = :task AND {_WHOLE_SHARE})))"
)
"""Whether a task may see row t of `trees`; for shared_owner see `TreeStore.shared_owner`."""


class TreeStore:
    """Reads and creates trees; `damaged` counts rows that were left out since the start.

    A tree belongs to one task. A tree whose spec is shared belongs to all tasks with its root key: its column `task`
    holds no task's name, and the table `shares` lists the tasks that use it.
    """

    def __init__(self, database: StoreDatabase, namespace: Callable[[str], str]) -> None:
        """Create the reader; `namespace` separates a task's shared trees from those that other tokens see."""
        self._database, self._namespace = database, namespace
        self.damaged = 0

    def open(self, task: str, root_key: str, spec: EnvironmentSpec) -> Tree:
        """Return or create a task's tree under this root key; a shared spec has one for all tasks."""
        known = self.id_of(task, root_key, spec)
        if known is not None:
            return self.load(known)
        tree, root = self._database.take_number("trees"), Node(self._database.take_number("nodes"))
        values = (tree, self.owner(task, spec), root_key, spec.model_dump_json(), root.id, time.time())
        with self._database.transaction() as execute:
            execute("INSERT INTO trees VALUES (?, ?, ?, ?, ?, ?)", values)
            insert_node(execute, tree, root)
        return Tree(tree, root, spec, root_key)

    def load(self, tree_id: int) -> Tree:
        """Return an existing tree with all of its nodes and records, as `reading` reads it."""
        reading = self.reading(tree_id)
        while reading.step():
            pass
        return reading.tree

    def reading(self, tree_id: int, attach: Callable[[Node], object] = lambda _: None) -> TreeReading:
        """Begin to read an existing tree back; see `TreeReading`. Raises DamagedError for its own row, or its root.

        Damaged nodes and records, and what only they lead to, are left out and counted in `damaged`.
        """
        sql = f"SELECT root, spec, root_key FROM trees WHERE id = ? AND {is_whole('trees')}"
        row = self._database.row(sql, (tree_id,))
        if row is None:
            raise DamagedError(f"tree {tree_id} is damaged in the store.")
        root, spec = self._root(row[0]), EnvironmentSpec.model_validate_json(row[1])

        def tree(unread: Unread) -> Tree:
            return Tree(tree_id, root, spec, row[2], unread)

        return TreeReading(self._database, tree, attach, self._leave_out)

    def _leave_out(self, damaged: int) -> None:
        self.damaged += damaged

    def id_of(self, task: str, root_key: str, spec: EnvironmentSpec) -> int | None:
        """Return the number of the tree that `open` would read; None if it would create one."""
        # A damaged tree is not found: its task begins another one, and its rollouts are lost. In a restored store,
        # tasks of equal environments may use different shared trees: each keeps its own.
        sql = (
            f"SELECT id FROM trees WHERE task = ? AND root_key = ? AND {is_whole('trees')} "
            "ORDER BY id NOT IN (SELECT tree FROM shares WHERE task = ?), id LIMIT 1"
        )
        row = self._database.row(sql, (self.owner(task, spec), root_key, task))
        return None if row is None else int(row[0])

    def exists(self, tree: int) -> bool:
        """Return whether the store has this tree."""
        return self._database.row("SELECT 1 FROM trees WHERE id = ?", (tree,)) is not None

    def specs(self, trees: Iterable[int]) -> Iterator[tuple[int, EnvironmentSpec]]:
        """Yield the environments of trees, each with the tree's number. Damaged and missing ones are left out."""
        for tree in trees:
            row = self._database.row(f"SELECT spec FROM trees WHERE id = ? AND {is_whole('trees')}", (tree,))
            if row is not None:
                yield tree, EnvironmentSpec.model_validate_json(row[0])

    def is_empty(self, tree: int) -> bool:
        """Return whether no call is recorded in a tree."""
        return self._database.row("SELECT 1 FROM records WHERE tree = ?", (tree,)) is None

    def share(self, task: str, tree: int) -> None:
        """Write that a task uses a shared tree."""
        with self._database.transaction() as execute:
            execute("INSERT OR REPLACE INTO shares VALUES (?, ?)", (task, tree))

    def owner(self, task: str, spec: EnvironmentSpec) -> str:
        """Return the value of the column `task` for a tree of this task with this spec."""
        return self.shared_owner(task) if spec.shared else task

    def shared_owner(self, task: str) -> str:
        """Return the owner of the trees that a task shares: empty, or its namespace now, with a leading slash."""
        space = self._namespace(task)
        return f"/{space}" if space else ""

    def task_of(self, tree: int) -> str:
        """Return the name of a tree's task, or of a shared tree's first task; empty if the tree was deleted."""
        row = self._database.row(
            "SELECT COALESCE(CASE WHEN task = '' OR task GLOB '/*' THEN "
            f"(SELECT MIN(task) FROM shares WHERE tree = id AND {_WHOLE_SHARE}) ELSE task END, '') "
            "FROM trees WHERE id = ?",
            (tree,),
        )
        return "" if row is None else str(row[0])

    def ids_of(self, task: str) -> list[int]:
        """Return the numbers of all trees that a task ever used, one for each root state."""
        return [row[0] for row in self._database.rows(TREES_OF.format(task="?1"), (task,))]

    def sole_ids(self, task: str) -> list[int]:
        """Return the numbers of the trees that no other task uses."""
        # A damaged share may be another task's of any shared tree.
        others = f"SELECT tree FROM shares WHERE task <> ?1 OR EXISTS (SELECT 1 FROM shares WHERE NOT {_WHOLE_SHARE})"
        sql = f"SELECT id FROM ({TREES_OF.format(task='?1')}) WHERE id NOT IN ({others})"
        return [row[0] for row in self._database.rows(sql, (task,))]

    def id_with_node(self, task: str, node: int) -> int | None:
        """Return the number of the task's tree that holds a node; None if only other tasks' trees do, or none."""
        sql = f"SELECT t.id FROM nodes n JOIN trees t ON t.id = n.tree WHERE n.id = :node AND {OF_TASK}"
        row = self._database.row(sql, {"node": node, "task": task, "shared_owner": self.shared_owner(task)})
        return None if row is None else int(row[0])

    def task_with_node(self, node: int) -> str:
        """Return the name of the task that holds a node, or of the first that shares it; empty if no tree has it."""
        row = self._database.row("SELECT tree FROM nodes WHERE id = ?", (node,))
        return "" if row is None else self.task_of(row[0])

    def _root(self, node: int) -> Node:
        sql = f"SELECT exact, content, pinned FROM nodes WHERE id = ? AND {is_whole('nodes')}"
        row = self._database.row(sql, (node,))
        if row is None:
            raise DamagedError(f"the root n{node} of a tree is damaged in the store.")
        return node_of(node, row[0], row[1], "", row[2])
