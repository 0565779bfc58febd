"""Attacks from inside a sandbox. Each is really tried; none may reach further than the sandbox itself."""

import asyncio
import os
import time
from functools import partial
from pathlib import Path

import pytest

from sandboxes.driver import Sandbox
from sandboxes.errors import SandboxError
from sandboxes.local.driver import LocalDriver
from sandboxes.spec import EnvironmentSpec, Limits
from tests.sandboxes.box import file, in_sandbox, local_driver, opened, run
from tests.sandboxes.security_contract import Inside, SecurityContract

REFUSED = {
    "mount": "mount -t tmpfs none /mnt",
    "bind mount": "mount --bind /etc /mnt",
    "remount /proc/sys": "mount -o remount,rw /proc/sys",
    "umount": "umount /dev",
    "unshare": "unshare -r true",
    "user namespace": "unshare -Ur true",
    "nsenter": "nsenter -t 1 -m true",
    "chroot escape by descriptor": "ls -L /proc/1/root/",
    "pid 1's descriptors": "ls -lL /proc/1/fd/",
    "pid 1's environment": "cat /proc/1/environ",
    "pid 1's memory": "head -c 1 /proc/1/mem",
    "pid 1's maps": "cat /proc/1/maps | grep .",
    "pid 1's working directory": "readlink /proc/1/cwd",
    "ptrace of pid 1": "python3 -c 'import ctypes,sys; sys.exit(ctypes.CDLL(None).ptrace(16, 1, 0, 0) == -1)'",
    "kernel settings": "echo 1 > /proc/sys/kernel/panic",
    "core_pattern": "echo '|/bin/sh' > /proc/sys/kernel/core_pattern",
    "sysrq": "echo b > /proc/sysrq-trigger",
    "kernel log": "dmesg",
    "kernel memory": "head -c 1 /proc/kcore | grep -q . ",
    "a disk's device node": "mknod /tmp/disk b 254 0",
    "a character device": "mknod /tmp/mem c 1 1",
    "a hidden device": "ls /dev/mem /dev/kmsg /dev/vda /dev/fuse /dev/kvm 2>/dev/null | grep .",
    "files in /dev": "touch /dev/left-behind",
    "chmod in /dev": "chmod 600 /dev/null",
    "/sys": "ls /sys | grep .",
    "hostname": "hostname other",
    "the clock": "date -s 2001-01-01",
    "raw sockets": "python3 -c 'import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)'",
    "a network address": "ip addr add 10.0.0.1/8 dev lo",
    "lifting a hard limit": "ulimit -Hf unlimited",
    "a module": "insmod /dev/null",
    "shadow": "cat /etc/shadow /etc/shadow- /etc/gshadow 2>/dev/null | grep .",
    "host keys": "ls /etc/ssh 2>/dev/null | grep '_key$'",
    "private keys": "ls /etc/ssl/private 2>/dev/null | grep .",
    "sudoers": "cat /etc/sudoers 2>/dev/null | grep .",
    "homes": "ls -A /root /home | grep -v : | grep .",
    "run, tmp, mnt": "find /run /tmp /mnt /srv /boot /media -not -type d | grep .",
    "logs and spools": "find /var/log /var/spool /var/mail /var/cache /var/backups -type f | grep .",
    "the data directory": "find / -xdev -name 'forkpoint-test-*' | grep .",
    "privilege by setuid": "grep -q 'NoNewPrivs:.0' /proc/self/status",
    "keyring": "python3 -c 'import ctypes,sys; sys.exit(ctypes.CDLL(None).syscall(250, 0, -3, 1) == -1)'",
    "io_uring": "python3 -c 'import ctypes,sys; sys.exit(ctypes.CDLL(None).syscall(425, 1, 0) == -1)'",
    "bpf": "python3 -c 'import ctypes,sys; sys.exit(ctypes.CDLL(None).syscall(321, 0, 0, 0) == -1)'",
    "clone3": "python3 -c 'import ctypes,sys; sys.exit(ctypes.CDLL(None).syscall(435, 0, 0) == -1)'",
    "clone into a namespace": "python3 -c 'import ctypes,sys; sys.exit(ctypes.CDLL(None).syscall(56, 0x10000011, 0, 0, 0, 0) == -1)'",  # noqa: E501
}


class TestLocalSecurity(SecurityContract):
    refused = REFUSED
    unreachable = ("1.1.1.1/53", "127.0.0.1/22")
    needs_root = True
    max_processes = 6

    @pytest.fixture
    def inside(self, data_dir: Path) -> Inside:
        return partial(in_sandbox, data_dir)


def test_loopback_reaches_the_sandbox_s_own_servers(data_dir: Path) -> None:
    async def test(sandbox: Sandbox) -> None:
        served = "python3 -m http.server -b 127.0.0.1 8000 >/dev/null 2>&1 & sleep 1; echo > /dev/tcp/127.0.0.1/8000"
        assert (await run(sandbox, served)).code == 0

    in_sandbox(data_dir, test)


def test_nothing_of_the_host_s_environment_comes_in(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")

    async def test(sandbox: Sandbox) -> None:
        said = await run(sandbox, "env; cat /proc/*/environ /proc/*/cmdline 2>/dev/null | tr '\\0' '\\n'")
        assert "hunter2" not in said.out
        assert str(data_dir) not in said.out
        assert "forkpoint" not in (await run(sandbox, "cat /proc/1/cmdline /proc/1/comm /proc/self/cgroup")).out
        names = (await run(sandbox, "env | cut -d= -f1 | sort | tr '\\n' ' '")).out.split()
        assert set(names) <= {
            "GIT_OPTIONAL_LOCKS", "HOME", "LANG", "PATH", "PWD", "PYTHONDONTWRITEBYTECODE", "SHLVL", "TERM", "USER", "_",  # noqa: E501
        }  # fmt: skip

    in_sandbox(data_dir, test)


def test_file_operations_stay_inside(data_dir: Path, tmp_path: Path) -> None:
    async def test(sandbox: Sandbox) -> None:
        outside = tmp_path / "outside"
        outside.write_text("host")
        links = f"mkdir -p {tmp_path}; ln -s {outside} /tmp/a; ln -s /proc/1/root{outside} /tmp/b; ln -s /proc/1/fd /tmp/c; mkfifo /tmp/fifo"  # noqa: E501
        links += "; ln -s ../../../../../../etc/shadow /tmp/d; ln -s /tmp/loop /tmp/loop; mkdir /tmp/dir; ln -s /dev/zero /tmp/z"  # noqa: E501
        await run(sandbox, links)
        assert (await file(sandbox, "get", "/tmp/a"))[0] == 404
        assert (await file(sandbox, "put", "/tmp/a", b"inside"))[0] == 201
        assert outside.read_text() == "host"
        for fd in range(3, 60):
            assert (await file(sandbox, "get", f"/proc/self/fd/{fd}/../../../etc/hostname"))[0] in {404, 409}
        assert (await file(sandbox, "get", "/tmp/b"))[0] in {404, 409}
        assert (await file(sandbox, "get", "/tmp/c/35"))[0] in {404, 409}
        assert (await file(sandbox, "get", "/proc/1/environ"))[0] in {404, 409}
        for path in ("/tmp/d", "/tmp/loop"):
            assert (await file(sandbox, "get", path))[0] in {404, 409}
        for path in ("/tmp/fifo", "/tmp/z", "/dev/tty"):
            assert (await file(sandbox, "get", path))[0] == 409
            assert (await file(sandbox, "put", path, b"x"))[0] == 409
        assert (await file(sandbox, "put", "/tmp/dir", b"x"))[0] == 409
        assert (await file(sandbox, "put", "/dev/x", b"x"))[0] == 409
        assert (await file(sandbox, "put", "relative", b"x"))[0] == 400
        assert (await file(sandbox, "put", "/tmp/f", b"x", sha256="00"))[0] == 400
        assert (await file(sandbox, "put", "/tmp/deep/er/f", b"x", mode=0o750))[0] == 201
        assert (await run(sandbox, "stat -c %a /tmp/deep/er/f")).out == "750\n"
        assert (await file(sandbox, "delete", "/tmp/dir"))[0] == 204
        status, listing = await file(sandbox, "get", "/tmp/deep")
        assert (status, listing) == (200, b'{"entries": [{"name": "er", "type": "directory", "size": 4096}]}')

    in_sandbox(data_dir, test)


def test_the_host_survives_the_removal_of_everything(data_dir: Path) -> None:
    before = {
        name: len(os.listdir(name))  # noqa: PTH208
        for name in ("/", "/etc", "/usr/bin", "/root" if os.geteuid() == 0 else "/usr")
    }

    async def go() -> None:
        async with opened(local_driver(data_dir)) as driver:
            sandbox = await driver.start(EnvironmentSpec(limits=Limits(timeout_s=60)))
            said = await run(sandbox, "rm -rf / --no-preserve-root 2>/dev/null; echo done", timeout_s=60)
            assert said.out == "done\n"
            gone = await run(sandbox, "echo on")
            assert gone.code == 127
            assert "/bin/bash" in gone.err
            await sandbox.close()
            assert (await run(await driver.start(EnvironmentSpec()), "echo fresh")).out == "fresh\n"

    asyncio.run(go())
    assert {name: len(os.listdir(name)) for name in before} == before  # noqa: PTH208 - a count or names


def test_death_of_pid_1_is_an_error(data_dir: Path) -> None:
    async def go() -> None:
        async with opened(local_driver(data_dir)) as driver:
            assert isinstance(driver, LocalDriver)
            sandbox = await driver.start(EnvironmentSpec())
            sandbox._kill()
            with pytest.raises(SandboxError, match="died"):
                await run(sandbox, "true")
            deadline = time.monotonic() + 5
            while sandbox.alive and time.monotonic() < deadline:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.01)
            assert not sandbox.alive

    asyncio.run(go())
