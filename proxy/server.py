"""The web server of an application: uvicorn, with protocols of ours for its connections."""

import asyncio
import socket
from functools import partial
from typing import cast

import structlog
import uvicorn

from proxy.address import remove_address, url_of, write_address
from proxy.dataplane.app import DataPlane
from proxy.dataplane.hit_protocol import HitFirst, protocol_for
from proxy.dataplane.logged_hits import LoggedHits
from proxy.dataplane.response_reports import report_responses
from proxy.dataplane.socket_protocol import BoundedSocketProtocol
from proxy.first_call import first_call
from proxy.priority import go_first, make_threads, raise_session
from proxy.workers.siblings import Siblings
from proxy.workers.views import AllWorkers

log = structlog.get_logger()

GRACE_S = 30
"""How long open requests may take when the proxy is told to stop. Then they are answered with an error."""


def server(application: DataPlane, worker: Siblings | None = None) -> uvicorn.Server:
    """Return the web server of an application, for a listening socket; the worker is None without others."""
    # A cluster's members answer together what names no task.
    others = application.others
    joined = application if others is None else AllWorkers(application, others)
    served = joined if worker is None else AllWorkers(joined, worker)
    return _Server(
        application,
        uvicorn.Config(
            report_responses(served),
            loop="uvloop",
            http=protocol_for(application, None if worker is None else worker, kind=_kind_of(application)),
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
            timeout_graceful_shutdown=GRACE_S,
        ),
        worker,
    )


def _kind_of(application: DataPlane) -> type[HitFirst]:
    return HitFirst if application.hits is None else LoggedHits


class _Server(uvicorn.Server):
    """Ends event streams and terminals before it waits for open requests, which would otherwise never end."""

    def __init__(self, application: DataPlane, config: uvicorn.Config, worker: Siblings | None) -> None:
        super().__init__(config)
        self._application, self._engine, self._worker = application, application.engine, worker

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        # Before the application opens, which starts the first threads and processes.
        raise_session()
        go_first()
        asyncio.get_running_loop().set_default_executor(make_threads())
        await super().startup(sockets)
        if self.started:
            # Connections of other members and workers go to no other worker.
            peer = protocol_for(self._application, is_limited=False, kind=_kind_of(self._application))
            make_peer = partial(self._make_protocol, peer)
            self._application.serve_peers(make_peer)
            if self._worker is not None:
                self._worker.open(partial(self._make_protocol, self.config.http_protocol_class), make_peer)
                self._worker.is_serving()
                return
        for listener in sockets or () if self.started else ():
            url = url_of(*listener.getsockname()[:2])
            write_address(self._engine.settings.data, url)
            # From here on the proxy answers.
            log.info("listening", url=url, page=f"{url}/ui/")
            engine = self._engine
            default, needs_token = engine.settings.default_spec.driver, engine.access.needs_token
            log.info(first_call(url, default, engine.drivers, needs_token=needs_token))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._engine.lifecycle.hang_up()
        if self._worker is not None:
            await self._worker.aclose()
        remove_address(self._engine.settings.data)
        await super().shutdown(sockets)

    def _make_protocol(self, kind: type[asyncio.Protocol], **state: object) -> asyncio.Protocol:
        made = cast("type[HitFirst]", kind)
        app_state = {**self.lifespan.state, **state}
        return made(config=self.config, server_state=self.server_state, app_state=app_state)
