"""Joining a cluster: the tables, which the first member creates, and the number and the start of each member."""

import hmac
from hashlib import sha256
from typing import NamedTuple

from proxy.cluster.postgres.connection import Connection, row_of

FORMAT = 7
"""Version of the tables and of the lines. A database of another version is refused and left unchanged."""
LEASE_S = 3.0
"""How long a member's lease lasts, in seconds of the database's clock. Others may take its tasks over then."""

_SCHEMA = """
CREATE SCHEMA forkpoint;
CREATE TABLE forkpoint.cluster (format int NOT NULL, id text NOT NULL, proof text NOT NULL, store text);
CREATE TABLE forkpoint.members (
    number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, name text NOT NULL UNIQUE, boot bigint NOT NULL,
    url text NOT NULL, until timestamptz NOT NULL);
CREATE TABLE forkpoint.lines (
    task text NOT NULL, row bigint NOT NULL, member bigint NOT NULL, boot bigint NOT NULL, body bytea,
    PRIMARY KEY (task, row));
CREATE INDEX ON forkpoint.lines (task, row) WHERE body IS NULL;
"""
_USAGE = """
CREATE TABLE IF NOT EXISTS forkpoint.usage (
    quota text NOT NULL, member bigint NOT NULL, boot bigint NOT NULL, running int NOT NULL, waiting int NOT NULL,
    PRIMARY KEY (quota, member))
"""
"""What members use of quotas. No answer depends on it, and members of earlier releases do not know of it."""


class ClusterError(RuntimeError):
    """This member cannot join the cluster. The text says why, and what helps."""


class Membership(NamedTuple):
    """This process, as the other members see it."""

    cluster: str  # The cluster's random name.
    number: int  # Number of the data directory in the cluster; never used for another one.
    boot: int  # Start of the member, a number that grows from start to start.


async def join(connection: Connection, secret: bytes, name: str, url: str, known: tuple[str, int] | None) -> Membership:
    """Create the tables where they are missing, and become a member; see `ClusterDatabase.join`."""
    async with connection.transaction():
        # Members that start at the same time create the tables once. The number has no meaning.
        await connection.execute("SELECT pg_advisory_xact_lock(8700870087)")
        cluster = await _cluster(connection, secret)
        if known is not None and known[0] != cluster:
            raise ClusterError(
                "the data directory belongs to another cluster. Use another --data, or that cluster's database."
            )
        holder = await row_of(
            connection,
            "SELECT number, until > clock_timestamp() FROM forkpoint.members WHERE name = %s", (name,),
        )  # fmt: skip
        if holder is not None and (known is None or holder[0] != known[1]):
            if holder[1]:
                raise ClusterError(f"a member named {name!r} is running. Choose another --node name.")
            # The name goes to the new data directory. The log may still name the old one, by its number.
            statement = "UPDATE forkpoint.members SET name = name || '/' || number WHERE number = %s"
            await connection.execute(statement, (holder[0],))
        if known is None:
            statement = (
                "INSERT INTO forkpoint.members (name, boot, url, until) "
                "VALUES (%s, 1, %s, clock_timestamp() + %s * interval '1 second') RETURNING number, boot"
            )
            row = await row_of(connection, statement, (name, url, LEASE_S))
        else:
            statement = (
                "UPDATE forkpoint.members SET name = %s, url = %s, boot = boot + 1, "
                "until = clock_timestamp() + %s * interval '1 second' WHERE number = %s RETURNING number, boot"
            )
            row = await row_of(connection, statement, (name, url, LEASE_S, known[1]))
        if row is None:
            raise ClusterError("the cluster does not know the data directory. Use another --data.")
        return Membership(cluster, *row)


async def _cluster(connection: Connection, secret: bytes) -> str:
    """Return the name of the cluster, which is created in an empty database."""
    row = await row_of(connection, "SELECT to_regnamespace('forkpoint') IS NOT NULL", ())
    if row == (False,):
        await connection.execute(_SCHEMA)
        created = await row_of(connection, "SELECT gen_random_uuid()::text", ())
        assert created is not None
        values = (FORMAT, created[0], _proof(secret, created[0]))
        await connection.execute("INSERT INTO forkpoint.cluster VALUES (%s, %s, %s, NULL)", values)
    if await row_of(connection, "SELECT to_regclass('forkpoint.cluster') IS NOT NULL", ()) == (False,):
        raise ClusterError(
            "the database has a schema named forkpoint that belongs to another program. Use another database."
        )
    row = await row_of(connection, "SELECT format, id, proof FROM forkpoint.cluster", ())
    if row is None or row[0] != FORMAT:
        version = None if row is None else row[0]
        # Logs before version 5 lack the hits, which only the members had.
        raise ClusterError(
            f"the database has format {version}, and this Forkpoint reads {FORMAT}. Use the version that wrote it, or "
            "another database."
        )
    if not hmac.compare_digest(row[2], _proof(secret, row[1])):
        raise ClusterError(
            "the database belongs to a cluster with another secret. Set FORKPOINT_CLUSTER_SECRET to its secret, or "
            "use another database."
        )
    await connection.execute(_USAGE)
    return str(row[1])


def _proof(secret: bytes, cluster: str) -> str:
    """Return a text that only members with this secret can make. It tells nothing about a long random secret."""
    return hmac.new(secret, f"forkpoint cluster {cluster}".encode(), sha256).hexdigest()
