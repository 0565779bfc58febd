"""Ways to run an agent's command without Forkpoint, with their CPU time: what `bench.misspath` compares it with.

Each session is one process that reads commands from a pipe: a plain bash, a bash that starts bubblewrap or `docker
exec` for each command (which adds the fork of a bash, 0.3 ms), or Python with the local runtime of SWE-ReX. The
processes run in a control group of their own. So their CPU time is exact, and the measuring client's is not in it.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from bench.machine import console
from bench.sandboxes import docker_image

END = b"\x1e"
"""Printed after the output of each command. No command of the benchmark prints it."""
ACCOUNTING = Path("/sys/fs/cgroup/cpuacct")
SWE_REX = """
import asyncio, logging, sys
from swerex.runtime.abstract import BashAction, CreateBashSessionRequest
from swerex.runtime.local import LocalRuntime
async def main():
    logger = logging.getLogger("quiet")
    logger.setLevel(logging.ERROR)
    runtime = LocalRuntime(logger=logger)
    await runtime.create_session(CreateBashSessionRequest())
    for line in sys.stdin:
        observation = await runtime.run_in_session(BashAction(command=line.rstrip("\\n"), check="silent"))
        sys.stdout.write(observation.output + "\\x1e")
        sys.stdout.flush()
    await runtime.close()
asyncio.run(main())
"""


class CpuGroup:
    """CPU time of all processes that are started with `wrapper`, and of their descendants.

    Without a writable `cpuacct` hierarchy (cgroup version 1), it is the CPU time of the whole machine; see `exact`.
    """

    def __init__(self, name: str) -> None:
        self._group = ACCOUNTING / f"forkpoint-bench-{os.getpid()}-{name}"
        self.exact = False
        with suppress(OSError):
            self._group.mkdir()
            self.exact = True

    @property
    def wrapper(self) -> tuple[str, ...]:
        """Words before a command, with which it runs in the group."""
        enter = f'echo $$ > {self._group / "cgroup.procs"}; exec "$@"'
        return ("sh", "-c", enter, "sh") if self.exact else ()

    def seconds(self) -> float:
        """Return the CPU time so far."""
        if self.exact:
            return int((self._group / "cpuacct.usage").read_text()) / 1e9
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
        return sum(int(fields[number]) for number in (1, 2, 3, 6, 7)) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """Remove the group; its processes must have ended."""
        deadline = time.monotonic() + 10
        while self.exact and time.monotonic() < deadline:
            with suppress(OSError):
                self._group.rmdir()
                return
            time.sleep(0.01)


@dataclass
class Session:
    """A process that runs one command after another."""

    process: "subprocess.Popen[bytes]"
    line: Callable[[str], str]

    def run(self, command: str) -> bytes:
        """Run a command and return its output.

        Raises:
            RuntimeError: The process ended.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(self.line(command).encode())
        self.process.stdin.flush()
        output = b""
        while not output.endswith(END):
            part = os.read(self.process.stdout.fileno(), 1 << 16)
            if not part:
                raise RuntimeError(f"{self.process.args!r} ended")
            output += part
        return output[:-1]


@dataclass
class Shells:
    """One way to run commands. `run(session, command)` runs one; the sessions are numbered from 0."""

    name: str
    cpu: CpuGroup
    sessions: list[Session]

    def run(self, number: int, command: str) -> bytes:
        return self.sessions[number].run(command)


def _piped(prefix: str) -> Callable[[str], str]:
    def line(command: str) -> str:
        # Each prefix gets the command as one word. A plain bash reads it as it is.
        return f"{prefix} {shlex.quote(command)}" if prefix else command

    return lambda command: f"{line(command)}\nprintf '\\036'\n"


@contextmanager
def _shells(name: str, program: list[str], lines: list[Callable[[str], str]]) -> Iterator[Shells]:
    cpu, sessions = CpuGroup(name.replace(" ", "-")), []
    try:
        for line in lines:
            process = subprocess.Popen(
                [*cpu.wrapper, *program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            sessions.append(Session(process, line))
        yield Shells(name, cpu, sessions)
    finally:
        for session in sessions:
            assert session.process.stdin is not None
            session.process.stdin.close()
        for session in sessions:
            try:
                session.process.wait(10)
            except subprocess.TimeoutExpired:
                session.process.kill()
                session.process.wait()
            assert session.process.stdout is not None
            session.process.stdout.close()
        cpu.close()


@contextmanager
def plain_bash(count: int) -> Iterator[Shells]:
    """A bash for each session: no isolation."""
    with _shells("bash over a pipe", ["bash", "--norc"], [_piped("")] * count) as shells:
        yield shells


@contextmanager
def bubblewrap(count: int) -> Iterator[Shells]:
    """Bubblewrap for each command: namespaces, a private /tmp for each session, no limits and no session."""
    with ExitStack() as stack:
        lines = []
        for _ in range(count):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="forkpoint-bench-"))
            lines.append(
                _piped(f"bwrap --unshare-all --ro-bind / / --dev /dev --proc /proc --bind {folder} /tmp bash -c")
            )
        yield stack.enter_context(_shells("bubblewrap per call", ["bash", "--norc"], lines))


@contextmanager
def docker_exec(count: int, image: str) -> Iterator[Shells]:
    """`docker exec` for each command, in a container for each session. The daemon's CPU time is not in the figures."""
    names = [f"forkpoint-bench-{os.getpid()}-{number}" for number in range(count)]
    try:
        for name in names:
            command = ["docker", "run", "-d", "--rm", "--network", "none", "--name", name, image, "sleep", "3600"]
            subprocess.run(command, capture_output=True, check=True)
        lines = [_piped(f"docker exec {name} bash -c") for name in names]
        with _shells("docker exec", ["bash", "--norc"], lines) as shells:
            yield shells
    finally:
        subprocess.run(["docker", "rm", "-f", *names], capture_output=True, check=False)


@contextmanager
def swe_rex(count: int, python: str) -> Iterator[Shells]:
    """SWE-ReX's local runtime, one for each session: no isolation."""
    with _shells("SWE-ReX local", [python, "-c", SWE_REX], [lambda command: f"{command}\n"] * count) as shells:
        yield shells


@contextmanager
def _swe_rex_python() -> Iterator[str | None]:
    """Install SWE-ReX into a temporary environment and yield its interpreter; None if it cannot be installed."""
    with tempfile.TemporaryDirectory(prefix="forkpoint-bench-") as folder:
        python = Path(folder) / "bin" / "python"
        install = [str(python), "-m", "pip", "install", "--quiet", "swe-rex"]
        made = subprocess.run([sys.executable, "-m", "venv", folder], capture_output=True, check=False).returncode == 0
        yield str(python) if made and not subprocess.run(install, capture_output=True, check=False).returncode else None


@contextmanager
def alternatives(count: int, names: list[str]) -> Iterator[list[Shells]]:
    """Yield the ways that can run here, of pipe, bwrap, docker and swerex, and print why others cannot."""
    with ExitStack() as stack:
        chosen = []
        if "pipe" in names:
            chosen.append(stack.enter_context(plain_bash(count)))
        if "bwrap" in names:
            if shutil.which("bwrap"):
                chosen.append(stack.enter_context(bubblewrap(count)))
            else:
                console.print("bubblewrap is left out: it is not installed (Debian: apt install bubblewrap).")
        if "docker" in names:
            image, why = docker_image(None)
            if image is None:
                console.print(f"docker exec is left out: {why}.")
            else:
                chosen.append(stack.enter_context(docker_exec(count, image)))
        if "swerex" in names:
            python = stack.enter_context(_swe_rex_python())
            if python is None:
                console.print("SWE-ReX is left out: it cannot be installed from PyPI here.")
            else:
                chosen.append(stack.enter_context(swe_rex(count, python)))
        yield chosen
