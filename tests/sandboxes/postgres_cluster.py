"""A PostgreSQL server for tests, in a temporary directory, and databases on it."""

import contextlib
import functools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest

from forkpoint.ephemeral_proxy import free_port
from sandboxes.spec import Database, EnvironmentSpec

PASSWORD = "the administrator's"
_NEEDED_BYTES = 4 << 30
"""Memory that must be free for data directories; those of a run of all tests take some hundred megabytes."""
SHOP = """
CREATE TABLE item (id int PRIMARY KEY, name text NOT NULL, price numeric(8, 2), stock int DEFAULT 0);
INSERT INTO item SELECT n, 'item ' || n, n * 1.25, n % 7 FROM generate_series(1, 50) n;
CREATE TABLE sale (id serial PRIMARY KEY, item int REFERENCES item, amount int);
INSERT INTO sale (item, amount) SELECT n, n * 2 FROM generate_series(1, 20) n;
CREATE VIEW dear AS SELECT * FROM item WHERE price > 40;
CREATE FUNCTION sell(what int, many int) RETURNS int LANGUAGE sql AS
    'INSERT INTO sale (item, amount) VALUES (what, many) RETURNING id';
"""


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running server. Its administrator is `postgres`, with `PASSWORD`."""

    port: int
    data: Path
    start: Callable[[], None] = field(compare=False)
    host: str = "127.0.0.1"

    def kill(self) -> None:
        """Kill the server with SIGKILL; `start` starts it again."""
        postmaster = int((self.data / "postmaster.pid").read_text().split()[0])
        children = Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split()
        for pid in (postmaster, *map(int, children)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @property
    def dsn(self) -> str:
        """Connection string of the administrator."""
        return (
            f"host={self.host} port={self.port} user=postgres password='{PASSWORD.replace(chr(39), chr(92) + chr(39))}'"
        )

    @property
    def socket_dsn(self) -> str:
        """The same by a socket of the file system, which reaches a server in another network namespace too."""
        return self.dsn.replace(f"host={self.host}", f"host={self.data.parent}")

    def connect(self, database: str = "postgres") -> psycopg.Connection[Any]:
        """Open a connection of the administrator."""
        return psycopg.connect(self.socket_dsn, dbname=database, autocommit=True)

    def create(self, name: str, script: str = SHOP) -> None:
        """Create a database and run a script in it."""
        with self.connect() as connection:
            connection.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')
            connection.execute(f'CREATE DATABASE "{name}"')
        with self.connect(name) as connection:
            connection.execute(script)

    def ours(self) -> list[str]:
        """Return the names of databases and roles that a driver created."""
        with self.connect() as connection:
            names = "SELECT datname FROM pg_database UNION ALL SELECT rolname FROM pg_roles"
            return [row[0] for row in connection.execute(names) if row[0].startswith("forkpoint_")]

    def spec(self, *sources: str, **fields: Any) -> EnvironmentSpec:
        """Return a spec with databases of this server, under their own names."""
        databases = {name: Database(dsn=self.dsn, source=name) for name in sources}
        return EnvironmentSpec(driver="postgres", databases=databases, **fields)


def require_postgres() -> None:
    """Skip the test if no server can be started. With `FORKPOINT_NEEDS_POSTGRES`, fail instead."""
    if missing := _missing():
        assert not os.environ.get("FORKPOINT_NEEDS_POSTGRES"), missing
        pytest.skip(missing)


def server_programs() -> Path:
    """Return the directory of the server's programs; skip or fail as `require_postgres` without them."""
    require_postgres()
    programs = _programs()
    assert programs is not None
    return programs


@functools.cache
def _missing() -> str:
    if not _programs():
        return "PostgreSQL is not installed (Debian: apt-get install postgresql)"
    if os.geteuid() == 0 and _user() is None:
        return "PostgreSQL does not run as root, and there is no user postgres"
    return ""


def _programs() -> Path | None:
    servers = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: path.parts[-3].zfill(3))
    if servers:
        return servers[-1].parent
    program = shutil.which("postgres")
    return None if program is None else Path(program).parent


def _user() -> pwd.struct_passwd | None:
    with contextlib.suppress(KeyError):
        return pwd.getpwnam("postgres")
    return None


@contextmanager
def cluster(
    prefix: tuple[str, ...] = (), host: str = "127.0.0.1", standby_of: Cluster | None = None
) -> Iterator[Cluster]:
    """Start a server with an empty data directory; stop it and remove the directory at the end.

    Args:
        prefix: What runs a command on another machine of the test.
        host: Where clients reach the server. One on another machine listens on all of its addresses.
        standby_of: The server whose changes it follows, until it is promoted.
    """
    programs = _programs()
    assert programs is not None
    folder = Path(tempfile.mkdtemp(prefix="forkpoint-pg-", dir=_place()))
    password = folder / "password"
    password.write_text(PASSWORD)
    identity: dict[str, Any] = {}
    if os.geteuid() == 0 and (user := _user()) is not None:
        identity = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        for path in (folder, password):
            os.chown(path, user.pw_uid, user.pw_gid)
    port = free_port() if standby_of is None else standby_of.port
    data = str(folder / "data")
    try:
        if standby_of is None:
            _run(
                [programs / "initdb", "-D", data, "-U", "postgres", "-A", "scram-sha-256", f"--pwfile={password}",
                 "-E", "UTF8", "--locale=C.UTF-8", "--no-sync"], identity,
            )  # fmt: skip
        if prefix:
            prefix, identity = (*prefix, *_as(identity)), {}
        if standby_of is not None:
            copy = [programs / "pg_basebackup", "-D", data, "-d", standby_of.dsn, "-R", "-c", "fast", "--no-sync"]
            _run([*prefix, *copy], identity)
        settings = {
            "port": port, "listen_addresses": "*" if prefix else host, "unix_socket_directories": str(folder),
            "fsync": "off", "full_page_writes": "off", "synchronous_commit": "off", "max_connections": 200,
            "shared_buffers": "32MB",
        }  # fmt: skip
        with (folder / "data" / "postgresql.conf").open("a") as file:
            file.writelines(f"{name} = '{value}'\n" for name, value in settings.items())
        if prefix:
            with (folder / "data" / "pg_hba.conf").open("a") as file:
                file.write("host all,replication all all scram-sha-256\n")
        start = [*prefix, programs / "pg_ctl", "-D", data, "-l", str(folder / "log"), "-w", "-t", "60"]
        _run([*start, "start"], identity)
        try:
            yield Cluster(port, Path(data), lambda: _start_again([*start, "start"], identity), host)
        finally:
            _run([*prefix, programs / "pg_ctl", "-D", data, "-m", "immediate", "-w", "stop"], identity)
    finally:
        shutil.rmtree(folder)


def _place() -> Path:
    """Return where data directories lie: in memory if enough is free, where a database is made four times as fast."""
    memory, disk = Path("/dev/shm"), Path("/var/tmp")
    return memory if memory.is_dir() and shutil.disk_usage(memory).free > _NEEDED_BYTES else disk


def _as(identity: dict[str, Any]) -> tuple[str, ...]:
    """Return what runs a command as a user. Only root can bring it to another machine first."""
    if not identity:
        return ()
    return ("setpriv", f"--reuid={identity['user']}", f"--regid={identity['user']}", "--clear-groups")


def _start_again(command: list[Any], identity: dict[str, Any]) -> None:
    """Start a server that was killed. It refuses to as long as a process of its predecessor has the shared memory."""
    deadline = time.monotonic() + 30
    while True:
        try:
            _run(command, identity)
        except AssertionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return


def _run(command: list[Any], identity: dict[str, Any]) -> None:
    done = subprocess.run(
        [str(part) for part in command], cwd="/", check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}, **identity,
    )  # fmt: skip
    assert done.returncode == 0, f"{command[0]} {command[-1]} failed with {done.returncode}"
