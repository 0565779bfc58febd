import asyncio
from pathlib import Path

import pytest

from sandboxes.driver import Driver, Sandbox
from sandboxes.local.driver import LocalDriver
from tests.machine import require_criu
from tests.sandboxes.box import in_sandbox, kept_driver, local_driver, needs_forks, needs_root, opened, ran, run
from tests.sandboxes.processes import SPEC, Audience, ProcessesSuite


class TestLocalProcesses(ProcessesSuite):
    @pytest.fixture
    def driver(self, data_dir: Path) -> Driver:
        return kept_driver.offer("", LocalDriver, data_dir)


class TestLocalProcessesWithCriu:
    def test_detached_process_is_restored_and_never_blocks(self, data_dir: Path) -> None:
        require_criu()

        async def go() -> None:
            async with opened(driver := local_driver(data_dir)):
                sandbox = await driver.start(SPEC)
                loop = "while :; do head -c 9999 /dev/zero; echo tick >&2; echo t >>/tmp/ticks; sleep 0.02; done"
                assert (await ran(sandbox, "sh", "-c", loop, listener=Audience())).ending.exit_code is None
                restored = await driver.restore(SPEC, await sandbox.freeze())
                look = "a=$(wc -l </tmp/ticks); until [ $(wc -l </tmp/ticks) -gt $((a + 20)) ]; do sleep 0.02; done"
                for one in (sandbox, restored):
                    assert (await ran(one, "sh", "-c", look)).ending.exit_code == 0

        asyncio.run(go())


@pytest.mark.parametrize("checkpoints", [False, True])
def test_session_survives_its_killed_idle_shell(data_dir: Path, checkpoints: bool) -> None:
    if checkpoints:
        require_criu()

    async def go() -> None:
        async with opened(local_driver(data_dir, checkpoints=checkpoints)) as driver:
            sandbox = await driver.start(SPEC)
            await run(sandbox, "X=7; cd /tmp")
            await ran(sandbox, "/bin/sh", "-c", "kill -9 -1")
            back = await driver.restore(SPEC, await sandbox.freeze())
            for one in (sandbox, back):
                answer = await run(one, "echo $X; pwd")
                assert (answer.out, answer.code) == ("7\n/tmp\n", 0)

    asyncio.run(go())


ACCOUNTS = {
    "/etc/passwd": "root:x:0:0::/root:/bin/sh\nann:x:1000:100::/tmp/ann:/bin/sh\nnohome:x:1001:101:::\n",
    "/etc/group": "root:x:0:\nusers:x:100:\nstaff:x:50:ann\nwheel:x:51:ann,bob\n",
}
USERS: dict[str | None, str] = {
    None: "0:0 0 /root",
    "ann": "1000:100 50 51 100 /tmp/ann",
    "1000": "1000:100 50 51 100 /tmp/ann",
    "ann:wheel": "1000:51 51 /tmp/ann",
    "1000:7": "1000:7 7 /tmp/ann",
    "nohome": "1001:101 101 /",
    "4000": "4000:0 0 /",
    "root": "0:0 0 /root",
}
"""What processes of these users show of themselves."""
WHO = """while read -r name ids; do
case $name in Uid:) u=${ids%%[!0-9]*};; Gid:) g=${ids%%[!0-9]*};; Groups:) m=$ids;; esac
done </proc/self/status; echo $u:$g $m $HOME"""
NO_SUCH = {"bob": "user bob", "4294967295": "user 4294967295", "ann:nothing": "group nothing", "bob:staff": "user bob"}


@needs_root
def test_a_process_is_its_user_s(data_dir: Path, shells: str) -> None:
    """The base needs no program for that. Where shells are executed, there is root only."""

    async def test(sandbox: Sandbox) -> None:
        await run(sandbox, "rm -f $(type -ap setpriv chroot su runuser sudo)")
        for user, shown in USERS.items():
            result = await ran(sandbox, "sh", "-c", WHO, user=user)
            if shells == "executed" and user not in (None, "root"):
                assert (result.out.startswith(b"unable to become user"), result.ending.exit_code) == (True, 126)
                continue
            assert (result.out.decode(), result.ending.exit_code) == (f"{shown}\n", 0), user
            assert (await ran(sandbox, "sh", "-c", WHO, user=user, env={"HOME": "/x"})).out.split()[-1] == b"/x"
        for user, missing in NO_SUCH.items() if shells == "forked" else ():
            result = await ran(sandbox, "sh", "-c", WHO, user=user)
            text = (
                f"unable to find {missing}: no matching entries in {missing.split()[0].replace('user', 'passwd')} file"
            )
            assert (result.out.decode(), result.ending.exit_code) == (f"{text}\r\n", 126)

    in_sandbox(data_dir, test, files=ACCOUNTS)


@needs_root
def test_a_terminal_belongs_to_the_user_of_its_process(data_dir: Path) -> None:
    """So the process may open it again, and others may not."""
    look = "stat -Lc %u /proc/self/fd/0; test -t 0 && echo on >/dev/tty; echo again >/proc/self/fd/1"

    async def test(sandbox: Sandbox) -> None:
        for user, uid in ((None, 0), ("ann", 1000), ("4000", 4000)):
            result = await ran(sandbox, "sh", "-c", look, user=user, tty=True)
            assert result.out.decode().split() == [str(uid), "on", "again"]
        assert (await ran(sandbox, "true", user="bob", tty=True)).out.startswith(b"unable to find user bob")

    in_sandbox(data_dir, test, files=ACCOUNTS)


@needs_root
@needs_forks
def test_hostile_files_of_users_stop_no_process(data_dir: Path) -> None:
    """Not a FIFO, on which bash waits itself."""

    async def test(sandbox: Sandbox) -> None:
        for make in ("mkdir", "ln -s /proc/self/environ", "ln -s passwd", "head -c 100M /dev/zero >"):
            await run(sandbox, f"rm -rf /etc/passwd /etc/group; {make} /etc/passwd; {make} /etc/group")
            assert (await ran(sandbox, "sh", "-c", WHO, user="7:8")).out == b"7:8 8 /\n", make
            assert (await ran(sandbox, "true", user="ann")).ending.exit_code == 126, make

    in_sandbox(data_dir, test, files=ACCOUNTS)


def test_a_closed_port_is_free(data_dir: Path) -> None:
    """A server that closed a connection first leaves no TIME_WAIT: the next call can listen at its port."""
    serve = (
        'python3 -c \'import socket; s = socket.socket(); s.bind(("127.0.0.1", 8080)); s.listen();'
        ' c = socket.create_connection(("127.0.0.1", 8080)); s.accept()[0].close(); c.recv(1); c.close()\'; echo $?'
    )

    async def test(sandbox: Sandbox) -> None:
        for _ in range(3):
            answer = await run(sandbox, serve)
            assert (answer.out, answer.err) == ("0\n", "")

    in_sandbox(data_dir, test)
