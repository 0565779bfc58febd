"""Whole data directories: backed up while calls are answered, restored elsewhere, and upgraded."""

import json
import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from proxy.cli.main import app
from proxy.storage.schema import CHECKSUM_FUNCTION, SCHEMA_VERSION, row_checksum
from sandboxes.linux.dir_lock import DirLock
from tests.proxy.cli.typing_commands import as_json, proxy, typed
from tests.proxy.serving import Running, serving
from tests.proxy.storage.migration_scenario import unpack

__all__ = ["proxy"]


@pytest.fixture
def backup(proxy: Running, tmp_path: Path) -> Path:
    file = tmp_path / "a.backup"
    assert as_json(proxy, "backup", str(file)) == {"file": str(file), "bytes": file.stat().st_size}
    return file


def run(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})


def restored(file: Path, data: Path) -> Any:
    result = run("restore", str(file), "--data", str(data), "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_backup_is_served_from_another_directory(proxy: Running, backup: Path, tmp_path: Path) -> None:
    """Trees and answers are all there. Rollouts that ran are refused, because their agents may know later answers."""
    assert restored(backup, tmp_path / "data") == {"tasks": 1, "calls": 3, "lost_rollouts": 2, "snapshots": 0}
    before = as_json(proxy, "tree", "demo")["nodes"]
    with serving(tmp_path / "data") as again:
        assert [node["id"] for node in as_json(again, "tree", "demo")["nodes"]] == [node["id"] for node in before]
        refused = again.exec("first", "cat f", task="demo")
        assert (refused.status_code, refused.json()["type"]) == (409, "urn:forkpoint:rollout-lost")
        lost = as_json(again, "rollouts", "demo")
        assert {row["state"] for row in lost} == {"lost"}
        assert (as_json(again, "rollouts", "demo", "--running"), as_json(again, "tasks")[0]["running"]) == ([], 0)
        statuses = [again.exec("new", call, task="demo").headers["cache-status"] for call in ("echo one > f", "cat f")]
        assert statuses == ["forkpoint; fwd=miss; stored; detail=not-kept", "forkpoint; hit"], (
            "the backup has no states"
        )
    assert (tmp_path / "data" / "forkpoint.sqlite").stat().st_mode & 0o077 == 0


def test_backup_beside_calls_is_consistent(tmp_path: Path) -> None:
    """Calls are recorded while backups are made; every backup restores, since each row in it is checked."""
    with serving(tmp_path / "data") as running:
        enough = threading.Event()

        def work() -> None:
            turn = 0
            while not enough.is_set():
                running.exec("r", f"echo {turn} >> f").raise_for_status()
                turn += 1

        thread = threading.Thread(target=work)
        thread.start()
        try:
            for number in range(4):
                # Two of them with the snapshots that there are at that moment.
                typed(running, "backup", str(tmp_path / f"{number}.backup"), *["--snapshots"][: number % 2])
        finally:
            enough.set()
            thread.join()
        assert list((tmp_path / "data" / "imports").iterdir()) == []
    views = [restored(tmp_path / f"{n}.backup", tmp_path / f"r{n}") for n in range(4)]
    counts = [view["calls"] for view in views]
    assert counts == sorted(counts)
    assert [view["snapshots"] > 0 for view in views[::2]] == [False, False]


def damage_row(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.create_function(CHECKSUM_FUNCTION, -1, lambda *_: b"wrong", deterministic=True)
        connection.execute("UPDATE records SET seconds = 1")


def damage_blob(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.create_function(CHECKSUM_FUNCTION, -1, row_checksum, deterministic=True)
        connection.execute("UPDATE blobs SET data = x'00'")


def make_newer(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.create_function(CHECKSUM_FUNCTION, -1, row_checksum, deterministic=True)
        connection.execute("UPDATE meta SET value = '1000' WHERE name = 'schema'")


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (damage_row, "3 rows of records are not what was written"),
        (damage_blob, "of the store is damaged: a disk or another program"),
        (make_newer, "it has schema 1000"),
        (lambda path: path.write_bytes(path.read_bytes()[:5000]), "is not a backup of Forkpoint"),
        (lambda path: path.write_bytes(b"tar" * 3000), "is not a backup of Forkpoint: file is not a database"),
    ],
)
def test_damaged_backup_leaves_the_directory_empty(backup: Path, tmp_path: Path, damage: Any, sentence: str) -> None:
    damage(backup)
    result = run("restore", str(backup), "--data", str(tmp_path / "data"))
    assert result.exit_code == 1
    assert sentence in result.output
    assert [entry.name for entry in (tmp_path / "data").iterdir()] == ["lock"]


def test_restore_needs_an_empty_directory(backup: Path, tmp_path: Path) -> None:
    """What a store and its snapshots say of the same numbers must come from one proxy."""
    restored(backup, tmp_path / "data")
    result = run("restore", str(backup), "--data", str(tmp_path / "data"))
    assert (result.exit_code, "is not empty (it has forkpoint.sqlite)" in result.output) == (1, True)


@pytest.mark.parametrize("words", [("restore", "a.backup"), ("upgrade",)])
def test_served_directory_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.backup").touch()
    unpack("schema-2", tmp_path / "data")
    owner = DirLock(tmp_path / "data")
    owner.acquire()
    result = run(*words, "--data", "data")
    owner.release()
    assert (result.exit_code, "is in use by another process" in result.output) == (1, True)


def test_upgrade_shows_and_makes_the_changes(tmp_path: Path) -> None:
    """--check changes nothing and exits with 1; afterwards there is nothing to do."""
    path = unpack("schema-1-oldest", tmp_path)
    before = path.read_bytes()
    checked = run("upgrade", "--check", "--data", str(tmp_path))
    assert checked.exit_code == 1
    assert f"{tmp_path} has schema 1. Changes:\n  2: rows get checksums" in checked.output
    assert path.read_bytes() == before
    view = json.loads(run("upgrade", "--data", str(tmp_path), "--json").stdout)
    assert (view["schema"], view["current"], view["upgraded"]) == (1, SCHEMA_VERSION, True)
    assert Path(view["copy"]).exists()
    again = run("upgrade", "--check", "--data", str(tmp_path))
    assert (again.exit_code, f"has schema {SCHEMA_VERSION}, which is this version's" in again.output) == (0, True)
    assert "has no store yet" in run("upgrade", "--data", str(tmp_path / "none")).output
