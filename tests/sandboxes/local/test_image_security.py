"""Attacks from inside a sandbox of an image. Each is really tried; none may reach further than the sandbox itself."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest

from sandboxes.driver import Sandbox
from sandboxes.errors import NotFreezableError
from sandboxes.spec import EnvironmentSpec
from tests.sandboxes.attack_list import COMMANDS as REFUSED_BY_LOCAL
from tests.sandboxes.box import SMALL, file, opened, run
from tests.sandboxes.docker import OnImage
from tests.sandboxes.security_contract import Inside, SecurityContract

# The image has no homes, logs and machine's files of its own to hide.
OTHERWISE = {"homes", "logs and spools", "run, tmp, mnt"}
REFUSED = {name: attack for name, attack in REFUSED_BY_LOCAL.items() if name not in OTHERWISE} | {
    "a mount in /sys": "mkdir /sys/fs/cgroup/x",
    "/proc/sys": "echo 1 > /proc/sys/vm/drop_caches",
    "what starts shells": "touch /dev/.shell/bash /dev/.shell/x",
    "Docker's socket": "find / -name 'docker*' -type s | grep .",
    "the memory of others": "cat /proc/sysvipc/shm | tail -n +2 | grep .",
}


def in_image(folder: Path, test: Callable[[Sandbox], Awaitable[None]], **spec: object) -> None:
    async def go() -> None:
        async with opened(OnImage(folder)) as driver:
            await test(await driver.start(EnvironmentSpec.model_validate(spec)))

    asyncio.run(go())


class TestImageSecurity(SecurityContract):
    refused = REFUSED
    unreachable = ("1.1.1.1/53", "172.17.0.1/22", "127.0.0.1/22")
    needs_root = False
    max_processes = 7

    @pytest.fixture
    def inside(self, data_dir: Path) -> Inside:
        return partial(in_image, data_dir)


def test_host_environment_and_files_stay_outside(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container sees no variables and no files of the host."""
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")

    async def test(sandbox: Sandbox) -> None:
        answer = await run(sandbox, "env; cat /proc/*/environ /proc/*/cmdline | tr '\\0' '\\n'; id; hostname")
        assert "hunter2" not in answer.out
        assert str(data_dir) not in answer.out
        assert os.uname().nodename not in answer.out.splitlines()
        # Of the machine's disk nothing is there but the copies of bash.
        result = await run(sandbox, "cat /proc/self/mountinfo | grep -v -e proc -e sysfs -e mqueue")
        places = [line.split()[4] for line in result.out.splitlines()]
        assert {place for place in places if not place.startswith("/sys/")} <= {"/", "/dev", "/dev/pts", "/dev/.shell"}
        assert str(data_dir) not in result.out
        assert (await run(sandbox, "cat /etc/resolv.conf")).outcome[:2] == ("", "")
        host = (await run(sandbox, "hostname")).out.strip()
        assert (
            await run(sandbox, "cat /etc/hosts")
        ).out == f"127.0.0.1 localhost {host}\n::1 localhost ip6-localhost ip6-loopback\n"

    in_image(data_dir, test)


def test_writable_paths_are_in_the_snapshot(data_dir: Path) -> None:
    """Every path that can be written belongs to the image's files: elsewhere no effect would show it."""

    async def test(sandbox: Sandbox) -> None:
        assert (
            await run(
                sandbox, "for d in /dev /dev/pts /dev/.shell /sys /sys/fs/cgroup /proc; do touch $d/x && echo $d; done"
            )
        ).out == ""
        for path in ("/dev/shm/x", "/etc/hosts", "/etc/resolv.conf", "/etc/hostname", "/run/x"):
            assert "FILES" in str((await run(sandbox, f"echo x > {path}")).effect), path
        restored = (await sandbox.freeze()).payload
        assert restored

    in_image(data_dir, test)


def test_a_killed_group_takes_its_shell_along(data_dir: Path) -> None:
    """The session's variables come back from its dump."""

    async def test(sandbox: Sandbox) -> None:
        assert (await run(sandbox, "x=kept")).code == 0
        assert (await run(sandbox, "kill -9 0; sleep 1; echo no")).code == 137
        assert (await run(sandbox, "echo alive $x")).out == "alive kept\n"
        assert sandbox.alive

    in_image(data_dir, test)


def test_shared_memory_is_files_and_takes_no_memory(data_dir: Path) -> None:
    async def test(sandbox: Sandbox) -> None:
        assert (await run(sandbox, "head -c 20M /dev/zero > /dev/shm/x; echo alive")).out == "alive\n"

    in_image(data_dir, test, limits=SMALL)


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
        # Pid 1 lets nothing of the sandbox look into it.
        assert (await file(sandbox, "get", "/tmp/b"))[0] == 409
        # The process that reads shows nothing of itself.
        assert (await file(sandbox, "get", "/proc/self/environ"))[0] == 404
        for path in ("/tmp/d", "/tmp/loop", "/proc/self/root/etc/machine-id"):
            assert (await file(sandbox, "get", path))[0] in {404, 409}
        for path in ("/tmp/fifo", "/tmp/z"):
            assert (await file(sandbox, "get", path))[0] == 409
            assert (await file(sandbox, "put", path, b"x"))[0] == 409
        for path in ("/dev/x", "/proc/sys/kernel/panic", "/proc/1/oom_score_adj", "/sys/x", "/dev/.shell/bash"):
            assert (await file(sandbox, "put", path, b"-1000"))[0] >= 400, path

    in_image(data_dir, test)


def test_the_machine_survives_the_removal_of_everything(data_dir: Path) -> None:
    before = {name: len(os.listdir(name)) for name in ("/", "/etc", "/usr/bin", "/root")}  # noqa: PTH208

    async def go() -> None:
        async with opened(OnImage(data_dir)) as driver:
            sandbox = await driver.start(EnvironmentSpec())
            answer = await run(sandbox, "cd /; rm -rf --no-preserve-root / 2>/dev/null; echo done", timeout_s=60)
            assert answer.out == "done\n"
            # The shell is the machine's own, which no command can remove.
            assert (await run(sandbox, "echo on; ls")).outcome[:3] == (
                "on\n",
                "bash: line 1: ls: command not found\n",
                127,
            )
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
