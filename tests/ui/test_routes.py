"""The page's own routes: columns and their news, labels, failures, calls and their answers."""

from typing import Any

from tests.proxy.serving import Running


def get(proxy: Running, path: str, status: int = 200) -> Any:
    answer = proxy.client.get(f"/api/v1/tasks/{path}")
    assert answer.status_code == status, answer.text
    return answer.json()


def number(answer: Any) -> int:
    return int(answer.headers["x-forkpoint-node"][1:])


def test_columns_have_tree_and_rollouts(proxy: Running) -> None:
    one = number(proxy.exec("a", "echo 1 > f", task="columns"))
    proxy.exec("b", "echo 1 > f", task="columns")
    proxy.exec("b", "cat f", task="columns")
    two = number(proxy.exec("b", "echo 2 > f", task="columns"))
    view = get(proxy, "columns/columns")
    columns = view["columns"]
    assert columns["id"] == [view["root"], one, two]
    assert columns["parent"] == [0, view["root"], one]
    assert (columns["hits"], columns["seen"], columns["effect"]) == ([0, 1, 0], [0, 1, 0], [0, 1, 1])
    assert view["standing"] == {str(one): ["a"], str(two): ["b"]}
    assert (view["nodes"], view["more"]) == (3, False)


def test_columns_are_paged_and_updated(proxy: Running) -> None:
    made = [number(proxy.exec("r", f"echo {n} > f", task="parts")) for n in range(5)]
    first = get(proxy, "parts/columns?limit=3")
    assert first["more"]
    rest = get(proxy, f"parts/columns?limit=3&after={first['columns']['id'][-1]}")
    assert first["columns"]["id"][1:] + rest["columns"]["id"] == made
    assert not rest["more"]
    assert get(proxy, f"parts/columns?after={made[-1]}")["columns"]["id"] == []
    new = number(proxy.exec("r", "echo new > f", task="parts"))
    assert get(proxy, f"parts/columns?after={made[-1]}")["columns"]["id"] == [new]


def test_columns_have_merged_paths(proxy: Running) -> None:
    proxy.exec("a", "echo 1 > f", task="meet")
    away = number(proxy.exec("a", "export X=1", task="meet"))
    back = proxy.exec("a", "cd /root", task="meet")
    assert number(back) == away, "nothing changed"
    proxy.exec("b", "echo 2 > g", task="meet")
    proxy.exec("b", "rm g", task="meet")
    view = get(proxy, "meet/columns")
    assert all(pair[0] in view["columns"]["id"] and pair[1] in view["columns"]["id"] for pair in view["meets"])


def test_title_is_a_call_in_one_line(proxy: Running) -> None:
    node = number(proxy.exec("r", "echo 1 > f;\n\n  false", task="labels"))
    [title] = get(proxy, f"labels/titles?nodes={node},999999")["items"]
    assert (title["text"], title["exit_code"]) == ("echo 1 > f;\n\n  false", 1)
    long = number(proxy.exec("r", "echo " + "x" * 5000 + " > f", task="labels"))
    assert len(get(proxy, f"labels/titles?nodes={long}")["items"][0]["text"]) == 200
    get(proxy, "labels/titles?nodes=n1", 422)


def test_failures_separate_nodes_and_observations(proxy: Running) -> None:
    led = number(proxy.exec("r", "echo 1 > f; false", task="failures"))
    proxy.exec("r", "cat nothing", task="failures")
    proxy.exec("r", "cat f", task="failures")
    found = get(proxy, "failures/failures")
    assert (found["nodes"], found["reads"]) == ([led], [led])
    assert get(proxy, f"failures/failures?after={found['upto']}")["nodes"] == []
    more = number(proxy.exec("r", "echo 2 > f; false", task="failures"))
    assert get(proxy, f"failures/failures?after={found['upto']}")["nodes"] == [more]


def test_call_has_answer_and_rollouts(proxy: Running) -> None:
    answer = proxy.exec("a", "echo 1 > f", task="call")
    proxy.exec("b", "echo 1 > f", task="call")
    node = answer.headers["x-forkpoint-node"]
    [title] = get(proxy, f"call/titles?nodes={node[1:]}")["items"]
    call = get(proxy, f"call/nodes/{node}/calls/{title['record']}")
    assert call["answer"]["json"] == answer.json()
    assert [(passed["rollout"], passed["outcome"]) for passed in call["passed"]] == [("b", "hit"), ("a", "miss")]
    get(proxy, f"call/nodes/{node}/calls/0", 404)


def test_observations_are_listed_by_hits(proxy: Running) -> None:
    proxy.exec("a", "ls", task="reads")
    for rollout in ("a", "b", "c"):
        proxy.exec(rollout, "pwd", task="reads")
    root = f"n{get(proxy, 'reads/columns')['root']}"
    assert [read["text"] for read in get(proxy, f"reads/nodes/{root}/observations")["items"]] == ["pwd", "ls"]


def test_rollout_is_forked_at_any_node(proxy: Running) -> None:
    node = proxy.exec("a", "echo 1 > f", task="fork").headers["x-forkpoint-node"]
    proxy.exec("a", "echo 2 > f", task="fork")
    proxy.client.delete("/api/v1/tasks/fork/rollouts/a")
    forked = proxy.client.post(f"/api/v1/tasks/fork/nodes/{node}/fork", json={"name": "again"})
    assert (forked.status_code, forked.json()["node"]) == (201, node)
    assert proxy.exec("again", "cat f", task="fork").json()["stdout"] == "1\n"
    assert proxy.client.post(f"/api/v1/tasks/fork/nodes/{node}/fork", json={"name": "again"}).status_code == 409


def test_timings_have_times_and_parts(proxy: Running) -> None:
    """A hit has the time of its answer and no seconds; an executed call has both."""
    proxy.exec("a", "echo 1 > f", task="timings")
    proxy.exec("b", "echo 1 > f", task="timings")
    proxy.exec("b", "cat f", task="timings")
    assert list(get(proxy, "timings/rollouts/a/timings")) == ["0"]
    timings = get(proxy, "timings/rollouts/b/timings")
    assert list(timings) == ["0", "1"]
    assert timings["0"]["answered_at"] <= timings["1"]["answered_at"]
    assert (timings["0"]["tool_s"], timings["1"]["tool_s"] > 0) == (0.0, True)


def test_page_has_a_strict_content_policy(proxy: Running) -> None:
    page = proxy.client.get("/ui/")
    assert page.status_code == 200
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    again = proxy.client.get("/ui/", headers={"if-none-match": page.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert proxy.client.get("/ui").headers["location"] == "/ui/"
    for path in ("/ui/none.js", "/ui/../settings.py", "/ui/%2e%2e/routes.py", "/ui/js"):
        assert proxy.client.get(path).status_code == 404, path


def test_ways_have_nodes_outcomes_and_labels(proxy: Running) -> None:
    """Newest first; a read stays at its node; a tree's ways are its own."""
    one = number(proxy.exec("a", "echo 1 > f", task="ways"))
    proxy.exec("a", "cat f", task="ways")
    proxy.exec("b", "echo 1 > f", task="ways")
    two = number(proxy.exec("b", "echo 2 > f", task="ways"))
    proxy.client.patch("/api/v1/tasks/ways/rollouts/b/labels", json={"group": "g", "reward": 1}).raise_for_status()
    view = get(proxy, "ways/ways")
    assert [(way["rollout"], way["nodes"], way["outcomes"]) for way in view["items"]] == [
        ("b", [one, two], "hm"), ("a", [one, one], "mm"),
    ]  # fmt: skip
    assert view["items"][0]["labels"]["group"] == "g"
    assert (view["total"], view["next"]) == (2, None)
    page = get(proxy, "ways/ways?limit=1")
    rest = get(proxy, f"ways/ways?limit=1&cursor={page['next']}")
    assert [[way["rollout"] for way in each["items"]] for each in (page, rest)] == [["b"], ["a"]]
