"""Attacks from inside a container. Each is really tried; none may reach further than the container itself."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest

from sandboxes.container.sandbox import ContainerSandbox
from sandboxes.driver import Sandbox
from sandboxes.errors import NotFreezableError
from sandboxes.local.driver import LocalDriver
from sandboxes.spec import EnvironmentSpec
from tests.sandboxes.attack_list import COMMANDS as REFUSED_BY_LOCAL
from tests.sandboxes.box import SMALL, file, opened, run
from tests.sandboxes.docker import OnImage
from tests.sandboxes.security_contract import Inside, SecurityContract

# Docker's own profile and mounts answer otherwise here: harmless, or masked in another way.
OTHERWISE = {
    "chroot and back": "reads the environment of pid 1, which is what the image says",
    "set-user-id file gains rights": "likewise",
    "memory of pid 1 by process_vm_readv": "a shell in a loop",
    "chroot escape by descriptor": "ls -L /proc/1/root/ shows the container's own root",
    "pid 1's descriptors": "the container's own pid 1, which has nothing of the machine",
    "pid 1's environment": "what the image says, and nothing of the proxy's",
    "pid 1's memory": "a shell in a loop",
    "pid 1's maps": "likewise",
    "pid 1's working directory": "/",
    "ptrace of pid 1": "likewise",
    "/sys": "mounted read-only, its dangerous parts masked",
    "homes": "the image's own",
    "logs and spools": "the image's own",
    "run, tmp, mnt": "the image's own",
    "kernel memory": "masked by a null device, which reads as empty",
    "layers' paths": "Docker's, which nothing can hide in a mount that Docker has made",
    "more terminals than its share": "Docker's own mount, without a limit",
    "lifting a hard limit": "file size, see below",
}
REFUSED = {name: attack for name, attack in REFUSED_BY_LOCAL.items() if name not in OTHERWISE} | {
    "a mount in /sys": "mkdir /sys/fs/cgroup/x",
    "its control group": "echo 0 > /sys/fs/cgroup/memory/memory.limit_in_bytes 2>/dev/null || echo max > /sys/fs/cgroup/memory.max",  # noqa: E501
    "/proc/sys": "echo 1 > /proc/sys/vm/drop_caches",
    "what starts shells": "touch /dev/.box/anchor /dev/.box/x",
    "the file size limit": "ulimit -f unlimited",
    "a clone3 into namespaces": "python3 -c 'import ctypes,sys; a=(ctypes.c_uint64*11)(0x10000000,0,0,0,17); sys.exit(ctypes.CDLL(None).syscall(435, a, 88) == -1)'",  # noqa: E501
    "Docker's socket": "find / -name 'docker*' -type s | grep .",
    "the memory of others": "cat /proc/sysvipc/shm | tail -n +2 | grep .",
}


def in_container(folder: Path, test: Callable[[Sandbox], Awaitable[None]], **spec: object) -> None:
    async def go() -> None:
        async with opened(OnImage(folder)) as driver:
            await test(await driver.start(EnvironmentSpec.model_validate(spec)))

    asyncio.run(go())


class TestContainerSecurity(SecurityContract):
    refused = REFUSED
    unreachable = ("1.1.1.1/53", "172.17.0.1/22", "127.0.0.1/22")
    needs_root = False
    max_processes = 7

    @pytest.fixture
    def inside(self, data_dir: Path) -> Inside:
        return partial(in_container, data_dir)


def test_rights_are_few_and_can_not_grow(data_dir: Path) -> None:
    async def test(sandbox: Sandbox) -> None:
        answer = (await run(sandbox, "grep -E '^(Cap|NoNew|Seccomp:)' /proc/self/status")).out.splitlines()
        facts = dict(line.split(":\t") for line in answer)
        assert facts["NoNewPrivs"] == "1"
        assert facts["Seccomp"] == "2"
        allowed = sum(1 << capability for capability in (0, 1, 3, 4, 5, 6, 7, 8, 10, 18, 29, 31))
        assert all(int(facts[kind], 16) & ~allowed == 0 for kind in ("CapPrm", "CapEff", "CapBnd", "CapInh", "CapAmb"))

    in_container(data_dir, test)


def test_host_environment_and_files_stay_outside(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container sees no variables and no files of the host."""
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")

    async def test(sandbox: Sandbox) -> None:
        answer = await run(sandbox, "env; cat /proc/*/environ /proc/*/cmdline | tr '\\0' '\\n'; id; hostname")
        assert "hunter2" not in answer.out
        assert str(data_dir) not in answer.out
        assert os.uname().nodename not in answer.out.splitlines()
        # Of the machine's disk only the box is there, and it holds pipes and the texts of its own shells.
        result = await run(sandbox, "cat /proc/self/mountinfo | grep -v -e overlay -e proc -e sysfs -e cgroup")
        places = [line.split()[4] for line in result.out.splitlines()]
        assert set(places) <= {"/dev", "/dev/pts", "/dev/.box", "/sys/firmware"}
        assert (
            "hosts"
            not in (await run(sandbox, "cat /etc/resolv.conf; find / -xdev -newer /etc/passwd -path '*host*'")).err
        )
        assert (await run(sandbox, "cat /etc/hosts")).out == "127.0.0.1 localhost sandbox\n::1 localhost\n"

    in_container(data_dir, test)


def test_writable_paths_are_in_the_snapshot(data_dir: Path) -> None:
    """Every path that can be written belongs to the image's files: elsewhere no effect would show it."""

    async def test(sandbox: Sandbox) -> None:
        assert (
            await run(
                sandbox, "for d in /dev /dev/pts /dev/.box /sys /sys/fs/cgroup /proc; do touch $d/x && echo $d; done"
            )
        ).out == ""
        for path in ("/dev/shm/x", "/etc/hosts", "/etc/resolv.conf", "/etc/hostname", "/run/x"):
            assert "FILES" in str((await run(sandbox, f"echo x > {path}")).effect), path
        restored = (await sandbox.freeze()).payload
        assert restored

    in_container(data_dir, test)


def test_a_killed_group_takes_its_shell_along(data_dir: Path) -> None:
    """The session's variables come back from its dump."""

    async def test(sandbox: Sandbox) -> None:
        assert (await run(sandbox, "x=kept")).code == 0
        assert (await run(sandbox, "kill -9 0; sleep 1; echo no")).code == 137
        assert (await run(sandbox, "echo alive $x")).out == "alive kept\n"
        assert sandbox.alive

    in_container(data_dir, test)


@pytest.mark.parametrize("gone", ["kill -9 $PPID", "kill -9 $PPID; kill -9 $$"], ids=["the anchor", "and the shell"])
def test_a_killed_anchor_is_started_again(data_dir: Path, gone: str) -> None:
    async def test(sandbox: Sandbox) -> None:
        assert (await run(sandbox, "x=kept")).code == 0
        for number in range(3):
            await run(sandbox, gone)
            # Twice: the shell of the killed anchor may have begun before.
            for _ in range(2):
                assert (
                    await run(sandbox, f"echo {number} $x; ps -e -o comm | grep -c tini")
                ).out == f"{number} kept\n1\n"
        assert sandbox.alive

    in_container(data_dir, test)


def test_shared_memory_is_files_and_takes_no_memory(data_dir: Path) -> None:
    async def test(sandbox: Sandbox) -> None:
        assert (await run(sandbox, "head -c 20M /dev/zero > /dev/shm/x; echo alive")).out == "alive\n"

    in_container(data_dir, test, limits=SMALL)


def test_file_operations_stay_inside(data_dir: Path, tmp_path: Path) -> None:
    async def test(sandbox: Sandbox) -> None:
        outside = tmp_path / "outside"
        outside.write_text("host")
        links = f"mkdir -p {tmp_path}; ln -s {outside} /tmp/a; ln -s /proc/1/root{outside} /tmp/b; mkfifo /tmp/fifo"
        links += "; ln -s ../../../../../../etc/machine-id /tmp/d; ln -s /tmp/loop /tmp/loop; mkdir /tmp/dir; ln -s /dev/zero /tmp/z"  # noqa: E501
        await run(sandbox, links)
        assert (await file(sandbox, "get", "/tmp/a"))[0] == 404
        assert (await file(sandbox, "put", "/tmp/a", b"inside"))[0] == 201
        assert outside.read_text() == "host"
        assert (await file(sandbox, "get", "/tmp/b")) == (200, b"inside")
        for path in ("/tmp/d", "/tmp/loop", "/proc/self/environ", "/proc/self/root/etc/machine-id"):
            assert (await file(sandbox, "get", path))[0] in {404, 409}
        for path in ("/tmp/fifo", "/tmp/z", "/dev/.box/orders"):
            assert (await file(sandbox, "get", path))[0] == 409
            assert (await file(sandbox, "put", path, b"x"))[0] == 409
        for path in ("/dev/x", "/proc/sys/kernel/panic", "/proc/1/oom_score_adj", "/sys/x", "/dev/.box/anchor"):
            assert (await file(sandbox, "put", path, b"-1000"))[0] >= 400, path

    in_container(data_dir, test)


def test_links_do_not_lead_out_of_a_snapshot(data_dir: Path, tmp_path: Path) -> None:
    """Freezing and restoring walk the agent's files as root of the machine."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("host")

    async def go() -> None:
        async with opened(OnImage(data_dir)) as driver:
            spec = EnvironmentSpec()
            sandbox = await driver.start(spec)
            # A link to the machine's own path, under names that hold a directory in the image, and in the copy.
            await run(sandbox, f"rm -rf /opt; ln -s {outside} /opt; mkdir /tmp/d; ln -s {outside}/secret /tmp/d/s")
            await run(sandbox, f"rm -rf /home; ln -s ../../../../../../..{outside} /home; ln -s /tmp/d /tmp/e")
            first = await sandbox.freeze()
            await run(
                sandbox, "rm /opt; mkdir /opt; echo mine > /opt/secret; rm /tmp/e; mkdir /tmp/e; echo x > /tmp/e/s"
            )
            second = await sandbox.freeze()
            for frozen, says in ((first, ""), (second, "mine\nx\n")):
                restored = await driver.restore(spec, frozen)
                assert (await run(restored, "cat /opt/secret /tmp/e/s")).out == says
                assert (await file(restored, "get", "/tmp/d/s"))[0] == 404
            copies = driver_states(driver)
            assert not any(
                "host" in path.read_text() for path in copies.rglob("s*") if path.is_file() and not path.is_symlink()
            )

    asyncio.run(go())
    assert sorted(path.name for path in outside.iterdir()) == ["secret"]
    assert (outside / "secret").read_text() == "host"


def driver_states(driver: object) -> Path:
    assert isinstance(driver, LocalDriver)
    return driver.states.folder


def test_the_machine_survives_the_removal_of_everything(data_dir: Path) -> None:
    before = {name: len(os.listdir(name)) for name in ("/", "/etc", "/usr/bin", "/root")}  # noqa: PTH208

    async def go() -> None:
        async with opened(OnImage(data_dir)) as driver:
            sandbox = await driver.start(EnvironmentSpec())
            assert isinstance(sandbox, ContainerSandbox)
            answer = await run(sandbox, "cd /; rm -rf --no-preserve-root / 2>/dev/null; echo done", timeout_s=60)
            assert answer.out == "done\n"
            gone = await run(sandbox, "echo on")
            assert gone.code == 127
            frozen = await sandbox.freeze()
            assert (await run(await driver.start(EnvironmentSpec()), "echo fresh")).out == "fresh\n"
            assert frozen.state is not None

    asyncio.run(go())
    assert {name: len(os.listdir(name)) for name in before} == before  # noqa: PTH208


def test_deep_folders_end_the_call_only(data_dir: Path) -> None:
    """A command nests folders deeper than a tree is walked. It gets an error, the sandbox lives, and `rm` mends it."""

    async def go() -> None:
        async with opened(OnImage(data_dir)) as driver:
            sandbox = await driver.start(EnvironmentSpec())
            nest = "mkdir /tmp/top; cd /tmp/top; for i in {1..300}; do mkdir d; cd -P d 2>/dev/null || exit; done; :"
            answer = await run(sandbox, f"bash -c '{nest}'; cd /", timeout_s=30)
            assert (answer.code, answer.state, "nest directories" in answer.err) == (137, None, True)
            with pytest.raises(NotFreezableError):
                await sandbox.freeze()
            answer = await run(sandbox, "rm -rf /tmp/top; truncate -s 3G /tmp/sparse; echo ok", timeout_s=30)
            assert (answer.code, answer.out) == (0, "ok\n")
            assert (await sandbox.freeze()).size_bytes < 1 << 20

    asyncio.run(go())
