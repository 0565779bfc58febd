"""A task may have several trees: each is listed, and the routes accept nodes of all of them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr
from typer.testing import CliRunner
from websockets.sync.client import connect

from proxy.cli.main import app
from proxy.control.tree_listing import title_of
from sandboxes.spec import Database, EnvironmentSpec
from sandboxes.sqlite.driver import SqliteDriver
from tests.proxy.compat.docker.test_endpoint import container, execution, start
from tests.proxy.dialects.test_sql_endpoint import make
from tests.proxy.serving import Running, serving
from tests.sandboxes.memory_driver import MemoryDriver

SPEC = {"driver": "memory"}


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("data"), any_image=True) as running:
        yield running


def get(proxy: Running, path: str, status: int = 200) -> Any:
    answer = proxy.client.get(f"/api/v1/tasks/{path}")
    assert answer.status_code == status, answer.text
    return answer.json()


def begin(proxy: Running, task: str, rollout: str, *env: str) -> None:
    """Begin a rollout in its own environment, as a client of the Docker API does."""
    body = {"Image": "any", "Cmd": ["sleep", "2h"], "Env": list(env)}
    made = proxy.client.post(f"/t/{task}/r/{rollout}/docker/containers/create", json=body)
    assert made.status_code == 201, made.text


def two_trees(proxy: Running, task: str) -> tuple[str, str, str, str]:
    """Make two trees in a task; return root and node of the current tree, then of the other."""
    node = proxy.exec("own", "echo own > f", task=task).headers["x-forkpoint-node"]
    begin(proxy, task, "other", "X=7")
    other = proxy.exec("other", "echo $X > f", task=task).headers["x-forkpoint-node"]
    proxy.exec("other", "cat f", task=task)
    first, second = get(proxy, f"{task}/trees")["items"]
    return first["root"], node, second["root"], other


def test_current_tree_is_listed_first(proxy: Running) -> None:
    two_trees(proxy, "listed")
    begin(proxy, "listed", "third", "X=7")
    proxy.client.delete("/api/v1/tasks/listed/rollouts/other")
    first, second = get(proxy, "listed/trees")["items"]
    assert (first["current"], first["nodes"], first["calls"], first["rollouts"], first["running"]) == (True, 2, 1, 1, 1)
    assert (second["current"], second["nodes"], second["calls"]) == (False, 2, 2)
    assert (second["rollouts"], second["running"]) == (2, 1)
    assert (first["title"], second["title"]) == ("memory", "memory · env X")
    assert first["root"] == get(proxy, "listed")["root"] == get(proxy, "listed/tree")["root"]
    assert get(proxy, "listed/trees?sort=current&limit=1")["items"] == [second]
    ran_in = {rollout["rollout"]: rollout["root"] for rollout in get(proxy, "listed/rollouts")["items"]}
    assert ran_in == {"own": first["root"], "other": second["root"], "third": second["root"]}
    shown = get(proxy, "listed")
    assert (shown["nodes"], shown["rollouts"]) == (4, 3), "of all trees"
    (line,) = (task for task in proxy.client.get("/api/v1/tasks").json()["items"] if task["task"] == "listed")
    assert (line["nodes"], line["rollouts"]) == (4, 3)
    get(proxy, "none/trees", 404)


def test_task_with_new_spec_lists_both_trees(proxy: Running) -> None:
    proxy.client.put("/api/v1/tasks/respec", json=SPEC)
    before = proxy.exec("a", "echo 1 > f", task="respec").headers["x-forkpoint-node"]
    proxy.client.put("/api/v1/tasks/respec", json=SPEC | {"workdir": "/tmp", "files": {"/tmp/seed": ""}})
    now, then = get(proxy, "respec/trees")["items"]
    assert (now["title"], now["calls"], then["calls"]) == ("memory · workdir /tmp · files /tmp/seed", 0, 1)
    assert get(proxy, f"respec/nodes/{before}")["parent"] == then["root"]
    assert [node["id"] for node in get(proxy, "respec/tree")["nodes"]] == [now["root"]]


def test_tree_routes_accept_any_tree_of_task(proxy: Running) -> None:
    root, node, other_root, other = two_trees(proxy, "whole")
    for query, expected in (
        ("", [root, node]),
        (f"?root={root}", [root, node]),
        (f"?root={other_root}", [other_root, other]),
    ):
        assert [node["id"] for node in get(proxy, f"whole/tree{query}")["nodes"]] == expected
    assert [node["id"] for node in get(proxy, f"whole/tree?node={other}")["nodes"]] == [other]
    assert get(proxy, f"whole/tree?root={other}")["root"] == other_root, "any node of it names a tree"
    assert get(proxy, "whole/search?q=echo")["items"][0]["node"] == node
    assert get(proxy, f"whole/search?q=echo&root={other}")["items"][0]["node"] == other
    columns = get(proxy, f"whole/columns?root={other_root}")
    assert (columns["root"], columns["standing"]) == (int(other_root[1:]), {other[1:]: ["other"]})
    assert get(proxy, f"whole/titles?nodes={other[1:]}")["items"] == []
    assert get(proxy, f"whole/titles?nodes={other[1:]}&root={other}")["items"][0]["text"] == "echo $X > f"
    assert get(proxy, f"whole/failures?root={other}")["nodes"] == []
    for path in ("tree?", "search?q=x&", "columns?", "labels?nodes=1&", "failures?", "audit?", "export?"):
        get(proxy, f"whole/{path}root=n999999", 404)
    warm = proxy.client.post(f"/api/v1/tasks/whole/warm?root={other}", json={"count": 1}).json()
    assert warm["node"] == other_root


def test_node_routes_accept_nodes_of_any_tree(proxy: Running) -> None:
    _, own, root, node = two_trees(proxy, "nodes")
    shown = get(proxy, f"nodes/nodes/{node}")
    assert (shown["parent"], shown["rollouts"], shown["kept"] != "") == (root, ["other"], True)
    assert [passed["rollout"] for passed in shown["passed"]] == ["other"]
    assert get(proxy, f"nodes/nodes/{root}/children")["items"][0]["nodes"][0]["id"] == node
    assert get(proxy, f"nodes/nodes/{node}/rollouts")["items"][0]["rollout"] == "other"
    (read,) = get(proxy, f"nodes/nodes/{node}/observations")["items"]
    assert get(proxy, f"nodes/nodes/{node}/calls/{read['record']}")["answer"]["json"]["stdout"] == "7\n"
    assert get(proxy, f"nodes/nodes/{node}/answer?record={read['record']}")["stdout"] == "7\n"

    def post(path: str, body: Any = None, status: int = 200) -> Any:
        answer = proxy.client.post(f"/api/v1/tasks/nodes/{path}", json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    assert post(f"nodes/{node}/pin")["flags"] == ["pinned"]
    assert post(f"nodes/{node}/snapshot")["snapshot"]
    tried = post(f"nodes/{node}/exec", {"command": "cat f; echo $X"})
    assert (tried["answer"]["json"]["stdout"], tried["known"]) == ("7\n7\n", False)
    assert get(proxy, f"nodes/nodes/{root}/diff/{node}")["files"][0]["path"] == "/root/f"
    assert get(proxy, f"nodes/nodes/{own}/diff/{node}", 409)["type"] == "urn:forkpoint:other-tree"
    assert post(f"nodes/{node}/fork", {"name": "forked"}, 201)["node"] == node
    assert post("rollouts/own/fork", {"name": "again", "node": node}, 201)["start"] == node
    for name in ("forked", "again"):
        assert proxy.exec(name, "cat f", task="nodes").headers["cache-status"] == "forkpoint; hit"
    address = f"ws://127.0.0.1:{proxy.address[1]}/api/v1/tasks/nodes/nodes/{node}/terminal"
    with connect(address, open_timeout=30) as line:
        assert "no-terminal" in str(line.recv(timeout=30)), "the node exists; the in-memory driver has no terminals"
    gone = proxy.client.delete(f"/api/v1/tasks/nodes/nodes/{node}?end_rollouts=true").json()
    assert (gone["nodes"], gone["rollouts"]) == (1, ["again", "forked", "other"])
    get(proxy, f"nodes/nodes/{node}", 404)
    assert get(proxy, f"nodes/nodes/{own}")["rollouts"] == ["own"]


def test_each_tree_has_its_own_audit(proxy: Running) -> None:
    _, _, root, _ = two_trees(proxy, "audits")
    begun = proxy.client.post("/api/v1/tasks/audits/verify", json={"node": root, "sample": None})
    assert begun.json()["of"] == 2
    while (view := get(proxy, f"audits/audit?root={root}"))["running"] is not None:
        pass
    assert (view["root"], view["bounds"][0]["checked"], view["findings"]) == (root, 2, [])
    assert get(proxy, "audits/audit")["bounds"] == []
    assert proxy.client.delete(f"/api/v1/tasks/audits/verify?root={root}").status_code == 204


def test_trees_load_lazily_after_restart(tmp_path: Path) -> None:
    with serving(tmp_path, any_image=True) as proxy:
        root, _, other_root, other = two_trees(proxy, "kept")
        for rollout in ("own", "other"):
            proxy.client.delete(f"/api/v1/tasks/kept/rollouts/{rollout}")
    with serving(tmp_path, any_image=True) as proxy:
        first, second = get(proxy, "kept/trees")["items"]
        assert (first["root"], second["root"]) == (root, other_root)
        trees = proxy.engine.trees
        assert [tree.root.id for tree in trees] == [int(root[1:])], "a listing reads no tree back"
        assert get(proxy, f"kept/nodes/{other}")["parent"] == other_root
        assert len(list(trees)) == 2


def test_tree_of_disabled_driver_is_still_shown(tmp_path: Path) -> None:
    make(tmp_path / "db")
    spec = {"driver": "sqlite", "databases": {"main": {"source": str(tmp_path / "db")}}, "share": "off"}
    with serving(tmp_path / "data", drivers={"sqlite": SqliteDriver(tmp_path / "sqlite")}) as proxy:
        proxy.client.put("/api/v1/tasks/off", json=spec).raise_for_status()
        body = {"sql": "DELETE FROM item"}
        node = proxy.client.post("/t/off/r/a/sql/query", json=body).headers["x-forkpoint-node"]
        proxy.client.delete("/api/v1/tasks/off/rollouts/a")
        proxy.client.put("/api/v1/tasks/off", json=SPEC).raise_for_status()
    with serving(tmp_path / "data") as proxy:
        assert get(proxy, f"off/nodes/{node}")["call"]["arguments"]["sql"] == "DELETE FROM item"
        tried = proxy.client.post(
            f"/api/v1/tasks/off/nodes/{node}/exec", json={"endpoint": "sql", "path": "query", "body": body}
        )
        assert (tried.status_code, "the driver 'sqlite' is not turned on" in tried.text) == (422, True)
        assert proxy.client.get(f"/api/v1/tasks/off/export?snapshots=true&root={node}").status_code == 200


def test_nodes_of_other_tasks_are_not_reachable(tmp_path: Path) -> None:
    root, alice, bob = "root-token-0123456789", "alice-token-012345678", "bobby-token-012345678"
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{alice} alice-*\n{bob} bob-*\n")
    with serving(tmp_path / "data", token=SecretStr(root), token_file=tokens, any_image=True) as proxy:
        proxy.client.headers["authorization"] = f"Bearer {root}"
        _, own, other_root, other = two_trees(proxy, "alice-1")
        two_trees(proxy, "bob-1")
        for token, status in ((alice, 200), (bob, 403)):
            proxy.client.headers["authorization"] = f"Bearer {token}"
            get(proxy, f"alice-1/nodes/{other}", status)
        for node in (own, other_root, other):
            for path in (f"nodes/{node}", f"nodes/{node}/children", f"nodes/{node}/answer", f"tree?root={node}",
                         f"export?root={node}", f"columns?root={node}", f"search?q=e&root={node}",
                         f"audit?root={node}", f"nodes/{node}/diff/{node}", f"nodes/{node}/image"):  # fmt: skip
                get(proxy, f"bob-1/{path}", 404)
            for path, body in (("pin", None), ("snapshot", None), ("fork", {"name": "x"}), ("exec", {"command": "ls"}),
                               ("image", {"name": "x"})):  # fmt: skip
                answer = proxy.client.post(f"/api/v1/tasks/bob-1/nodes/{node}/{path}", json=body)
                assert answer.status_code == 404, answer.text
            assert proxy.client.delete(f"/api/v1/tasks/bob-1/nodes/{node}").status_code == 404
            body = {"name": "y", "node": node}
            assert proxy.client.post("/api/v1/tasks/bob-1/rollouts/own/fork", json=body).status_code == 404
            assert proxy.client.post("/api/v1/tasks/bob-1/verify", json={"node": node}).status_code == 404


def test_tokens_do_not_see_earlier_shared_trees(tmp_path: Path) -> None:
    make(tmp_path / "db")
    spec = {"driver": "sqlite", "databases": {"main": {"source": str(tmp_path / "db")}}}
    drivers = {"sqlite": SqliteDriver(tmp_path / "sqlite")}
    with serving(tmp_path / "data", drivers=drivers) as proxy:
        for task in ("alice-1", "bob-1"):
            proxy.client.put(f"/api/v1/tasks/{task}", json=spec).raise_for_status()
        response = proxy.client.post("/t/alice-1/r/a/sql/query", json={"sql": "DELETE FROM item"})
        node = response.headers["x-forkpoint-node"]
        assert get(proxy, "bob-1/trees")["items"][0]["calls"] == 1, "both tasks share the tree"
        assert get(proxy, f"bob-1/nodes/{node}")["id"] == node
        proxy.client.delete("/api/v1/tasks/alice-1/rollouts/a")
    tokens = tmp_path / "tokens"
    tokens.write_text("bobby-token-012345678 bob-*\n")
    drivers = {"sqlite": SqliteDriver(tmp_path / "sqlite")}
    with serving(tmp_path / "data", drivers=drivers, token_file=tokens) as proxy:
        proxy.client.headers["authorization"] = "Bearer bobby-token-012345678"
        assert [tree["calls"] for tree in get(proxy, "bob-1/trees")["items"]] == [0]
        get(proxy, f"bob-1/nodes/{node}", 404)


@pytest.mark.parametrize("driver", ["memory", "sqlite"])
def test_tasks_with_equal_roots_share_a_tree_by_name(tmp_path: Path, driver: str) -> None:
    """A shell task shares its tree if its spec says so. Each task can be shown alone."""
    make(tmp_path / "db")
    specs = {
        "memory": {"driver": "memory", "share": "on"},
        "sqlite": {"driver": "sqlite", "databases": {"main": {"source": str(tmp_path / "db")}}},
    }
    path = {"memory": "shell/exec", "sqlite": "sql/query"}[driver]
    member, change, reads = {
        "memory": ("command", "echo 1 > f", ["cat f", "ls"]),
        "sqlite": ("sql", "DELETE FROM item", ["SELECT 1", "SELECT 2"]),
    }[driver]
    drivers: dict[str, Any] = {"memory": MemoryDriver(), "sqlite": SqliteDriver(tmp_path / "sqlite")}
    with serving(tmp_path / "data", drivers=drivers) as proxy:
        for task, read in zip(("a", "b"), reads, strict=True):
            proxy.client.put(f"/api/v1/tasks/{task}", json=specs[driver]).raise_for_status()
            for call in (read, change)[: 2 if task == "a" else 1]:
                proxy.client.post(f"/t/{task}/r/1/{path}", json={member: call}).raise_for_status()
        again = proxy.client.post(f"/t/b/r/2/{path}", json={member: reads[0]})
        assert again.headers["cache-status"] == "forkpoint; hit"
        (shown,) = get(proxy, "a/trees")["items"]
        assert (shown["shared"], shown["shared_with"]) == (True, ["b"])

        def sizes(task: str, query: str) -> list[int]:
            nodes = get(proxy, f"{task}/tree{query}")["nodes"]
            columns = get(proxy, f"{task}/columns{query}")
            observed = [len(node["observations"]) for node in nodes]
            assert columns["columns"]["seen"] == observed
            assert columns["nodes"] == len(nodes)
            assert len(get(proxy, f"{task}/nodes/{shown['root']}/observations{query}")["items"]) == observed[0]
            return observed

        assert sizes("a", "") == sizes("b", "") == [2, 0]
        assert sizes("a", "?own=true") == [1, 0]
        assert sizes("b", "?own=true") == [2]
        environment = {"FORKPOINT_URL": str(proxy.client.base_url)}
        assert "Shared with b" in CliRunner().invoke(app, ["tree", "a"], env=environment).output
        assert change not in CliRunner().invoke(app, ["tree", "b", "--own"], env=environment).output


def test_imported_tree_serves_rollouts_with_its_environment(
    proxy: Running, tmp_path_factory: pytest.TempPathFactory
) -> None:
    _, _, root, node = two_trees(proxy, "travels")
    proxy.client.post(f"/api/v1/tasks/travels/nodes/{node}/snapshot").raise_for_status()
    bundle = proxy.client.get(f"/api/v1/tasks/travels/export?root={root}&snapshots=true").content
    with serving(tmp_path_factory.mktemp("there"), any_image=True) as there:
        for task in ("travels", "again"):
            if task == "again":
                there.exec("own", "echo own > f", task=task)
            response = there.client.post(f"/api/v1/tasks/{task}/import", content=bundle).json()
            assert (response["current"], response["nodes"], response["records"], response["snapshots"]) == (
                False,
                2,
                2,
                2,
            )
            current, other = get(there, f"{task}/trees")["items"]
            assert (other["root"], other["calls"], other["title"]) == (response["root"], 2, "memory · env X")
            assert get(there, task)["default"]
            begin(there, task, "same", "X=7")
            begin(there, task, "different", "X=8")
            hit, miss = (there.exec(name, "echo $X > f", task=task) for name in ("same", "different"))
            assert (hit.headers["cache-status"], there.exec("same", "cat f", task=task).json()["stdout"]) == (
                "forkpoint; hit", "7\n",
            )  # fmt: skip
            assert miss.headers["cache-status"] == "forkpoint; fwd=miss; stored"
            assert there.exec("plain", "cat f", task=task).json()["exit_code"] == 1
            refused = there.client.post(f"/api/v1/tasks/{task}/import", content=bundle)
            assert (refused.status_code, refused.json()["type"]) == (409, "urn:forkpoint:tree-exists")
            assert [tree["root"] for tree in get(there, f"{task}/trees")["items"]][:2] == [
                current["root"],
                other["root"],
            ]


def test_imported_tree_becomes_current_if_spec_matches(
    proxy: Running, tmp_path_factory: pytest.TempPathFactory
) -> None:
    _, _, root, _ = two_trees(proxy, "own")
    bundle = proxy.client.get(f"/api/v1/tasks/own/export?root={root}").content
    with serving(tmp_path_factory.mktemp("there")) as there:
        there.client.put("/api/v1/tasks/put", json=SPEC | {"env": {"X": "7"}}).raise_for_status()
        response = there.client.post("/api/v1/tasks/put/import", content=bundle).json()
        assert (response["current"], get(there, "put")["root"]) == (True, response["root"])
        nodes = len(get(there, "put/tree")["nodes"])
        assert there.exec("r", "echo $X > f", task="put").is_success
        assert len(get(there, "put/tree")["nodes"]) == nodes, "it ran again, and led to the imported node"


def test_calls_over_docker_api_are_in_tree(tmp_path: Path) -> None:
    with serving(tmp_path, any_image=True) as running:
        for rollout in ("a", "b"):
            box = container(running, rollout, Env=["X=7"])
            call = execution(running, rollout, box, "echo $X > f; cat f")
            assert start(running, rollout, call) == (101, {1: b"7\n"})
        current, theirs = get(running, "task/trees")["items"]
        assert (current["calls"], current["rollouts"], theirs["rollouts"], theirs["running"]) == (0, 0, 2, 2)
        nodes = get(running, f"task/tree?root={theirs['root']}")["nodes"]
        assert any("echo $X > f; cat f" in str(node["call"]) for node in nodes)
        (last,) = (node for node in nodes if node["rollouts"] == ["a", "b"])
        assert get(running, f"task/nodes/{last['id']}")["rollouts"] == ["a", "b"]


def typed(proxy: Running, *words: str, code: int = 0) -> str:
    environment = {"FORKPOINT_URL": str(proxy.client.base_url), "COLUMNS": "160"}
    result = CliRunner().invoke(app, list(words), env=environment)
    assert result.exit_code == code, result.output
    return result.stdout


def test_commands_reach_every_tree(proxy: Running, tmp_path: Path) -> None:
    root, node, other_root, other = two_trees(proxy, "typed")
    text = typed(proxy, "tree", "typed")
    assert "echo own > f" in text
    assert f"--root {other_root}  memory · env X  2 nodes, 2 calls, 1 rollouts" in text
    text = typed(proxy, "tree", "typed", "--root", other)
    assert "echo $X > f" in text
    assert f"--root {root}  memory (current)" in text
    assert f"{other} echo $X > f" in typed(proxy, "tree", "typed", "--node", other)
    assert "echo $X > f" in typed(proxy, "node", "typed", other)
    assert "/root/f" in typed(proxy, "diff", "typed", other_root, other)
    assert "different trees" in CliRunner().invoke(
        app, ["diff", "typed", node, other], env={"FORKPOINT_URL": str(proxy.client.base_url)}
    ).output  # fmt: skip
    assert "recorded" not in typed(proxy, "verify", "typed", "--root", other, "--all")
    typed(proxy, "export", "typed", str(tmp_path / "f"), "--root", other_root)
    assert "for rollouts that request its environment" in typed(proxy, "import", str(tmp_path / "f"), "copied")


def test_title_has_no_values_of_variables() -> None:
    default = EnvironmentSpec()
    box = EnvironmentSpec(image="debian:12", workdir="/testbed", env={"KEY": "secret", "A": "1"})
    assert title_of(box, default) == "local debian:12 · workdir /testbed · env KEY, A"
    assert title_of(default, default) == "local host"
    assert title_of(default, default, "base") == "base · local host"
    assert (
        title_of(EnvironmentSpec(base="/srv/base.tar", cache="never"), default) == "local /srv/base.tar · cache never"
    )
    sql = EnvironmentSpec(driver="sqlite", databases={"shop": Database(source="x.db")}, share="off")
    assert title_of(sql, default) == "sqlite shop · share off"


@given(st.dictionaries(st.from_regex(r"[A-Z]{1,80}", fullmatch=True), st.text("ab"), max_size=9))
def test_title_is_short(env: dict[str, str]) -> None:
    assert len(title_of(EnvironmentSpec(env=env), EnvironmentSpec())) <= 120
