"""Attacks from inside a sandbox. Each is really tried; none may reach further than the sandbox itself."""

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from sandboxes.calls import ToolCall
from sandboxes.driver import Sandbox
from sandboxes.errors import NotFreezableError, SandboxError
from sandboxes.local.driver import LocalDriver
from sandboxes.local.sandbox import LocalSandbox
from sandboxes.spec import EnvironmentSpec, Limits
from tests.machine import wait_until
from tests.sandboxes.attack_list import COMMANDS as REFUSED
from tests.sandboxes.box import file, in_sandbox, local_driver, needs_root, opened, ran, run
from tests.sandboxes.processes import archive, leave
from tests.sandboxes.security_contract import Inside, SecurityContract
from tests.sandboxes.terminals import opened_in, typed


class TestLocalSecurity(SecurityContract):
    refused = REFUSED
    unreachable = ("1.1.1.1/53", "127.0.0.1/22")
    needs_root = True
    max_processes = 7

    @pytest.fixture
    def inside(self, data_dir: Path) -> Inside:
        return partial(in_sandbox, data_dir)


def test_loopback_reaches_the_sandbox_s_own_servers(data_dir: Path) -> None:
    async def test(sandbox: Sandbox) -> None:
        served = "python3 -m http.server -b 127.0.0.1 8000 >/dev/null 2>&1 &"
        assert (await run(sandbox, f"{served} until echo > /dev/tcp/127.0.0.1/8000; do sleep .05; done")).code == 0

    in_sandbox(data_dir, test)


def test_nothing_of_the_host_s_environment_comes_in(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")

    async def test(sandbox: Sandbox) -> None:
        answer = await run(sandbox, "env; cat /proc/*/environ /proc/*/cmdline 2>/dev/null | tr '\\0' '\\n'")
        assert "hunter2" not in answer.out
        assert str(data_dir) not in answer.out
        assert "forkpoint" not in (await run(sandbox, "cat /proc/1/cmdline /proc/1/comm /proc/self/cgroup")).out
        names = (await run(sandbox, "env | cut -d= -f1 | sort | tr '\\n' ' '")).out.split()
        assert set(names) <= {
            "GIT_OPTIONAL_LOCKS", "HOME", "LANG", "PATH", "PWD", "PYTHONDONTWRITEBYTECODE", "SHLVL", "TERM", "USER", "_",  # noqa: E501
        }  # fmt: skip

    in_sandbox(data_dir, test)


OWN = ("maps", "environ", "cmdline", "mountinfo", "auxv", "task", "map_files", "exe", ".")


@pytest.mark.parametrize("way", ["/proc/self", "/proc/thread-self", "/tmp/link", "/tmp/proc/self"])
def test_file_operations_show_nothing_of_their_process(data_dir: Path, way: str) -> None:
    """It is a fork of pid 1, whose programs and addresses are the host's."""

    async def test(sandbox: Sandbox) -> None:
        await run(sandbox, "ln -s /proc /tmp/proc; ln -s proc/self /tmp/link; ln -s /proc/self/maps /tmp/maps")
        for path in (*(f"{way}/{name}" for name in OWN), "/tmp/maps"):
            assert (await file(sandbox, "get", path))[0] == 404, path
            assert (await archive(sandbox, "stat", f"{path}/."))[0] == 404, path
            assert (await archive(sandbox, "pack", f"{path}/."))[0] == 404, path
            for tool in ("read", "info", "list"):
                call = ToolCall("files", tool, {"path": path, "user": "", "limit_bytes": 1 << 20, "depth": 3})
                assert (await sandbox.execute(call)).result.status == 404, path
        assert (await file(sandbox, "get", "/proc/version"))[0] == 200

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
    """The system goes first; of a machine with millions of files beside it, as many as go in 20 s."""
    before = {
        name: len(os.listdir(name))  # noqa: PTH208
        for name in ("/", "/etc", "/usr/bin", "/root" if os.geteuid() == 0 else "/usr")
    }

    async def go() -> None:
        async with opened(local_driver(data_dir)) as driver:
            sandbox = await driver.start(EnvironmentSpec(limits=Limits(timeout_s=600)))
            remove = "timeout 20 rm -rf /bin /usr/bin /lib* /usr /etc /* --no-preserve-root 2>/dev/null"
            answer = await run(sandbox, f"cd /; {remove}; echo done", timeout_s=600)
            assert answer.out == "done\n"
            assert isinstance(driver, LocalDriver)
            gone = await run(sandbox, "echo on; ls")
            # The shells are forks of what is no file of the sandbox; without a compiler they are the sandbox's bash.
            assert isinstance(driver, LocalDriver)
            forks = driver.machine.shell is not None
            assert gone.code == 127
            assert (gone.out, "/bin/bash" in gone.err) == (("on\n", False) if forks else ("", True))
            await sandbox.close()
            assert (await run(await driver.start(EnvironmentSpec()), "echo fresh")).out == "fresh\n"

    asyncio.run(go())
    assert {name: len(os.listdir(name)) for name in before} == before  # noqa: PTH208 - a count or names


RIGHTS = """
import os, re, sys
for pid in filter(str.isdigit, os.listdir("/proc")):
    with open(f"/proc/{pid}/status") as status:
        sets = dict(re.findall(r"(Cap\\w+):\\t(\\w+)", status.read()))
    if int(pid) != 1 and any(int(rights, 16) >> 19 & 1 for rights in sets.values()):
        print(pid, sets)
"""
"""Prints which processes have CAP_SYS_PTRACE in any set, but for pid 1."""


@needs_root
def test_no_process_has_the_right_to_look_into_others(data_dir: Path, shells: str) -> None:
    """Pid 1 alone can look into processes of every user: not its forks, and nothing that it starts."""
    other = "1000" if shells == "forked" else None

    async def test(sandbox: Sandbox) -> None:
        await file(sandbox, "put", "/tmp/rights.py", RIGHTS.encode())
        await run(sandbox, "sleep 1000 & sleep 1000 &")
        secret = "sleep 1000 & echo $! >/tmp/pid; wait"
        left = await leave(sandbox, f"{secret} & until [ -s /tmp/pid ]; do :; done; echo up", user=other)
        assert left.out == b"up\n"
        seen = [await run(sandbox, "python3 /tmp/rights.py"), await run(sandbox, "python3 /tmp/rights.py", session="b")]
        assert [answer.printed for answer in seen] == 2 * [("", "", 0)]
        for user in (None, other):
            assert (await ran(sandbox, "python3", "/tmp/rights.py", user=user)).out == b""
        assert (await ran(sandbox, "python3", "/tmp/rights.py", tty=True)).out == b""
        pid = (await run(sandbox, "cat /tmp/pid")).out.strip()
        for path in ("environ", "maps", "fd/1", "root/etc/hostname", "cwd/hostname") if other else ():
            assert (await run(sandbox, f"head -c 1 /proc/{pid}/{path}")).code != 0, path
            assert (await file(sandbox, "get", f"/proc/{pid}/{path}"))[0] in {403, 404, 409}, path
        terminal = await opened_in(sandbox)
        await typed(terminal, b"python3 /tmp/rights.py && echo no''ne\n", "none")

    in_sandbox(data_dir, test)


def test_death_of_pid_1_is_an_error(data_dir: Path) -> None:
    async def go() -> None:
        async with opened(local_driver(data_dir)) as driver:
            assert isinstance(driver, LocalDriver)
            sandbox = await driver.start(EnvironmentSpec())
            sandbox._kill()
            with pytest.raises(SandboxError, match="died"):
                await run(sandbox, "true")
            await asyncio.to_thread(wait_until, lambda: not sandbox.alive, "the sandbox lives")

    asyncio.run(go())


NEST = "import os\nfor i in range({levels}):\n os.mkdir('d'); os.chdir('d')"


@pytest.mark.parametrize("levels", [300, 1_500, 100_000])
def test_deep_folders_end_the_call_only(data_dir: Path, levels: int) -> None:
    """A command nests folders deeper than a tree is walked. It gets an error, the sandbox lives, and `rm` mends it."""

    async def test(sandbox: Sandbox) -> None:
        await run(sandbox, "cd /tmp; mkdir top; cd top")
        answer = await run(sandbox, f'python3 -c "{NEST.format(levels=levels)}"', timeout_s=30)
        assert (answer.code, answer.state) == (137, None)
        assert "forkpoint" in answer.err
        with pytest.raises(NotFreezableError):
            await sandbox.freeze()
        status, body = await file(sandbox, "put", "/tmp/f", b"x")
        assert (status, b"nest" in body) == (507, True)
        process = await ran(sandbox, "true")
        assert (process.ending.exit_code, b"nest" in process.err) == (137, True)
        answer = await run(sandbox, "cd /; rm -rf /tmp/top; echo ok", timeout_s=30)
        assert (answer.code, answer.out) == (0, "ok\n")
        assert answer.state is not None
        await sandbox.freeze()

    in_sandbox(data_dir, test)


def test_start_survives_what_a_sandbox_left(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed instance leaves deep folders, odd names and something that cannot be removed; the next one starts."""

    async def go() -> None:
        async with opened(LocalDriver(data_dir)) as driver:
            sandbox = await driver.start(EnvironmentSpec())
            assert isinstance(sandbox, LocalSandbox)
            await run(sandbox, f'cd /tmp; python3 -c "{NEST.format(levels=3_000)}"', timeout_s=30)
            await run(sandbox, "cd /tmp; touch $'\\xff\\n' stuck; mkdir -m 0 closed; sleep 100 & disown")
            # What is on disk at this moment is what a `kill -9` leaves.
            left = sandbox._layers.upper.path
            left.rename(data_dir / "saved")
        (data_dir / "saved").rename(left)
        unlink = os.unlink

        def refuse(name: str, *, dir_fd: int | None = None) -> None:
            if name == "stuck":
                raise PermissionError(1, "Operation not permitted")
            unlink(name, dir_fd=dir_fd)

        with monkeypatch.context() as patched:
            patched.setattr(os, "unlink", refuse)
            async with opened(LocalDriver(data_dir)) as driver:
                assert (await run(await driver.start(EnvironmentSpec()), "echo on")).out == "on\n"
                assert [path.name for path in left.rglob("*") if path.is_file()] == ["stuck"]
        async with opened(LocalDriver(data_dir)):
            assert not left.exists()

    asyncio.run(go())


def test_file_operations_work_while_others_fill_the_disk(data_dir: Path) -> None:
    """The sandbox is measured beside the operation. The process that ran it may have ended by then."""
    done = threading.Event()

    def fill() -> None:
        while not done.is_set():
            (data_dir / "filler").write_bytes(bytes(8 << 20))
            (data_dir / "filler").unlink()

    async def test() -> None:
        async with opened(local_driver(data_dir, checkpoints=False)) as driver:
            sandbox = await driver.start(EnvironmentSpec(limits=Limits(disk_mb=8)))
            for _ in range(120):
                assert (await file(sandbox, "put", "/root/f", b"text"))[0] in (201, 204)

    with ThreadPoolExecutor(1) as threads:
        filling = threads.submit(fill)
        try:
            asyncio.run(test())
        finally:
            done.set()
        filling.result()
