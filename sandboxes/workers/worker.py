"""The worker process: one request at a time, within limits, and killable at any moment.

It is forked from the zygote, which has loaded the engine's modules and dropped what no worker may have: the network,
its capabilities, and all files outside the driver's data directory.
"""

import os
import resource
import signal
import socket

from sandboxes.ipc.codec import Envelope, IpcMessage, decode, pack_message
from sandboxes.ipc.frames import Inbox, receive
from sandboxes.ipc.messages import Done, Failed
from sandboxes.linux import syscalls as kernel
from sandboxes.workers.engine import Answer, WorkerEngine, module_of
from sandboxes.workers.messages import CloseEngine, SetLimits, WarmUp

OUT_OF_MEMORY = 70
"""Exit code of a worker whose request needed more memory than its limit."""
MAX_DESCRIPTORS = 256
"""Limit of open files in the zygote and in each worker. An engine keeps a few databases open, with three files each."""


def become_worker(end: socket.socket, parent: int, engine: str) -> None:
    """Turn a process that was just forked into a worker of `parent`, until the other end of its socket is closed."""
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
    """Answer requests until the other end is closed; return the exit code of the process."""
    inbox, limits = Inbox(), RequestLimits()
    while True:
        data, _ = receive(end)
        if not data:
            return 0
        inbox.feed(data, [])
        while (frame := inbox.take()) is not None:
            envelope = decode(frame)
            if isinstance(envelope.message, SetLimits):
                limits.set(envelope.message)
                continue
            try:
                answer, body = _answer(engine, envelope)
            except MemoryError:
                # The heap may be exhausted, so nothing is sent: the exit code is the message.
                return OUT_OF_MEMORY
            except Exception as error:  # noqa: BLE001 - the worker ends here, and the driver reports the error
                end.sendall(pack_message(Failed(f"{type(error).__name__}: {error}")))
                return 1
            end.sendall(pack_message(answer, body))


def _answer(engine: WorkerEngine, envelope: Envelope[IpcMessage]) -> Answer:
    match envelope.message:
        case WarmUp():
            getattr(engine, "warm", lambda: None)()
        case CloseEngine():
            engine.close()
        case request:
            return engine.answer(request, envelope.body)
    return Done(), b""


class RequestLimits:
    """Memory and disk that a request may use, in addition to what an idle worker uses."""

    def __init__(self) -> None:
        # The address space in use. Workers cannot read /proc, so the zygote measured its own.
        self._base_bytes = int(os.environ["FORKPOINT_WORKER_BYTES"])

    def set(self, limits: SetLimits) -> None:
        """Apply limits to the following requests."""
        _set_soft_limit(resource.RLIMIT_AS, self._base_bytes + (limits.memory_mb << 20))
        _set_soft_limit(resource.RLIMIT_FSIZE, limits.disk_mb << 20)


def _set_soft_limit(kind: int, size_bytes: int) -> None:
    """Set a soft limit. The hard limit stays, so that a later request may have a higher one."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (size_bytes if hard == resource.RLIM_INFINITY else min(size_bytes, hard), hard))
