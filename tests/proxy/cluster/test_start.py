"""What is wrong with the configuration of a member is said in one sentence when it starts."""

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pydantic import ValidationError

from proxy.cluster.postgres.joining import ClusterError
from proxy.cluster.start import Joined, join
from proxy.cluster.states.objects import ObjectStore, ObjectStoreError
from proxy.settings import Settings
from tests.sandboxes.postgres_cluster import Cluster

SECRET = "the secret of the tests"


def settings(dsn: str, folder: Path, **changed: Any) -> Settings:
    options: dict[str, Any] = {
        "data": folder / "b",
        "cluster": dsn,
        "cluster_secret": SECRET,
        "store": str(folder / "store"),
        "node": "b",
    }
    return Settings.load(**(options | changed))


def close(joined: Joined) -> None:
    joined.listener.close()


@pytest.fixture
def running(dsn: str, tmp_path: Path) -> Iterator[Joined]:
    """A member named a, whose lease does not end during the test."""
    joined = join(settings(dsn, tmp_path, data=tmp_path / "a", node="a"))
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("UPDATE forkpoint.members SET until = 'infinity'")
    yield joined
    close(joined)


@pytest.mark.usefixtures("running")
@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"store": "ftp://host"}, "s3, gs, az"),
        ({"store": "/proc/store"}, "cannot be used"),
        ({"store": "another"}, "uses another --store"),
        ({"cluster_secret": "another secret of tests"}, "another secret"),
        ({"node": "a"}, "a member named 'a' is running"),
        ({"cluster": "postgresql://127.0.0.1:1/none"}, "Connection refused. Check --cluster"),
        ({"cluster": "mysql://user:password@host/db"}, "^the URL is not like postgresql://[^:]*:PASSWORD@"),
        ({"link": "192.0.2.1:1"}, "Set --link"),
    ],
)
def test_what_is_wrong_is_said(dsn: str, tmp_path: Path, changed: dict[str, Any], why: str) -> None:
    """The start ends with a sentence, and the member holds no lease afterwards."""
    if changed.get("store") == "another":
        changed = {"store": str(tmp_path / "another")}
    with pytest.raises(ClusterError, match=why):
        join(settings(dsn, tmp_path, **changed))
    with psycopg.connect(dsn) as connection:
        alive = connection.execute("SELECT name FROM forkpoint.members WHERE until > clock_timestamp()").fetchall()
    assert alive == [("a",)]


@pytest.mark.usefixtures("running")
def test_clocks_apart(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that is minutes off is a mistake in the set-up of a machine."""
    now = time.time()
    monkeypatch.setattr("proxy.cluster.start.time.time", lambda: now + 300)
    with pytest.raises(ClusterError, match="Set both by NTP"):
        join(settings(dsn, tmp_path))


@pytest.mark.usefixtures("running")
def test_store_of_another_cluster(server: Cluster, tmp_path: Path) -> None:
    """Two clusters do not share a store."""
    server.create("another", "SELECT 1")
    with pytest.raises(ClusterError, match="belongs to another cluster"):
        join(settings(f"{server.dsn} dbname=another", tmp_path))


def test_a_full_store_does_not_keep_a_member_away(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only at the first start of a cluster is it refused, as a mistake in the settings."""

    async def put(*_: object) -> None:
        raise ObjectStoreError("no space left")

    with monkeypatch.context() as full:
        full.setattr(ObjectStore, "put", put)
        full.setattr(ObjectStore, "create", put)
        with pytest.raises(ClusterError, match="no space left"):
            join(settings(dsn, tmp_path))
    close(join(settings(dsn, tmp_path, node="a", data=tmp_path / "a")))
    monkeypatch.setattr(ObjectStore, "put", put)
    joined = join(settings(dsn, tmp_path))
    close(joined)
    assert joined.trouble == "no space left"


@pytest.mark.parametrize(
    ("link", "url"),
    [("[::1]:0", "[::1]:"), ("[::1]", "[::1]:"), ("[127.0.0.1]:0", "127.0.0.1:"), ("127.0.0.1", "127.0.0.1:")],
)
def test_links_of_both_families(dsn: str, tmp_path: Path, link: str, url: str) -> None:
    """The database has the address as URLs write it."""
    if "::" in link and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    joined = join(settings(dsn, tmp_path, link=link))
    with psycopg.connect(dsn) as connection:
        ((found,),) = connection.execute("SELECT url FROM forkpoint.members").fetchall()
    close(joined)
    assert found.startswith(url)
    assert int(found.removeprefix(url))


def test_member_keeps_its_number(dsn: str, tmp_path: Path) -> None:
    """A data directory is the same member at each start."""
    first = join(settings(dsn, tmp_path))
    close(first)
    again = join(settings(dsn, tmp_path))
    close(again)
    assert (again.membership.number, again.membership.boot) == (first.membership.number, first.membership.boot + 1)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"cluster_secret": None}, "FORKPOINT_CLUSTER_SECRET"),
        ({"store": None}, "Set store"),
        ({"cluster": None}, "Set cluster"),
    ],
)
def test_incomplete_settings(
    tmp_path: Path, changed: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings that belong together are required together."""
    for name in ("FORKPOINT_CLUSTER", "FORKPOINT_CLUSTER_SECRET", "FORKPOINT_STORE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValidationError, match=why):
        settings("postgresql://host/db", tmp_path, **changed)
