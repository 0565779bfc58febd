"""A separate Docker daemon for tests, which can be killed and restarted."""

import contextlib
import os
import secrets
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sandboxes.linux.files import remove_tree
from tests.machine import is_sandbox, mounts_below, wait_until

STARTS = 3
_GROUPS = Path("/sys/fs/cgroup")


@dataclass
class Dockerd:
    """`dockerd` with all that it has below folder. Its containers have no network; the machine's daemon is not touched.

    parent: the control group above all of its containers.
    """

    folder: Path
    parent: str = field(default_factory=lambda: f"forkpoint-dockerd-{secrets.token_hex(4)}")
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def host(self) -> str:
        """The value of DOCKER_HOST."""
        return f"unix://{self.folder}/sock"

    def start(self) -> None:
        """Start the daemon and return when it answers. Restarts it if it exits, because containerd may be late."""
        places = ("--data-root", "data"), ("--exec-root", "exec"), ("--pidfile", "pid")
        options = [word for name, place in places for word in (name, f"{self.folder}/{place}")]
        options += ["--bridge", "none", "--iptables=false", "--ip6tables=false", "--cgroup-parent", f"/{self.parent}"]
        for _ in range(STARTS):
            with (self.folder / "log").open("ab") as log:
                self.process = subprocess.Popen(
                    ["dockerd", "--host", self.host, *options], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    start_new_session=True,
                )  # fmt: skip
            wait_until(self._answers_or_ended, "dockerd does not answer", within_s=60)
            if self.process.poll() is None:
                return
        raise AssertionError((self.folder / "log").read_text(errors="replace")[-3000:])

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        # Its containerd ends with it. Where the machine's init is slow to reap that, the next one waits for it in vain.
        (self.folder / "exec" / "containerd" / "containerd.pid").unlink(missing_ok=True)

    def stop(self) -> None:
        """Stop the daemon with SIGTERM, with the containers that still run."""
        if self.process is None:
            return
        for container in self.ask("ps", "--all", "--quiet").split():
            self.ask("rm", "--force", container)
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)
        self.process = None

    def ask(self, *words: str) -> str:
        """Run a `docker` command and return its output."""
        command = ["docker", "--host", self.host, *words]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout

    def pids(self) -> list[int]:
        """Return pid 1 of every running container, without asking the daemon."""
        results = {int(pid) for group in self.groups() for pid in _members(group)}
        return sorted(pid for pid in results if is_sandbox(pid))

    def groups(self) -> list[Path]:
        """Return the control groups of its containers."""
        # os.walk ignores directories that disappear meanwhile.
        return [Path(at, name) for parent in self._parents() for at, names, _ in os.walk(parent) for name in names]

    def living(self) -> list[str]:
        """Return the processes in the daemon's containers, without asking the daemon."""
        results = {int(pid) for group in self.groups() for pid in _members(group)}
        return [f"process {pid} in a container" for pid in sorted(results)]

    def remains(self) -> list[str]:
        """Return what an ended daemon left behind: a daemon that is killed while it starts a container forgets it."""
        results = [f"process {pid} of dockerd" for pid in _naming(str(self.folder))]
        # The daemon's bind mount of its own data stays until the machine shuts down.
        mounts = [line for line in mounts_below(self.folder) if line.split()[4] != str(self.folder / "data")]
        return results + [f"mount {line}" for line in mounts] + [f"control group {group}" for group in self.groups()]

    def clear(self) -> None:
        """Remove the daemon's files and everything that it left behind."""
        for pid in {*_naming(str(self.folder)), *self.pids()}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for line in reversed(mounts_below(self.folder)):
            subprocess.run(["umount", "--lazy", line.split()[4]], check=False)
        remove_tree(self.folder)
        wait_until(self._ungrouped, f"control groups of {self.parent} stay")

    def _ungrouped(self) -> bool:
        """Remove the control groups; False while the kernel keeps some for processes that were killed."""
        for group in sorted({*self.groups(), *self._parents()}, reverse=True):
            with contextlib.suppress(OSError):
                group.rmdir()
        return not self._parents()

    def _answers_or_ended(self) -> bool:
        assert self.process is not None
        return bool(self.process.poll() is not None or self.ask("version", "--format", "{{.Server.Version}}").strip())

    def _parents(self) -> list[Path]:
        return [place / self.parent for place in (_GROUPS, *_GROUPS.iterdir()) if (place / self.parent).is_dir()]


@contextlib.contextmanager
def dockerd() -> Iterator[Dockerd]:
    """Run a separate daemon on a real disk, and remove everything of it at the end."""
    daemon = Dockerd(Path(tempfile.mkdtemp(prefix="forkpoint-dockerd-", dir="/var/lib")))
    try:
        daemon.start()
        yield daemon
    finally:
        try:
            daemon.stop()
        finally:
            daemon.clear()


def _members(group: Path) -> list[str]:
    try:
        return (group / "cgroup.procs").read_text().split()
    except OSError:
        return []


def _naming(text: str) -> list[int]:
    """Return the processes whose command line contains a text."""
    results = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if text.encode() in (entry / "cmdline").read_bytes():
                    results.append(int(entry.name))
    return results
