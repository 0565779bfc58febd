"""The start of a member: one sentence reports what is wrong with its configuration, before it answers anything."""

import asyncio
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import orjson
import structlog

from proxy.cluster.backup import back_up
from proxy.cluster.compaction import LOOK_S, compact_logs
from proxy.cluster.gate import ClusterGate
from proxy.cluster.member import Member
from proxy.cluster.plane import ClusterPlane
from proxy.cluster.postgres.connection import DatabaseError
from proxy.cluster.postgres.database import ClusterDatabase
from proxy.cluster.postgres.joining import ClusterError, Membership
from proxy.cluster.states.objects import ObjectStore, open_store
from proxy.cluster.states.service import SharedStates
from proxy.cluster.states.store_mark import admit_store, check_store
from proxy.engine import Engine
from proxy.http.asgi import AsgiApp
from proxy.lifecycle import BackgroundWork
from proxy.settings import Settings
from proxy.storage.data_dir import make_private
from sandboxes.linux.files import write_whole

log = structlog.get_logger()

CLOCKS_APART_S = 60.0
"""How far the clocks of a member and of the database may differ at the start, in seconds.

Nothing that is answered depends on clocks. Times in views would be wrong, and clocks that differ by a minute are a
mistake in the set-up of a machine.
"""


@dataclass(frozen=True, slots=True)
class Joined:
    """A membership, before the engine is built."""

    membership: Membership  # Cluster, number and start of this member.
    dsn: str = field(repr=False)
    secret: bytes = field(repr=False)  # What all members share.
    gate: ClusterGate
    states: SharedStates
    listener: socket.socket  # Where peers are accepted; it listens already.
    trouble: str  # Why the store cannot be used now; empty if it can.


def join(settings: Settings) -> Joined:
    """Become a member of the cluster that the settings name. Raises ClusterError, StoreError."""
    assert settings.cluster is not None
    assert settings.cluster_secret is not None
    make_private(settings.data)
    own = settings.data / "cluster"
    own.mkdir(exist_ok=True)
    secret = settings.cluster_secret.get_secret_value().encode()
    dsn, name = settings.cluster.get_secret_value(), settings.node or socket.gethostname()
    known = _known(own)
    store = _store(settings)
    membership, listener, trouble = asyncio.run(_join(ClusterDatabase(dsn, secret), store, settings, name, known))
    write_whole(own / "member.json", orjson.dumps({"cluster": membership.cluster, "number": membership.number}))
    states = SharedStates(store)
    return Joined(membership, dsn, secret, ClusterGate(membership.number, states), states, listener, trouble)


def member_of(joined: Joined, engine: Engine, behind: AsgiApp) -> ClusterPlane:
    """Return the data plane of a member, which opens and closes with its engine."""
    database = ClusterDatabase(joined.dsn, joined.secret, joined.membership)
    joined.gate.attach(engine.store.copies, engine.store.trees, partial(back_up, database))
    member = Member(database, joined.gate, joined.secret, engine)
    plane = ClusterPlane(engine, behind, member, joined.secret)
    states = joined.states
    states.attach(engine, joined.gate)

    async def use(used: Mapping[str, tuple[int, int]]) -> Mapping[str, Sequence[tuple[int, int]]] | None:
        try:
            return await database.use(used)
        except DatabaseError as error:
            log.warning("quotas are not divided anew", error=str(error))
            return None

    async def opened() -> None:
        if joined.trouble:
            log.warning("the store cannot be used, so kept states are sent later", reason=joined.trouble)
            engine.counts.failure("store")
            states.objects.admit = partial(admit_store, _store(engine.settings), database)
        states.open()
        await plane.listener.serve(joined.listener)
        member.start()

    def replaced() -> None:
        # The server ends as it does for a service manager.
        signal.raise_signal(signal.SIGTERM)

    async def closed() -> None:
        await states.aclose()
        await plane.tunnels.aclose()
        plane.listener.close()
        await member.aclose()

    member.replaced, member.hands_over = replaced, states.flush
    compacting = partial(compact_logs, database, joined.gate.owned, engine.counts)
    engine.lifecycle.background.append(BackgroundWork("compaction", LOOK_S, compacting))
    if engine.executor.quotas is not None:
        engine.lifecycle.background.append(engine.executor.quotas.divide(use))
    engine.lifecycle.at_open.append(opened)
    engine.lifecycle.before_close.append(closed)
    return plane


async def _join(
    database: ClusterDatabase, store: ObjectStore, settings: Settings, name: str, known: tuple[str, int] | None
) -> tuple[Membership, socket.socket, str]:
    listener: socket.socket | None = None
    try:
        host = await _check_database(database)
        listener, url = _listen(settings.link, host)
        membership = await database.join(name, url, known)
        trouble = await check_store(store, database)
    except BaseException as error:
        if listener is not None:
            listener.close()
        # A member that does not start holds no lease.
        await database.aclose()
        if isinstance(error, DatabaseError):
            raise ClusterError(str(error)) from error
        raise
    await database.disconnect()
    return membership, listener, trouble


def _store(settings: Settings) -> ObjectStore:
    assert settings.store is not None
    try:
        return open_store(settings.store)
    except ValueError as error:
        raise ClusterError(
            f"--store {settings.store!r} cannot be used: {error}. Use one that can be written."
        ) from error


async def _check_database(database: ClusterDatabase) -> str:
    """Return the address of the database, which answers and agrees about the time."""
    try:
        host, clock = await database.server()
    except DatabaseError as error:
        raise ClusterError(f"{error}. Check --cluster, and that the server accepts this user.") from error
    apart_s = abs(clock - time.time())
    if apart_s > CLOCKS_APART_S:
        raise ClusterError(
            f"the clocks of this machine and of the database are {apart_s:.0f} s apart. Set both by NTP, and try again."
        )
    return host


def _known(own: Path) -> tuple[str, int] | None:
    try:
        value = orjson.loads((own / "member.json").read_bytes())
        return str(value["cluster"]), int(value["number"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ClusterError(f"{own / 'member.json'} cannot be read: {error}. Use another --data.") from error


def _listen(link: str, database: str) -> tuple[socket.socket, str]:
    """Listen for peers; return also where they reach the socket. Raises ClusterError."""
    named, _, port = link.rpartition(":") if ":" in link and not link.endswith("]") else (link, "", "0")
    named = named.strip("[]")
    host = named or _local_address(database)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, int(port)), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        raise ClusterError(
            f"other members cannot be accepted on {host}:{port}: {error}. Set --link to an address of this machine."
        ) from error
    bound, number = listener.getsockname()[:2]
    host = named if named and bound in ("0.0.0.0", "::") else bound  # noqa: S104 - compared, not bound
    return listener, f"[{host}]:{number}" if ":" in host else f"{host}:{number}"


def _local_address(database: str) -> str:
    """Return the address from which this machine reaches the database; loopback for a socket of this machine."""
    if not database:
        return "127.0.0.1"
    family = socket.AF_INET6 if ":" in database else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # No packet is sent: the kernel only chooses the route.
        probe.connect((database, 9))
        return str(probe.getsockname()[0])
