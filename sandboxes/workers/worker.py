"""The worker process: one request at a time, within limits, and killable at any moment.

It is forked from the zygote, which has already loaded the engine's modules and dropped what no worker may have: the
network, its capabilities, and all files outside the driver's data directory.
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
"""Exit code of a worker whose request needed more memory than its limit."""
MAX_DESCRIPTORS = 256
"""Limit of open files in the zygote and in each worker. An engine keeps a few databases open, with three files each."""


def become_worker(end: socket.socket, parent: int, engine: str) -> None:
    """Turn a process that was just forked into a worker. Never returns.

    Args:
        end: The worker's end of its socket; the worker exits when the other end is closed.
        parent: Process id of the zygote.
        engine: Name of the engine, as in `module_of`.
    """
    code = 1
    try:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            # The zygote died before the kernel had noted the death signal, so it will never be sent.
            os._exit(0)
        os.setsid()
        code = serve(end, module_of(engine).make_engine())
    except MemoryError:
        code = OUT_OF_MEMORY
    finally:
        # Skip destructors: closing a database could write to it, and its files must stay as the last request left them.
        os._exit(code)


def serve(end: socket.socket, engine: WorkerEngine) -> int:
    """Answer requests until the other end is closed.

    Returns:
        The exit code of the process.
    """
    inbox, limits = Inbox(), RequestLimits()
    while True:
        data, _ = receive(end)
        if not data:
            return 0
        inbox.feed(data, [])
        while (message := inbox.take()) is not None:
            limits.set(message.fields.pop("limits", {}))
            try:
                fields, body = _answer(engine, message)
            except MemoryError:
                # The heap may be exhausted, so nothing is sent: the exit code is the message.
                return OUT_OF_MEMORY
            except Exception as error:  # noqa: BLE001 - the worker ends here, and the driver reports the error
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
            raise ValueError(f"unknown worker operation {other!r}")


class RequestLimits:
    """Memory and disk that a request may use, in addition to what an idle worker uses."""

    def __init__(self) -> None:
        # The address space in use. Workers cannot read /proc, so the zygote measured its own.
        self._base_bytes = int(os.environ["FORKPOINT_WORKER_BYTES"])
        self._current: dict[str, int] = {}

    def set(self, limits: dict[str, int]) -> None:
        """Apply limits to this request and the following ones.

        Args:
            limits: `memory_mb` and `disk_mb` (the largest file, in MiB). An empty dictionary keeps the current limits.
        """
        if not limits or limits == self._current:
            return
        self._current = limits
        _set_soft_limit(resource.RLIMIT_AS, self._base_bytes + (limits["memory_mb"] << 20))
        _set_soft_limit(resource.RLIMIT_FSIZE, limits["disk_mb"] << 20)


def _set_soft_limit(kind: int, size_bytes: int) -> None:
    """Set a soft limit. The hard limit stays, so that a later request may have a higher one."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (size_bytes if hard == resource.RLIM_INFINITY else min(size_bytes, hard), hard))
