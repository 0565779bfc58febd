"""What a proxy that is not root can have its launcher do: each attack is one that a proxy that was taken over tries."""

import os
import signal
import socket
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from sandboxes.errors import SandboxError
from sandboxes.ipc.channel import Channel, PeerFailedError
from sandboxes.ipc.fork_server import ForkServer
from sandboxes.ipc.launch_messages import (
    ForkSandbox,
    LayerStack,
    MountLayers,
    RunCriu,
    ServiceMounts,
    SetLastPid,
    SwitchLayers,
    TryLinks,
)
from sandboxes.linux import cgroups
from sandboxes.linux import syscalls as kernel
from sandboxes.linux.descriptors import Opened
from sandboxes.rights.grounds import FOR, Grounds
from tests.sandboxes.box import needs_root
from tests.sandboxes.ipc.test_fork_server import served

pytestmark = needs_root
UID = 1
NO_SERVICES = ServiceMounts([], [])


@pytest.fixture
def folder(data_dir: Path, request: pytest.FixtureRequest) -> Path:
    """The directory of the proxy, with an empty stack in it."""
    made = data_dir / f"grounds-{abs(hash(request.node.name))}"
    for name in ("host", "upper", "work", "lower", "base"):
        (made / name).mkdir(parents=True)
    os.chown(made, UID, UID)
    return made


@pytest.fixture
def outside(data_dir: Path, folder: Path) -> Path:
    """A directory of root's beside it."""
    made = data_dir / f"{folder.name}-outside"
    made.mkdir()
    return made


@contextmanager
def group_of(uid: int) -> Iterator[Path]:
    """Make a control group that the machine has delegated to a user."""
    groups = cgroups.Cgroups(f"forkpoint-test-{os.getpid()}")
    groups.open()
    assert groups.parents, groups.problem
    made = groups.parents[cgroups.PIDS] / "own"
    made.mkdir()
    try:
        os.chown(made / "cgroup.procs", uid, uid)
        yield made / "cgroup.procs"
    finally:
        groups.close()


def stack(folder: Path, upper: str, work: str | None = None) -> LayerStack:
    return LayerStack([f"{folder}/base", f"{folder}/lower"], upper, f"{folder}/work" if work is None else work)


def beside(folder: Path, test: Callable[[ForkServer], Awaitable[None]]) -> None:
    """Run a launcher for a proxy of `UID`."""
    arguments = [f"{folder}/host", FOR, str(UID), str(folder)]
    served(test, ForkServer("the launcher", "sandboxes.local.launcher", arguments))


async def answered(server: ForkServer, order: "MountLayers | SwitchLayers", fds: list[int]) -> str:
    """Return the error that the launcher tells a sandbox's pid 1."""
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    try:
        await server.post(order, [*fds[:1], theirs.fileno(), *fds[1:]] if len(fds) > 1 else [theirs.fileno()])
        theirs.close()
        with pytest.raises(PeerFailedError) as failure:
            await channel.next()
        return str(failure.value)
    finally:
        channel.close()


def test_nothing_outside_is_written_to(folder: Path, outside: Path) -> None:
    """An upper is a directory that root in a sandbox writes to."""
    (folder / "link").symlink_to(outside)
    (folder / "in").mkdir()
    (folder / "in" / "link").symlink_to(outside.parent)
    ways = [
        str(outside), f"{folder}/../{outside.name}", f"{folder}/link", f"{folder}/in/link/{outside.name}",
        f"{folder}/in/../../{outside.name}", f"{folder}-outside", f"/proc/self/root{outside}",
        f"{folder}/in/./../link", "",
    ]  # fmt: skip

    async def test(server: ForkServer) -> None:
        for way in ways:
            for made in (stack(folder, way), stack(folder, f"{folder}/upper", way)):
                with pytest.raises(SandboxError, match="refused"):
                    await server.ask(TryLinks(made))
                assert await answered(server, MountLayers(made), [])
        # The launcher goes on, and does what it is for.
        with suppress(SandboxError):
            await server.ask(TryLinks(stack(folder, f"{folder}/upper")))
        assert server.has_died is False

    beside(folder, test)
    assert not any(outside.iterdir())


def test_no_file_but_of_its_own_control_groups_is_joined(folder: Path, outside: Path) -> None:
    """Pid 1 writes to these files as root."""
    secret = outside / "secret"
    secret.write_text("secret")
    (folder / "mine").write_text("mine")
    os.chown(folder / "mine", UID, UID)

    async def test(server: ForkServer) -> None:
        async def fork(path: str) -> None:
            pairs = [socket.socketpair() for _ in range(2)]
            try:
                await server.ask(ForkSandbox([path], ""), [theirs.fileno() for _, theirs in pairs])
            finally:
                for pair in pairs:
                    for end in pair:
                        end.close()

        with group_of(0) as roots:
            for path in (secret, folder / "mine", Path("/dev/null"), Path("/proc/self/oom_score_adj"), roots):
                with pytest.raises(SandboxError, match="does not touch"):
                    await fork(str(path))
        with group_of(UID) as own:
            await fork(str(own))

    beside(folder, test)
    assert (secret.read_text(), (folder / "mine").read_text()) == ("secret", "mine")


@contextmanager
def other_process() -> Iterator[int]:
    """Run a process that is no sandbox, and yield its pid.

    It has namespaces of its own. If the launcher did enter them, no mount of this machine would change.
    """
    command = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child"]
    with subprocess.Popen([*command, "sh", "-c", "echo up; exec cat"], stdin=-1, stdout=-1) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
        finally:
            process.kill()


def test_only_sandboxes_are_entered(folder: Path) -> None:
    """In namespaces of the machine's the launcher would be root of it."""
    order = SwitchLayers(stack(folder, f"{folder}/upper"), [], NO_SERVICES, 0, same_below=False)

    async def test(server: ForkServer) -> None:
        with other_process() as pid, Opened(os.pidfd_open(pid)) as process:
            ways = [f"/proc/{pid}/ns/mnt", f"/proc/{server.pid}/ns/mnt", "/dev/null"]
            namespaces = [os.open(way, os.O_RDONLY) for way in ways]
            for namespace in namespaces:
                assert "does not touch" in await answered(server, order, [namespace, namespaces[-1]])
            for fd in namespaces:
                os.close(fd)
            assert (await server.ask(SetLastPid(1000), [process])).fds == []

    beside(folder, test)


def test_criu_is_not_driven(folder: Path) -> None:
    """CRIU runs with all rights, and makes processes with the rights that their images name."""

    async def test(server: ForkServer) -> None:
        null = os.open("/dev/null", os.O_RDONLY)
        with (
            other_process() as pid,
            Opened(os.pidfd_open(pid)) as process,
            pytest.raises(SandboxError, match="runs no CRIU"),
        ):
            await server.ask(RunCriu(["criu"]), [process, null, null, null, null])
        os.close(null)

    beside(folder, test)


def test_devices_of_layers_cannot_be_opened(folder: Path) -> None:
    """A base may be any directory, /dev as well."""
    os.mknod(folder / "base" / "null", 0o20666, os.makedev(1, 3))

    def opened() -> None:
        kernel.mount_without_devices()
        overlay = kernel.overlay([f"{folder}/base", f"{folder}/lower"], None, None)
        os.open("null", os.O_RDONLY, dir_fd=overlay)

    assert _error_in_child(opened) == "PermissionError"


def _error_in_child(function: Callable[[], None]) -> str:
    """Return the name of the error that a function raises in a fork of this process."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - its name is the result
            os.write(writing, type(error).__name__.encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as result:
        name = result.read()
    os.waitpid(pid, 0)
    return name


def test_child_is_a_sandbox_when_it_has_left(folder: Path) -> None:
    """Until then its namespaces are the launcher's own; and when it has ended, its number may be another process's."""
    grounds = Grounds(UID, str(folder))
    leave, left = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(leave[0], 1)
        kernel.unshare(kernel.CLONE_NEWNS)
        os.write(left[1], b"x")
        signal.pause()
    grounds.add(pid)
    try:
        with Opened(os.pidfd_open(pid)) as process:
            with pytest.raises(PermissionError), Opened(os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY)) as mounts:
                grounds.require_mounts(mounts)
            with pytest.raises(PermissionError):
                grounds.require_sandbox(process)
            os.write(leave[1], b"x")
            os.read(left[0], 1)
            with Opened(os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY)) as mounts:
                grounds.require_mounts(mounts)
                grounds.require_sandbox(process)
                os.kill(pid, signal.SIGKILL)
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
                with pytest.raises(PermissionError):
                    grounds.require_mounts(mounts)
                with pytest.raises(PermissionError):
                    grounds.require_sandbox(process)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        grounds.close()
        for fd in (*leave, *left):
            os.close(fd)


def test_number_of_an_ended_child_is_nobody(folder: Path) -> None:
    """The kernel gives it to another process, perhaps one with other namespaces."""
    grounds = Grounds(UID, str(folder))
    ended = os.fork()
    if ended == 0:
        os._exit(0)
    grounds.add(ended)
    with subprocess.Popen(["unshare", "--mount", "sh", "-c", "echo up; exec cat"], stdin=-1, stdout=-1) as other:
        assert other.stdout is not None
        other.stdout.readline()
        # What the launcher would have if the number had come again.
        os.waitid(os.P_PID, ended, os.WEXITED | os.WNOWAIT)
        grounds._children = {other.pid: grounds._children[ended]}
        with pytest.raises(PermissionError), Opened(os.open(f"/proc/{other.pid}/ns/mnt", os.O_RDONLY)) as mounts:
            grounds.require_mounts(mounts)
        other.kill()
    os.waitpid(ended, 0)
    grounds.close()


def test_directory_stays_the_one_that_was_checked(folder: Path, outside: Path) -> None:
    """A link in its place, put there after the check, leads nowhere."""
    grounds = Grounds(UID, str(folder))
    with grounds.stack(stack(folder, f"{folder}/upper")) as checked:
        (folder / "upper").rename(folder / "moved")
        (folder / "upper").symlink_to(outside)
        (Path(checked.upper) / "written").touch()
    assert (folder / "moved" / "written").exists()
    assert not any(outside.iterdir())
    grounds.close()
