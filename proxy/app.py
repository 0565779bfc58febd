"""The application: the data plane in front, the control plane behind it, and the engine that both speak to."""

# First, because it loads structlog without Rich.
from proxy.logs import setup

# isort: split

import asyncio
import functools
import gc
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, cast

import structlog
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from proxy.address import remove_address, url_of, write_address
from proxy.control.api_description import TAGS, completed, operation_id
from proxy.control.metrics import MEDIA_TYPE as METRICS_TYPE
from proxy.control.metrics import Metrics
from proxy.control.parts import ControlPlane
from proxy.control.routes.api import control_plane
from proxy.control.routes.params import PROBLEM, granted
from proxy.dataplane.app import DataPlane
from proxy.dataplane.hit_protocol import HitFirst, protocol_for
from proxy.dataplane.response_reports import report_responses
from proxy.dataplane.socket_protocol import BoundedSocketProtocol
from proxy.engine import Engine, build_engine
from proxy.http.access import AccessError
from proxy.http.browser_guard import BrowserGuard
from proxy.http.problems import FORESEEN, problem_of
from proxy.refusals import MEDIA_TYPE, RefusalError
from proxy.settings import Settings
from proxy.shares import Share
from proxy.storage.data_dir import owning
from proxy.storage.errors import StoreError
from proxy.ui.api import PageData, page_data
from proxy.ui.manual_files import manual
from proxy.ui.static_files import page
from proxy.ui.system import system
from proxy.ui.ways import ways
from proxy.workers.division import claim, settings_of
from proxy.workers.supervisor import WorkerFailedError, supervise
from proxy.workers.worker import Worker
from sandboxes.driver import Driver
from sandboxes.errors import SandboxError
from sandboxes.plugins import CheckpointerFactory, DriverContext, PluginError, make_driver, no_checkpointer
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
    """Return the whole application. The engine opens and closes with its lifespan.

    Args:
        settings: The settings.
        drivers: The drivers by name; None creates those that the settings name.
        joined: The cluster that this proxy is a member of; None without one.
        share: The tasks of this worker; None for all tasks.
    """
    if joined is not None:
        from proxy.cluster.start import member_of  # noqa: PLC0415 - psycopg is optional

        made = drivers if drivers is not None else _drivers(settings)
        engine = build_engine(settings, made, joined.gate, block=joined.membership.number)
        control = ControlPlane.over(engine)
        return member_of(joined, engine, BrowserGuard(_behind(control), engine.names))
    # Each worker's store has numbers of its own, so that rollouts and nodes of different workers never share one.
    block = 0 if share is None else share.number
    engine = build_engine(settings, drivers if drivers is not None else _drivers(settings), block=block, share=share)
    return assemble(ControlPlane.over(engine))


def assemble(control: ControlPlane) -> DataPlane:
    """Return the application over existing parts: the data plane in front, the control plane behind it."""
    return DataPlane(control.engine, BrowserGuard(_behind(control), control.engine.names))


class StartError(RuntimeError):
    """The proxy cannot start. The text says why, and what helps."""


def run(settings: Settings, inherited: int | None = None) -> None:
    """Serve until SIGTERM or SIGINT; the calls in flight are answered first.

    Args:
        settings: The settings.
        inherited: The file descriptor of a listening socket that the parent process made; None to listen on the host
            and port of the settings.

    Raises:
        StartError: The port is in use, the descriptor is no listening socket, the data directory belongs to another
            process, or a driver cannot start.
    """
    setup(settings.log_level, json=settings.log == "json")
    listener = _listen(settings) if inherited is None else _inherit(inherited)
    with listener, ExitStack() as owned:
        try:
            # Before the store is opened, which may upgrade it.
            owned.enter_context(owning(settings.data))
            claim(settings.data, settings.workers)
        except StoreError as error:
            raise StartError(str(error)) from error
        except OSError as error:
            raise _unusable(settings, error) from error
        if settings.default_spec.driver == "local" and settings.default_spec.base == "host":
            log.info(
                "tasks without a base of their own run on this machine's system (base: host), which is for trying out: "
                "each change of the machine begins new trees. See docs/tasks.md."
            )
        if settings.workers == 1:
            _serve(settings, listener)
        else:
            _supervise(settings, listener)


def _serve(settings: Settings, listener: socket.socket, worker: Worker | None = None) -> None:
    """Serve in this process.

    Raises:
        StartError: The data directory cannot be used, or a driver cannot start.
    """
    try:
        joined = _join(settings)
        share = None if worker is None or joined is not None else worker.share
        application = build(settings, joined=joined, share=share)
    except (StoreError, AccessError) as error:
        raise StartError(str(error)) from error
    except OSError as error:
        raise _unusable(settings, error) from error
    # What every process has loaded by now stays for good; see `proxy.execution.collector`.
    gc.collect()
    gc.freeze()
    try:
        server(application, worker).run(sockets=[listener])
    except SystemExit:
        # uvicorn exits like this after a start that failed.
        if not application.engine.lifecycle.start_error:
            raise
        raise StartError(application.engine.lifecycle.start_error) from None


def _supervise(settings: Settings, listener: socket.socket) -> None:
    """Serve in as many processes as the settings say.

    Raises:
        StartError: A worker cannot start.
    """

    def work(number: int, is_serving: Callable[[], None]) -> None:
        structlog.contextvars.bind_contextvars(worker=number)
        own = settings_of(settings, number)
        try:
            with owning(own.data):
                _serve(own, listener, Worker.among(settings, number, is_serving))
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
        return socket.create_server((settings.host, settings.port), backlog=4096, family=_family(settings.host))
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
        raise StartError(f"--fd {descriptor} is no socket: {os.strerror(error.errno or 0)}.") from error
    if not listens:
        raise StartError(f"--fd {descriptor} is a socket that does not listen.")
    # Like every socket of the proxy, it is not passed on to a sandbox.
    listener.set_inheritable(False)
    return listener


def _join(settings: Settings) -> "Joined | None":
    """Become a member of the cluster that the settings name; None if they name none.

    Raises:
        StartError: The cluster cannot be joined, or the library for its database is not installed.
    """
    if settings.cluster is None:
        return None
    try:
        from proxy.cluster.database import ClusterError  # noqa: PLC0415 - psycopg is optional
        from proxy.cluster.start import join  # noqa: PLC0415 - psycopg is optional
    except ImportError as error:
        raise StartError(
            "--cluster needs psycopg and obstore. Install them: pip install 'forkpoint[cluster]'"
        ) from error
    try:
        return join(settings)
    except ClusterError as error:
        raise StartError(str(error)) from error


def server(application: DataPlane, worker: Worker | None = None) -> uvicorn.Server:
    """Return the web server of an application; the caller runs it on a listening socket.

    Args:
        application: The application.
        worker: This process among the workers of the proxy; None if it has no others.
    """
    served = application if worker is None else worker.before(application)
    return _Server(
        application.engine,
        uvicorn.Config(
            report_responses(served),
            loop="uvloop",
            http=protocol_for(application, None if worker is None else worker.siblings),
            ws=BoundedSocketProtocol,
            ws_max_size=application.engine.settings.max_body_bytes,
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            # Longer than a model thinks between two calls. With the library's 5 s, the server would close idle
            # connections just as their agents send the next call.
            timeout_keep_alive=120,
            timeout_graceful_shutdown=30,
        ),
        worker,
    )


class _Server(uvicorn.Server):
    """Ends event streams and terminals before it waits for open requests, which would otherwise never end."""

    def __init__(self, engine: Engine, config: uvicorn.Config, worker: Worker | None) -> None:
        super().__init__(config)
        self._engine, self._worker = engine, worker

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._worker is not None and self.started:
            self._worker.open(self._make_protocol)
            return
        for listener in sockets or () if self.started else ():
            url = url_of(*listener.getsockname()[:2])
            write_address(self._engine.settings.data, url)
            # From here on the proxy answers.
            first_call = f'try: curl -s {url}/t/demo/r/1/shell/exec -d \'{{"command": "uname -a"}}\''
            log.info("listening", url=url, page=f"{url}/ui/")
            log.info(first_call)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._engine.lifecycle.hang_up()
        if self._worker is not None:
            await self._worker.siblings.aclose()
        remove_address(self._engine.settings.data)
        await super().shutdown(sockets)

    def _make_protocol(self) -> asyncio.Protocol:
        """Return the protocol of a connection, as uvicorn makes it for one that it has accepted."""
        made = cast("type[HitFirst]", self.config.http_protocol_class)
        return made(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _drivers(settings: Settings) -> dict[str, Driver]:
    spares = {"container": settings.container_spares, "postgres": settings.postgres_spares}
    created: dict[str, Driver] = {}
    for name in settings.drivers:
        directory = settings.data / name
        checkpointer: CheckpointerFactory = no_checkpointer
        if settings.checkpoints:
            checkpointer = functools.partial(CriuCheckpointer, directory, images_dir=settings.checkpoint_dir)
        try:
            created[name] = make_driver(
                name,
                DriverContext(
                    directory,
                    checkpointer,
                    spares.get(name, 0),
                    settings.source_rules,
                    cpu_groups=settings.speculate > 0,
                ),
            )
        except PluginError as error:
            raise SystemExit(str(error)) from error
    return created


def _behind(control: ControlPlane) -> FastAPI:
    engine = control.engine

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        try:
            await engine.open()
        except (SandboxError, StoreError, OSError) as error:
            # Foreseen: `run` shows the sentence, and the data plane keeps the traceback away from the log.
            engine.lifecycle.start_error = str(error)
            raise
        try:
            yield
        finally:
            await engine.aclose()
            log.info("stopped")

    app = FastAPI(
        title="Forkpoint",
        version=version("forkpoint"),
        summary="A transparent proxy between LLM agents and their tools.",
        lifespan=lifespan,
        # The framework's pages run scripts of other hosts. `proxy.ui` shows the description with its own files.
        docs_url=None,
        redoc_url=None,
        openapi_tags=TAGS,
        generate_unique_id_function=operation_id,
    )
    app.state.control = control
    app.include_router(control_plane)
    app.state.page = PageData.over(engine)
    app.include_router(page_data)
    app.include_router(ways)
    app.include_router(system)
    app.include_router(page())
    app.include_router(manual())
    _health(app, control)
    _problems(app, engine)
    _describe(app)
    return app


def _health(app: FastAPI, control: ControlPlane) -> None:
    engine, metrics = control.engine, Metrics(control)

    @app.get("/healthz", tags=["health"], name="get_health")
    async def healthz() -> dict[str, str]:
        """Report that the process answers requests."""
        return {"status": "ok"}

    @app.get("/readyz", tags=["health"], name="get_readiness", responses={503: PROBLEM})
    async def readyz() -> dict[str, str]:
        """Report that calls can be answered: the store is open and can be written."""
        if not engine.lifecycle.ready:
            raise RefusalError(503, "not-ready", "the store and the drivers are still opening. Try again soon.")
        engine.store.database.check_writable()
        return {"status": "ready"}

    @app.get(
        "/metrics",
        tags=["health"],
        name="get_metrics",
        response_class=Response,
        responses={200: {"content": {METRICS_TYPE: {}}}},
    )
    async def show_metrics(request: Request) -> Response:
        """Return the totals in Prometheus' text format."""
        granted(request).require_whole()
        return Response(metrics.render(), media_type=METRICS_TYPE)


def _problems(app: FastAPI, engine: Engine) -> None:
    async def respond(_request: Request, error: Exception) -> Response:
        problem = problem_of(_refused(error))
        if problem.infrastructure:
            engine.counts.failure(problem.slug)
            log.error("request failed", problem=problem.slug, error=repr(error), exc_info=error)
        headers = {name.decode(): value.decode() for name, value in problem.headers() if name != b"cache-status"}
        return Response(problem.body(), status_code=problem.status, headers=headers, media_type=MEDIA_TYPE)

    # Every known class is registered by itself: Starlette answers errors of the handler for `Exception`, and then
    # raises them again as unexpected.
    for kind in (Exception, HTTPException, RequestValidationError, *FORESEEN):
        app.add_exception_handler(kind, respond)


def _refused(error: Exception) -> Exception:
    """Return an error of the web framework as a refusal; other errors unchanged."""
    if isinstance(error, HTTPException):
        return RefusalError(error.status_code, "http", str(error.detail))
    if isinstance(error, RequestValidationError):
        faults = (f"{'.'.join(str(part) for part in fault['loc'])}: {fault['msg']}" for fault in error.errors())
        return RefusalError(422, "validation", "; ".join(faults))
    return error


def _describe(app: FastAPI) -> None:
    framework = app.openapi

    def openapi() -> dict[str, Any]:
        return completed(framework())

    app.openapi = openapi  # type: ignore[method-assign]
