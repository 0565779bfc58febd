"""The REST API of tasks, trees, nodes, rollouts and forks, and its refusals."""

from typing import Any

import pytest

from tests.proxy.serving import Running, get

SPEC = {"driver": "memory"}


def test_task_is_put_shown_listed_and_deleted(proxy: Running) -> None:
    spec = SPEC | {"files": {"/root/f": "text\n"}}
    assert proxy.client.put("/api/v1/tasks/life", json=spec).status_code == 201
    assert proxy.client.put("/api/v1/tasks/life", json=spec).status_code == 200
    shown = get(proxy, "tasks/life")
    assert (shown["spec"]["files"], shown["default"], shown["nodes"]) == (spec["files"], False, 1)
    assert proxy.exec("r", "cat f", task="life").json()["stdout"] == "text\n"
    assert "life" in [task["task"] for task in get(proxy, "tasks")["items"]]
    assert proxy.client.delete("/api/v1/tasks/life").status_code == 204
    get(proxy, "tasks/life", 404)


def test_unknown_task_has_default_environment(proxy: Running) -> None:
    proxy.exec("r", "pwd", task="unknown")
    assert get(proxy, "tasks/unknown")["default"]


def test_each_environment_of_a_task_keeps_its_tree(proxy: Running) -> None:
    first, second = SPEC | {"files": {"/root/f": "one\n"}}, SPEC | {"files": {"/root/f": "two\n"}}
    answers = []
    for rollout, spec in (("a", first), ("b", second), ("c", first)):
        proxy.client.put("/api/v1/tasks/respec", json=spec)
        answers.append(proxy.exec(rollout, "cat f", task="respec"))
    assert [answer.json()["stdout"] for answer in answers] == ["one\n", "two\n", "one\n"]
    assert [answer.headers["cache-status"] for answer in answers][2] == "forkpoint; hit"
    assert proxy.exec("a", "cat f", task="respec").json()["stdout"] == "one\n", "a running rollout keeps its tree"


def test_tree_shows_nodes_observations_and_rollouts(proxy: Running) -> None:
    for command in ("echo 1 > f", "cat f", "false"):
        proxy.exec("first", command, task="tree")
    proxy.exec("second", "echo 1 > f", task="tree")
    root, child = get(proxy, "tasks/tree/tree")["nodes"]
    assert (root["parent"], root["call"], root["children"]) == (None, None, 1)
    assert child["parent"] == root["id"]
    assert child["call"]["arguments"]["command"] == "echo 1 > f"
    assert (child["effect"], child["hits"], child["exit_code"]) == (["files"], 1, 0)
    assert child["rollouts"] == ["first", "second"]
    assert [(seen["call"]["arguments"]["command"], seen["exit_code"]) for seen in child["observations"]] == [
        ("cat f", 0), ("false", 1),
    ]  # fmt: skip
    assert get(proxy, f"tasks/tree/tree?node={child['id']}")["nodes"] == [child]
    assert get(proxy, "tasks/tree/tree?depth=0")["nodes"] == [root]
    assert get(proxy, "tasks/tree/tree?limit=1")["truncated"]


def test_node_shows_its_answer_and_snapshot(proxy: Running) -> None:
    answer = proxy.exec("r", "echo 1 > f", task="node")
    proxy.exec("r", "cat f", task="node")
    shown = get(proxy, f"tasks/node/nodes/{answer.headers['x-forkpoint-node']}")
    assert shown["answer"]["json"] == answer.json()
    assert shown["snapshot_detail"]["kind"] == "files"
    assert shown["snapshot_detail"] in get(proxy, "snapshots")["items"]
    assert (shown["passes"], shown["diverged"]) == (1, "")


def test_rollout_shows_its_calls_and_their_outcomes(proxy: Running) -> None:
    for rollout in ("one", "two"):
        for command in ("cd /tmp", "pwd"):
            proxy.exec(rollout, command, task="steps")
    shown = get(proxy, "tasks/steps/rollouts/two")
    assert [(step["turn"], step["outcome"], step["effect"]) for step in shown["steps"]["items"]] == [
        (0, "hit", ["session"]), (1, "hit", ["none"]),
    ]  # fmt: skip
    assert [step["outcome"] for step in get(proxy, "tasks/steps/rollouts/one")["steps"]["items"]] == ["miss", "miss"]
    assert shown["base_url"].endswith("/t/steps/r/two")
    first = get(proxy, "tasks/steps/rollouts/two?limit=1")["steps"]
    rest = get(proxy, f"tasks/steps/rollouts/two?limit=1&cursor={first['next']}")["steps"]
    assert ([step["turn"] for step in rest["items"]], rest["total"], rest["next"]) == ([1], 2, None)


def test_finished_rollout_frees_its_name_keeps_its_calls(proxy: Running) -> None:
    proxy.exec("again", "cd /tmp", task="finish")
    assert proxy.client.delete("/api/v1/tasks/finish/rollouts/again").status_code == 204
    assert proxy.client.delete("/api/v1/tasks/finish/rollouts/again").status_code == 404
    assert proxy.exec("again", "pwd", task="finish").json()["stdout"] == "/root\n"
    listed = get(proxy, "tasks/finish/rollouts")["items"]
    assert [(entry["rollout"], entry["finished"]) for entry in listed] == [("again", True), ("again", False)]
    assert get(proxy, "tasks/finish/rollouts?sort=-created_at&limit=1")["items"] == listed[1:]
    assert get(proxy, "tasks/finish/rollouts?finished=false")["items"] == listed[1:]


def test_fork_begins_at_source_or_at_given_node(proxy: Running) -> None:
    first = proxy.exec("source", "echo 1 > f", task="fork").headers["x-forkpoint-node"]
    proxy.exec("source", "echo 2 > f", task="fork")
    fork = "/api/v1/tasks/fork/rollouts/source/fork"
    assert proxy.client.post(fork, json={"name": "here"}).status_code == 201
    assert proxy.client.post(fork, json={"name": "there", "node": first}).json()["start"] == first
    assert proxy.exec("here", "cat f", task="fork").json()["stdout"] == "2\n"
    assert proxy.exec("there", "cat f", task="fork").json()["stdout"] == "1\n"
    assert proxy.client.post(fork, json={"name": "here"}).status_code == 409
    assert proxy.client.post(fork, json={"name": "nowhere", "node": "n99999"}).status_code == 404


def test_forgotten_calls_run_again(proxy: Running) -> None:
    node = proxy.exec("a", "echo 1 > f", task="forget").headers["x-forkpoint-node"]
    gone = proxy.client.delete(f"/api/v1/tasks/forget/nodes/{node}?end_rollouts=true").json()
    assert gone == {"nodes": 1, "rollouts": ["a"], "going_on": []}
    again = proxy.exec("b", "echo 1 > f", task="forget")
    assert again.headers["cache-status"] == "forkpoint; fwd=miss; stored"
    assert again.headers["x-forkpoint-node"] != node
    root = get(proxy, "tasks/forget/tree")["root"]
    assert proxy.client.delete(f"/api/v1/tasks/forget/nodes/{root}").status_code == 409
    assert proxy.client.delete(f"/api/v1/tasks/forget/nodes/{node}").status_code == 404


def test_rollouts_in_forgotten_subtree_continue_alone(proxy: Running) -> None:
    top = proxy.exec("a", "echo 1 > f", task="stay").headers["x-forkpoint-node"]
    deep = proxy.exec("a", "echo 2 >> f", task="stay").headers["x-forkpoint-node"]
    beside = proxy.exec("b", "echo 1 > f", task="stay") and proxy.exec("b", "echo 9 >> f", task="stay")
    proxy.client.delete("/api/v1/tasks/stay/rollouts/b")
    responses = [proxy.client.delete(f"/api/v1/tasks/stay/nodes/{top}") for _ in range(2)]
    assert [answer.status_code for answer in responses] == [200, 200]
    assert responses[0].json() == {"nodes": 3, "rollouts": [], "going_on": ["a"]}
    assert responses[1].json() == {"nodes": 0, "rollouts": [], "going_on": []}, "forgetting twice does no harm"
    get(proxy, f"tasks/stay/nodes/{beside.headers['x-forkpoint-node']}", 404)
    # What it asks now runs where its agent believes to be: in a new sandbox, by replay.
    for box in [slot for slot in proxy.engine.pool.roster.slots if slot.sandbox is not None]:
        proxy.driver.live[box.sandbox.id].kill() if box.sandbox.id in proxy.driver.live else None  # type: ignore[union-attr]
    assert proxy.exec("a", "cat f", task="stay").json()["stdout"] == "1\n2\n"
    assert proxy.exec("a", "echo 3 >> f", task="stay").status_code == 200
    assert proxy.exec("a", "cat f", task="stay").json()["stdout"] == "1\n2\n3\n"
    new = proxy.exec("c", "echo 1 > f", task="stay")
    assert new.headers["cache-status"] == "forkpoint; fwd=miss; stored"
    assert new.headers["x-forkpoint-node"] != top
    assert [node["id"] for node in get(proxy, "tasks/stay/tree")["nodes"]][1:] == [new.headers["x-forkpoint-node"]]
    proxy.engine.tasks._tasks["stay"].tree.check()
    assert get(proxy, f"tasks/stay/nodes/{deep}")["flags"] == ["diverged"]


def test_node_is_pinned_and_unpinned(proxy: Running) -> None:
    node = proxy.exec("a", "echo 1 > f", task="pin").headers["x-forkpoint-node"]
    assert proxy.client.post(f"/api/v1/tasks/pin/nodes/{node}/pin").json()["flags"] == ["pinned"]
    assert proxy.client.post(f"/api/v1/tasks/pin/nodes/{node}/pin", json={"pinned": False}).json()["flags"] == []


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"driver": "nonsense"}, "is not turned on"),
        ({"driver": "memory", "base": "/nowhere"}, "no bases"),
        ({"driver": "memory", "limits": {"pids": 0}}, "limits.pids"),
        ({"driver": "memory", "surprise": 1}, "surprise"),
        ({"driver": "memory", "files": {"relative": "x"}}, "files"),
    ],
)
def test_invalid_spec_is_refused_and_changes_nothing(proxy: Running, spec: dict[str, Any], says: str) -> None:
    refused = proxy.client.put("/api/v1/tasks/spec", json=spec)
    assert (refused.status_code, refused.headers["content-type"]) == (422, "application/problem+json")
    assert says in refused.json()["detail"]
    get(proxy, "tasks/spec", 404)


def test_failed_setup_is_reported_by_first_call(proxy: Running) -> None:
    proxy.client.put("/api/v1/tasks/broken", json=SPEC | {"setup": ["true", "cat missing"]})
    live = len(proxy.driver.live)
    refused = proxy.exec("a", "pwd", task="broken")
    assert refused.status_code == 422
    assert "cat missing" in refused.json()["detail"]
    assert len(proxy.driver.live) == live


@pytest.mark.parametrize("name", ["a%2Fb", ".hidden", "a b", "a%00b", "x" * 201, "%2e%2e"])
def test_malformed_names_are_refused(proxy: Running, name: str) -> None:
    refused = proxy.client.put(f"/api/v1/tasks/{name}", json=SPEC)
    assert refused.status_code in (404, 422)
    assert refused.headers["content-type"] == "application/problem+json"


def test_health_stats_and_metrics_count_calls(proxy: Running) -> None:
    assert proxy.client.get("/healthz").json() == {"status": "ok"}
    assert proxy.client.get("/readyz").json() == {"status": "ready"}
    before = get(proxy, "stats")
    for rollout in ("a", "b"):
        proxy.exec(rollout, "echo counted", task="stats")
    after = get(proxy, "stats")
    assert (after["hits"] - before["hits"], after["misses"] - before["misses"]) == (1, 1)
    assert after["saved_s"] - before["saved_s"] == pytest.approx(0.01)
    assert after["sandboxes"].keys() <= {"idle", "leased", "freezing", "starting"}
    page = proxy.client.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert f'forkpoint_calls_total{{outcome="hit"}} {float(after["hits"])}' in page.text
    assert get(proxy, "sandboxes")["items"][0]["state"] == "idle"


def test_openapi_describes_both_planes(proxy: Running) -> None:
    paths = proxy.client.get("/openapi.json").json()["paths"]
    for path in ("/t/{task}/r/{rollout}/shell/exec", "/e/shell/files/{path}", "/api/v1/tasks/{task}/tree", "/metrics"):
        assert path in paths
    assert proxy.client.get("/docs").status_code == 200


def test_snapshots_show_costs_and_reasons(proxy: Running) -> None:
    node = proxy.exec("a", "echo kept > f", task="why").headers["x-forkpoint-node"]
    proxy.exec("a", "pwd", task="why")
    proxy.client.post(f"/api/v1/tasks/why/nodes/{node}/snapshot")
    (shown,) = [snapshot for snapshot in get(proxy, "snapshots?limit=1000")["items"] if snapshot["node"] == node]
    assert (shown["task"], shown["kind"], shown["leases"], shown["uses"]) == ("why", "files", 0, 0)
    assert shown["size_bytes"] > 0
    assert shown["cost_s"] > 0
    assert shown["expected_uses"] > 0
    assert "uses expected" in shown["why"]
    proxy.client.post(f"/api/v1/tasks/why/nodes/{node}/pin")
    (pinned,) = [snapshot for snapshot in get(proxy, "snapshots?limit=1000")["items"] if snapshot["node"] == node]
    assert pinned["why"].startswith("pinned")


def test_requested_snapshot_is_taken_once(proxy: Running) -> None:
    node = proxy.exec("a", "echo 1 > f", task="ask").headers["x-forkpoint-node"]
    proxy.exec("a", "echo 2 > f", task="ask")
    path = f"/api/v1/tasks/ask/nodes/{node}/snapshot"
    first, second = (proxy.client.post(path).json() for _ in range(2))
    assert first["snapshot_detail"]["id"] == second["snapshot_detail"]["id"]
    assert proxy.client.post("/api/v1/tasks/ask/nodes/n99999/snapshot").status_code == 404


def test_unfreezable_state_is_refused_with_its_reason(proxy: Running) -> None:
    node = proxy.exec("a", "sleep 9 &", task="lives").headers["x-forkpoint-node"]
    refused = proxy.client.post(f"/api/v1/tasks/lives/nodes/{node}/snapshot")
    assert (refused.status_code, refused.json()["type"]) == (409, "urn:forkpoint:not-freezable")
    assert "1 processes live" in refused.json()["detail"]
    assert get(proxy, f"tasks/lives/nodes/{node}")["unfreezable"] == "1 processes live"
    (own,) = [s for s in get(proxy, "sandboxes")["items"] if s["node"] == node]
    assert (own["task"], own["rollout"], own["state"], own["warm"]) == ("lives", "a", "idle", False)
    assert own["why"] == "idle, reserved for rollout a"
    assert proxy.exec("a", "pwd", task="lives").json()["stdout"] == "/root\n"


def test_warm_forks_are_requested_for_a_batch(proxy: Running) -> None:
    answer = proxy.client.post("/api/v1/tasks/batch/warm", json={"count": 8})
    assert answer.status_code == 202
    assert answer.json().items() >= {"task": "batch", "granted": 0, "ready": 0}.items(), "warm forks are off here"
    assert proxy.client.post("/api/v1/tasks/batch/warm", json={"count": 0}).status_code == 422


def test_learnt_costs_are_shown(proxy: Running) -> None:
    proxy.exec("a", "echo 1 > f", task="costs")
    proxy.exec("a", "pwd", task="costs")
    costs = get(proxy, "stats")["costs"]["memory"]
    assert costs["measured"]["fresh"] > 0
    assert costs["measured"]["freeze_files"] > 0
    assert 0 < costs["fresh_s"] < 1
