"""A whole proxy on a real socket, over real sandboxes: what an agent's client meets."""

import asyncio
import socket
import sqlite3
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from proxy.app import build
from proxy.engine import Engine
from proxy.lifecycle import UNFINISHED
from proxy.server import server
from proxy.settings import Settings
from sandboxes.driver import Driver
from sandboxes.linux.files import remove_tree
from sandboxes.sqlite.driver import SqliteDriver
from sandboxes.task_owner import waits_at
from tests.machine import PLAIN
from tests.proxy.rig import KEEPS_ALL
from tests.sandboxes.box import local_driver

if TYPE_CHECKING:
    import uvicorn

    from proxy.dataplane.app import DataPlane
    from sandboxes.driver import Driver

_STOP_S = 120.0
"""How long a proxy may take to stop. It takes a second; a freeze of the last states some more."""


@dataclass(frozen=True)
class Proxy:
    """One that serves. `client` has its address as base URL."""

    client: httpx.Client
    engine: Engine
    address: tuple[str, int]

    @property
    def url(self) -> str:
        return f"http://{self.address[0]}:{self.address[1]}"

    def put(self, task: str, **spec: Any) -> None:
        """Give a task its environment."""
        answer = self.client.put(f"/api/v1/tasks/{task}", json=spec)
        assert answer.is_success, answer.text

    def outcomes(self, task: str, rollout: str) -> list[str]:
        """How each call of a rollout was answered."""
        steps = self.client.get(f"/api/v1/tasks/{task}/rollouts/{rollout}").json()["steps"]["items"]
        return [step["outcome"] for step in steps]

    def is_kept(self, task: str) -> bool:
        """Return whether the state at which each rollout of a task is has a snapshot."""
        running = list(self.engine.tasks.rollouts.running.items())
        return all(rollout.node.snapshot is not None for (name, _), rollout in running if name == task)

    @property
    def recorded(self) -> int:
        """How many calls are in all trees."""
        with closing(sqlite3.connect(self.engine.settings.data / "forkpoint.sqlite")) as store:
            return int(store.execute("SELECT COUNT(*) FROM records").fetchone()[0])


def _waits() -> str:
    """Return where each task of all event loops of this process waits."""
    # `asyncio.all_tasks` has those of one loop, which only its own thread knows.
    return "\n".join(f"{task.get_name()}: {waits_at(task)}" for task in list(getattr(asyncio.tasks, "_all_tasks", ())))


@contextmanager
def real_proxy(
    *, checkpoints: bool = False, keeps_all: bool = True, kept: Path | None = None, **settings: Any
) -> Iterator[Proxy]:
    """Serve on a free port, as `forkpoint serve` does, in a thread.

    kept: a directory for its data that stays; without one it is made, and removed.
    """
    folder = kept or Path(tempfile.mkdtemp(prefix="forkpoint-agents-", dir="/var/tmp"))
    folder.chmod(0o755)
    chosen = Settings(data=folder, **{"warm_sandboxes": 0, **settings})
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()[:2]
    made: list[tuple[DataPlane, uvicorn.Server]] = []

    def serve() -> None:
        # The store belongs to the thread that opens it, so the application is built where it will run.
        drivers: dict[str, Driver] = {
            "local": local_driver(folder / "local", checkpoints=checkpoints),
            "sqlite": SqliteDriver(folder / "sqlite"),
        }
        application = build(chosen, drivers)
        if keeps_all:
            application.engine.snapshot_value.reuse = KEEPS_ALL
        made.append((application, server(application)))
        made[0][1].run(sockets=[listener])

    # A daemon, so that one that hangs does not keep the tests from ending.
    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        with httpx.Client(
            base_url=f"http://{address[0]}:{address[1]}", timeout=60, trust_env=False, verify=PLAIN
        ) as client:
            # The socket listens, so this waits until it is served.
            client.get("/readyz").raise_for_status()
            yield Proxy(client, made[0][0].engine, address)
    finally:
        if made:
            made[0][1].should_exit = True
        thread.join(_STOP_S)
        listener.close()
        assert not thread.is_alive(), f"the proxy does not stop. It waits for:\n{_waits()}"
        # Its log, which has the stage that was cut off and what that waited for, is beside the failure.
        assert not made or not made[0][0].engine.counts.failures[UNFINISHED], "a part of the proxy did not stop"
        if kept is None:
            remove_tree(folder)
