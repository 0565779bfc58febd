"""A part of a list of rollouts is found in an index, and counted once."""

from pathlib import Path

from proxy.control.paging import ListQuery
from proxy.storage.rollout_lists import RolloutFilters, RolloutIndex
from tests.proxy.storage.rig import opened, tree_of


def test_page_of_rollouts_is_found_in_an_index(tmp_path: Path) -> None:
    """Its cost does not grow with the task: SQLite searches an index for the cursor, and sorts nothing."""
    by_name, begun = ListQuery("rollout", descending=True, after=("r08", 8)), ListQuery("created_at", after=(7,))
    orders = ((RolloutIndex.NAME, by_name.sql("name", "id")), (RolloutIndex.BEGUN, begun.sql("id")))
    with opened(tmp_path) as store:
        tree = tree_of(store)
        for number in range(1, 11):
            store.rollouts.create("task", f"r{number:02}", tree.id, tree.root.id)
        store.rollouts.create("task", "~own", tree.id, tree.root.id)
        for (index, (end, values)), numbers in zip(orders, (range(7, 0, -1), range(8, 11)), strict=True):
            rows, total = store.rollout_lists.part("task", index, end, values, RolloutFilters())
            assert ([row["id"] for row in rows], total) == ([*numbers], 10)
            sql = f"EXPLAIN QUERY PLAN SELECT * FROM rollouts INDEXED BY {index} WHERE task = :task{end}"
            plan = str(store.database.views(sql, {"task": "task", **values}))
            assert "SEARCH rollouts USING INDEX" in plan
            assert "TEMP B-TREE" not in plan
        assert store.rollout_lists.part("task", index, end, values, RolloutFilters(finished=True)) == ([], 0)


def test_total_follows_what_comes_and_goes(tmp_path: Path) -> None:
    """Only new rollouts are counted; a task that was deleted and came again begins at none."""
    end, values = ListQuery("created_at").sql("id")
    with opened(tmp_path) as store:
        tree, totals = tree_of(store), []
        for names in (("a", "b"), ("~own",), ("c",), ()):
            for name in names:
                store.rollouts.create("task", name, tree.id, tree.root.id)
            totals.append(store.rollout_lists.part("task", RolloutIndex.BEGUN, end, values, RolloutFilters())[1])
        store.tasks.delete("task")
        store.rollouts.create("task", "d", tree.id, tree.root.id)
        rows, total = store.rollout_lists.part("task", RolloutIndex.BEGUN, end, values, RolloutFilters())
        assert (totals, total, [row["name"] for row in rows]) == ([2, 2, 3, 3], 1, ["d"])
