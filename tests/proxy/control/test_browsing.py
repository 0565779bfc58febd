"""Large trees, one page at a time: children, folded chains, totals, search, answers and past rollouts."""

import pytest

from tests.proxy.serving import Running, get


def walk(proxy: Running, task: str, rollout: str, *commands: str) -> list[str]:
    return [proxy.exec(rollout, command, task=task).headers["x-forkpoint-node"] for command in commands]


def test_children_are_paged_with_subtree_totals(proxy: Running) -> None:
    for name in "abc":
        walk(proxy, "pages", name, f"echo {name} > f", f"echo {name}{name} > f")
    walk(proxy, "pages", "again", "echo b > f", "cat f", "echo bb > f")
    root = get(proxy, "tasks/pages/tree")["root"]
    page = get(proxy, f"tasks/pages/nodes/{root}/children?limit=2&sort=-hits")
    assert (page["total"], page["below"]["nodes"], page["below"]["hits"], page["below"]["rollouts"]) == (3, 7, 2, 4)
    first, second = page["items"]
    assert (first["nodes"][0]["title"], first["below"]["hits"], first["below"]["saved_s"]) == ("echo b > f", 2, 0.02)
    assert (first["length"], second["below"]["hits"]) == (2, 0)
    assert first["last"]["rollouts"] == ["again", "b"]
    rest = get(proxy, f"tasks/pages/nodes/{root}/children?limit=2&sort=-hits&cursor={page['next']}")
    assert ([chain["nodes"][0]["title"] for chain in rest["items"]], rest["next"]) == (["echo a > f"], None)


def test_chain_of_only_children_is_folded(proxy: Running) -> None:
    nodes = walk(proxy, "chain", "r", *(f"X={n}" for n in range(50)))
    walk(proxy, "chain", "other", *(f"X={n}" for n in range(50)), "echo 1 > f")
    walk(proxy, "chain", "third", *(f"X={n}" for n in range(50)), "echo 2 > f")
    root = get(proxy, "tasks/chain/tree")["root"]
    (chain,) = get(proxy, f"tasks/chain/nodes/{root}/children?fold=3")["items"]
    assert [node["id"] for node in chain["nodes"]] == nodes[:3]
    assert (chain["length"], chain["last"]["id"], chain["last"]["children"]) == (50, nodes[-1], 2)


def test_search_ignores_case(proxy: Running) -> None:
    long = "echo " + "x" * 3000 + " NEEDLE"
    first, second, third = walk(
        proxy, "search", "r", "echo 'a Needle\t%_\\\"' > f", "cat f; echo needle", long + " > g"
    )
    matches = get(proxy, "tasks/search/search?q=NEEDLE")["items"]
    assert [(hit["node"], hit["observation"]) for hit in matches] == [(first, False), (second, True), (third, False)]
    assert second == first
    for part in ("%25_", "%5C%22", "a%20needle%09"):
        assert len(get(proxy, f"tasks/search/search?q={part}")["items"]) == 1
    assert get(proxy, "tasks/search/search?q=session")["items"] == [], "the names of arguments are not searched"
    assert get(proxy, "tasks/search/search?q=needle")["total"] == 3
    page = get(proxy, "tasks/search/search?q=needle&limit=2")
    assert (len(page["items"]), page["total"]) == (2, None), "the others were not compared"
    rest = get(proxy, f"tasks/search/search?q=needle&limit=2&cursor={page['next']}")
    assert ([hit["node"] for hit in rest["items"]], rest["next"]) == ([third], None)
    get(proxy, "tasks/search/search?q=", 422)


def test_long_answer_is_downloaded_whole(proxy: Running) -> None:
    (node,) = walk(proxy, "long", "r", f"echo {'y' * 200_000} > f")
    proxy.exec("r", "cat f", task="long")
    shown = get(proxy, f"tasks/long/nodes/{node}")
    (seen,) = shown["observations"]
    download = proxy.client.get(f"/api/v1/tasks/long/nodes/{node}/answer?record={seen['record']}")
    assert len(download.json()["stdout"]) == 200_001
    assert download.headers["content-type"] == "application/octet-stream"
    assert download.headers["content-disposition"].startswith("attachment")
    assert "sandbox" in download.headers["content-security-policy"]
    assert proxy.client.get(f"/api/v1/tasks/long/nodes/{node}/answer").json()["exit_code"] == 0
    get(proxy, f"tasks/long/nodes/{node}/answer?record=99999", 404)
    get(proxy, f"tasks/long/nodes/{get(proxy, 'tasks/long/tree')['root']}/answer", 404)


def test_node_lists_past_rollouts_and_snapshot_reason(proxy: Running) -> None:
    (node,) = walk(proxy, "who", "first", "echo 1 > f")
    walk(proxy, "who", "second", "pwd", "echo 1 > f")
    proxy.client.post(f"/api/v1/tasks/who/nodes/{node}/snapshot").raise_for_status()
    shown = get(proxy, f"tasks/who/nodes/{node}")
    assert [(passed["rollout"], passed["turn"]) for passed in shown["passed"]] == [("second", 1), ("first", 0)]
    assert shown["kept"].startswith("kept: ")
    assert "saves" in shown["kept"]
    assert [passed["rollout"] for passed in get(proxy, f"tasks/who/nodes/{node}/rollouts?limit=1")["items"]] == [
        "second"
    ]
    (unkept,) = walk(proxy, "who", "third", "sleep 9 &")
    assert "not kept" in get(proxy, f"tasks/who/nodes/{unkept}")["kept"]


def test_tasks_are_listed_with_totals(proxy: Running) -> None:
    for name in ("a", "b", "c"):
        walk(proxy, "totals", name, "echo 1 > f", "cat f")
    proxy.client.delete("/api/v1/tasks/totals/rollouts/c")
    proxy.control.task_totals.expires_at = 0
    get(proxy, "tasks/totals/rollouts")  # folds the journal, so that the store has the steps
    (totals,) = [task for task in get(proxy, "tasks")["items"] if task["task"] == "totals"]
    assert (totals["calls"], totals["hits"], totals["misses"], totals["running"], totals["rollouts"]) == (6, 4, 2, 2, 3)
    assert totals["hit_rate"] == pytest.approx(4 / 6)
    assert (totals["executed_s"], totals["saved_s"]) == (pytest.approx(0.02), pytest.approx(0.04))
    assert len(get(proxy, "tasks?limit=1")["items"]) == 1


def test_markup_in_commands_is_returned_unchanged(proxy: Running) -> None:
    hostile = "echo '<script>alert(1)</script>\x1b[2J' > f"
    (node,) = walk(proxy, "markup", "r", hostile)
    assert get(proxy, f"tasks/markup/nodes/{node}")["call"]["arguments"]["command"] == hostile
    assert proxy.client.get("/api/v1/tasks/%3Cscript%3E").status_code == 422
    assert proxy.client.get("/api/v1/tasks/markup/nodes/%3Cb%3E").status_code == 422
