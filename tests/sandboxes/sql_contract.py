"""What every SQL driver promises, in SQL that all of them speak.

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
from tests.sandboxes.sql_calls import Said, ask

Test = Callable[[Any, EnvironmentSpec], Awaitable[None]]
COUNT = "SELECT count(*) FROM item"
INSERT = "INSERT INTO item (id, name, stock) VALUES (51, 'new', 1)"


def driven(driver: Driver, spec: EnvironmentSpec, test: Test) -> None:
    async def go() -> None:
        async with opened(driver):
            await test(driver, spec)

    asyncio.run(go())


async def after(driver: Driver, spec: EnvironmentSpec, *statements: str) -> Sandbox:
    sandbox = await driver.start(spec)
    for statement in statements:
        said = await ask(sandbox, statement)
        assert said.error is None, said.error
    return sandbox


async def told(sandbox: Sandbox, *statements: str) -> list[Said]:
    return [await ask(sandbox, statement) for statement in statements]


class SqlContract:
    """The suite. Each test gets a driver that nobody has opened yet.

    endless: a query that runs until it is stopped. parameters: the statement that gives its three parameters back.
    """

    endless: ClassVar[str]
    parameters: ClassVar[str]
    missing: ClassVar[EnvironmentSpec]

    def forks(self, driver: Any) -> int:
        """Return how many copies of databases the driver's sandboxes have now."""
        raise NotImplementedError

    def source(self, spec: EnvironmentSpec) -> Any:
        """Return what changes when the source database does."""
        raise NotImplementedError

    def test_what_reads_has_no_effect_and_costs_no_fork(self, driver: Driver, spec: EnvironmentSpec) -> None:
        async def test(driver: Driver, spec: EnvironmentSpec) -> None:
            sandboxes = [await driver.start(spec) for _ in range(8)]
            answers = await asyncio.gather(*(ask(sandbox, COUNT) for sandbox in sandboxes))
            assert {(said.value, said.effect, said.state) for said in answers} == {(50, Effect.NONE, answers[0].state)}
            assert answers[0].state is not None
            for tool, arguments in (("tables", {}), ("schema", {"table": "item"}), ("explain", {"sql": COUNT})):
                said = await ask(sandboxes[0], arguments.pop("sql", ""), tool, **arguments)
                assert (said.error, said.effect) == (None, Effect.NONE), tool
                assert said.rows
            said = await ask(sandboxes[0], INSERT, "explain")
            assert (said.error, said.effect) == (None, Effect.NONE)
            assert self.forks(driver) == 0

        driven(driver, spec, test)

    def test_what_writes_is_seen_by_its_own_rollout_only(self, driver: Driver, spec: EnvironmentSpec) -> None:
        async def test(driver: Driver, spec: EnvironmentSpec) -> None:
            one, two = await driver.start(spec), await driver.start(spec)
            before = (await ask(one, COUNT)).state
            wrote = await ask(one, INSERT)
            assert wrote.effect & Effect.DATABASE
            assert wrote.body["row_count"] == 1
            assert wrote.state not in {before, None}
            assert [(await ask(sandbox, COUNT)).value for sandbox in (one, two)] == [51, 50]

        driven(driver, spec, test)

    def test_equal_statements_reach_equal_states(self, driver: Driver, spec: EnvironmentSpec) -> None:
        async def test(driver: Driver, spec: EnvironmentSpec) -> None:
            statements = (
                INSERT, "UPDATE item SET stock = stock + 1 WHERE id < 20", "CREATE TABLE other (a int, b text)",
                "INSERT INTO other SELECT id, name FROM item", "DELETE FROM item WHERE id > 40", "DROP TABLE other",
                "CREATE INDEX by_name ON item (name)", "ALTER TABLE item ADD COLUMN more text",
            )  # fmt: skip
            first = await told(await driver.start(spec), *statements)
            other = await driver.start(spec)
            await told(other, COUNT, "SELECT * FROM few")
            second = []
            for statement in statements:
                second.append(await ask(other, statement))
                await told(other, COUNT, "SELECT * FROM nowhere")
            assert [said.error for said in first] == [None] * len(statements)
            assert [said.state for said in first] == [said.state for said in second]
            assert len({said.state for said in first}) == len(statements)

        driven(driver, spec, test)

    def test_a_failed_statement_leaves_nothing(self, driver: Driver, spec: EnvironmentSpec) -> None:
        async def test(driver: Driver, spec: EnvironmentSpec) -> None:
            sandbox = await driver.start(spec)
            before = (await ask(sandbox, COUNT)).state
            failing = (
                "SELECT * FROM nowhere", "SELEC 1", "INSERT INTO item (id, name) VALUES (60, 'a'), (1, 'twice')",
                "UPDATE item SET id = 1", "DROP TABLE nowhere", "INSERT INTO item (id) VALUES (61)",
            )  # fmt: skip
            for said in await told(sandbox, *failing):
                assert said.error is not None
                assert said.error["kind"] == "sql"
                assert (said.effect, said.state, said.shareable) == (Effect.NONE, before, True)
            assert self.forks(driver) == 0
            wrote = await ask(sandbox, INSERT)
            assert {said.state for said in await told(sandbox, *failing)} == {wrote.state}
            assert (await ask(sandbox, COUNT)).value == 51

        driven(driver, spec, test)

    def test_an_open_transaction_is_the_rollout_s_session(self, driver: Driver, spec: EnvironmentSpec) -> None:
        async def test(driver: Driver, spec: EnvironmentSpec) -> None:
            sandbox = await driver.start(spec)
            began, wrote = await told(sandbox, "BEGIN", INSERT)
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
            assert [said.witness for said in await told(again, "BEGIN", INSERT)] == [began.witness, wrote.witness]

        driven(driver, spec, test)

    def test_a_committed_transaction_is_state(self, driver: Driver, spec: EnvironmentSpec) -> None:
        async def test(driver: Driver, spec: EnvironmentSpec) -> None:
            sandbox = await after(driver, spec, "BEGIN", INSERT, "DELETE FROM item WHERE id = 1", "COMMIT")
            frozen = await sandbox.freeze()
            restored = await driver.restore(spec, frozen)
            assert (await ask(restored, "SELECT min(id) FROM item")).value == 2

        driven(driver, spec, test)

    def test_temporary_tables_are_session(self, driver: Driver, spec: EnvironmentSpec) -> None:
        async def test(driver: Driver, spec: EnvironmentSpec) -> None:
            sandbox = await after(driver, spec, "CREATE TEMP TABLE mine (a int)", "INSERT INTO mine VALUES (1)")
            read = await ask(sandbox, "SELECT * FROM mine")
            assert (read.rows, read.effect, read.state) == ([[1]], Effect.NONE, None)
            with pytest.raises(NotFreezableError):
                await sandbox.freeze()
            assert (await ask(await driver.start(spec), "SELECT * FROM mine")).error is not None
            assert (await ask(sandbox, "DROP TABLE mine")).state is not None

        driven(driver, spec, test)

    def test_a_restored_state_answers_as_the_frozen_one(self, driver: Driver, spec: EnvironmentSpec) -> None:
        async def test(driver: Driver, spec: EnvironmentSpec) -> None:
            sandbox = await after(driver, spec, INSERT, "CREATE TABLE other (a int)", "INSERT INTO other VALUES (7)")
            state = (await ask(sandbox, COUNT)).state
            frozen = await sandbox.freeze()
            await sandbox.close()
            restored = await driver.restore(spec, frozen)
            answers = await told(restored, COUNT, "SELECT a FROM other")
            assert [said.value for said in answers] == [51, 7]
            assert {frozen.state, *(said.state for said in answers)} == {state}
            wrote = await ask(restored, "INSERT INTO other VALUES (8)")
            direct = await after(driver, spec, INSERT, "CREATE TABLE other (a int)", "INSERT INTO other VALUES (7)")
            assert wrote.state == (await ask(direct, "INSERT INTO other VALUES (8)")).state

        driven(driver, spec, test)

    def test_a_frozen_sandbox_goes_on_and_harms_nobody(self, driver: Driver, spec: EnvironmentSpec) -> None:
        async def test(driver: Driver, spec: EnvironmentSpec) -> None:
            sandbox = await after(driver, spec, INSERT)
            first = await sandbox.freeze()
            await told(sandbox, "DELETE FROM item WHERE id <= 10")
            second = await sandbox.freeze()
            one, two = await driver.restore(spec, first), await driver.restore(spec, second)
            await told(one, "DELETE FROM item")
            three = await driver.restore(spec, first)
            counts = [(await ask(each, COUNT)).value for each in (one, two, three, sandbox)]
            assert counts == [0, 41, 51, 41]

        driven(driver, spec, test)

    def test_a_script_does_all_or_nothing(self, driver: Driver, spec: EnvironmentSpec) -> None:
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

    def test_several_statements_in_a_query_are_refused(self, driver: Driver, spec: EnvironmentSpec) -> None:
        async def test(driver: Driver, spec: EnvironmentSpec) -> None:
            sandbox = await driver.start(spec)
            said = await ask(sandbox, "DELETE FROM item; SELECT 1")
            assert said.error is not None
            assert said.effect is Effect.NONE
            assert (await ask(sandbox, COUNT)).value == 50

        driven(driver, spec, test)

    def test_what_takes_too_long_is_stopped_and_never_shared(self, driver: Driver, spec: EnvironmentSpec) -> None:
        async def test(driver: Driver, spec: EnvironmentSpec) -> None:
            for statements in ((), (INSERT,)):
                sandbox = await after(driver, spec, *statements)
                before = (await ask(sandbox, COUNT)).state
                said = await ask(sandbox, self.endless, timeout_s=0.2)
                assert said.error is not None
                assert said.error["kind"] == "timeout"
                assert (said.effect, said.state, said.shareable) == (Effect.NONE, before, False)
                assert (await ask(sandbox, COUNT)).value == 50 + len(statements)

        driven(driver, spec, test)

    def test_parameters_are_values(self, driver: Driver, spec: EnvironmentSpec) -> None:
        async def test(driver: Driver, spec: EnvironmentSpec) -> None:
            sandbox = await driver.start(spec)
            for values in ([2**63 - 1, "'; DROP TABLE item; --", None], [-(2**63), "ä\u2028\U0001f40d", None]):
                assert (await ask(sandbox, self.parameters, params=values)).rows == [values]

        driven(driver, spec, test)

    def test_limits_say_that_rows_are_missing(self, driver: Driver, spec: EnvironmentSpec) -> None:
        async def test(driver: Driver, spec: EnvironmentSpec) -> None:
            limits = spec.limits.model_copy(update={"output_bytes": 200})
            few, small = await driver.start(spec), await driver.start(spec.model_copy(update={"limits": limits}))
            said = await ask(few, "SELECT id FROM item ORDER BY id", max_rows=3)
            assert (said.rows, said.body["row_count"], said.body["truncated"]) == ([[1], [2], [3]], 3, True)
            assert not (await ask(few, "SELECT id FROM item", max_rows=50)).body["truncated"]
            said = await ask(small, "SELECT name FROM item ORDER BY id")
            assert said.body["truncated"]
            assert 0 < len(said.rows) < 50

        driven(driver, spec, test)

    def test_a_comparison_judges_and_changes_nothing(self, driver: Driver, spec: EnvironmentSpec) -> None:
        async def test(driver: Driver, spec: EnvironmentSpec) -> None:
            sandbox = await after(driver, spec, INSERT)
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
                said = await ask(sandbox, sql, "compare", gold=gold, ordered=ordered)
                assert said.body["match"] is match, (sql, gold, said.body)
                assert bool(said.body["why"]) is not match
                assert (said.effect, said.state) == (Effect.NONE, state)
            assert (await ask(sandbox, COUNT)).value == 51

        driven(driver, spec, test)

    def test_the_source_never_changes(self, driver: Driver, spec: EnvironmentSpec) -> None:
        before = self.source(spec)

        async def test(driver: Driver, spec: EnvironmentSpec) -> None:
            sandbox = await after(driver, spec, INSERT, "DELETE FROM item", "CREATE TABLE other (a int)")
            await sandbox.freeze()

        driven(driver, spec, test)
        assert self.source(spec) == before

    def test_collecting_spares_what_is_kept_and_what_is_in_use(self, driver: Driver, spec: EnvironmentSpec) -> None:
        async def test(driver: Driver, spec: EnvironmentSpec) -> None:
            states: list[FrozenState] = []
            for name in ("kept", "dropped"):
                sandbox = await after(driver, spec, f"INSERT INTO item (id, name) VALUES (51, '{name}')")
                states.append(await sandbox.freeze())
                await sandbox.close()
            using = await driver.restore(spec, states[0])
            await driver.collect([])
            assert (await ask(using, COUNT)).value == 51
            await driver.collect(states[0].parts)
            restored = await driver.restore(spec, states[0])
            assert (await ask(restored, "SELECT name FROM item WHERE id = 51")).value == "kept"

        driven(driver, spec, test)

    def test_a_source_that_is_not_there_is_the_spec_s_fault(self, driver: Driver, spec: EnvironmentSpec) -> None:
        async def test(driver: Driver, _spec: EnvironmentSpec) -> None:
            with pytest.raises(SpecError):
                await driver.identity(self.missing)

        driven(driver, spec, test)

    def test_closing_twice_is_closing_once(self, driver: Driver, spec: EnvironmentSpec) -> None:
        async def test(driver: Driver, spec: EnvironmentSpec) -> None:
            sandbox = await after(driver, spec, INSERT)
            assert sandbox.alive
            await sandbox.close()
            await sandbox.close()
            assert self.forks(driver) == 0
            assert not sandbox.alive

        driven(driver, spec, test)
