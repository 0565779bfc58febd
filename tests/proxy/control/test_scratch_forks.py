"""Scratch forks: diffs, tried calls and terminals. None of them changes the tree."""

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from sandboxes.linux.files import remove_tree
from sandboxes.sqlite.driver import SqliteDriver
from tests.machine import require_sandboxes, wait_until
from tests.proxy.serving import Running, get, serving
from tests.sandboxes.box import local_driver
from tests.sandboxes.image_archives import bash_image


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    data = tmp_path_factory.mktemp("data")
    with serving(data, drivers={"sqlite": SqliteDriver(data / "sqlite")}) as running:
        yield running


@pytest.fixture(scope="module")
def local() -> Iterator[Running]:
    require_sandboxes()
    folder = Path(mkdtemp(prefix="forkpoint-test-", dir="/var/tmp"))
    with serving(folder, drivers={"local": local_driver(folder / "local")}) as running:
        yield running
    remove_tree(folder)


@pytest.fixture(params=["host", "image"])
def real(request: pytest.FixtureRequest, local: Running) -> tuple[Running, dict[str, str]]:
    """A proxy with real sandboxes, and the spec of such a sandbox."""
    return local, {"driver": "local"} if request.param == "host" else {"image": bash_image()}


def at(proxy: Running, task: str, *commands: str, rollout: str = "r") -> list[str]:
    """Run commands in a rollout and return the nodes that it reached."""
    return [proxy.exec(rollout, command, task=task).headers["x-forkpoint-node"] for command in commands]


def tried(proxy: Running, task: str, node: str, status: int = 200, **trial: Any) -> Any:
    answer = proxy.client.post(f"/api/v1/tasks/{task}/nodes/{node}/exec", json=trial)
    assert answer.status_code == status, answer.text
    return answer.json()


def terminal(proxy: Running, task: str, node: str, **query: int) -> ClientConnection:
    host, port = proxy.address
    asked = "&".join(f"{name}={value}" for name, value in query.items())
    return connect(f"ws://{host}:{port}/api/v1/tasks/{task}/nodes/{node}/terminal?{asked}", open_timeout=30)


def shown(tree: dict[str, Any]) -> Any:
    return [(node["id"], node["hits"], len(node["observations"]), node["children"]) for node in tree["nodes"]]


def test_tried_call_leaves_the_tree_unchanged(proxy: Running) -> None:
    first, second = at(proxy, "try", "echo 1 > f", "echo 2 > f")
    before = shown(get(proxy, "tasks/try/tree"))
    told = tried(proxy, "try", first, command="cat f")
    assert (told["answer"]["json"]["stdout"], told["effect"], told["known"]) == ("1\n", ["none"], False)
    told = tried(proxy, "try", first, command="echo 2 > f")
    assert (told["effect"], told["known"], told["leads_to"]) == (["files"], True, second)
    assert tried(proxy, "try", second, command="cat f")["answer"]["json"]["stdout"] == "2\n"
    assert shown(get(proxy, "tasks/try/tree")) == before
    assert [step["turn"] for step in get(proxy, "tasks/try/rollouts/r")["steps"]["items"]] == [0, 1]
    assert not any(box["why"].startswith("scratch fork") for box in get(proxy, "sandboxes")["items"]), (
        "the forks are gone"
    )


def test_any_request_to_an_endpoint_can_be_tried(proxy: Running) -> None:
    (node,) = at(proxy, "any", "echo 1 > /tmp/f")
    told = tried(proxy, "any", node, endpoint="shell", method="GET", path="files/tmp/f")
    assert told["answer"]["text"] == "1\n"
    put = tried(proxy, "any", node, endpoint="shell", method="PUT", path="files/tmp/g", body="text")
    assert (put["answer"]["status"], put["effect"]) == (201, ["files"])


@pytest.mark.parametrize(
    ("node", "trial", "status"),
    [
        ("n99999", {"command": "true"}, 404),
        ("x", {"command": "true"}, 422),
        ("NODE", {}, 422),
        ("NODE", {"command": "true", "endpoint": "shell"}, 422),
        ("NODE", {"endpoint": "nothing"}, 404),
        ("NODE", {"endpoint": "shell", "path": "exec", "body": {"no": "command"}}, 422),
        ("NODE", {"endpoint": "shell", "path": "files/ä\n"}, 422),
        ("NODE", {"command": "a\0b"}, 422),
        ("NODE", {"command": "true", "service": "none"}, 422),
        ("NODE", {"command": "true", "seconds": 5}, 422),
    ],
)
def test_invalid_trials_are_refused(proxy: Running, node: str, trial: dict[str, Any], status: int) -> None:
    (known,) = at(proxy, "refuse", "echo 1 > f")
    assert tried(proxy, "refuse", known if node == "NODE" else node, status, **trial)["status"] == status


def test_diff_compares_files_and_sessions(proxy: Running) -> None:
    a, _, _, b = at(
        proxy, "diff", "echo one > f; echo gone > g", "echo two >> f; rm g", "mkdir /root/d; X=1", "cd /tmp"
    )
    told = get(proxy, f"tasks/diff/nodes/{a}/diff/{b}")
    changes = {change["path"]: change for change in told["files"]}
    assert {path: change["change"] for path, change in changes.items()} == {
        "/root/f": "changed", "/root/g": "removed", "/root/d": "added",
    }  # fmt: skip
    assert "\n one\n+two\n" in changes["/root/f"]["diff"]
    assert (changes["/root/d"]["after"]["kind"], changes["/root/d"]["before"]) == ("directory", None)
    (session,) = told["sessions"]
    assert (session["cwd"]["before"], session["cwd"]["after"]) == ("/root", "/tmp")
    assert session["variables"] == [{"name": "X", "before": None, "after": "1"}]
    assert not told["same"]
    back = get(proxy, f"tasks/diff/nodes/{b}/diff/{a}")
    assert {change["path"]: change["change"] for change in back["files"]} == {
        "/root/f": "changed", "/root/g": "added", "/root/d": "removed",
    }  # fmt: skip


def test_state_does_not_differ_from_itself(proxy: Running) -> None:
    (a,) = at(proxy, "itself", "echo one > f")
    told = get(proxy, f"tasks/itself/nodes/{a}/diff/{a}")
    assert (told["same"], told["files"], told["sessions"], told["databases"]) == (True, [], [], [])
    get(proxy, f"tasks/itself/nodes/{a}/diff/n99999", 404)


def test_diff_compares_database_rows(proxy: Running, tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "shop.db") as made:
        made.executescript("CREATE TABLE item (id INTEGER PRIMARY KEY, name TEXT); INSERT INTO item VALUES (1, 'a');")
    made.close()
    spec = {"driver": "sqlite", "databases": {"shop": {"source": str(tmp_path / "shop.db")}}}
    proxy.client.put("/api/v1/tasks/sql", json=spec)

    def query(sql: str) -> str:
        answer = proxy.client.post("/t/sql/r/r/sql/query", json={"sql": sql})
        assert answer.json()["error"] is None
        return str(answer.headers["x-forkpoint-node"])

    root = get(proxy, "tasks/sql/tree")["root"]
    query("INSERT INTO item VALUES (2, 'b')")
    query("UPDATE item SET name = 'A' WHERE id = 1")
    last = query("CREATE TABLE more (x)")
    told = get(proxy, f"tasks/sql/nodes/{root}/diff/{last}")
    assert (told["files"], told["unshown"]) == (
        None,
        ["files and sessions: driver 'sqlite' cannot compare them"],
    )
    (database,) = told["databases"]
    item, more = database["tables"]
    assert (item["table"], item["before_rows"], item["after_rows"]) == ("item", 1, 2)
    assert (sorted(item["added"]), item["removed"]) == ([[1, "A"], [2, "b"]], [[1, "a"]])
    assert (more["table"], more["before_rows"], more["after_rows"]) == ("more", None, 0)
    assert "CREATE TABLE more" in more["schema_"]["after"]


def test_diff_compares_modes_sizes_and_links(local: Running) -> None:
    spec = {"driver": "local"}
    local.client.put("/api/v1/tasks/files", json=spec)
    a, b = at(
        local, "files",
        "printf 'x\\n' > t; printf '\\0\\1' > bin; echo l > plain; ln -s t link; f() { echo old; }",
        "chmod 700 t; printf '\\0\\2' > bin; ln -sfn plain link; head -c 100000 /dev/zero > big; f() { echo new; }",
    )  # fmt: skip
    told = get(local, f"tasks/files/nodes/{a}/diff/{b}")
    changes = {change["path"]: change for change in told["files"]}
    assert sorted(changes) == ["/root/big", "/root/bin", "/root/link", "/root/t"]
    assert [changes["/root/t"][side]["mode"] for side in ("before", "after")] == ["0644", "0700"]
    assert changes["/root/bin"]["unshown"] == "binary"
    assert [changes["/root/link"][side]["target"] for side in ("before", "after")] == ["t", "plain"]
    assert (changes["/root/big"]["after"]["size_bytes"], changes["/root/big"]["unshown"]) == (
        100_000,
        "longer than 64 KiB",
    )
    (function,) = told["sessions"][0]["functions"]
    assert ("echo old" in function["before"], "echo new" in function["after"]) == (True, True)


def test_terminal_continues_session_and_changes_no_state(
    real: tuple[Running, dict[str, str]],
) -> None:
    proxy, spec = real
    proxy.client.put("/api/v1/tasks/term", json=spec).raise_for_status()
    (node,) = at(proxy, "term", "mkdir -p /srv/d; cd /srv/d; NAME=value; g() { echo from-$1; }")
    before = shown(get(proxy, "tasks/term/tree"))
    with terminal(proxy, "term", node, columns=90, rows=30) as socket:
        socket.send(b"stty size; pwd; g $NAME; touch made\n")
        until(socket, "30 90", "/srv/d", "from-value")
        socket.send(json.dumps({"resize": [100, 40]}))
        socket.send(b"stty size\n")
        until(socket, "40 100")
        socket.send("no json")
        socket.send(b"exit\n")
        texts = [message for message in socket if isinstance(message, str)]
    assert json.loads(texts[-1]) == {"exit": "the shell has ended"}
    assert proxy.exec("r", "ls", task="term").json()["stdout"] == "", "files made in the terminal are gone"
    assert shown(get(proxy, "tasks/term/tree"))[0] == before[0]


def test_fork_closes_when_terminal_disconnects(real: tuple[Running, dict[str, str]]) -> None:
    proxy, spec = real
    proxy.client.put("/api/v1/tasks/left", json=spec).raise_for_status()
    (node,) = at(proxy, "left", "echo 1 > f")
    with terminal(proxy, "left", node) as socket:
        socket.send(b"echo ready-$((1+1))\n")
        until(socket, "ready-2")
        # The fork of another test's terminal may still be closing.
        wait_until(lambda: proxy.control.scratch_forks.open == 1, "the terminal has no fork")
    wait_until(
        lambda: not any(box["why"].startswith("scratch fork") for box in get(proxy, "sandboxes")["items"]),
        "the fork of a closed terminal is still open",
    )


def test_driver_without_terminals_is_refused(proxy: Running) -> None:
    (node,) = at(proxy, "none", "echo 1 > f")
    for name, code, slug in ((node, 4409, "no-terminal"), ("n99999", 4404, "no-such-node")):
        with terminal(proxy, "none", name) as socket:
            problem = json.loads(socket.recv())
            with pytest.raises(ConnectionClosed) as closed:
                socket.recv()
        assert problem["type"] == f"urn:forkpoint:{slug}"
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == code


def until(socket: ClientConnection, *words: str) -> None:
    text = ""
    while not all(word in text for word in words):
        message = socket.recv(timeout=30)
        text += message if isinstance(message, str) else message.decode(errors="replace")
