"""Faults for `bench.differential`: processes are killed or stopped, proxies restarted, states evicted."""

import contextlib
import os
import random
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.machine import Process, Served, is_sandbox, process
from tests.sandboxes.postgres_cluster import Cluster

CRIU_S = 1.0
"""How long a strike on CRIU waits for a dump or a restore to begin. They take some 50 ms, a few times a second."""
WEIGHTS = {"process": 6, "criu": 2, "gc": 4, "proxy": 1, "stop": 1}
"""How often each kind of strike falls, beside the others."""
CLUSTER_WEIGHTS = {"database": 1, "pause": 2}
"""The same for strikes that only a cluster receives."""
PAUSE_S = 6.0
"""Longest time for which a member of a cluster is stopped: twice its lease, so that others take its tasks over."""

FORK_SERVERS = {
    b"sandboxes.local.launcher": "launcher",
    b"sandboxes.workers.zygote": "worker or zygote",
}
"""Names of our fork servers and their children, by the module that their command line names."""


class Strikes:
    """Kills what belongs to some proxies, again and again, until the block ends.

    Args:
        proxies: The proxies that are struck: one, or all members of a cluster.
        database: The database server of the cluster; None for a single proxy.
        every_s: Mean seconds between two strikes.
        counts: Strikes by kind; they are added here.
    """

    def __init__(
        self,
        proxies: Sequence[Served],
        database: Cluster | None,
        dice: random.Random,
        every_s: float,
        counts: Counter[str],
    ) -> None:
        self._proxies, self._database = proxies, database
        self._dice, self._every_s, self._counts = dice, every_s, counts
        self._weights = WEIGHTS if database is None else WEIGHTS | CLUSTER_WEIGHTS
        self._over = threading.Event()

    @contextmanager
    def falling(self) -> Iterator[None]:
        """Strike from another thread for the duration of the block."""
        thread = threading.Thread(target=self._go)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _go(self) -> None:
        while not self._over.wait(self._dice.uniform(0.3, 1.7) * self._every_s):
            if struck := self._strike():
                self._counts[struck] += 1

    def _strike(self) -> str:
        """Strike once; return what was struck, or an empty string if there was nothing."""
        kind = self._dice.choices(list(self._weights), list(self._weights.values()))[0]
        proxy = self._dice.choice(self._proxies)
        if kind == "process":
            return self._kill_process(proxy)
        if kind == "criu":
            return self._kill_criu(proxy)
        if kind == "gc":
            with contextlib.suppress(httpx.TransportError):
                httpx.post(f"{proxy.url}/api/v1/gc", timeout=60)
        elif kind == "database":
            assert self._database is not None
            self._database.kill()
            time.sleep(self._dice.uniform(0, 4))
            self._database.start()
        elif kind == "pause":
            assert proxy.process is not None
            proxy.process.send_signal(signal.SIGSTOP)
            time.sleep(self._dice.uniform(0.3, PAUSE_S))
            proxy.process.send_signal(signal.SIGCONT)
        else:
            if kind == "stop":
                try:
                    proxy.stop()
                except subprocess.TimeoutExpired:
                    kind = "stop, killed in the end"
            proxy.kill()
            proxy.start()
        return kind

    def _kill_process(self, proxy: Served) -> str:
        """Kill one of our own processes of a random role; never one of the agent's."""
        roles: dict[str, list[Process]] = {}
        for candidate in sorted(proxy.processes()):
            if name := role(candidate[0]):
                roles.setdefault(name, []).append(candidate)
        struck = self._dice.choice(sorted(name for name in roles if roles[name]) or [""])
        if struck:
            _kill(self._dice.choice(roles[struck]))
        return struck

    def _kill_criu(self, proxy: Served) -> str:
        """Wait for a running CRIU, and kill it."""
        deadline = time.monotonic() + CRIU_S
        while time.monotonic() < deadline and not self._over.is_set():
            for candidate in proxy.processes():
                if role(candidate[0]) == "criu":
                    time.sleep(self._dice.uniform(0, 0.03))
                    _kill(candidate)
                    return "criu"
            time.sleep(0.005)
        return ""


def _kill(candidate: Process) -> None:
    pid, _ = candidate
    with contextlib.suppress(ProcessLookupError):
        if process(pid) == candidate:
            os.kill(pid, signal.SIGKILL)


def role(pid: int) -> str:
    """Return what a process of a proxy is; an empty string for the processes of agents."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    if is_sandbox(pid):
        return "pid 1"
    if words[0] == b"anchor":
        return "anchor"
    if words[0].endswith(b"criu"):
        return "criu"
    # Forked processes show the command line of their fork server.
    return next((name for module, name in FORK_SERVERS.items() if any(module in word for word in words)), "")
