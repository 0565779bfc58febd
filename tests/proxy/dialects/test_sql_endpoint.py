"""The sql endpoint over HTTP, on SQLite databases."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from proxy.dialects.rule_schema import steady
from sandboxes.calls import ToolCall
from sandboxes.spec import EnvironmentSpec
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
        fields = {"driver": "sqlite", "databases": databases, **spec}
        self.put = proxy.client.put(f"/api/v1/tasks/{name}", json=fields)

    def ask(self, rollout: str, tool: str = "query", **arguments: Any) -> httpx.Response:
        return self.proxy.client.post(f"/t/{self.name}/r/{rollout}/sql/{tool}", json=arguments)

    def outcome(self, rollout: str, sql: str, **arguments: Any) -> tuple[Any, str, str]:
        """Return the rows or the error, the cache status, and the node."""
        response = self.ask(rollout, sql=sql, **arguments)
        body = response.json()
        status = response.headers["cache-status"].removeprefix("forkpoint; ")
        return body["error"] or body["rows"], status, response.headers["x-forkpoint-node"]


def test_equal_databases_share_one_tree(proxy: Running, source: Path, tmp_path: Path) -> None:
    """A second task over an equal database hits what the first one recorded, until both are deleted."""
    (tmp_path / "copy").mkdir()
    twin = make(tmp_path / "copy" / "shop.db")
    one, two = Task(proxy, "one", source), Task(proxy, "two", twin)
    assert one.outcome("a", COUNT)[:2] == ([[50]], "fwd=miss; stored")
    assert two.outcome("b", COUNT)[:2] == ([[50]], "hit")
    assert two.outcome("b", "SELECT  count(*)   FROM item -- again")[:2] == ([[50]], "hit")
    # Only the rollout that writes moves.
    wrote = two.outcome("b", "DELETE FROM item WHERE id > 10")
    assert wrote[1] == "fwd=miss; stored"
    assert two.outcome("b", COUNT)[0] == [[10]]
    assert one.outcome("a", COUNT)[:2] == ([[50]], "hit")
    assert one.outcome("c", "DELETE FROM item WHERE id > 10")[1:] == ("hit", wrote[2])
    # Deleting a task deletes only what no other task uses.
    assert proxy.client.delete("/api/v1/tasks/one").status_code == 204
    assert two.outcome("d", COUNT)[1] == "hit"
    assert proxy.client.delete("/api/v1/tasks/two").status_code == 204
    assert Task(proxy, "three", twin).outcome("e", COUNT)[1] == "fwd=miss; stored"


def test_share_off_has_a_tree_of_its_own(proxy: Running, source: Path) -> None:
    """Tasks with `share: off` never hit each other's records."""
    for name in ("own-1", "own-2"):
        assert Task(proxy, name, source, share="off").outcome("a", COUNT)[1] == "fwd=miss; stored"


def test_forgetting_a_shared_node_keeps_rollouts(proxy: Running, source: Path) -> None:
    """Rollouts of other tasks at the forgotten node continue."""
    one, two = Task(proxy, "shared-1", source), Task(proxy, "shared-2", source)
    node = one.outcome("a", "DELETE FROM item WHERE id = 7")[2]
    assert two.outcome("b", "DELETE FROM item WHERE id = 7")[1] == "hit"
    proxy.client.delete("/api/v1/tasks/shared-1/rollouts/a").raise_for_status()
    gone = proxy.client.delete(f"/api/v1/tasks/shared-1/nodes/{node}").json()
    assert gone["going_on"] == ["b"]
    assert two.outcome("b", "SELECT count(*) FROM item")[::2] == ([[49]], node)
    assert one.outcome("c", "DELETE FROM item WHERE id = 7")[1:] != ("hit", node)


def test_volatile_results_are_not_shared(proxy: Running, source: Path) -> None:
    """Random results bypass the tree, and a write of one makes a private node."""
    task = Task(proxy, "clock", source)
    first, status, node = task.outcome("a", "SELECT random()")
    assert status == "fwd=bypass"
    second, status, other = task.outcome("b", "SELECT random()")
    assert (status, other) == ("fwd=bypass", node)
    assert first != second
    # A write of a random value makes a private node, and the rollout continues there.
    task.outcome("a", "INSERT INTO item (name) VALUES (random())")
    assert task.outcome("b", "INSERT INTO item (name) VALUES (random())")[1] == "fwd=bypass"
    assert task.outcome("a", COUNT)[0] == [[51]]


def test_timeouts_are_not_recorded(proxy: Running, source: Path) -> None:
    """The agent sees the timeout, and the next rollout runs the statement again."""
    task = Task(proxy, "timeout", source)
    endless = "WITH RECURSIVE n(k) AS (SELECT 1 UNION ALL SELECT k + 1 FROM n) SELECT count(*) FROM n"
    for rollout in ("a", "b"):
        error, status, _ = task.outcome(rollout, endless, timeout_s=0.2)
        assert (error["kind"], status) == ("timeout", "fwd=bypass")


def test_engine_errors_are_results(proxy: Running, source: Path) -> None:
    """An error is recorded and hit like rows, and a failed write stays at its node."""
    task = Task(proxy, "errors", source)
    assert task.outcome("a", "SELECT * FROM nowhere")[0]["message"] == "no such table: nowhere"
    assert task.outcome("b", "SELECT * FROM nowhere")[1] == "hit"
    start = task.outcome("a", COUNT)[2]
    assert task.outcome("a", "INSERT INTO item (id, name) VALUES (1, 'twice')")[2] == start


def test_defaults_do_not_change_the_key(proxy: Running, source: Path) -> None:
    """A request that spells the defaults out hits one that omits them."""
    task = Task(proxy, "defaults", source)
    task.outcome("a", COUNT)
    assert task.outcome("b", COUNT, database="shop", max_rows=100, timeout_s=5, format="json", params=None)[1] == "hit"
    assert task.outcome("b", COUNT, max_rows=99)[1] != "hit"


def test_get_reads_tables_and_schema(proxy: Running, source: Path) -> None:
    """GET and POST have the same key."""
    Task(proxy, "listing", source)
    url = "/t/listing/r/a/sql"
    assert proxy.client.get(f"{url}/tables").json()["rows"]
    assert proxy.client.get(f"{url}/schema?table=item").json()["rows"]
    assert proxy.client.post(f"{url}/schema", json={"table": "item"}).headers["cache-status"] == "forkpoint; hit"


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "detail"),
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
def test_bad_requests_are_explained(
    proxy: Running, source: Path, method: str, path: str, content: bytes, status: int, detail: str
) -> None:
    """The detail names the wrong member, or what exists."""
    Task(proxy, "refusals", source)
    response = proxy.client.request(method, f"/t/refusals/r/a/sql/{path}", content=content)
    assert (response.status_code, detail in response.json()["detail"]) == (status, True), response.text


def test_statements_have_a_size_limit(proxy: Running, source: Path) -> None:
    """Larger requests are refused with 413."""
    task = Task(proxy, "sizes", source)
    assert task.ask("a", sql="SELECT 1 -- " + "x" * (5 << 20)).status_code == 413
    long = "SELECT '" + "x" * (1 << 20) + "'"
    response = task.ask("a", sql=long)
    assert response.status_code == 200
    assert response.json()["truncated"] or response.json()["error"] or len(response.json()["rows"][0][0]) == 1 << 20


def test_missing_endpoints_name_the_available(proxy: Running, source: Path) -> None:
    """A task without a shell or a database says which endpoint it has."""
    Task(proxy, "only-sql", source)
    shell = proxy.client.post("/t/only-sql/r/a/shell/exec", json={"command": "ls"})
    assert (shell.status_code, "sql endpoint" in shell.json()["detail"]) == (404, True)
    sql = proxy.client.post("/t/no-database/r/a/sql/query", json={"sql": "SELECT 1"})
    assert (sql.status_code, "databases" in sql.json()["detail"]) == (404, True)


@pytest.mark.parametrize(
    ("spec", "detail"),
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
def test_invalid_specs_are_refused(proxy: Running, spec: dict[str, Any], detail: str) -> None:
    """The detail names the wrong member."""
    response = proxy.client.put("/api/v1/tasks/wrong", json=spec)
    assert (response.status_code, detail in response.json()["detail"]) == (422, True), response.text


@pytest.mark.parametrize(
    "plan",
    [
        "Seq Scan on t  (cost=0.00..1.01 rows=1) (actual time=0.0{}..0.1{} rows=1 loops=1)",
        "Planning Time: 0.{} ms", "Execution Time: {}.272 ms", '[{{"Plan": {{"Actual Total Time": 0.{}}}}}]',
    ],
)  # fmt: skip
def test_a_replay_takes_other_times(plan: str) -> None:
    """EXPLAIN ANALYZE prints how long its statement took. Rollouts behind one in a transaction were lost by that."""
    call, spec = ToolCall("sql", "query", {"sql": "EXPLAIN ANALYZE SELECT 1"}), EnvironmentSpec()
    bodies = [orjson.dumps({"rows": [[plan.format(number, number)]]}) for number in (12, 345)]
    assert steady(spec, call, bodies[0]) == steady(spec, call, bodies[1])
    others = [orjson.dumps({"rows": [[f"{plan.format(1, 1)} rows={number}"]]}) for number in (1, 2)]
    assert steady(spec, call, others[0]) != steady(spec, call, others[1])
    rows = ToolCall("sql", "query", {"sql": "SELECT plan FROM plans"})
    assert steady(spec, rows, bodies[0]) != steady(spec, rows, bodies[1])
