"""The driver's own queries: agents decide neither what their names mean nor what they see."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

import sandboxes.postgres
from sandboxes.effects import Effect
from sandboxes.postgres.driver import PostgresDriver
from tests.sandboxes.box import opened
from tests.sandboxes.postgres_cluster import Cluster
from tests.sandboxes.sql_calls import SqlResponse, ask

SOURCES = sorted(Path(sandboxes.postgres.__path__[0]).glob("*.py"))
BANK = """CREATE TABLE account (id int PRIMARY KEY, balance int);
INSERT INTO account SELECT n, 100 FROM generate_series(1, 20) n;
CREATE TABLE big AS SELECT n AS id, repeat('x', 100) AS note FROM generate_series(1, 5000) n;
CREATE SEQUENCE drawn;
CREATE FUNCTION poison() RETURNS int LANGUAGE plpgsql AS
    $$ BEGIN UPDATE public.big SET note = 'poison' WHERE id OPERATOR(pg_catalog.=) 7; RETURN 1; END $$;
CREATE FUNCTION deferred() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN PERFORM public.poison(); RETURN NULL; END $$;
"""
DECOYS = """CREATE SCHEMA mine;
DO $do$
DECLARE
    words text[] := '{%(words)s}';
    command text;
BEGIN
    FOR command IN
        SELECT format('CREATE FUNCTION mine.%%I(%%s) RETURNS %%s LANGUAGE plpgsql AS
            $f$ BEGIN RAISE ''a decoy was called''; END $f$', proname, pg_get_function_identity_arguments(oid),
            pg_get_function_result(oid))
        FROM pg_proc WHERE pronamespace = 'pg_catalog'::regnamespace AND proname = ANY (words)
        UNION ALL
        SELECT format('CREATE FUNCTION mine.op%%s(%%s, %%s) RETURNS %%s LANGUAGE plpgsql AS
            $f$ BEGIN RAISE ''a decoy was called''; END $f$;
            CREATE OPERATOR mine.%%s (LEFTARG = %%s, RIGHTARG = %%s, PROCEDURE = mine.op%%s)', oid,
            oprleft::regtype, oprright::regtype, oprresult::regtype, oprname, oprleft::regtype, oprright::regtype, oid)
        FROM pg_operator WHERE oprname IN ('=', '<>', '||', '!~', '~', '>', '<=', '+', '-') AND oprleft <> 0
        UNION ALL
        SELECT format('CREATE DOMAIN mine.%%I AS int', typname) FROM pg_type
        WHERE typnamespace = 'pg_catalog'::regnamespace AND typname IN ('text', 'name', 'regclass', 'xid', 'regtype')
        UNION ALL
        SELECT format('CREATE VIEW mine.%%I AS SELECT * FROM pg_catalog.%%I WHERE false', relname, relname)
        FROM pg_class WHERE relnamespace = 'pg_catalog'::regnamespace AND relname = ANY (words)
            AND relkind IN ('r', 'v')
    LOOP
        BEGIN
            EXECUTE command;
        EXCEPTION WHEN OTHERS THEN NULL;  -- Polymorphic ones have no simple form.
        END;
    END LOOP;
END
$do$
"""
SHADOWS = """DO $do$
DECLARE
    command text;
BEGIN
    FOR command IN
        SELECT pg_catalog.format('CREATE TEMP VIEW %I AS SELECT * FROM mine.%I', relname, relname)
        FROM pg_catalog.pg_class WHERE relnamespace = 'mine'::regnamespace AND relkind = 'v'
    LOOP
        EXECUTE command;
    END LOOP;
END
$do$
"""
CALLS = {
    "UPDATE public.big SET note = 'y' WHERE id OPERATOR(pg_catalog.=) 7": True,
    "UPDATE public.account SET balance = 7 WHERE id OPERATOR(pg_catalog.=) 7": True,
    "CREATE TABLE public.made (a int)": True,
    "SELECT pg_catalog.nextval('public.drawn')": True,
    "SELECT pg_catalog.setval('public.drawn', 7)": True,
    "SELECT pg_catalog.currval('public.drawn')": False,
    "BEGIN": False,
    "DELETE FROM public.account WHERE id OPERATOR(pg_catalog.=) 1": False,
    "COMMIT": True,
    "PREPARE p AS SELECT 1": False,
    "DECLARE c CURSOR WITH HOLD FOR SELECT id FROM public.account": True,
    "FETCH 1 FROM c": False,
    "ANALYZE public.account": True,
    "SELECT id FROM public.account": False,
}
"""Calls that use no name of `pg_catalog` without its schema, and whether they change the database."""

TWO_COUNTERS = """CREATE TEMP VIEW pg_stat_xact_user_tables AS SELECT 0::oid AS relid, 0::bigint AS n_tup_ins,
    0::bigint AS n_tup_upd, 0::bigint AS n_tup_del WHERE false;
CREATE TEMP VIEW pg_stat_xact_sys_tables AS SELECT ''::name AS schemaname, ''::name AS relname, 0::bigint AS n_tup_ins,
    0::bigint AS n_tup_upd, 0::bigint AS n_tup_del WHERE false"""
UPDATE = "UPDATE big SET note = 'poison' WHERE id OPERATOR(pg_catalog.=) 7"
HELD = "DECLARE c CURSOR WITH HOLD FOR SELECT poison()"
ON_COMMIT = """CREATE TEMP TABLE t (a int) ON COMMIT DROP; CREATE CONSTRAINT TRIGGER late AFTER INSERT ON t
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION deferred()"""
HIDDEN_UPDATES = {
    "temporary counters, DISCARD ALL": (TWO_COUNTERS, UPDATE, "DISCARD ALL"),
    "temporary counters, DISCARD TEMP": (TWO_COUNTERS, UPDATE, "DISCARD TEMP"),
    "temporary counters, dropped": (
        TWO_COUNTERS, UPDATE, "DROP VIEW pg_temp.pg_stat_xact_user_tables, pg_temp.pg_stat_xact_sys_tables",
    ),
    "a path, RESET": ("SET search_path = public, pg_catalog", UPDATE, "RESET search_path"),
    "a path in one call": (f"SET search_path = public, pg_catalog; {UPDATE}; RESET search_path",),
    "an encoding": ("SET client_encoding = 'LATIN1'", UPDATE, "DISCARD ALL"),
    "a prepared statement": (f"PREPARE p AS {UPDATE}", "EXECUTE p", "DISCARD ALL"),
    "a cursor WITH HOLD": (HELD, "CLOSE c"),
    "a cursor WITH HOLD among others": (f"{HELD}; SELECT 1", "CLOSE c"),
    "a cursor WITH HOLD in a transaction": ("BEGIN", HELD, "COMMIT", "CLOSE c"),
    "a cursor WITH HOLD that a text makes": (f"DO $$ BEGIN EXECUTE '{HELD}'; END $$", "CLOSE c"),
    "a trigger at the end of a transaction": ("BEGIN", ON_COMMIT, "INSERT INTO t VALUES (1)", "COMMIT"),
    "a transaction that begins another": ("BEGIN", UPDATE, "COMMIT AND CHAIN", "ROLLBACK"),
    "serializable": ("BEGIN ISOLATION LEVEL SERIALIZABLE", UPDATE, "COMMIT"),
}  # fmt: skip


def in_bank(tmp_path: Path, cluster: Cluster, test: Callable[[PostgresDriver], Awaitable[None]]) -> None:
    async def go() -> None:
        cluster.create("bank", BANK)
        driver = PostgresDriver(tmp_path / "postgres", spares=0)
        async with opened(driver):
            await test(driver)

    asyncio.run(go())


async def run(driver: PostgresDriver, cluster: Cluster, *texts: str | tuple[str, list[object]]) -> list[SqlResponse]:
    """Run calls in a new sandbox; a pair is a statement with its parameters."""
    sandbox = await driver.start(cluster.spec("bank"))
    responses = []
    for text in texts:
        sql, params = text if isinstance(text, tuple) else (text, None)
        responses.append(await ask(sandbox, sql, database="bank", params=params))
        assert responses[-1].error is None, (sql, responses[-1].error)
    await sandbox.close()
    return responses


def test_queries_name_schemas_of_relations() -> None:
    """A temporary relation comes first wherever a query does not say the schema."""
    unqualified = [
        (path.name, name)
        for path in SOURCES
        for name in re.findall(r"\b(?:FROM|JOIN)\s+(?:ONLY\s+)?((?:pg|information)_\w+\b(?!\.))", path.read_text())
    ]
    assert unqualified == []


def test_decoys_shape_no_query(tmp_path: Path, cluster: Cluster) -> None:
    """Relations, functions, operators and types with the catalog's names come first, and the driver sees the same."""
    words = {word for path in SOURCES for word in re.findall(r"\b[a-z]\w+\b", path.read_text())}

    async def test(driver: PostgresDriver) -> None:
        decoys = DECOYS % {"words": ",".join(sorted(words))}
        shown = []
        for shadows in (["SELECT 1", "SELECT 1"], [SHADOWS, "SET search_path = mine, pg_catalog"]):
            sandbox = await driver.start(cluster.spec("bank"))
            for text in (decoys, *shadows):
                assert (await ask(sandbox, text, database="bank")).error is None
            changed = {}
            for text in CALLS:
                response = await ask(sandbox, text, database="bank")
                assert response.error is None, (text, response.error)
                changed[text] = bool(response.effect & Effect.DATABASE)
            assert changed == CALLS
            for tool in ("tables", "schema"):
                rows = (await ask(sandbox, tool=tool, database="bank")).rows
                shown.append([row for row in rows if row[0] == "public"])
            await sandbox.close()
        assert [len(rows) for rows in shown[:2]] == [3, 5]
        assert shown[0] == shown[2]

    in_bank(tmp_path, cluster, test)


@pytest.mark.parametrize("how", HIDDEN_UPDATES)
def test_hidden_updates_lead_to_no_other_state(tmp_path: Path, cluster: Cluster, how: str) -> None:
    """A rollout that changed a large table never stands where one stands that did not."""

    async def test(driver: PostgresDriver) -> None:
        await run(driver, cluster, "SELECT 1")
        clean = (await run(driver, cluster, "UPDATE account SET balance = 100 WHERE false"))[-1]
        texts = (*HIDDEN_UPDATES[how], "SELECT note FROM big WHERE id = 7")
        responses = await run(driver, cluster, *texts)
        assert responses[-1].value == "poison"
        assert responses[-1].state is None or responses[-1].state != clean.state
        # What reads counters is volatile: no replay reaches it.
        again = await run(driver, cluster, *texts) if "pg_stat" not in texts[0] else responses
        assert [(r.state, r.witness) for r in responses] == [(r.state, r.witness) for r in again]

    in_bank(tmp_path, cluster, test)


DIFFERENT = [
    ("DELETE FROM big WHERE id = 7", "DELETE FROM big WHERE id = 8"),
    (("DELETE FROM big WHERE id = $1", [7]), ("DELETE FROM big WHERE id = $1", [8])),
    ("UPDATE big SET id = 0 WHERE id = 7", "UPDATE big SET id = 0 WHERE id = 8"),
    (("SELECT set_config('app.x', $1, false)", ["a"]), ("SELECT set_config('app.x', $1, false)", ["b"])),
    (
        "UPDATE account SET balance = 7 WHERE id = 7; INSERT INTO account SELECT n, 0 FROM generate_series(21, 9000) n",
        "UPDATE account SET balance = 8 WHERE id = 7; INSERT INTO account SELECT n, 0 FROM generate_series(21, 9000) n",
    ),
]


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_different_changes_are_different_states(
    tmp_path: Path, cluster: Cluster, one: str | tuple[str, list[object]], other: str | tuple[str, list[object]]
) -> None:
    """Rows that a large table no longer has, and parameters, are a part of what a call did."""

    async def test(driver: PostgresDriver) -> None:
        first, same, second = [(await run(driver, cluster, text))[-1] for text in (one, one, other)]
        assert (first.state, first.witness) == (same.state, same.witness)
        assert (first.state, first.witness) != (second.state, second.witness)

    in_bank(tmp_path, cluster, test)


def test_small_table_that_grows_keeps_its_content(tmp_path: Path, cluster: Cluster) -> None:
    """When a table becomes too large to be read, what it contained before stays a part of the state."""

    async def test(driver: PostgresDriver) -> None:
        grow = "INSERT INTO account SELECT n, 0 FROM generate_series(21, 9000) n"
        states = [
            (await run(driver, cluster, f"UPDATE account SET balance = {n} WHERE id = 7", grow))[-1].state
            for n in (1, 2)
        ]
        assert states[0] != states[1]

    in_bank(tmp_path, cluster, test)


def test_rows_that_a_policy_hides_are_told_apart(tmp_path: Path, cluster: Cluster) -> None:
    """A table that its owner may not read counts as large, and its changes are named by their statements."""

    async def test(driver: PostgresDriver) -> None:
        hide = (
            "ALTER TABLE account ENABLE ROW LEVEL SECURITY; ALTER TABLE account FORCE ROW LEVEL SECURITY; "
            "CREATE POLICY a ON account FOR INSERT WITH CHECK (true)"
        )
        states = [
            (await run(driver, cluster, hide, f"INSERT INTO account VALUES (100, {n})"))[-1].state for n in (1, 2)
        ]
        assert None not in states
        assert states[0] != states[1]

    in_bank(tmp_path, cluster, test)


@pytest.mark.parametrize(
    "texts",
    [("DISCARD PLANS",), ("SET search_path = public", "RESET search_path"), ("CREATE TEMP TABLE t ()", "DROP TABLE t")],
)
def test_names_that_may_mean_others_make_a_branch(tmp_path: Path, cluster: Cluster, texts: tuple[str, ...]) -> None:
    """Where a digest is a history, a session that decides what names mean is a part of it. Small content is read."""

    async def test(driver: PostgresDriver) -> None:
        clean = (await run(driver, cluster, "SELECT 1"))[-1].state
        large = [(await run(driver, cluster, *texts))[-1].state for _ in range(2)]
        assert large[0] == large[1] != clean
        assert large[0] is not None
        if "TEMP" in texts[0]:
            # A change of system tables without a difference in what is described is named by its text anyway.
            return
        cluster.create("little", "CREATE TABLE account (id int)")
        sandbox = await driver.start(cluster.spec("little"))
        before, *responses = [await ask(sandbox, text, database="little") for text in ("SELECT 1", *texts)]
        assert (responses[-1].error, responses[-1].state) == (None, before.state)

    in_bank(tmp_path, cluster, test)
