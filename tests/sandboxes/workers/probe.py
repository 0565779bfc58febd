"""A worker's engine that tries what no worker may, and a program that prints how it fares."""

import asyncio
import errno
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from sandboxes.ipc.codec import IpcMessage, IpcRequest
from sandboxes.linux import syscalls as kernel
from sandboxes.workers.engine import Answer
from sandboxes.workers.pool import WorkerPool

FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)


class Tried(IpcMessage, op="tried"):
    """What each attempt gave."""

    results: list[str]


class Try(IpcRequest[Tried], op="try"):
    """Try everything."""


class ProbingEngine:
    """An engine that says what its process can do."""

    def answer(self, _request: IpcMessage, _body: bytes) -> Answer:
        """Try to make sockets and a namespace and to open a foreign file; add the capabilities that are left."""
        results = [_outcome(lambda: socket.socket(family)) for family in FAMILIES]  # noqa: B023 - called at once
        results.append(_outcome(lambda: kernel.unshare(kernel.CLONE_NEWUSER)))
        results.append(_outcome(lambda: os.open("/etc/hostname", os.O_RDONLY)))
        return Tried(results), b""

    def close(self) -> None:
        """Release nothing."""


def make_engine() -> ProbingEngine:
    """Return the engine of a worker."""
    return ProbingEngine()


def _outcome(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "done"


def rights_of(pid: int) -> dict[str, str]:
    """Return what the kernel says of a process, and its environment."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    rights = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    return rights | {"environ": Path(f"/proc/{pid}/environ").read_text()}


async def _probe(folder: Path) -> None:
    pool = WorkerPool(__spec__.name if __spec__ else "", folder)
    try:
        await pool.open()
        worker = await pool.dedicated()
        status = rights_of(worker.pid)
        tried = (await worker.ask(Try(), timeout_s=30)).message
        rights = status["NoNewPrivs"], *tried.results, hex(int(status["CapEff"], 16))
        print("confined" if pool.confined else "open", *rights)
    finally:
        await pool.aclose()


if __name__ == "__main__":
    asyncio.run(_probe(Path(sys.argv[1])))
