"""Which worker has a task."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.refusals import RefusalError
from proxy.shares import Share


@given(st.text(), st.integers(1, 256))
def test_each_task_has_one_worker(task: str, workers: int) -> None:
    """Every worker computes the same one, and only that one has the task."""
    name = task.encode("utf-8", "ignore").decode()
    assert [number for number in range(workers) if Share(number, workers).has(name)] == [
        Share(0, workers).worker_of(name)
    ]


def test_rule_never_changes() -> None:
    """A data directory is divided by it: another rule would look for tasks in the wrong worker's store."""
    assert [Share(0, 4).worker_of(f"task-{number}") for number in range(8)] == [2, 3, 3, 2, 1, 1, 1, 2]
    assert Share(0, 7).worker_of("Aufgabe Ä") == 0


def test_tasks_of_others_are_misdirected() -> None:
    with pytest.raises(RefusalError, match="another worker of this proxy has task 'task-0'") as refused:
        Share(1 - Share(0, 2).worker_of("task-0"), 2).require("task-0")
    assert refused.value.status == 421
