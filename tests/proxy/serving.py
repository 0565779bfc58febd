"""The whole application on a real socket, over the in-memory driver."""

import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from proxy.app import assemble
from proxy.control.parts import ControlPlane
from proxy.engine import Engine, build_engine
from proxy.server import server
from proxy.settings import Settings
from sandboxes.driver import Driver
from sandboxes.spec import EnvironmentSpec
from tests.machine import PLAIN
from tests.proxy.rig import KEEPS_ALL
from tests.sandboxes.memory_driver import Gate, MemoryDriver

if TYPE_CHECKING:
    import uvicorn


@dataclass(frozen=True)
class Running:
    """A proxy that serves. `client` has its address as base URL."""

    client: httpx.Client
    engine: Engine
    control: ControlPlane
    driver: MemoryDriver
    address: tuple[str, int]

    def exec(self, rollout: str, command: str, task: str = "task", **more: Any) -> httpx.Response:
        return self.client.post(f"/t/{task}/r/{rollout}/shell/exec", json={"command": command, **more})


def get(proxy: Running, path: str, status: int = 200) -> Any:
    """Return the JSON of a route below `/api/v1/`."""
    answer = proxy.client.get(f"/api/v1/{path}")
    assert answer.status_code == status, answer.text
    return answer.json()


@contextmanager
def serving(
    data: Path, *, gate: Gate | None = None, drivers: Mapping[str, Driver] | None = None, **settings: Any
) -> Iterator[Running]:
    """Serve on a free port, as `forkpoint serve` does, in a thread. drivers: others than the in-memory one."""
    driver = MemoryDriver(gate)
    chosen = Settings(data=data, **{"default_spec": EnvironmentSpec(driver="memory"), "warm_sandboxes": 0, **settings})
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()[:2]
    made: list[tuple[Engine, ControlPlane, uvicorn.Server]] = []

    def serve() -> None:
        # The store belongs to the thread that opens it, so the application is built where it will run.
        engine = build_engine(chosen, {"memory": driver, **(drivers or {})})
        engine.snapshot_value.reuse = KEEPS_ALL
        control = ControlPlane.over(engine)
        made.append((engine, control, server(assemble(engine, control))))
        made[0][2].run(sockets=[listener])

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with httpx.Client(base_url=f"http://{address[0]}:{address[1]}", timeout=30, verify=PLAIN) as client:
            # The socket listens, so this waits until it is served.
            client.get("/readyz").raise_for_status()
            yield Running(client, *made[0][:2], driver, address)
    finally:
        if made:
            made[0][2].should_exit = True
        thread.join()
        listener.close()
