"""A start that fails says in one sentence what was wrong and what helps."""

import os
import socket
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from proxy.cli.main import unknown_variables
from sandboxes.linux.dir_lock import DirLock
from tests import forks

HTTP_ONLY = {"FORKPOINT_DRIVERS": '["http"]'}


def started(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `serve` until it fails."""
    with tempfile.NamedTemporaryFile("r") as log:
        words = ["forkpoint", "serve", *options]
        process = forks.server().fork(words, Path.cwd(), os.environ | HTTP_ONLY | environment, Path(log.name))
        return subprocess.CompletedProcess(words, process.wait(60), "", log.read())


def inheriting(descriptors: tuple[int, ...], *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `serve` until it fails; it inherits file descriptors."""
    command = [sys.executable, "-m", "forkpoint", "serve", *options]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60, env=os.environ | HTTP_ONLY | environment,
        pass_fds=descriptors,
    )  # fmt: skip


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield int(listener.getsockname()[1])


def assert_one_sentence(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert all(part in done.stderr.splitlines()[-1] for part in parts), done.stderr


def test_port_in_use_is_one_sentence(busy_port: int, tmp_path: Path) -> None:
    done = started("--port", str(busy_port), "--data", str(tmp_path / "data"))
    assert_one_sentence(done, f"127.0.0.1:{busy_port}: Address already in use", "--port")


def test_inherited_socket_must_listen(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file, socket.socket() as silent:
        for descriptor, wrong in ((file.fileno(), "is not a socket"), (silent.fileno(), "does not listen")):
            done = inheriting((descriptor,), "--fd", str(descriptor), "--data", str(tmp_path / "data"))
            assert_one_sentence(done, f"--fd {descriptor} is", wrong)


def test_parent_must_be_the_parent(tmp_path: Path) -> None:
    """A parent that has ended before the proxy could ask for its death would leave the proxy behind."""
    assert_one_sentence(started("--parent", "1", "--data", str(tmp_path / "data")), "--parent 1 is not the process")


@pytest.mark.parametrize("locked", [".", "local"])
def test_data_directory_in_use_is_one_sentence(tmp_path: Path, locked: str) -> None:
    """Also if it is served by an earlier version, which locks only the directories of its drivers."""
    owner = DirLock(tmp_path / locked)
    owner.acquire()
    done = started("--port", "0", "--data", str(tmp_path))
    owner.release()
    assert_one_sentence(done, "The proxy cannot start", "is in use by another process", "choose another data directory")
    assert not (tmp_path / "forkpoint.sqlite").exists()


def test_newer_data_directory_is_one_sentence(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "forkpoint.sqlite")) as connection, connection:
        connection.execute("CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT)")
        connection.execute("INSERT INTO meta VALUES ('schema', '1000')")
    done = started("--port", "0", "--data", str(tmp_path))
    assert_one_sentence(done, "The proxy cannot start", "it has schema 1000", "use the version that wrote it")


def test_foreign_store_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "forkpoint.sqlite").write_text("no database")
    done = started("--port", "0", "--data", str(tmp_path))
    assert_one_sentence(done, "The proxy cannot start", "forkpoint.sqlite")


def test_file_as_data_directory_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert_one_sentence(started("--data", str(tmp_path / "file")), "must name a directory")


@pytest.mark.parametrize(
    ("options", "environment", "parts"),
    [
        ((), {"FORKPOINT_PORT": "abc"}, ("FORKPOINT_PORT", "'abc'")),
        ((), {"FORKPOINT_DRIVERS": "local"}, ("FORKPOINT_DRIVERS", "write it as JSON")),
        (("--log", "loud"), {}, ("--log", "'loud'")),
        (("--host", "192.0.2.1"), {}, ("token",)),
        ((), {"FORKPOINT_CLUSTER_SECRET": "short"}, ("CLUSTER_SECRET", "it needs 16 characters or more.")),
    ],
)
def test_invalid_setting_names_its_source(
    options: tuple[str, ...], environment: dict[str, str], parts: tuple[str, ...]
) -> None:
    assert_one_sentence(started(*options, **environment), *parts)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("prot = 1", ("a.toml has the key prot, which is not a setting. Did you mean port?",)),
        ("port = 'x'", ("port", "a.toml", "'x'")),
        ("port = ?\n", ("a.toml", "at line 1")),
    ],
)
def test_bad_file_is_named_with_its_key(tmp_path: Path, text: str, parts: tuple[str, ...]) -> None:
    (tmp_path / "a.toml").write_text(text)
    assert_one_sentence(started("--config", str(tmp_path / "a.toml")), *parts)


def test_missing_file_of_settings_is_one_sentence(tmp_path: Path) -> None:
    done = started("--config", str(tmp_path / "none.toml"))
    assert_one_sentence(done, "--config names", "none.toml, which is not a file")


@pytest.mark.parametrize(
    ("name", "value", "parts"),
    [
        ("FORKPOINT_TOKEN", "short", ("The proxy cannot start", "is malformed", "openssl rand -hex 24")),
        ("FORKPOINT_TOKEN_FILE", "/nothing", ("The proxy cannot start", "token_file /nothing cannot be read")),
        ("FORKPOINT_DATA", "/proc/forkpoint", ("The proxy cannot start", "/proc/forkpoint cannot be used", "--data")),
    ],
)
def test_unusable_value_is_one_sentence(tmp_path: Path, name: str, value: str, parts: tuple[str, ...]) -> None:
    assert_one_sentence(started("--port", "0", **{"FORKPOINT_DATA": str(tmp_path / "data"), name: value}), *parts)


def test_unknown_variables_are_named_with_the_meant_one() -> None:
    environment = {"FORKPOINT_PROT": "1", "FORKPOINT_PORT": "1", "FORKPOINT_URL": "x", "PATH": ""}
    assert unknown_variables(environment) == [("FORKPOINT_PROT", "FORKPOINT_PORT")]
