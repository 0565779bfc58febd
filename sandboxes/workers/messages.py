"""Messages between a driver, its zygote and the workers; each engine adds its own requests."""

from sandboxes.ipc.codec import IpcMessage, IpcRequest
from sandboxes.ipc.messages import Done


class WorkerForked(IpcMessage, op="worker_forked"):
    """The worker was forked, with this pid."""

    pid: int


class ForkWorker(IpcRequest[WorkerForked], op="fork_worker", descriptors=(1, 1)):
    """Fork a worker, which serves on the socket that accompanies this message."""


class WorkerEnded(IpcMessage, op="worker_ended"):
    """How a worker ended: by which signal, or with which exit code. Neither, if it had ended before."""

    signal: int | None = None
    code: int | None = None


class EndWorker(IpcRequest[WorkerEnded], op="end_worker"):
    """Kill a worker if it still runs, and say how it ended."""

    pid: int


class SetLimits(IpcMessage, op="set_limits"):
    """What each of the next requests may use, in addition to what an idle worker uses. It is not answered."""

    memory_mb: int
    disk_mb: int  # The largest file.


class WarmUp(IpcRequest[Done], op="warm_up"):
    """Use every code path once, before the first request."""


class CloseEngine(IpcRequest[Done], op="close_engine"):
    """Release what the engine has opened. The worker keeps running."""
