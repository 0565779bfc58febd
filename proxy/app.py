"""The application: the data plane in front, the control plane behind it, and the engine that both speak to."""

# First, because it loads structlog without Rich.
from proxy.logs import setup

# isort: split

import functools
import gc
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import structlog

from proxy.address import remove_address, url_of, write_address
from proxy.control.parts import ControlPlane
from proxy.control_app import control_application
from proxy.dataplane.app import DataPlane
from proxy.engine import Engine, build_engine
from proxy.http.access import AccessError
from proxy.http.browser_guard import BrowserGuard
from proxy.server import server
from proxy.settings import Settings
from proxy.shares import Share
from proxy.storage.data_dir import owning
from proxy.storage.errors import StoreError
from proxy.workers.division import claim, settings_of
from proxy.workers.siblings import Siblings
from proxy.workers.supervisor import WorkerFailedError, supervise
from sandboxes.checkpointing import Checkpointer, NoCheckpointer
from sandboxes.driver import Driver
from sandboxes.linux import oom_score
from sandboxes.linux.dir_lock import DirLock
from sandboxes.plugins import DriverContext, PluginError, make_driver
from snapshots.criu.checkpoints import CriuCheckpointer

if TYPE_CHECKING:
    from proxy.cluster.start import Joined

log = structlog.get_logger()


def build(
    settings: Settings,
    drivers: Mapping[str, Driver] | None = None,
    joined: "Joined | None" = None,
    share: Share | None = None,
) -> DataPlane:
    """Return the whole application, whose engine opens and closes with its lifespan; None creates the drivers."""
    if joined is not None:
        from proxy.cluster.start import member_of  # noqa: PLC0415 - psycopg is optional

        made = drivers if drivers is not None else _drivers(settings)
        engine = build_engine(settings, made, joined.gate, block=joined.membership.number)
        return member_of(joined, engine, _guarded(engine, ControlPlane.over(engine)))
    # Each worker's store has numbers of its own, so that rollouts and nodes of different workers never share one.
    block = 0 if share is None else share.number
    engine = build_engine(settings, drivers if drivers is not None else _drivers(settings), block=block, share=share)
    return assemble(engine, ControlPlane.over(engine))


def assemble(engine: Engine, control: ControlPlane) -> DataPlane:
    """Return the application over existing parts: the data plane in front, the control plane behind it."""
    return DataPlane(engine, _guarded(engine, control))


def _guarded(engine: Engine, control: ControlPlane) -> BrowserGuard:
    return BrowserGuard(control.changes.around(control_application(control, engine)), engine.names)


class StartError(RuntimeError):
    """The proxy cannot start. The text says why, and what helps."""


def run(settings: Settings, inherited: int | None = None, left_out: Sequence[str] = ()) -> None:
    """Serve until SIGTERM or SIGINT; the calls in flight are answered first.

    `inherited` is the descriptor of a socket that the parent process listens on. `left_out` has a sentence for each
    driver that cannot run here. Raises StartError if the socket, the data directory or a driver cannot be used.
    """
    setup(settings.log_level, json=settings.log == "json")
    listener = _listen(settings) if inherited is None else _inherit(inherited)
    with listener, ExitStack() as owned:
        try:
            # Before the store is opened, which may upgrade it.
            ownership = owned.enter_context(owning(settings.data))
            claim(settings.data, settings.workers)
        except StoreError as error:
            raise StartError(str(error)) from error
        except OSError as error:
            raise _unusable(settings, error) from error
        for sentence in left_out:
            log.warning(sentence)
        default = settings.default_spec
        runs_shells = default.driver == "local" and "local" in settings.driver_names
        if runs_shells and default.base == "host" and default.image is None:
            log.info(
                "tasks without a base of their own run on this machine's system (base: host), which is for trying out: "
                "each change of the machine begins new trees. See docs/tasks.md."
            )
        # Before the first process is started: workers inherit it.
        oom_score.shelter()
        if settings.workers == 1:
            _serve(settings, listener)
        else:
            _supervise(settings, listener, ownership)


def _serve(settings: Settings, listener: socket.socket, worker: Siblings | None = None) -> None:
    """Serve in this process. Raises StartError if the data directory cannot be used, or a driver cannot start."""
    try:
        joined = _join(settings)
        share = None if worker is None or joined is not None else worker.share
        application = build(settings, joined=joined, share=share)
    except (StoreError, AccessError) as error:
        raise StartError(str(error)) from error
    except OSError as error:
        raise _unusable(settings, error) from error
    # What every process has loaded by now stays for good; see `proxy.execution.open_trees`.
    gc.collect()
    gc.freeze()
    try:
        server(application, worker).run(sockets=[listener])
    except SystemExit:
        # uvicorn exits like this after a start that failed.
        if not application.engine.lifecycle.start_error:
            raise
        raise StartError(application.engine.lifecycle.start_error) from None


def _supervise(settings: Settings, listener: socket.socket, ownership: DirLock) -> None:
    """Serve in as many processes as the settings say. Raises StartError if a worker cannot start."""

    def work(number: int, is_serving: Callable[[], None]) -> None:
        structlog.contextvars.bind_contextvars(worker=number)
        own = settings_of(settings, number)
        # A fork has the lock too. With it, a start after a kill of the parent would fail while a worker still ends.
        ownership.release()
        try:
            with owning(own.data):
                _serve(own, listener, Siblings.among(settings, number, is_serving))
        except (StartError, StoreError) as error:
            log.error("the worker cannot start", reason=str(error))  # noqa: TRY400 - a foreseen reason
            raise SystemExit(1) from error

    def ready() -> None:
        write_address(settings.data, url)
        log.info("all workers answer", url=url, workers=settings.workers, page=f"{url}/ui/")

    url = url_of(*listener.getsockname()[:2])
    # A collection in a worker writes to the header of each object, and would so copy the pages that workers share.
    gc.collect()
    gc.freeze()
    try:
        supervise(settings.workers, work, ready)
    except WorkerFailedError as error:
        raise StartError(str(error)) from error
    finally:
        remove_address(settings.data)


def _unusable(settings: Settings, error: OSError) -> StartError:
    return StartError(f"{settings.data} cannot be used: {error}. Choose another directory with --data.")


def _listen(settings: Settings) -> socket.socket:
    try:
        # Without an address, IPv6 and IPv4 alike.
        both = settings.host == "::" and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        address = (settings.host, settings.port)
        return socket.create_server(address, backlog=4096, family=family, dualstack_ipv6=both)
    except OSError as error:
        raise StartError(
            f"cannot listen on {settings.host}:{settings.port}: {os.strerror(error.errno or 0)}. Choose another "
            "--port, or stop the process that uses this one."
        ) from error


def _inherit(descriptor: int) -> socket.socket:
    try:
        listener = socket.socket(fileno=descriptor)
        listens = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise StartError(f"--fd {descriptor} is not a socket: {os.strerror(error.errno or 0)}.") from error
    if not listens:
        raise StartError(f"--fd {descriptor} is a socket that does not listen.")
    # Like every socket of the proxy, it is not passed on to a sandbox.
    listener.set_inheritable(False)
    return listener


def _join(settings: Settings) -> "Joined | None":
    """Become a member of the cluster that the settings name, if any. Raises StartError if that is not possible."""
    if settings.cluster is None:
        return None
    try:
        from proxy.cluster.postgres.joining import ClusterError  # noqa: PLC0415 - psycopg is optional
        from proxy.cluster.start import join  # noqa: PLC0415 - psycopg is optional
    except ImportError as error:
        raise StartError(
            "--cluster needs psycopg and obstore. Install them: pip install 'forkpoint[cluster]'"
        ) from error
    try:
        return join(settings)
    except ClusterError as error:
        raise StartError(str(error)) from error


def _drivers(settings: Settings) -> dict[str, Driver]:
    spares = {"postgres": settings.postgres_spares}
    created: dict[str, Driver] = {}
    for name in settings.driver_names:
        directory = settings.data / name
        checkpointer: Callable[[], Checkpointer] = NoCheckpointer
        if settings.checkpoints:
            checkpointer = functools.partial(CriuCheckpointer, directory, images_dir=settings.checkpoint_dir)
        try:
            created[name] = make_driver(
                name, DriverContext(directory, checkpointer, spares.get(name, 0), settings.source_rules)
            )
        except PluginError as error:
            raise SystemExit(str(error)) from error
    return created
