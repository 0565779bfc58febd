"""What agents can do to each other where their databases share a server: nothing."""

from pathlib import Path

import psycopg
import pytest

from sandboxes.errors import SandboxError
from sandboxes.postgres.driver import PostgresDriver
from sandboxes.spec import Database, EnvironmentSpec
from tests.sandboxes.postgres.test_driver import driven
from tests.sandboxes.postgres_cluster import SHOP, Cluster
from tests.sandboxes.sql_calls import ask

CANARY = "a text of the other agent"
KNOWN = "known"
WRITE = "INSERT INTO item (id, name) VALUES (1000, 'x')"
OTHERS = "FROM pg_database WHERE datname LIKE 'forkpoint%' AND datname <> current_database()"
ATTACKS = [
    "ALTER ROLE CURRENT_USER PASSWORD 'x'",
    "ALTER ROLE CURRENT_USER SET search_path = nowhere",
    "SET ROLE NONE; ALTER ROLE CURRENT_USER PASSWORD 'x'; ALTER ROLE CURRENT_USER SET search_path = nowhere",
    "DO $$ BEGIN EXECUTE 'ALTER ROLE CURRENT_USER SET default_transaction_read_only = on'; END $$",
    "ALTER ROLE CURRENT_USER NOLOGIN",
    "ALTER ROLE CURRENT_USER CONNECTION LIMIT 0",
    "DROP OWNED BY CURRENT_USER",
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()",
    "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()",
    *(
        f"DO $$ DECLARE name text; BEGIN FOR name IN SELECT datname {OTHERS} LOOP BEGIN "
        f"EXECUTE format('{command}', name); EXCEPTION WHEN OTHERS THEN NULL; END; END LOOP; END $$"
        for command in (
            "ALTER DATABASE %I SET search_path = nowhere", "ALTER DATABASE %I ALLOW_CONNECTIONS false",
            "ALTER DATABASE %I CONNECTION LIMIT 0", "ALTER DATABASE %I RENAME TO stolen",
            "REVOKE ALL ON DATABASE %I FROM PUBLIC", "GRANT ALL ON DATABASE %I TO PUBLIC",
        )
    ),
]  # fmt: skip
"""What an agent tries. Some of it is refused, and some of it changes nothing for others."""


@pytest.mark.parametrize("spares", [0, 1])
def test_an_agent_harms_no_other_sandbox(tmp_path: Path, cluster: Cluster, spares: int) -> None:
    """The other agent's session, its reads on shared clones, its next clone and its restored states go on."""
    cluster.create("shop")
    cluster.create("store")

    async def test(driver: PostgresDriver) -> None:
        attacker, victim = await driver.start(cluster.spec("shop")), await driver.start(cluster.spec("store"))

        async def attempt(statement: str) -> None:
            nonlocal attacker
            # The server ends a session that alters a database while this is dropped.
            try:
                await ask(attacker, statement)
            except SandboxError:
                attacker = await driver.start(cluster.spec("shop"))
                await ask(attacker, WRITE)

        await ask(victim, WRITE, database="store")
        frozen = await victim.freeze()
        await ask(attacker, WRITE)
        for attack in ATTACKS:
            await attempt(attack)
            # A statement of many databases, none of which may be dropped in a transaction.
            for name in cluster.ours():
                await attempt(f'DROP DATABASE "{name}" WITH (FORCE)')
            assert (await ask(victim, "SELECT count(*) FROM item", database="store")).rows == [[51]], attack
            reader = await driver.start(cluster.spec("store"))
            assert (await ask(reader, "SELECT count(*) FROM item", database="store")).rows == [[50]], attack
            await reader.close()
        later, restored = await driver.start(cluster.spec("store")), await driver.restore(cluster.spec("store"), frozen)
        for sandbox, count in ((later, 50), (restored, 51)):
            assert (await ask(sandbox, "SELECT count(*) FROM item", database="store")).rows == [[count]]
            for statement in ("CREATE SCHEMA mine", "DELETE FROM sale"):
                assert (await ask(sandbox, statement, database="store")).error is None

    driven(tmp_path, test, spares=spares)


def test_an_agent_reads_nothing_of_another_session(tmp_path: Path, cluster: Cluster) -> None:
    """Neither its statements nor its databases' sizes."""
    cluster.create("shop")

    async def test(driver: PostgresDriver) -> None:
        attacker, victim = await driver.start(cluster.spec("shop")), await driver.start(cluster.spec("shop"))
        await ask(victim, WRITE)
        await ask(victim, f"BEGIN; SELECT '{CANARY}'")
        for prelude in ("", "SET ROLE NONE; "):
            shown = await ask(
                attacker, f"{prelude}SELECT query FROM pg_stat_activity", tool="script" if prelude else "query"
            )
            assert shown.rows, shown
            assert CANARY not in repr(shown.rows)
        sizes = await ask(attacker, f"SELECT pg_database_size(datname) {OTHERS} AND datname LIKE '%fork%'")
        assert sizes.error is not None

    driven(tmp_path, test)


def test_a_login_opens_its_own_clone_only(tmp_path: Path, cluster: Cluster) -> None:
    """Even with its password, which an agent may have set."""
    cluster.create("shop")

    async def test(driver: PostgresDriver) -> None:
        first, second = await driver.start(cluster.spec("shop")), await driver.start(cluster.spec("shop"))
        for sandbox in (first, second):
            await ask(sandbox, WRITE)
        await ask(first, f"SET ROLE NONE; ALTER ROLE CURRENT_USER PASSWORD '{KNOWN}'", tool="script")
        clones = [sandbox.positions["shop"].clone for sandbox in (first, second)]
        mine, other = (clone.database for clone in clones if clone is not None)
        psycopg.connect(cluster.dsn, dbname=mine, user=mine, password=KNOWN).close()
        with pytest.raises(psycopg.OperationalError, match="permission denied"):
            psycopg.connect(cluster.dsn, dbname=other, user=mine, password=KNOWN)

    driven(tmp_path, test)


def test_a_session_acts_as_the_agents_role_in_each_call(tmp_path: Path, cluster: Cluster) -> None:
    """Also after statements that make it act as its login."""
    cluster.create("shop")

    async def test(driver: PostgresDriver) -> None:
        sandbox = await driver.start(cluster.spec("shop"))
        (agent,) = (await ask(sandbox, "SELECT current_user")).rows[0]
        for statement in (WRITE, "SET ROLE NONE", "DISCARD ALL", "RESET SESSION AUTHORIZATION"):
            await ask(sandbox, statement)
            assert (await ask(sandbox, "SELECT current_user")).rows == [[agent]], statement
        assert await sandbox.freeze()

    driven(tmp_path, test)


def test_a_user_that_may_make_databases_and_roles_is_enough(tmp_path: Path, cluster: Cluster) -> None:
    """Also for a state that outlives the driver, and for what the first start left."""
    with cluster.connect() as connection:
        connection.execute(f"CREATE ROLE maker LOGIN CREATEDB CREATEROLE PASSWORD '{KNOWN}'")
        connection.execute("CREATE DATABASE made OWNER maker")
    dsn = f"host={cluster.host} port={cluster.port} user=maker password={KNOWN} dbname=made"
    with psycopg.connect(dsn) as connection:
        connection.execute(SHOP)
    spec = EnvironmentSpec(
        driver="postgres",
        databases={"shop": Database(dsn=dsn.replace("dbname=made", "dbname=postgres"), source="made")},
    )
    states = []

    async def write(driver: PostgresDriver) -> None:
        sandbox = await driver.start(spec)
        for statement in (WRITE, "CREATE TABLE mine (a int)", "CREATE SCHEMA other"):
            assert (await ask(sandbox, statement)).error is None
        states.append(await sandbox.freeze())

    async def restore(driver: PostgresDriver) -> None:
        sandbox = await driver.restore(spec, states[0])
        assert (await ask(sandbox, "INSERT INTO mine VALUES (1)")).error is None
        await sandbox.close()
        await driver.clones.idle()
        # Logins go with their clones.
        assert not [name for name in cluster.ours() if "_fork_" in name]

    driven(tmp_path, write)
    driven(tmp_path, restore)
