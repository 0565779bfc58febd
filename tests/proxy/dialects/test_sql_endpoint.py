"""The sql endpoint as an agent sees it: on a socket, over SQLite."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from sandboxes.sqlite.driver import SqliteDriver
from tests.proxy.serving import Running, serving

COUNT = "SELECT count(*) FROM item"


def make(path: Path) -> Path:
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE item (id INTEGER PRIMARY KEY, name TEXT)")
        database.executemany("INSERT INTO item (name) VALUES (?)", [(f"item {n}",) for n in range(50)])
    database.close()
    return path


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    data = tmp_path_factory.mktemp("data")
    with serving(data, drivers={"sqlite": SqliteDriver(data / "sqlite")}) as running:
        yield running


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make(tmp_path / "shop.db")


class Task:
    """A task over a database, and calls of its rollouts."""

    def __init__(self, proxy: Running, name: str, *sources: Path, **spec: Any) -> None:
        self.proxy, self.name = proxy, name
        databases = {path.stem: {"source": str(path)} for path in sources}
        told = {"driver": "sqlite", "databases": databases, **spec}
        self.put = proxy.client.put(f"/api/v1/tasks/{name}", json=told)

    def ask(self, rollout: str, tool: str = "query", **arguments: Any) -> httpx.Response:
        return self.proxy.client.post(f"/t/{self.name}/r/{rollout}/sql/{tool}", json=arguments)

    def told(self, rollout: str, sql: str, **arguments: Any) -> tuple[Any, str, str]:
        """Return rows or error, how it was answered, and the node."""
        answer = self.ask(rollout, sql=sql, **arguments)
        body = answer.json()
        status = answer.headers["cache-status"].removeprefix("forkpoint; ")
        return body["error"] or body["rows"], status, answer.headers["x-forkpoint-node"]


def test_what_one_task_asked_of_a_database_others_are_answered(proxy: Running, source: Path, tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    twin = make(tmp_path / "copy" / "shop.db")
    one, two = Task(proxy, "one", source), Task(proxy, "two", twin)
    assert one.told("a", COUNT)[:2] == ([[50]], "fwd=miss; stored")
    assert two.told("b", COUNT)[:2] == ([[50]], "hit")
    assert two.told("b", "SELECT  count(*)   FROM item -- again")[:2] == ([[50]], "hit")
    # Whoever writes is alone there, and its task's other rollouts are where they were.
    wrote = two.told("b", "DELETE FROM item WHERE id > 10")
    assert wrote[1] == "fwd=miss; stored"
    assert two.told("b", COUNT)[0] == [[10]]
    assert one.told("a", COUNT)[:2] == ([[50]], "hit")
    assert one.told("c", "DELETE FROM item WHERE id > 10")[1:] == ("hit", wrote[2])
    # What goes with a task is what nobody else uses.
    assert proxy.client.delete("/api/v1/tasks/one").status_code == 204
    assert two.told("d", COUNT)[1] == "hit"
    assert proxy.client.delete("/api/v1/tasks/two").status_code == 204
    assert Task(proxy, "three", twin).told("e", COUNT)[1] == "fwd=miss; stored"


def test_a_tree_of_one_s_own_is_one_s_own(proxy: Running, source: Path) -> None:
    for name in ("own-1", "own-2"):
        assert Task(proxy, name, source, share="off").told("a", COUNT)[1] == "fwd=miss; stored"


def test_forgetting_a_shared_subtree_lets_the_rollouts_of_all_tasks_go_on(proxy: Running, source: Path) -> None:
    one, two = Task(proxy, "shared-1", source), Task(proxy, "shared-2", source)
    node = one.told("a", "DELETE FROM item WHERE id = 7")[2]
    assert two.told("b", "DELETE FROM item WHERE id = 7")[1] == "hit"
    proxy.client.delete("/api/v1/tasks/shared-1/rollouts/a").raise_for_status()
    gone = proxy.client.delete(f"/api/v1/tasks/shared-1/nodes/{node}").json()
    assert gone["going_on"] == ["b"]
    assert two.told("b", "SELECT count(*) FROM item")[::2] == ([[49]], node)
    assert one.told("c", "DELETE FROM item WHERE id = 7")[1:] != ("hit", node)


def test_a_clock_s_answer_is_nobody_else_s(proxy: Running, source: Path) -> None:
    task = Task(proxy, "clock", source)
    first, status, node = task.told("a", "SELECT random()")
    assert status == "fwd=bypass"
    second, status, other = task.told("b", "SELECT random()")
    assert (status, other) == ("fwd=bypass", node)
    assert first != second
    # What was made of it is a state of its own, and the rollout goes on there.
    task.told("a", "INSERT INTO item (name) VALUES (random())")
    assert task.told("b", "INSERT INTO item (name) VALUES (random())")[1] == "fwd=bypass"
    assert task.told("a", COUNT)[0] == [[51]]


def test_a_timeout_is_told_and_not_recorded(proxy: Running, source: Path) -> None:
    task = Task(proxy, "timeout", source)
    endless = "WITH RECURSIVE n(k) AS (SELECT 1 UNION ALL SELECT k + 1 FROM n) SELECT count(*) FROM n"
    for rollout in ("a", "b"):
        error, status, _ = task.told(rollout, endless, timeout_s=0.2)
        assert (error["kind"], status) == ("timeout", "fwd=bypass")


def test_the_engine_s_error_is_a_result(proxy: Running, source: Path) -> None:
    task = Task(proxy, "errors", source)
    assert task.told("a", "SELECT * FROM nowhere")[0]["message"] == "no such table: nowhere"
    assert task.told("b", "SELECT * FROM nowhere")[1] == "hit"
    start = task.told("a", COUNT)[2]
    assert task.told("a", "INSERT INTO item (id, name) VALUES (1, 'twice')")[2] == start


def test_saying_a_default_is_leaving_it_out(proxy: Running, source: Path) -> None:
    task = Task(proxy, "defaults", source)
    task.told("a", COUNT)
    assert task.told("b", COUNT, database="shop", max_rows=100, timeout_s=5, format="json", params=None)[1] == "hit"
    assert task.told("b", COUNT, max_rows=99)[1] != "hit"


def test_get_asks_for_tables_and_schema(proxy: Running, source: Path) -> None:
    Task(proxy, "listing", source)
    url = "/t/listing/r/a/sql"
    assert proxy.client.get(f"{url}/tables").json()["rows"]
    assert proxy.client.get(f"{url}/schema?table=item").json()["rows"]
    assert proxy.client.post(f"{url}/schema", json={"table": "item"}).headers["cache-status"] == "forkpoint; hit"


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "told"),
    [
        ("POST", "query", b"{", 400, "not JSON"),
        ("POST", "query", b"[]", 422, "JSON object"),
        ("POST", "query", b"{}", 422, "sql: Field required"),
        ("POST", "query", b'{"sql": 7}', 422, "valid string"),
        ("POST", "query", b'{"sql": "SELECT 1", "rows": 7}', 422, "rows"),
        ("POST", "query", b'{"sql": "SELECT 1", "max_rows": -1}', 422, "max_rows"),
        ("POST", "query", b'{"sql": "SELECT 1", "timeout_s": 0}', 422, "timeout_s"),
        ("POST", "query", b'{"sql": "SELECT 1", "format": "xml"}', 422, "format"),
        ("POST", "query", b'{"sql": "SELECT 1", "database": "other"}', 422, "databases are: shop"),
        ("POST", "query", b'{"sql": "SELECT \\u0000"}', 422, "NUL"),
        ("POST", "compare", b'{"sql": "SELECT 1"}', 422, "gold"),
        ("POST", "nothing", b"{}", 404, "query, script"),
        ("GET", "query", b"", 405, "POST"),
        ("DELETE", "tables", b"", 405, "GET or POST"),
    ],
)
def test_what_cannot_be_asked_says_what_can(
    proxy: Running, source: Path, method: str, path: str, content: bytes, status: int, told: str
) -> None:
    Task(proxy, "refusals", source)
    answer = proxy.client.request(method, f"/t/refusals/r/a/sql/{path}", content=content)
    assert (answer.status_code, told in answer.json()["detail"]) == (status, True), answer.text


def test_a_statement_has_a_size(proxy: Running, source: Path) -> None:
    task = Task(proxy, "sizes", source)
    assert task.ask("a", sql="SELECT 1 -- " + "x" * (5 << 20)).status_code == 413
    long = "SELECT '" + "x" * (1 << 20) + "'"
    answer = task.ask("a", sql=long)
    assert answer.status_code == 200
    assert answer.json()["truncated"] or answer.json()["error"] or len(answer.json()["rows"][0][0]) == 1 << 20


def test_endpoints_that_a_task_has_not_are_named(proxy: Running, source: Path) -> None:
    Task(proxy, "only-sql", source)
    shell = proxy.client.post("/t/only-sql/r/a/shell/exec", json={"command": "ls"})
    assert (shell.status_code, "sql endpoint" in shell.json()["detail"]) == (404, True)
    sql = proxy.client.post("/t/no-database/r/a/sql/query", json={"sql": "SELECT 1"})
    assert (sql.status_code, "databases" in sql.json()["detail"]) == (404, True)


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ({"driver": "sqlite"}, "needs `databases`"),
        ({"driver": "sqlite", "databases": {"a": {}}}, "it needs source"),
        ({"driver": "sqlite", "databases": {"a": {"source": "/x", "dsn": "y"}}}, "takes source"),
        ({"driver": "sqlite", "databases": {"a": {"source": "/x"}}, "setup": ["ls"]}, "runs no shell"),
        ({"driver": "sqlite", "databases": {"a b": {"source": "/x"}}}, "databases"),
        ({"driver": "postgres", "databases": {"a": {"source": "x"}}}, "dsn, source"),
        (
            {"driver": "postgres", "databases": {"a": {"source": "x", "dsn": "y"}}, "volatile": "frozen"},
            "cannot be frozen",
        ),
        ({"driver": "local", "databases": {"a": {"source": "/x"}}}, "it needs path"),
        ({"driver": "memory", "databases": {"a": {"source": "/x"}}}, "has no databases"),
        ({"driver": "sqlite", "databases": {"a": {"source": "/nowhere.db"}}}, "/nowhere.db"),
    ],
)
def test_a_spec_that_cannot_be_is_refused(proxy: Running, spec: dict[str, Any], told: str) -> None:
    answer = proxy.client.put("/api/v1/tasks/wrong", json=spec)
    assert (answer.status_code, told in answer.json()["detail"]) == (422, True), answer.text
