"""Docker's events: what happens to the containers that a URL shows, for clients that wait for it (`GET /events`)."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import orjson

from proxy.compat.docker import responses
from proxy.compat.docker.containers import Container, ShownContainers

_MAX_WAITING = 1000
"""Events that are kept for a client that does not read. A client that falls further behind loses the oldest ones."""


class ContainerEvents:
    """Passes events on to the clients that listen. Nothing is kept for those that come later."""

    def __init__(self) -> None:
        self._listeners: dict[asyncio.Queue[bytes], ShownContainers] = {}

    def publish(self, action: str, container: Container) -> None:
        """Tell the clients of a container's URL what happened: create, start, die, stop or destroy."""
        listeners = [listener for listener, shown in self._listeners.items() if shown.includes(container)]
        if not listeners:
            return
        line = orjson.dumps(_event(action, container, time.time_ns())) + b"\n"
        for listener in listeners:
            if listener.full():
                listener.get_nowait()
            listener.put_nowait(line)

    async def send(
        self, shown: ShownContainers, filters: Mapping[str, Sequence[str]], send: Callable[[bytes], Awaitable[None]]
    ) -> None:
        """Send a URL's events until the caller cancels; filters but type, event, container and label are ignored."""
        queue: asyncio.Queue[bytes] = asyncio.Queue(_MAX_WAITING)
        self._listeners[queue] = shown
        try:
            # The head goes out at once: clients act only when they listen.
            await send(b"")
            while True:
                line = await queue.get()
                if _matches(orjson.loads(line), filters):
                    await send(line)
        finally:
            del self._listeners[queue]


def _event(action: str, container: Container, time_ns: int) -> dict[str, Any]:
    attributes = {**(container.spec.body.get("Labels") or {}), "image": container.spec.image, "name": container.name}
    if action == "die":
        attributes["exitCode"] = str(container.exit_code)
    return {
        "status": action, "id": container.id, "from": container.spec.image, "Type": "container", "Action": action,
        "Actor": {"ID": container.id, "Attributes": attributes}, "scope": "local", "time": time_ns // 10**9,
        "timeNano": time_ns,
    }  # fmt: skip


def _matches(event: Mapping[str, Any], filters: Mapping[str, Sequence[str]]) -> bool:
    attributes = event["Actor"]["Attributes"]
    checks: dict[str, Callable[[str], bool]] = {
        "type": lambda value: value == event["Type"],
        "event": lambda value: value == event["Action"],
        "container": lambda value: value in (event["id"], attributes["name"]),
        "label": lambda value: responses.has_label(attributes, value),
    }
    return responses.passes(filters, checks)
