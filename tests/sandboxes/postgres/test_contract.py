from pathlib import Path
from typing import Any, ClassVar

import pytest

from sandboxes.driver import Driver
from sandboxes.effects import Effect
from sandboxes.postgres.driver import PostgresDriver
from sandboxes.spec import Database, EnvironmentSpec
from tests.sandboxes.postgres_cluster import Cluster
from tests.sandboxes.sql_calls import ask
from tests.sandboxes.sql_contract import COUNT, SqlContract, driven

SCRIPT = """
CREATE TABLE item (id int PRIMARY KEY, name text NOT NULL, stock int);
INSERT INTO item SELECT n, 'item ' || n, n % 7 FROM generate_series(1, 50) n;
CREATE VIEW few AS SELECT * FROM item WHERE id <= 3;
"""


class TestPostgres(SqlContract):
    endless: ClassVar[str] = "WITH RECURSIVE n(k) AS (SELECT 1 UNION ALL SELECT 1 FROM n) SELECT count(*) FROM n"
    parameters: ClassVar[str] = "SELECT $1::bigint, $2::text, $3::int"
    missing: ClassVar[EnvironmentSpec] = EnvironmentSpec(
        driver="postgres", databases={"shop": Database(dsn="host=127.0.0.1 port=1", source="shop")}
    )

    @pytest.fixture
    def driver(self, tmp_path: Path) -> PostgresDriver:
        return PostgresDriver(tmp_path / "data", spares=0)

    @pytest.fixture
    def spec(self, cluster: Cluster) -> EnvironmentSpec:
        cluster.create("contract", SCRIPT)
        self.server = cluster
        database = Database(dsn=cluster.dsn, source="contract")
        return EnvironmentSpec(driver="postgres", databases={"shop": database})

    def forks(self, driver: Any) -> int:
        # A private clone without changes does not count.
        return sum(not position.frozen for sandbox in driver.sandboxes for position in sandbox.positions.values())

    def source(self, spec: EnvironmentSpec) -> Any:  # noqa: ARG002 - there is only one
        with self.server.connect("contract") as connection:
            rows = connection.execute("SELECT ctid, xmin, xmax, * FROM item ORDER BY ctid").fetchall()
            return rows, connection.execute("SELECT oid, relname, relfilenode FROM pg_class ORDER BY oid").fetchall()

    def test_query_refuses_several_statements(self, driver: Driver, spec: EnvironmentSpec) -> None:
        """PostgreSQL runs them as one transaction, and the result is that of the last one."""

        async def test(driver: Driver, spec: EnvironmentSpec) -> None:
            sandbox = await driver.start(spec)
            response = await ask(sandbox, "DELETE FROM item; SELECT 1/0")
            assert (response.effect, (await ask(sandbox, COUNT)).value) == (Effect.NONE, 50)
            response = await ask(sandbox, "DELETE FROM item; SELECT 1")
            assert (response.value, response.effect) == (1, Effect.DATABASE)

        driven(driver, spec, test)
