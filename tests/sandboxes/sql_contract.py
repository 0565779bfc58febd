"""The contract of all SQL drivers, in SQL that all of them understand.

A driver's test module subclasses `SqlContract` and gives it the fixtures `driver` (unopened) and `spec`: a database
`shop` with a table `item (id int primary key, name text not null, stock int)` of 50 rows, 1 to 50, named `item 1` and
so on, a view `few` of the first three, and no sequence or trigger.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

import pytest

from sandboxes.driver import Driver, FrozenState, Sandbox
from sandboxes.effects import Effect
from sandboxes.errors import NotFreezableError, SpecError
from sandboxes.spec import EnvironmentSpec
from tests.sandboxes.box import opened
from tests.sandboxes.sql_calls import SqlResponse, ask

Test = Callable[[Any, EnvironmentSpec], Awaitable[None]]
COUNT = "SELECT count(*) FROM item"
INSERT = "INSERT INTO item (id, name, stock) VALUES (51, 'new', 1)"


def driven(driver: Driver, spec: EnvironmentSpec, test: Test) -> None:
    """Run a test with an open driver."""

    async def go() -> None:
        async with opened(driver):
            await test(driver, spec)

    asyncio.run(go())


async def start_after(driver: Driver, spec: EnvironmentSpec, *statements: str) -> Sandbox:
    """Start a sandbox and run statements that must succeed."""
    sandbox = await driver.start(spec)
    for statement in statements:
        response = await ask(sandbox, statement)
        assert response.error is None, response.error
    return sandbox


async def run_all(sandbox: Sandbox, *statements: str) -> list[SqlResponse]:
    """Run statements and return their responses."""
    return [await ask(sandbox, statement) for statement in statements]


class SqlContract:
    """The contract suite. Each test gets an unopened driver.

    Attributes:
        endless: A query that runs until it is cancelled.
        parameters: A statement that returns its three parameters.
        missing: A spec whose source does not exist.
    """

    endless: ClassVar[str]
    parameters: ClassVar[str]
    missing: ClassVar[EnvironmentSpec]

    def forks(self, driver: Any) -> int:
        """Return how many sandboxes have a changed copy of a database."""
        raise NotImplementedError

    def source(self, spec: EnvironmentSpec) -> Any:
        """Return a value that changes when the source database does."""
        raise NotImplementedError

    def test_reads_have_no_effect_and_no_fork(self, driver: Driver, spec: EnvironmentSpec) -> None:
        """Any number of sandboxes read one state at the same time without a copy of the database."""

        async def test(driver: Driver, spec: EnvironmentSpec) -> None:
            sandboxes = [await driver.start(spec) for _ in range(8)]
            answers = await asyncio.gather(*(ask(sandbox, COUNT) for sandbox in sandboxes))
            assert {(response.value, response.effect, response.state) for response in answers} == {
                (50, Effect.NONE, answers[0].state)
            }
            assert answers[0].state is not None
            for tool, arguments in (("tables", {}), ("schema", {"table": "item"}), ("explain", {"sql": COUNT})):
                response = await ask(sandboxes[0], arguments.pop("sql", ""), tool, **arguments)
                assert (response.error, response.effect) == (None, Effect.NONE), tool
                assert response.rows
            response = await ask(sandboxes[0], INSERT, "explain")
            assert (response.error, response.effect) == (None, Effect.NONE)
            assert self.forks(driver) == 0

        driven(driver, spec, test)

    def test_writes_stay_in_their_own_sandbox(self, driver: Driver, spec: EnvironmentSpec) -> None:
        """A write changes the state of its sandbox and is invisible in others."""

        async def test(driver: Driver, spec: EnvironmentSpec) -> None:
            one, two = await driver.start(spec), await driver.start(spec)
            before = (await ask(one, COUNT)).state
            wrote = await ask(one, INSERT)
            assert wrote.effect & Effect.DATABASE
            assert wrote.body["row_count"] == 1
            assert wrote.state not in {before, None}
            assert [(await ask(sandbox, COUNT)).value for sandbox in (one, two)] == [51, 50]

        driven(driver, spec, test)

    def test_changed_rows_are_counted(self, driver: Driver, spec: EnvironmentSpec) -> None:
        """However a statement begins, and whatever the one before it changed."""
        counts = {
            "WITH s AS (SELECT 101 AS n UNION SELECT 102) INSERT INTO item SELECT n, 'new', 1 FROM s": 2,
            "WITH s AS (SELECT 3 AS n) UPDATE item SET stock = 0 WHERE id <= (SELECT n FROM s)": 3,
            "WITH s AS (SELECT 45 AS n) DELETE FROM item WHERE id <= 50 AND id > (SELECT n FROM s)": 5,
            "/* a */ -- b\nUPDATE item SET stock = 1 WHERE id = 1": 1,
            "UPDATE item SET stock = 1 WHERE id = 1000": 0,
            "CREATE TABLE other (a int)": 0,
        }

        async def test(driver: Driver, spec: EnvironmentSpec) -> None:
            sandbox = await driver.start(spec)
            responses = await run_all(sandbox, *counts)
            assert [response.error for response in responses] == [None] * len(counts)
            assert [response.body["row_count"] for response in responses] == list(counts.values())

        driven(driver, spec, test)

    def test_equal_statements_reach_equal_states(self, driver: Driver, spec: EnvironmentSpec) -> None:
        """Reads and failures in between do not affect the digest."""

        async def test(driver: Driver, spec: EnvironmentSpec) -> None:
            statements = (
                INSERT, "UPDATE item SET stock = stock + 1 WHERE id < 20", "CREATE TABLE other (a int, b text)",
                "INSERT INTO other SELECT id, name FROM item", "DELETE FROM item WHERE id > 40", "DROP TABLE other",
                "CREATE INDEX by_name ON item (name)", "ALTER TABLE item ADD COLUMN more text",
            )  # fmt: skip
            first = await run_all(await driver.start(spec), *statements)
            other = await driver.start(spec)
            await run_all(other, COUNT, "SELECT * FROM few")
            second = []
            for statement in statements:
                second.append(await ask(other, statement))
                await run_all(other, COUNT, "SELECT * FROM nowhere")
            assert [response.error for response in first] == [None] * len(statements)
            assert [response.state for response in first] == [response.state for response in second]
            assert len({response.state for response in first}) == len(statements)

        driven(driver, spec, test)

    def test_failed_statements_leave_nothing(self, driver: Driver, spec: EnvironmentSpec) -> None:
        """A failed statement has no effect, and a fork that was made for it is dropped."""

        async def test(driver: Driver, spec: EnvironmentSpec) -> None:
            sandbox = await driver.start(spec)
            before = (await ask(sandbox, COUNT)).state
            failing = (
                "SELECT * FROM nowhere", "SELEC 1", "INSERT INTO item (id, name) VALUES (60, 'a'), (1, 'twice')",
                "UPDATE item SET id = 1", "DROP TABLE nowhere", "INSERT INTO item (id) VALUES (61)",
            )  # fmt: skip
            for response in await run_all(sandbox, *failing):
                assert response.error is not None
                assert response.error["kind"] == "sql"
                assert (response.effect, response.state, response.shareable) == (Effect.NONE, before, True)
            assert self.forks(driver) == 0
            wrote = await ask(sandbox, INSERT)
            assert {response.state for response in await run_all(sandbox, *failing)} == {wrote.state}
            assert (await ask(sandbox, COUNT)).value == 51

        driven(driver, spec, test)

    def test_open_transaction_is_session_state(self, driver: Driver, spec: EnvironmentSpec) -> None:
        """A sandbox in a transaction has no state, but a witness that equal statements reproduce."""

        async def test(driver: Driver, spec: EnvironmentSpec) -> None:
            sandbox = await driver.start(spec)
            began, wrote = await run_all(sandbox, "BEGIN", INSERT)
            assert (began.state, wrote.state) == (None, None)
            assert None not in (began.witness, wrote.witness)
            assert began.witness != wrote.witness
            read = await ask(sandbox, COUNT)
            assert (read.value, read.effect, read.witness) == (51, Effect.NONE, wrote.witness)
            with pytest.raises(NotFreezableError):
                await sandbox.freeze()
            ended = await ask(sandbox, "ROLLBACK")
            assert (ended.error, ended.witness) == (None, None)
            assert ended.state is not None
            assert (await ask(sandbox, COUNT)).value == 50
            again = await driver.start(spec)
            assert [response.witness for response in await run_all(again, "BEGIN", INSERT)] == [
                began.witness,
                wrote.witness,
            ]

        driven(driver, spec, test)

    def test_committed_transaction_is_state(self, driver: Driver, spec: EnvironmentSpec) -> None:
        """The frozen state contains the changes of a committed transaction."""

        async def test(driver: Driver, spec: EnvironmentSpec) -> None:
            sandbox = await start_after(driver, spec, "BEGIN", INSERT, "DELETE FROM item WHERE id = 1", "COMMIT")
            frozen = await sandbox.freeze()
            restored = await driver.restore(spec, frozen)
            assert (await ask(restored, "SELECT min(id) FROM item")).value == 2

        driven(driver, spec, test)

    def test_temporary_tables_are_session_state(self, driver: Driver, spec: EnvironmentSpec) -> None:
        """Temporary tables cannot be frozen, and other sandboxes do not see them."""

        async def test(driver: Driver, spec: EnvironmentSpec) -> None:
            sandbox = await start_after(driver, spec, "CREATE TEMP TABLE mine (a int)", "INSERT INTO mine VALUES (1)")
            read = await ask(sandbox, "SELECT * FROM mine")
            assert (read.rows, read.effect, read.state) == ([[1]], Effect.NONE, None)
            with pytest.raises(NotFreezableError):
                await sandbox.freeze()
            assert (await ask(await driver.start(spec), "SELECT * FROM mine")).error is not None
            assert (await ask(sandbox, "DROP TABLE mine")).state is not None

        driven(driver, spec, test)

    def test_restored_state_equals_frozen_state(self, driver: Driver, spec: EnvironmentSpec) -> None:
        """A restored sandbox has the state, the answers and the later states of the frozen one."""

        async def test(driver: Driver, spec: EnvironmentSpec) -> None:
            sandbox = await start_after(
                driver, spec, INSERT, "CREATE TABLE other (a int)", "INSERT INTO other VALUES (7)"
            )
            state = (await ask(sandbox, COUNT)).state
            frozen = await sandbox.freeze()
            await sandbox.close()
            restored = await driver.restore(spec, frozen)
            answers = await run_all(restored, COUNT, "SELECT a FROM other")
            assert [response.value for response in answers] == [51, 7]
            assert {frozen.state, *(response.state for response in answers)} == {state}
            wrote = await ask(restored, "INSERT INTO other VALUES (8)")
            direct = await start_after(
                driver, spec, INSERT, "CREATE TABLE other (a int)", "INSERT INTO other VALUES (7)"
            )
            assert wrote.state == (await ask(direct, "INSERT INTO other VALUES (8)")).state

        driven(driver, spec, test)

    def test_frozen_sandbox_continues_independently(self, driver: Driver, spec: EnvironmentSpec) -> None:
        """The frozen sandbox and all sandboxes restored from it change independently."""

        async def test(driver: Driver, spec: EnvironmentSpec) -> None:
            sandbox = await start_after(driver, spec, INSERT)
            first = await sandbox.freeze()
            await run_all(sandbox, "DELETE FROM item WHERE id <= 10")
            second = await sandbox.freeze()
            one, two = await driver.restore(spec, first), await driver.restore(spec, second)
            await run_all(one, "DELETE FROM item")
            three = await driver.restore(spec, first)
            counts = [(await ask(each, COUNT)).value for each in (one, two, three, sandbox)]
            assert counts == [0, 41, 51, 41]

        driven(driver, spec, test)

    def test_scripts_are_atomic(self, driver: Driver, spec: EnvironmentSpec) -> None:
        """A script that fails at any statement changes nothing."""

        async def test(driver: Driver, spec: EnvironmentSpec) -> None:
            sandbox = await driver.start(spec)
            before = (await ask(sandbox, COUNT)).state
            failed = await ask(sandbox, f"{INSERT}; CREATE TABLE half (a int); SELECT * FROM nowhere;", "script")
            assert failed.error is not None
            assert (failed.effect, failed.state) == (Effect.NONE, before)
            done = await ask(sandbox, f"{INSERT}; DELETE FROM item WHERE id = 1; {COUNT};", "script")
            assert (done.error, done.rows) == (None, [[50]])
            assert done.effect & Effect.DATABASE
            failed = await ask(sandbox, "DELETE FROM item; INSERT INTO nowhere VALUES (1)", "script")
            assert (failed.effect, failed.state) == (Effect.NONE, done.state)
            assert (await ask(sandbox, COUNT)).value == 50
            reading = await ask(await driver.start(spec), f"{COUNT}; SELECT 7", "script")
            assert (reading.rows, reading.effect) == ([[7]], Effect.NONE)

        driven(driver, spec, test)

    def test_query_refuses_several_statements(self, driver: Driver, spec: EnvironmentSpec) -> None:
        """A query is one statement; `script` runs several."""

        async def test(driver: Driver, spec: EnvironmentSpec) -> None:
            sandbox = await driver.start(spec)
            response = await ask(sandbox, "DELETE FROM item; SELECT 1")
            assert response.error is not None
            assert response.effect is Effect.NONE
            assert (await ask(sandbox, COUNT)).value == 50

        driven(driver, spec, test)

    def test_timeouts_are_results_but_not_shared(
        self, driver: Driver, spec: EnvironmentSpec, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The agent sees the timeout, no other rollout does, and the sandbox continues."""
        # The engine stops the statement itself, however long it waits for a CPU.
        monkeypatch.setattr("sandboxes.workers.pool.GRACE_S", 30.0)

        async def test(driver: Driver, spec: EnvironmentSpec) -> None:
            for statements in ((), (INSERT,)):
                sandbox = await start_after(driver, spec, *statements)
                before = (await ask(sandbox, COUNT)).state
                response = await ask(sandbox, self.endless, timeout_s=0.2)
                assert response.error is not None
                assert response.error["kind"] == "timeout"
                assert response.marks == ("timeout",)
                assert (response.effect, response.state, response.shareable) == (Effect.NONE, before, False)
                assert (await ask(sandbox, COUNT)).value == 50 + len(statements)

        driven(driver, spec, test)

    def test_parameters_are_values(self, driver: Driver, spec: EnvironmentSpec) -> None:
        """Parameters are never part of the statement's text, and keep their exact value."""

        async def test(driver: Driver, spec: EnvironmentSpec) -> None:
            sandbox = await driver.start(spec)
            for values in ([2**63 - 1, "'; DROP TABLE item; --", None], [-(2**63), "ä\u2028\U0001f40d", None]):
                assert (await ask(sandbox, self.parameters, params=values)).rows == [values]

        driven(driver, spec, test)

    def test_truncated_results_say_so(self, driver: Driver, spec: EnvironmentSpec) -> None:
        """A result cut by a limit of rows or bytes has `truncated` set."""

        async def test(driver: Driver, spec: EnvironmentSpec) -> None:
            limits = spec.limits.model_copy(update={"output_bytes": 200})
            few, small = await driver.start(spec), await driver.start(spec.model_copy(update={"limits": limits}))
            response = await ask(few, "SELECT id FROM item ORDER BY id", max_rows=3)
            assert (response.rows, response.body["row_count"], response.body["truncated"]) == ([[1], [2], [3]], 3, True)
            assert not (await ask(few, "SELECT id FROM item", max_rows=50)).body["truncated"]
            response = await ask(small, "SELECT name FROM item ORDER BY id")
            assert response.body["truncated"]
            assert response.marks == ("output",)
            assert 0 < len(response.rows) < 50

        driven(driver, spec, test)

    def test_compare_changes_nothing(self, driver: Driver, spec: EnvironmentSpec) -> None:
        """`compare` compares multisets or sequences of rows, and refuses statements that write."""

        async def test(driver: Driver, spec: EnvironmentSpec) -> None:
            sandbox = await start_after(driver, spec, INSERT)
            state = (await ask(sandbox, COUNT)).state
            up, down = "SELECT id FROM item ORDER BY id", "SELECT id FROM item ORDER BY id DESC"
            cases = (
                (up, down, False, True), (up, down, True, False), (up, up, True, True),
                (COUNT, "SELECT 51", True, True),
                ("SELECT 1 UNION ALL SELECT 1", "SELECT 1", False, False), ("SELECT 1, 2", "SELECT 1", False, False),
                ("SELECT * FROM nowhere", "SELECT 1", False, False),
                ("SELECT 1", "SELECT * FROM nowhere", False, False),
                ("DELETE FROM item", "SELECT 1", False, False), ("SELECT 1", "DELETE FROM item", False, False),
            )  # fmt: skip
            for sql, gold, ordered, match in cases:
                response = await ask(sandbox, sql, "compare", gold=gold, ordered=ordered)
                assert response.body["match"] is match, (sql, gold, response.body)
                assert bool(response.body["why"]) is not match
                assert (response.effect, response.state) == (Effect.NONE, state)
            assert (await ask(sandbox, COUNT)).value == 51

        driven(driver, spec, test)

    def test_source_never_changes(self, driver: Driver, spec: EnvironmentSpec) -> None:
        """Nothing that sandboxes do reaches the source database."""
        before = self.source(spec)

        async def test(driver: Driver, spec: EnvironmentSpec) -> None:
            sandbox = await start_after(driver, spec, INSERT, "DELETE FROM item", "CREATE TABLE other (a int)")
            await sandbox.freeze()

        driven(driver, spec, test)
        assert self.source(spec) == before

    def test_collect_spares_kept_and_used_states(self, driver: Driver, spec: EnvironmentSpec) -> None:
        """A collection deletes only states that the caller does not keep and no sandbox uses."""

        async def test(driver: Driver, spec: EnvironmentSpec) -> None:
            states: list[FrozenState] = []
            for name in ("kept", "dropped"):
                sandbox = await start_after(driver, spec, f"INSERT INTO item (id, name) VALUES (51, '{name}')")
                states.append(await sandbox.freeze())
                await sandbox.close()
            using = await driver.restore(spec, states[0])
            await driver.collect([])
            assert (await ask(using, COUNT)).value == 51
            await driver.collect(states[0].parts)
            restored = await driver.restore(spec, states[0])
            assert (await ask(restored, "SELECT name FROM item WHERE id = 51")).value == "kept"

        driven(driver, spec, test)

    def test_missing_source_is_a_spec_error(self, driver: Driver, spec: EnvironmentSpec) -> None:
        """A source that does not exist is reported before any sandbox starts."""

        async def test(driver: Driver, _spec: EnvironmentSpec) -> None:
            with pytest.raises(SpecError):
                await driver.identity(self.missing)

        driven(driver, spec, test)

    def test_close_is_idempotent(self, driver: Driver, spec: EnvironmentSpec) -> None:
        """The second close does nothing."""

        async def test(driver: Driver, spec: EnvironmentSpec) -> None:
            sandbox = await start_after(driver, spec, INSERT)
            assert sandbox.alive
            await sandbox.close()
            await sandbox.close()
            assert self.forks(driver) == 0
            assert not sandbox.alive

        driven(driver, spec, test)
