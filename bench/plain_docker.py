"""A task's calls in a plain container, each by `docker exec`, for `bench.public_tasks`."""

import io
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import docker
from docker.errors import DockerException

from bench.task_folders import TaskFolder

if TYPE_CHECKING:
    from docker.models.containers import Container

_IMAGE = "forkpoint-bench-host:1"
"""An image without files of its own: this machine's system is mounted into it, read-only."""
_MOUNTED = ("/usr", "/etc")
_LINKS = ("bin", "lib", "lib32", "lib64", "libx32", "sbin")
_EMPTY = ("dev", "etc", "opt", "proc", "root", "run", "sys", "tmp", "usr", "var", "var/tmp", "work")


def docker_client() -> "docker.DockerClient | None":
    """Return a client of the Docker daemon; None if none answers."""
    with suppress(DockerException):
        client = docker.from_env()
        client.ping()
        return client
    return None


class PlainContainer:
    """A container in which each call is a process of its own."""

    def __init__(self, container: "Container", task: TaskFolder) -> None:
        self._container, self._task = container, task

    def call(self, command: str) -> tuple[int, str]:
        """Run a command; return its exit code and its output."""
        done: Any = self._container.exec_run(["bash", "-c", command], workdir=self._task.workdir, demux=True)
        return done.exit_code, (done.output[0] or b"").decode(errors="replace")

    def write(self, path: str, text: str) -> None:
        """Write a file."""
        packed = _tar({path.lstrip("/"): text})
        self._container.put_archive("/", packed)


@contextmanager
def plain_container(client: "docker.DockerClient", task: TaskFolder) -> Iterator[PlainContainer]:
    """Run a container in the state in which a task begins."""
    image, volumes = str(task.spec.get("image") or _IMAGE), []
    if task.on_host:
        if not client.images.list(_IMAGE):
            client.api.import_image_from_data(_system(), repository=_IMAGE.partition(":")[0], tag="1")
        volumes = [f"{path}:{path}:ro" for path in _MOUNTED]
    # Bash reaps what the calls leave behind.
    container = client.containers.create(
        image, ["bash", "-c", "sleep infinity & wait"], entrypoint=[], network_mode="none", volumes=volumes,
        nano_cpus=int(1e9 * (task.spec.get("limits") or {}).get("cpus", 0)) or None,
        environment=task.spec.get("env") or {},
    )  # fmt: skip
    try:
        container.start()
        plain = PlainContainer(container, task)
        container.exec_run(["mkdir", "-p", task.workdir])
        for path, text in (task.spec.get("files") or {}).items():
            plain.write(path, text)
        for command in task.spec.get("setup") or ():
            code, output = plain.call(command)
            assert code == 0, f"{task.name}: {command!r} ended with {code}: {output}"
        yield plain
    finally:
        container.remove(force=True)


def _tar(files: dict[str, str]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    return packed.getvalue()


def _system() -> bytes:
    """Return a root directory with empty places for this machine's own system."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in _EMPTY:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name.endswith("tmp") else 0o755
            archive.addfile(entry)
        for name in _LINKS:
            if Path("/", name).is_symlink():
                entry = tarfile.TarInfo(name)
                entry.type, entry.linkname = tarfile.SYMTYPE, str(Path("/", name).readlink())
                archive.addfile(entry)
    return packed.getvalue()
