"""A state becomes an image, and a sandbox of the image has the state's files."""

import asyncio
import re
import socket
import subprocess
import tarfile
from pathlib import Path

import pytest

from sandboxes.errors import SandboxError, StateGoneError
from sandboxes.images.archives import ImageArchive
from sandboxes.images.config import ImageConfig
from sandboxes.local.driver import LocalDriver
from sandboxes.local.sandbox import LocalSandbox
from sandboxes.portability import NoImageError
from sandboxes.spec import EnvironmentSpec
from tests.machine import require_criu
from tests.sandboxes.box import driven, local_driver, needs_root, run
from tests.sandboxes.docker import require_docker
from tests.sandboxes.image_archives import PATH, bash_image, configured, root_tar
from tests.sandboxes.images.image_files import tree
from tests.sandboxes.images.test_archives import unpacked
from tests.sandboxes.local.test_image_services import spec as with_services
from tests.sandboxes.local.test_image_states import LISTING

pytestmark = needs_root

CONFIG = {
    "Env": [f"PATH={PATH}", "A=image", "B=image"], "WorkingDir": "/opt", "User": "root", "Cmd": ["/bin/sh"],
    "Entrypoint": ["/bin/bash"], "Labels": {"a": "b"}, "ExposedPorts": {"80/tcp": {}},
}  # fmt: skip
COMMANDS = (
    "mkdir -p d/e; echo b > d/e/f; chmod 4750 d/e/f; chown 7:8 d d/e/f; ln -s /nowhere/../x s; mkfifo p",
    "rm -rf /home /etc/group; mkdir /home; echo new > /home/x; chmod 1770 /home; touch -d 2001-02-03 /home/x",
    "rm -rf /usr/bin/sed; mkdir /usr/bin/sed; echo 1 > /usr/bin/sed/1",
    'python3 -c \'import os; os.setxattr("/home/x", "user.note", b"n"); open("/srv", "w").truncate(5 << 20)\'',
    "cd /tmp; C=lost",
)


def lines(text: str) -> list[str]:
    """Return the sorted lines of a listing, with whole seconds, which is what images have."""
    return sorted(re.sub(r"(\d{9,})\.\d+", r"\1", text).splitlines())


async def state(driver: LocalDriver, spec: EnvironmentSpec, *commands: str) -> LocalSandbox:
    sandbox = await driver.start(spec)
    for command in commands:
        assert (await run(sandbox, command)).code == 0, command
    return sandbox


def assert_clean(data_dir: Path, target: Path) -> None:
    """The driver has left nothing beside the file that was asked for."""
    assert {path.name for path in target.parent.iterdir()} <= {target.name}
    assert not list(data_dir.glob("tmp*"))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "image.tar"


def test_sandbox_of_the_image_has_the_files_of_the_state(data_dir: Path, target: Path) -> None:
    """Also those of the set-up, with modes, owners, links, times and attributes. The configuration is the spec's."""
    spec = EnvironmentSpec(
        image=configured(bash_image(), CONFIG),
        setup=("echo seed > /opt/seed; ln /opt/seed /opt/twin",),
        env={"B": "spec"},
        hostname="box",
    )

    async def test(driver: LocalDriver) -> None:
        sandbox = await state(driver, spec, *COMMANDS)
        look = f"{LISTING}; cat /home/x /opt/seed; env | sort | grep '^[AB]='"
        live = await run(sandbox, look)
        made = await driver.image(spec, await sandbox.freeze(), "made:1", target)
        await sandbox.close()
        with ImageArchive(target) as archive:
            assert archive.id == made
            environment = {"PATH": PATH, "A": "image", "B": "spec"}
            assert archive.config == ImageConfig.parse({**CONFIG, "Env": [f"{n}={v}" for n, v in environment.items()]})
        root = unpacked(target, target.parent / "tree")
        assert not [name for name in (".services", ".dockerenv", "proc", "dev", "sys") if (root / name).exists()]
        again = await driver.start(EnvironmentSpec(image=str(target), hostname="box"))
        assert (await run(again, "pwd; echo $C")).out == "/opt\n\n"
        # The working directory is another one: the state's last command has left it.
        assert lines((await run(again, f"cd /tmp; {look}")).out) == lines(live.out)
        names = "import os; print(os.getxattr('/home/x', 'user.note'))"
        assert (await run(again, f'python3 -c "{names}"')).out == "b'n'\n"

    driven(LocalDriver(data_dir), test)


def test_base_without_an_image_becomes_one(data_dir: Path, tmp_path: Path) -> None:
    """A tarball and a directory, also at their root states, which have no layer of their own."""
    (folder := tmp_path / "out").mkdir()
    (tmp_path / "root.tar").write_bytes(root_tar("bash", ["cat", "ls"]))
    subprocess.run(["mkdir", tmp_path / "root"], check=True)
    subprocess.run(["tar", "--extract", "--file", tmp_path / "root.tar", "--directory", tmp_path / "root"], check=True)

    async def test(driver: LocalDriver) -> None:
        for base in ("root.tar", "root"):
            spec = EnvironmentSpec(base=str(tmp_path / base), env={"A": "1"}, workdir="/")
            sandbox = await driver.start(spec)
            target = folder / f"{base}-image.tar"
            first = await driver.image(spec, await sandbox.freeze(), "", target)
            with ImageArchive(target) as archive:
                assert archive.config == ImageConfig(environment={"A": "1"}, workdir="/")
            kept, unpacked_again = tree(tmp_path / "root"), unpacked(target, folder / base)
            assert tree(unpacked_again).keys() == kept.keys()
            assert (await run(sandbox, "echo 1 > /root/new")).code == 0
            assert await driver.image(spec, await sandbox.freeze(), "", folder / f"{base}-later.tar") != first
            await sandbox.close()

    driven(LocalDriver(data_dir), test)


def test_services_are_no_part_of_the_image(data_dir: Path, target: Path) -> None:
    """They are live processes, of which an image has nothing but files."""
    require_criu()
    spec = with_services()

    async def test(driver: LocalDriver) -> None:
        sandbox = await driver.start(spec)
        assert (await run(sandbox, "echo 1 > /.services/store/1")).code == 0
        frozen = await sandbox.freeze()
        assert frozen.kind == "processes"
        await sandbox.close()
        await driver.image(spec, frozen, "", target)

    driven(local_driver(data_dir), test)
    with tarfile.open(target) as archive:
        layer = max(archive.getmembers(), key=lambda member: member.size)
        content = archive.extractfile(layer)
        assert content is not None
        with tarfile.open(fileobj=content) as files:
            names = files.getnames()
    assert "client.py" in names
    assert not [name for name in names if ".services" in name]


def test_hostile_files_reach_nothing_outside(data_dir: Path, target: Path) -> None:
    """Links are links, and sockets and marks of overlayfs stay behind. What no image can hold is refused."""
    hostile = (
        "ln -s / up; ln -s /proc/self/root/etc/shadow shadow; mkfifo fifo; mkdir -p o/in; echo kept > o/in/f; "
        'python3 -c \'import os, socket; socket.socket(socket.AF_UNIX).bind("sock"); '
        'os.setxattr("o", "user.overlay.opaque", b"y"); os.setxattr("o", "user.overlay.metacopy", b"")\''
    )
    spec = EnvironmentSpec(image=bash_image(), workdir="/root")

    async def test(driver: LocalDriver) -> None:
        sandbox = await driver.start(spec)
        # The marks may be refused; then there are none.
        await run(sandbox, hostile)
        await driver.image(spec, await sandbox.freeze(), "", target)
        root = unpacked(target, target.parent / "tree") / "root"
        assert {path.name for path in root.iterdir()} >= {"up", "shadow", "fifo", "o"}
        assert (root / "up").is_symlink()
        assert (root / "shadow").readlink() == Path("/proc/self/root/etc/shadow")
        assert not (root / "sock").exists()
        assert (root / "o/in/f").read_text() == "kept\n"
        for number, (command, says) in enumerate(
            [
                ("touch .wh.x", "whiteout"),
                ('rm .wh.x; python3 -c \'open("holes", "w").truncate(3 << 30)\'', "holes"),
            ]
        ):
            assert (await run(sandbox, command)).code == 0
            with pytest.raises(NoImageError, match=says):
                await driver.image(spec, await sandbox.freeze(), "", target.with_name(f"{number}.tar"))
            assert not target.with_name(f"{number}.tar").exists()
        await sandbox.close()

    driven(LocalDriver(data_dir), test)


def test_machine_itself_is_refused(data_dir: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so is everything, if the proxy has no rights over files."""

    async def test(driver: LocalDriver) -> None:
        sandbox = await driver.start(EnvironmentSpec())
        frozen = await sandbox.freeze()
        await sandbox.close()
        with pytest.raises(NoImageError, match="this machine itself"):
            await driver.image(EnvironmentSpec(), frozen, "", target)
        monkeypatch.setattr("os.geteuid", lambda: 1000)
        with pytest.raises(NoImageError, match="does not see the owners"):
            await driver.image(EnvironmentSpec(image=bash_image()), frozen, "", target)
        monkeypatch.undo()

    driven(LocalDriver(data_dir), test)
    assert_clean(data_dir, target)


def test_lost_state_and_full_disk_are_named(data_dir: Path, target: Path) -> None:
    spec = EnvironmentSpec(image=bash_image())

    async def test(driver: LocalDriver) -> None:
        sandbox = await state(driver, spec, "echo 1 > /root/a")
        frozen = await sandbox.freeze()
        with pytest.raises(SandboxError, match="No such file"):
            await driver.image(spec, frozen, "", target.parent / "missing" / "image.tar")
        await sandbox.close()
        await driver.collect([])
        with pytest.raises(StateGoneError, match="are gone"):
            await driver.image(spec, frozen, "", target)

    driven(LocalDriver(data_dir), test)
    assert_clean(data_dir, target)


def test_cancelled_image_leaves_nothing(data_dir: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process ends, and the next image is made."""
    spec = EnvironmentSpec(image=bash_image())

    async def test(driver: LocalDriver) -> None:
        sandbox = await driver.start(spec)
        frozen = await sandbox.freeze()
        await sandbox.close()
        with socket.create_server(("127.0.0.1", 0)) as daemon:
            daemon.setblocking(False)
            monkeypatch.setenv("DOCKER_HOST", f"tcp://127.0.0.1:{daemon.getsockname()[1]}")
            making = asyncio.create_task(driver.image(spec, frozen, "a:1", None))
            end, _ = await asyncio.get_running_loop().sock_accept(daemon)
            with end:
                making.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await making
        await driver.image(spec, frozen, "", target)

    driven(LocalDriver(data_dir), test)
    assert_clean(data_dir, target)


def test_daemon_gets_the_image(data_dir: Path) -> None:
    """Under the name, with a tag if it has none; a sandbox of it has the state's files."""
    require_docker()
    spec = EnvironmentSpec(image=bash_image(), env={"A": "1"})
    name = "forkpoint-test-state"

    async def test(driver: LocalDriver) -> None:
        sandbox = await state(driver, spec, "echo made > /root/made")
        made = await driver.image(spec, await sandbox.freeze(), name, None)
        await sandbox.close()
        about = await driver.images.config(f"{name}:latest")
        assert about["Id"] == made
        assert "A=1" in about["Env"]
        again = await driver.start(EnvironmentSpec(image=name))
        assert (await run(again, "cat /root/made; echo $A")).out == "made\n1\n"
        await again.close()
        for _ in range(2):
            driver.image_store.collect(set())

    try:
        driven(LocalDriver(data_dir), test)
    finally:
        subprocess.run(["docker", "rmi", "--force", name], capture_output=True, check=False)
