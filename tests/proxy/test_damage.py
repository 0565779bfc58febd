"""Damage on disk is an error or a new execution, and never an answer."""

import asyncio
import contextlib
import random
import re
import shutil
import sqlite3
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.control.paging import ListQuery
from proxy.control.reports import ReportRequest, read_part, report_of
from proxy.engine import Engine
from proxy.execution.errors import StateLostError
from proxy.refusals import RefusalError
from proxy.storage import journal as journal_module
from proxy.storage.errors import DamagedError, StoreError
from proxy.storage.journal_segments import STEP_BYTES
from proxy.storage.rollouts import Overhead
from proxy.storage.schema import CHECKSUM_FUNCTION, STEPS, count_damaged, row_checksum
from proxy.tree.rollout import Outcome
from proxy.ui.ways import read_ways
from tests.proxy.rig import ask, engine
from tests.proxy.test_restart import abandon, open_engine
from tests.sandboxes.memory_driver import MemoryDriver


def damage(data: Path, sql: str) -> None:
    """Change the store of a proxy that has ended."""
    connection = sqlite3.connect(data / "forkpoint.sqlite")
    connection.create_function(CHECKSUM_FUNCTION, -1, row_checksum, deterministic=True)
    with connection:
        assert connection.execute(sql).rowcount
    connection.close()


FLIP = (
    "UPDATE blobs SET data = CAST(REPLACE(CAST(data AS TEXT), 'alpha', 'aypha') AS BLOB) "
    "WHERE CAST(data AS TEXT) LIKE '%exit_code%alpha%' OR CAST(data AS TEXT) LIKE '%alpha%exit_code%'"
)
"""Flips a letter of the stored answers that contain `alpha`, and of no call."""


def test_a_damaged_answer_runs_again(tmp_path: Path) -> None:
    """One byte of a stored answer flips. The call runs again, its answer is right, and the next rollout hits."""

    async def body() -> None:
        async with engine(tmp_path) as running:
            rollout = await running.tasks.rollout("task", "first")
            for command in ("echo 1 > a", "echo alpha"):
                right = (await ask(running, rollout, command))[0]
        damage(tmp_path, FLIP)
        async with engine(tmp_path, driver := MemoryDriver()) as again:
            for name, outcome in (("second", Outcome.MISS), ("third", Outcome.HIT)):
                rollout = await again.tasks.rollout("task", name)
                assert (await ask(again, rollout, "echo 1 > a"))[1] is Outcome.HIT
                assert await ask(again, rollout, "echo alpha") == (right, outcome)
            assert driver.executed.count("echo alpha") == 1
            assert again.counts.failures["damaged-answer"] == 1
            rollout.tree.check()
        async with engine(tmp_path) as later:
            rollout = await later.tasks.rollout("task", "fourth")
            for command in ("echo 1 > a", "echo alpha"):
                assert (await ask(later, rollout, command))[1] is Outcome.HIT

    asyncio.run(body())


def test_a_damaged_step_leads_to_the_same_state(tmp_path: Path) -> None:
    """The answer of a call that changed the state is damaged. It runs again, and what follows is still known."""

    async def body() -> None:
        async with engine(tmp_path) as running:
            rollout = await running.tasks.rollout("task", "first")
            answers = [(await ask(running, rollout, c))[0] for c in ("echo 1 > a; echo alpha", "cat a")]
        damage(tmp_path, FLIP)
        async with engine(tmp_path, driver := MemoryDriver()) as again:
            first, second = [await again.tasks.rollout("task", name) for name in ("first", "second")]
            assert await ask(again, second, "echo 1 > a; echo alpha") == (answers[0], Outcome.MISS)
            assert second.node is first.node, "the same state is the same node"
            assert await ask(again, second, "cat a") == (answers[1], Outcome.HIT)
            second.tree.check()
            assert driver.executed == ["echo 1 > a; echo alpha"]

    asyncio.run(body())


def test_a_damaged_call_is_not_replayed(tmp_path: Path) -> None:
    """A recorded command is damaged and its state has no snapshot. The rollout gets an error, and nothing else runs."""

    async def body() -> None:
        async with engine(tmp_path) as running:
            rollout = await running.tasks.rollout("task", "first")
            await ask(running, rollout, "echo alpha > a")
        shutil.rmtree(tmp_path / "snapshots")
        damage(tmp_path, FLIP.replace("exit_code", "command"))
        async with engine(tmp_path, driver := MemoryDriver()) as again:
            rollout = await again.tasks.rollout("task", "first")
            with pytest.raises(StateLostError):
                await ask(again, rollout, "cat a")
            other = await again.tasks.rollout("task", "other")
            await ask(again, other, "echo alpha > a")
            assert (await ask(again, other, "cat a"))[0]["stdout"] == "alpha\n"
            assert driver.executed == ["echo alpha > a", "cat a"]

    asyncio.run(body())


def damage_last_step(data: Path) -> None:
    """Change the record of the last step, and not its checksum, which SQLite computes at each write."""
    whole = STEPS.replace(" IF NOT EXISTS", "")
    steps = [
        ("UPDATE sqlite_schema SET sql = ? WHERE name = 'steps'", (re.sub(r"GENERATED.*STORED", "", whole),)),
        ("UPDATE steps SET record = record + 1 WHERE turn = 2", ()),
        ("UPDATE sqlite_schema SET sql = ? WHERE name = 'steps'", (whole,)),
    ]
    for statement, values in steps:
        # A new connection reads the changed schema.
        with contextlib.closing(sqlite3.connect(data / "forkpoint.sqlite", isolation_level=None)) as connection:
            connection.execute("PRAGMA writable_schema = ON")
            assert connection.execute(statement, values).rowcount == 1


def test_a_damaged_step_row_is_an_error(tmp_path: Path) -> None:
    """Which polls a rollout has made beside its processes follows from its steps. It is refused, and others go on."""

    async def body() -> None:
        async with engine(tmp_path) as running:
            rollout = await running.tasks.rollout("task", "first")
            for command in ("sleep 100 &", "ls", "ls"):
                await ask(running, rollout, command)
        damage_last_step(tmp_path)
        async with engine(tmp_path) as again:
            with pytest.raises(RefusalError, match="a step of rollout 1 is damaged") as refused:
                await again.tasks.rollout("task", "first")
            assert refused.value.slug == "rollout-lost"
            with pytest.raises(DamagedError):
                again.store.rollouts.steps(rollout.id)
            assert count_damaged(again.store.database.tables) == {"steps": 1}
            other = await again.tasks.rollout("task", "other")
            assert (await ask(again, other, "sleep 100 &"))[1] is Outcome.HIT

    asyncio.run(body())


def damage_row(data: Path, table: str, change: str, which: str = "TRUE") -> None:
    """Change the first row of a table that a condition holds for, and not its checksum."""
    with contextlib.closing(sqlite3.connect(data / "forkpoint.sqlite")) as connection, connection:
        chosen = f"FROM {table} WHERE {which} ORDER BY rowid LIMIT 1"
        first, stored = connection.execute(f"SELECT rowid, {table}_checksum {chosen}").fetchone()
        connection.create_function(CHECKSUM_FUNCTION, -1, lambda *_: stored, deterministic=True)
        assert connection.execute(f"UPDATE {table} SET {change} WHERE rowid = {first}").rowcount == 1


@pytest.mark.parametrize(
    ("damages", "rollouts", "calls"),
    [
        (damage_last_step, 2, 4),
        (lambda data: damage_row(data, "records", "seconds = 1000000"), 2, 3),
        (lambda data: damage_row(data, "rollouts", "wait_s = 1000000"), 1, 2),
    ],
    ids=["step", "record", "rollout"],
)
def test_a_damaged_row_is_in_no_sum(tmp_path: Path, damages: Callable[[Path], None], rollouts: int, calls: int) -> None:
    """Reports and the ways of a tree leave out what is damaged, and count it."""

    async def body() -> None:
        async with engine(tmp_path) as running:
            for name, commands in (("first", ("echo 1 > a", "ls", "cat a")), ("second", ("echo 1 > a", "ls"))):
                rollout = await running.tasks.rollout("task", name)
                for command in commands:
                    await ask(running, rollout, command)
        damages(tmp_path)
        async with engine(tmp_path) as again:
            for by in ("run", "task", "endpoint"):
                view = report_of([again.store.database.read_apart(partial(read_part, request=ReportRequest(by)))])
                assert (view.total.rollouts, view.total.calls) == (rollouts, calls), by
                assert view.damaged == (5 - calls if rollouts == 2 else 1), by
                assert view.total.executed_s + view.total.saved_s + (view.total.waited_s or 0.0) < 1000
                assert [arm.executed + arm.tool_s < 1000 for arm in view.arms] == [True] * 3
            ways = again.store.database.read_apart(
                lambda store: read_ways(store, rollout.tree.id, ListQuery("created_at", limit=10))
            )
            assert (len(ways.items), sum(len(way.nodes) for way in ways.items)) == (rollouts, calls)
            assert ways.damaged == view.damaged

    asyncio.run(body())


def test_an_update_does_not_hide_damage(tmp_path: Path) -> None:
    """A row is damaged while its proxy runs, which writes to it again. Its damage still shows, after each start."""

    async def body() -> None:
        async with engine(tmp_path) as running:
            tree = (await running.tasks.open("task")).tree
            rollouts = running.store.rollouts
            number = rollouts.create("task", "first", tree.id, tree.root.id, "secret")
            rollout = await running.tasks.rollout("task", "other")
            await ask(running, rollout, "echo 1 > a")
            assert rollouts.by_token("secret") == ("task", "first")
            damage_row(tmp_path, "rollouts", "start = 99")
            rollouts.put_labels(number, {"run": "a"})
            rollouts.add_overhead({(number, "shell"): Overhead(1.0, 1.0, 1.0)})
            # What the row says could be another rollout's.
            assert rollouts.by_token("secret") is None
            damage_row(tmp_path, "records", "seconds = 1000000")
            running.store.records.save_proven(tree.root.records.values())
            assert count_damaged(running.store.database.tables) == {"rollouts": 1, "records": 1}
        for _ in range(2):
            async with engine(tmp_path) as again:
                with pytest.raises(RefusalError, match="damaged"):
                    await again.tasks.rollout("task", "first")
        async with engine(tmp_path) as last:
            await last.tasks.open("task")
            assert await last.tasks.dismiss("task", "first")
            assert (await last.tasks.rollout("task", "first")).calls == 0

    asyncio.run(body())


def test_a_damaged_record_says_no_position(tmp_path: Path) -> None:
    """The record of a rollout's last call is damaged before its step is folded. The rollout is refused, not moved."""

    async def body() -> None:
        async with engine(tmp_path) as running:
            rollout = await running.tasks.rollout("task", "first")
            await ask(running, rollout, "echo 1 > a")
            damage_row(tmp_path, "records", "target = source")
            running.journal.fold()
        async with engine(tmp_path) as again:
            with pytest.raises(RefusalError, match="the record of its last call is damaged"):
                await again.tasks.rollout("task", "first")

    asyncio.run(body())


# The journal


async def killed_with_steps(data: Path, rollouts: int = 2) -> None:
    """Leave a data directory as a kill does, with three steps of each rollout in the journal."""
    running = await open_engine(data, MemoryDriver())
    for turn in range(3):
        for number in range(rollouts):
            rollout = await running.tasks.rollout("task", f"r{number}")
            await ask(running, rollout, f"echo {number}{turn} >> log")
    await abandon(running)


async def positions(running: Engine) -> dict[str, str]:
    """Return what each rollout's file shows, or the slug of the refusal."""
    shown = {}
    for name in ("r0", "r1"):
        try:
            rollout = await running.tasks.rollout("task", name)
            shown[name] = (await ask(running, rollout, "cat log"))[0]["stdout"].replace("\n", " ")
        except RefusalError as refusal:
            shown[name] = refusal.slug
    return shown


WHOLE = {"r0": "00 01 02 ", "r1": "10 11 12 "}


def segment_of(data: Path) -> Path:
    (path,) = (data / "journal").glob("*.steps")
    return path


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)


def cut(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content.rstrip(b"\0")) - 60])


@pytest.mark.parametrize(
    ("damage_journal", "expected"),
    [
        (lambda _: None, WHOLE),
        (Path.unlink, {"r0": "rollout-lost", "r1": "rollout-lost"}),
        (cut, {"r0": "rollout-lost", "r1": "rollout-lost"}),
        (lambda path: flip(path, STEP_BYTES + 9), {**WHOLE, "r1": "rollout-lost"}),
        (lambda path: flip(path, 4 * STEP_BYTES + 9), {**WHOLE, "r0": "rollout-lost"}),
        (lambda path: flip(path, 5 * STEP_BYTES + 9), {"r0": "rollout-lost", "r1": "rollout-lost"}),
    ],
    ids=["whole", "gone", "cut", "second step", "last but one", "last step"],
)
def test_no_rollout_goes_back_silently(
    tmp_path: Path, damage_journal: Callable[[Path], None], expected: dict[str, str]
) -> None:
    """The journal is damaged after a kill. A rollout that may have lost a step is refused; the others go on."""

    async def body() -> None:
        await killed_with_steps(tmp_path)
        damage_journal(segment_of(tmp_path))
        running = await open_engine(tmp_path, MemoryDriver())
        assert await positions(running) == expected
        assert (running.counts.failures["damaged-journal"] > 0) is (expected != WHOLE)
        # Still so after another restart, and a new rollout is not affected.
        await abandon(running)
        async with engine(tmp_path) as again:
            assert await positions(again) == expected
            fresh = await again.tasks.rollout("task", "fresh")
            assert (await ask(again, fresh, "echo 00 >> log"))[1] is Outcome.HIT
            # The name is free when the lost rollout has been ended.
            if expected["r0"] == "rollout-lost":
                assert await again.tasks.dismiss("task", "r0")
                assert (await again.tasks.rollout("task", "r0")).calls == 0

    asyncio.run(body())


def test_after_a_machine_crash_rollouts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waited for the disk, so the last steps may be missing, although this disk has them all."""

    async def body() -> None:
        await killed_with_steps(tmp_path)
        monkeypatch.setattr(journal_module, "boot_id", lambda: "another boot")
        async with engine(tmp_path) as running:
            assert await positions(running) == {"r0": "rollout-lost", "r1": "rollout-lost"}

    asyncio.run(body())


# The store

WALK = ("echo 1 >> log", "mkdir d", "cat log", "cd d; pwd", "echo alpha", "echo 2 >> log", "cat log; cat /root/log")


async def answers_of(running: Engine, name: str) -> list[str]:
    """Return the answers of a walk; a refusal or an error ends it."""
    answers: list[str] = []
    with contextlib.suppress(RefusalError, StoreError, StateLostError):
        rollout = await running.tasks.rollout("task", name)
        while rollout.calls < len(WALK):
            answers.append((await ask(running, rollout, WALK[rollout.calls]))[0]["stdout"])
    return answers


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Return a data directory in which a rollout has ended its walk and another is in the middle, and the answers."""
    data = tmp_path_factory.mktemp("walked")

    async def body() -> list[str]:
        async with engine(data) as running:
            answers = await answers_of(running, "whole")
            middle = await running.tasks.rollout("task", "middle")
            for command in WALK[:4]:
                await ask(running, middle, command)
        return answers

    return data, asyncio.run(body())


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["bit", "bytes", "page", "cut"]))
def test_a_damaged_store_gives_no_false_answer(walked: tuple[Path, list[str]], seed: int, kind: str) -> None:
    """Bits, bytes or pages of the database are damaged, or it is cut: answers are right, or there is an error."""
    whole, truth = walked
    dice = random.Random(seed)  # noqa: S311 - dice of a test

    async def body(data: Path) -> None:
        try:
            async with engine(data) as running:
                for name in ("new", "other", "middle"):
                    answers = await answers_of(running, name)
                    begin = 4 if name == "middle" else 0
                    assert answers == truth[begin : begin + len(answers)]
        except StoreError:
            # Refused at the start, or by the last write, with a sentence.
            pass

    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        shutil.copytree(whole, data)
        path = data / "forkpoint.sqlite"
        content = bytearray(path.read_bytes())
        at = dice.randrange(len(content))
        if kind == "bit":
            content[at] ^= 1 << dice.randrange(8)
        elif kind == "bytes":
            content[at : at + 8] = dice.randbytes(8)[: len(content) - at]
        elif kind == "page":
            content[at & ~4095 : (at & ~4095) + 4096] = content[:4096] if dice.random() < 0.5 else bytes(4096)
        else:
            del content[at:]
        path.write_bytes(content)
        asyncio.run(body(data))
