"""An application that answers the parts of one worker by HTTP, as the server of a worker does."""

import asyncio
from collections.abc import Callable

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from proxy.http.asgi import AsgiApp


def serving(application: AsgiApp, made: list[HttpToolsProtocol] | None = None) -> Callable[..., asyncio.Protocol]:
    """Return what makes the protocol of a connection, given members of its state, and adds it to what was made."""
    config = uvicorn.Config(
        application, lifespan="off", log_config=None, access_log=False, server_header=False, date_header=False
    )
    config.load()

    def make(**state: object) -> asyncio.Protocol:
        protocol = HttpToolsProtocol(config=config, server_state=ServerState(), app_state=state)
        if made is not None:
            made.append(protocol)
        return protocol

    return make
