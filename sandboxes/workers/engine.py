"""The engine protocol: what a worker process runs for the SQL and video drivers."""

from importlib import import_module
from types import ModuleType
from typing import Protocol

from sandboxes.ipc.codec import IpcMessage

Answer = tuple[IpcMessage, bytes]
"""What the driver must know about a call, and the body of the agent's response."""


class WorkerEngine(Protocol):
    """An engine in one worker process, serving one request at a time.

    The worker makes it with `make_engine()` of the engine's module, after the fork and the drop of privileges. A module
    may also have `prepare()`, which runs once in the zygote, and an engine `warm()`, which runs in a spare worker. An
    exception that an engine raises ends its worker (`WorkerLostError`), so failures of an agent's statement are part of
    the result.
    """

    def answer(self, request: IpcMessage, body: bytes) -> Answer:
        """Answer a request of the engine's own vocabulary. The body, usually empty, belongs to it, such as a script."""
        ...

    def close(self) -> None:
        """Release what requests have opened. The worker keeps running and may have to open again."""
        ...


def module_of(engine: str) -> ModuleType:
    """Import an engine's module: `sandboxes.{engine}.worker_engine`, or the module itself if the name has a dot."""
    return import_module(engine if "." in engine else f"sandboxes.{engine}.worker_engine")
