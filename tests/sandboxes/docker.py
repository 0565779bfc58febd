"""Docker for tests: images made without a registry, and drivers that use them for specs that name none."""

import asyncio
import contextlib
import functools
import io
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from sandboxes.container.daemon import Daemon
from sandboxes.container.driver import ContainerDriver
from sandboxes.container.orphans import running
from sandboxes.container.sandbox import ContainerSandbox
from sandboxes.driver import FrozenState
from sandboxes.errors import SandboxError
from sandboxes.spec import EnvironmentSpec
from snapshots.criu.checkpoints import CriuCheckpointer
from tests.sandboxes.box import opened

BASH_IMAGE, SH_IMAGE, BUSYBOX_IMAGE, AGENT_IMAGE = (
    f"forkpoint-test-{kind}:9" for kind in ("bash", "sh", "busybox", "agent")
)
COMMANDS = [
    "cat",
    "chmod",
    "chown",
    "chroot",
    "cp",
    "cut",
    "date",
    "dd",
    "df",
    "dmesg",
    "env",
    "find",
    "grep",
    "head",
    "hostname",
    "id",
    "insmod",
    "kill",
    "ln",
    "ls",
    "mkdir",
    "mkfifo",
    "mknod",
    "mount",
    "mv",
    "ps",
    "python3",
    "readlink",
    "rm",
    "rmdir",
    "sed",
    "seq",
    "setpriv",
    "setsid",
    "sleep",
    "sort",
    "stat",
    "stty",
    "sync",
    "tail",
    "tee",
    "test",
    "touch",
    "tr",
    "true",
    "umount",
    "unshare",
    "wc",
]
AGENT_COMMANDS = (
    "awk", "basename", "diff", "du", "expr", "getfacl", "getfattr", "git", "ipcmk", "ipcs", "lsattr", "make",
    "md5sum", "mktemp", "nohup", "pgrep", "pkill", "prlimit", "pwd", "realpath", "renice", "setfacl", "setfattr", "tar",
    "taskset", "timeout", "truncate", "uniq", "xargs",
)  # fmt: skip
"""What else agents use. Programs that this machine lacks are left out."""
_PATHS = ("usr/bin", "usr/sbin", "bin", "sbin")


def require_docker() -> None:
    """Skip the test, with the reason, where containers cannot be run; in this project's CI they must."""
    if missing := _missing():
        assert not os.environ.get("FORKPOINT_NEEDS_DOCKER"), missing
        pytest.skip(f"containers cannot be run here: {missing}")


@functools.cache
def _missing() -> str:
    if os.geteuid() != 0:
        return "needs root, to look into containers from outside"
    daemon = Daemon()
    try:
        answer = daemon.check()
    except SandboxError as error:
        return str(error)
    finally:
        daemon.close()
    if answer.get("Driver") != "overlay2":
        return f"Docker's storage driver is {answer.get('Driver')}, not overlay2"
    make_bash_image()
    _make_image(SH_IMAGE, "dash", [name for name in COMMANDS if name != "python3"])
    if shutil.which("busybox"):
        _make_image(BUSYBOX_IMAGE, "", [])
    return ""


def make_bash_image() -> None:
    """Import the image that has bash and Python into the daemon that DOCKER_HOST names."""
    _make_image(BASH_IMAGE, "bash", COMMANDS)


def make_agent_image() -> None:
    """Import the image that also has git, make and what else agents use."""
    _make_image(AGENT_IMAGE, "bash", [*COMMANDS, *AGENT_COMMANDS])


def derive(name: str, changes: list[str]) -> str:
    """Make an image out of the one that has bash, with changes in a Dockerfile's words; return its name."""
    options = [word for change in changes for word in ("--change", change)]
    made = subprocess.run(["docker", "create", BASH_IMAGE, "/bin/true"], capture_output=True, text=True, check=True)
    container = made.stdout.strip()
    subprocess.run(["docker", "commit", *options, container, name], capture_output=True, check=True)
    subprocess.run(["docker", "rm", container], capture_output=True, check=True)
    return name


def _make_image(name: str, shell: str, commands: list[str]) -> None:
    """Import an image of this machine's own programs and the libraries they need. 1 s; kept by its name."""
    if subprocess.run(["docker", "image", "inspect", name], capture_output=True, check=False).returncode == 0:
        return
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        _folders(tar)
        if shell:
            _programs(tar, shell, commands)
        else:
            _busybox(tar)
    subprocess.run(["docker", "import", "-", name], input=archive.getvalue(), capture_output=True, check=True)


def _folders(tar: tarfile.TarFile) -> None:
    for folder in ("usr", "usr/bin", "etc", "root", "tmp", "run", "var", "home", "opt", "mnt"):
        entry = tarfile.TarInfo(folder)
        entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
        tar.addfile(entry)
    _link(tar, "bin", "usr/bin")
    _text(tar, "etc/passwd", "root:x:0:0:root:/root:/bin/sh\ndaemon:x:1:1::/usr/sbin:/bin/sh\n")
    _text(tar, "etc/group", "root:x:0:\n")


def _programs(tar: tarfile.TarFile, shell: str, commands: list[str]) -> None:
    files: set[str] = set()
    for name in (shell, *commands):
        result = shutil.which(name, path=":".join(f"/{path}" for path in _PATHS))
        if result is None:
            continue
        real = str(Path(result).resolve())
        tar.add(real, f"usr/bin/{name}")
        files |= _libraries(real)
        if name == "python3":
            files |= _python(real)
    if shell == "bash":
        _link(tar, "usr/bin/sh", "bash")
    else:
        _link(tar, "usr/bin/sh", shell)
    for file in sorted(files):
        tar.add(str(Path(file).resolve()), file.lstrip("/"))


def _libraries(program: str) -> set[str]:
    output = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
    return set(re.findall(r"(/\S+) \(0x", output))


def _python(real: str) -> set[str]:
    program = "import sys, ctypes, socket, json, sqlite3, py_compile, random, base64, hashlib, socketserver, typing, array, fcntl, mmap, resource, select, signal, struct, termios, tty; print('\\n'.join(m.__file__ for m in sys.modules.values() if getattr(m, '__file__', None)))"  # noqa: E501
    output = subprocess.run([real, "-I", "-S", "-c", program], capture_output=True, text=True, check=True).stdout
    folder = Path(output.splitlines()[0]).parent
    modules = {line for line in output.splitlines() if line.startswith("/")}
    modules |= {str(path) for path in (folder / "encodings").glob("*.py")}
    natives = {library for module in modules if module.endswith(".so") for library in _libraries(module)}
    return modules | natives


def _busybox(tar: tarfile.TarFile) -> None:
    tar.add(str(Path(shutil.which("busybox") or "").resolve()), "usr/bin/busybox")
    output = subprocess.run(["busybox", "--list"], capture_output=True, text=True, check=True).stdout
    for name in output.split():
        if name != "busybox":
            _link(tar, f"usr/bin/{name}", "busybox")


def _link(tar: tarfile.TarFile, name: str, target: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = tarfile.SYMTYPE, target
    tar.addfile(entry)


def _text(tar: tarfile.TarFile, name: str, text: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(text)
    tar.addfile(entry, io.BytesIO(text.encode()))


def _checkpointer(data_dir: Path, *, wanted: bool) -> CriuCheckpointer | None:
    return CriuCheckpointer(data_dir, outer_session=True) if wanted else None


def container_driver(data_dir: Path, *, spares: int = 1, checkpoints: bool = True) -> ContainerDriver:
    """Return a container driver; with checkpoints, live processes are frozen where CRIU works."""
    return ContainerDriver(data_dir, _checkpointer(data_dir, wanted=checkpoints), spares=spares)


class OnImage(ContainerDriver):
    """A container driver that gives specs without an image one."""

    def __init__(
        self,
        data_dir: Path,
        image: str = BASH_IMAGE,
        *,
        spares: int = 1,
        checkpoints: bool = False,
        docker_starts: bool = False,
    ) -> None:
        super().__init__(
            data_dir, _checkpointer(data_dir, wanted=checkpoints), spares=spares, docker_starts=docker_starts
        )
        self.image = image

    def _named(self, spec: EnvironmentSpec) -> EnvironmentSpec:
        return spec if spec.image else spec.model_copy(update={"driver": "container", "image": self.image})

    async def identity(self, spec: EnvironmentSpec) -> str:
        return await super().identity(self._named(spec))

    async def start(self, spec: EnvironmentSpec) -> ContainerSandbox:
        return await super().start(self._named(spec))

    async def restore(self, spec: EnvironmentSpec, frozen: FrozenState) -> ContainerSandbox:
        return await super().restore(self._named(spec), frozen)


def containers(data_dir: Path) -> list[str]:
    """Return the containers that are left of a data directory's instances: those that Docker lists, and the others."""
    daemon = Daemon()
    try:
        listed = [name for name, labels in daemon.labelled() if labels.get("forkpoint.data") == str(data_dir.resolve())]
    finally:
        daemon.close()
    return listed + [name for name in first_processes(data_dir) if name not in listed]


def first_processes(data_dir: Path) -> dict[str, int]:
    """Return pid 1 of the containers of a data directory that run, by what the driver calls them."""
    found = {}
    for _, pid, _ in running(data_dir.resolve() / "boxes"):
        with contextlib.suppress(OSError):
            # The last part of the path is the container's name, also in systemd's form.
            group = Path(f"/proc/{pid}/cgroup").read_text().splitlines()[0].rpartition("/")[2]
            found[group.removeprefix("docker-").removesuffix(".scope")] = pid
    return found


def remove_images(data_dir: Path) -> None:
    """Remove the images of root states that a test's instance has made."""
    daemon = Daemon()
    try:
        for image, labels in daemon.images():
            if labels.get("forkpoint.data") == str(data_dir.resolve()):
                daemon.forget_image(image)
    finally:
        daemon.close()


def driven(driver: ContainerDriver, test: Callable[[ContainerDriver], Awaitable[None]]) -> None:
    """Run a test with an opened driver."""

    async def go() -> None:
        async with opened(driver):
            await test(driver)

    asyncio.run(go())
