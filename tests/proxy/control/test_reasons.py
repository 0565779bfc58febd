"""Why calls were no hits: each reason, and the nearest state that knew the call."""

from pathlib import Path
from typing import Any

from proxy.control.reasons import MEANINGS
from tests.proxy.serving import Running, get, serving


def why(proxy: Running, rollout: str, task: str = "task") -> list[Any]:
    items: list[Any] = get(proxy, f"tasks/{task}/rollouts/{rollout}/why")["items"]
    for item in items:
        assert (item["meaning"], item["remedy"]) == MEANINGS[item["reason"]]
    return items


def test_a_call_that_is_known_elsewhere_names_the_nearest_state(proxy: Running) -> None:
    for rollout, commands in {
        "first": ("echo a > f", "echo a > g", "cat f"),
        "second": ("echo a > f", "echo b > g", "cat f", "cat g"),
        "third": ("cat f", "echo a > f", "echo b > g", "cat g"),
    }.items():
        nodes = [proxy.exec(rollout, command, task="elsewhere").headers["x-forkpoint-node"] for command in commands]
        if rollout == "first":
            after_a, after_both = nodes[0], nodes[1]
    second, third = why(proxy, "second", "elsewhere"), why(proxy, "third", "elsewhere")
    assert [item["reason"] for item in second] == ["hit", "new-call", "other-state", "new-call"]
    assert second[2]["nearest"] == {
        "node": after_both, "rollouts": 1, "last_common": after_a, "here": "echo b > g", "there": "echo a > g",
    }  # fmt: skip
    assert get(proxy, "tasks/elsewhere/rollouts/second/why?turn=2") == {"items": second[2:3], "total": 1, "next": None}
    assert get(proxy, "tasks/elsewhere/rollouts/second/why?turn=9")["items"] == []
    # Here the rollout itself is at the node where the others went on.
    assert [item["reason"] for item in third] == ["other-state", "hit", "hit", "hit"]
    assert (third[0]["nearest"]["here"], third[0]["nearest"]["there"]) == (None, "echo a > f")


def test_a_call_that_was_known_before_the_state_changed_is_told(proxy: Running) -> None:
    for command in ("cat f", "echo a > f", "echo b > g", "cat f"):
        proxy.exec("r", command, task="changed")
    *_, last = why(proxy, "r", "changed")
    assert (last["reason"], last["nearest"]["here"], last["nearest"]["there"]) == ("state-changed", "echo a > f", None)


def test_a_state_without_a_way_back_is_told(tmp_path: Path) -> None:
    """Also after a restart, from the times alone."""
    with serving(tmp_path) as proxy:
        proxy.exec("first", "echo a > f")
        proxy.client.delete("/api/v1/tasks/task/rollouts/first")
    with serving(tmp_path) as proxy:
        assert [item["reason"] for item in why(proxy, "first")] == ["new-call"]
        [tree] = proxy.engine.trees
        for node in tree.nodes.values():
            proxy.engine.cache.drop(node)
        answer = proxy.exec("second", "echo a > f")
        assert answer.headers["cache-status"] == "forkpoint; fwd=miss; stored; detail=not-kept"
        assert [item["reason"] for item in why(proxy, "second")] == ["not-kept"]
    with serving(tmp_path) as proxy:
        assert [item["reason"] for item in why(proxy, "second")] == ["not-kept"]


def test_rules_and_audits_are_told(proxy: Running) -> None:
    proxy.client.put("/api/v1/tasks/never", json={"driver": "memory", "cache": "never"}).raise_for_status()
    proxy.exec("r", "cat f", task="never")
    assert [item["reason"] for item in why(proxy, "r", "never")] == ["never-cached"]
    proxy.client.put("/api/v1/tasks/own", json={"driver": "memory", "own": ["secret"]}).raise_for_status()
    proxy.exec("r", "echo secret > f", task="own")
    assert [item["reason"] for item in why(proxy, "r", "own")] == ["private"]
    proxy.exec("first", "cat f", task="audited")
    rollout = proxy.engine.tasks.rollouts.running["audited", "first"]
    [record] = rollout.node.records.values()
    rollout.tree.quarantine(record, "it differs")
    proxy.exec("second", "cat f", task="audited")
    assert [item["reason"] for item in why(proxy, "second", "audited")] == ["quarantined"]


def test_forgotten_calls_have_no_title(proxy: Running) -> None:
    node = proxy.exec("r", "echo a > f", task="gone").headers["x-forkpoint-node"]
    proxy.exec("r", "echo b > f", task="gone")
    proxy.client.delete("/api/v1/tasks/gone/rollouts/r")
    proxy.client.delete(f"/api/v1/tasks/gone/nodes/{node}").raise_for_status()
    assert [(item["reason"], item["title"], item["node"]) for item in why(proxy, "r", "gone")] == [
        ("forgotten", None, None)
    ] * 2
