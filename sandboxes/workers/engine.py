"""What a worker process runs: the interface that both SQL engines have."""

from importlib import import_module
from types import ModuleType
from typing import Any, Protocol

Fields = dict[str, Any]
"""JSON members: what crosses the socket between driver and worker."""


class WorkerEngine(Protocol):
    """One engine, in one worker process, serving one request at a time.

    It is made by `make_engine()` of its module (`module_of`), once for each worker, after the fork
    and after the worker has given up its rights. Two things that a module may have make that faster: `prepare()` is
    called once, before all forks, and the engine's `warm()` in a spare worker, before its first request.

    What an engine raises ends the worker (`WorkerLost`): whatever the agent shall be told as the outcome of its
    statement is part of the answer instead.
    """

    def open(self, request: Fields) -> Fields:
        """Get ready to run on what request names (files, a DSN); may be called again, for another state or database."""
        ...

    def run(self, request: Fields, body: bytes) -> tuple[Fields, bytes]:
        """Run one call; return what the driver needs to know of it, and the answer's body as the agent gets it."""
        ...

    def close(self) -> None:
        """Let go of what `open` got. The worker goes on, and may be told to open again."""
        ...


def module_of(engine: str) -> ModuleType:
    """Return the module of an engine: a SQL one by its short name, any other by the name of its module."""
    return import_module(engine if "." in engine else f"sandboxes.{engine}.worker_engine")
