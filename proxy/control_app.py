"""The application behind the data plane: the control plane, the page, the manual, and the health of the proxy."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from threading import Timer
from typing import Any

import structlog
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from proxy.control.api_description import TAGS, completed
from proxy.control.metrics import MEDIA_TYPE as METRICS_TYPE
from proxy.control.metrics import Metrics
from proxy.control.parts import ControlPlane
from proxy.control.routes.api import control_routes
from proxy.control.routes.params import PROBLEM, WHOLE, operation_id
from proxy.engine import Engine
from proxy.http.problems import FORESEEN, problem_of
from proxy.lifecycle import BackgroundWork
from proxy.refusals import MEDIA_TYPE, RefusalError
from proxy.storage.errors import StoreError
from proxy.telemetry.alerts import EVERY_S
from proxy.ui.api import PageData, page_data
from proxy.ui.manual_files import manual
from proxy.ui.static_files import page
from proxy.ui.system import system
from proxy.ui.ways import ways
from sandboxes.errors import SandboxError

log = structlog.get_logger()

_SLOW_START_S = 1.0
"""After how long a start says what it is doing. Reading back blocks the event loop, so a thread says it."""
_SLOW_START = "still starting: reads back what the last process left, removes what it left half-done, tries each driver"

_FAULTS = 20
"""How many faults of a request its refusal lists: a body of 1 MB can have a hundred thousand."""


def control_application(control: ControlPlane, engine: Engine) -> FastAPI:
    """Return the application behind the data plane. The engine opens and closes with its lifespan."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        slow = Timer(_SLOW_START_S, log.info, (_SLOW_START,))
        slow.daemon = True
        slow.start()
        try:
            await engine.open()
        except (SandboxError, StoreError, OSError) as error:
            # Foreseen: `run` shows the sentence, and the data plane keeps the traceback away from the log.
            engine.lifecycle.start_error = str(error)
            raise
        finally:
            slow.cancel()
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
    app.router.routes.extend(control_routes)
    app.state.page = PageData.over(control)
    for router in (page_data, ways, system):
        app.router.routes.extend(router.routes)
    app.include_router(page())
    app.include_router(manual())
    _health(app, control)
    _problems(app, control)
    _describe(app)
    return app


def _health(app: FastAPI, control: ControlPlane) -> None:
    metrics = Metrics(control)

    async def look() -> None:
        control.alerts.add(time.time(), metrics.values())

    control.lifecycle.background.append(BackgroundWork("alerts", EVERY_S, look))

    @app.get("/healthz", tags=["health"], name="get_health")
    async def healthz() -> dict[str, str]:
        """Report that the process answers requests."""
        return {"status": "ok"}

    @app.get("/readyz", tags=["health"], name="get_readiness", responses={503: PROBLEM})
    async def readyz() -> dict[str, str]:
        """Report that calls can be answered: each driver has run a trial, and the store can be written."""
        if not control.lifecycle.ready:
            raise RefusalError(503, "not-ready", "the store and the drivers are still opening. Try again soon.")
        control.store.database.check_writable()
        return {"status": "ready"}

    @app.get(
        "/metrics",
        tags=["health"],
        name="get_metrics",
        response_class=Response,
        responses={200: {"content": {METRICS_TYPE: {}}}},
        dependencies=[WHOLE],
    )
    async def show_metrics() -> Response:
        """Return the totals in Prometheus' text format."""
        return Response(metrics.render(), media_type=METRICS_TYPE)


def _problems(app: FastAPI, control: ControlPlane) -> None:
    async def respond(_request: Request, error: Exception) -> Response:
        problem = problem_of(_refused(error))
        if problem.infrastructure:
            control.counts.failure(problem.slug)
            log.error("request failed", problem=problem.slug, error=repr(error), exc_info=error)
        headers = {name.decode(): value.decode() for name, value in problem.headers() if name != b"cache-status"}
        return Response(problem.body(), status_code=problem.status, headers=headers, media_type=MEDIA_TYPE)

    # Every known class is registered by itself: Starlette answers errors of the handler for `Exception`, and then
    # raises them again as unexpected.
    for kind in (Exception, HTTPException, RequestValidationError, *FORESEEN):
        app.add_exception_handler(kind, respond)


def _refused(error: Exception) -> Exception:
    if isinstance(error, HTTPException):
        return RefusalError(error.status_code, "http", str(error.detail))
    if isinstance(error, RequestValidationError):
        faults = (
            f"{'.'.join(str(part) for part in fault['loc'])}: {fault['msg']}" for fault in error.errors()[:_FAULTS]
        )
        return RefusalError(422, "validation", "; ".join(faults))
    return error


def _describe(app: FastAPI) -> None:
    framework = app.openapi

    def openapi() -> dict[str, Any]:
        return completed(framework())

    app.openapi = openapi  # type: ignore[method-assign]
