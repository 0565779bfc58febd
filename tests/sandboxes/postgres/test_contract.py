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
        # A clone in which nothing came of a statement is as good as none.
        return sum(not position.frozen for sandbox in driver.sandboxes for position in sandbox.positions.values())

    def source(self, spec: EnvironmentSpec) -> Any:  # noqa: ARG002 - there is but one
        with self.server.connect("contract") as connection:
            rows = connection.execute("SELECT ctid, xmin, xmax, * FROM item ORDER BY ctid").fetchall()
            return rows, connection.execute("SELECT oid, relname, relfilenode FROM pg_class ORDER BY oid").fetchall()

    def test_several_statements_in_a_query_are_refused(self, driver: Driver, spec: EnvironmentSpec) -> None:
        """PostgreSQL takes them, as one transaction; the answer is that of the last."""

        async def test(driver: Driver, spec: EnvironmentSpec) -> None:
            sandbox = await driver.start(spec)
            said = await ask(sandbox, "DELETE FROM item; SELECT 1/0")
            assert (said.effect, (await ask(sandbox, COUNT)).value) == (Effect.NONE, 50)
            said = await ask(sandbox, "DELETE FROM item; SELECT 1")
            assert (said.value, said.effect) == (1, Effect.DATABASE)

        driven(driver, spec, test)
