"""The process that runs queries: one request at a time, within limits, and able to end at any moment.

It is forked from the zygote, which has loaded the engine's modules and given up what no worker may have (network,
capabilities, all files but those of the driver's room).
"""

import os
import resource
import signal
import socket
from typing import Any

from sandboxes.ipc.frames import Inbox, Message, pack, receive
from sandboxes.linux import syscalls as kernel
from sandboxes.workers.engine import WorkerEngine, module_of

OUT_OF_MEMORY = 70
"""Exit code of a worker that a query drove out of its memory."""
MAX_DESCRIPTORS = 256


def become_worker(end: socket.socket, parent: int, engine: str) -> None:
    """Turn a just forked process into a worker that serves end until it is closed. Never returns."""
    code = 1
    try:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            # The parent died before the kernel knew that this process is to follow it.
            os._exit(0)
        os.setsid()
        code = serve(end, module_of(engine).make_engine())
    except MemoryError:
        code = OUT_OF_MEMORY
    finally:
        # No destructor runs: one that closes a database would write to it.
        os._exit(code)


def serve(end: socket.socket, engine: WorkerEngine) -> int:
    """Answer requests until the other end is closed; return the exit code."""
    inbox, room = Inbox(), Room()
    while True:
        data, _ = receive(end)
        if not data:
            return 0
        inbox.feed(data, [])
        while (message := inbox.take()) is not None:
            room.limit(message.fields.pop("limits", {}))
            try:
                fields, body = _answer(engine, message)
            except MemoryError:
                return OUT_OF_MEMORY
            except Exception as error:  # noqa: BLE001 - a worker ends here, and the driver is told why
                end.sendall(pack({"defect": f"{type(error).__name__}: {error}"}))
                return 1
            end.sendall(pack(fields, body))


def _answer(engine: WorkerEngine, message: Message) -> tuple[dict[str, Any], bytes]:
    match message.fields.pop("op"):
        case "open":
            return engine.open(message.fields), b""
        case "run":
            return engine.run(message.fields, message.body)
        case "warm":
            getattr(engine, "warm", lambda: None)()
            return {}, b""
        case "close":
            engine.close()
            return {}, b""
        case other:
            raise ValueError(f"a worker has no {other!r}")


class Room:
    """How much memory and disk a request may take, beyond what an idle worker has."""

    def __init__(self) -> None:
        self._base_bytes = _address_space()
        self._now: dict[str, int] = {}

    def limit(self, limits: dict[str, int]) -> None:
        """Set memory_mb and disk_mb (the largest file) for what comes now; what is not named stays as it was."""
        if not limits or limits == self._now:
            return
        self._now = limits
        _soft(resource.RLIMIT_AS, self._base_bytes + (limits["memory_mb"] << 20))
        _soft(resource.RLIMIT_FSIZE, limits["disk_mb"] << 20)


def _soft(what: int, size: int) -> None:
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (size if hard == resource.RLIM_INFINITY else min(size, hard), hard))


def _address_space() -> int:
    """Return the bytes of address space in use; the zygote has left /proc open to nobody, so it told us its own."""
    return int(os.environ["FORKPOINT_WORKER_BYTES"])
