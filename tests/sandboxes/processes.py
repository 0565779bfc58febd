"""What a process of its own promises beyond the contract, of sandboxes that are real."""

import asyncio
import gzip
import io
import json
import lzma
import tarfile
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from sandboxes.calls import ToolCall
from sandboxes.driver import Driver, Sandbox, execute
from sandboxes.effects import Effect
from sandboxes.errors import NotFreezableError
from sandboxes.process_output import OUT, ending, output
from sandboxes.spec import EnvironmentSpec
from tests.sandboxes.box import Ran, driven, ran, run
from tests.sandboxes.terminals import sleepers

SPEC = EnvironmentSpec()


async def archive(sandbox: Sandbox, tool: str, path: str, body: bytes = b"", **more: Any) -> tuple[int, bytes]:
    result = (await sandbox.execute(ToolCall("archive", tool, {"path": path, **more}, body))).result
    return result.status, result.body


async def tend(sandbox: Sandbox, tool: str, body: bytes = b"", **more: Any) -> int:
    """Do something about process 7; return the status of the answer."""
    return (await sandbox.execute(ToolCall("process", tool, {"process": 7, **more}, body))).result.status


async def said(sandbox: Sandbox, last: bytes) -> bytes:
    """Take what process 7 says until it has said last."""
    heard = b""
    while not heard.endswith(last):
        heard += output((await sandbox.execute(ToolCall("process", "attend", {"process": 7}))).result.body, OUT)
    return heard


class Audience:
    """A client of a process; it leaves once it has heard something."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []
        self._something = asyncio.Event()

    async def head(self, status: int, headers: Any) -> None:
        assert (status, headers) == (200, (("Content-Type", "application/vnd.forkpoint.process"),))

    async def data(self, chunk: bytes) -> None:
        self.heard.append(chunk)
        self._something.set()

    async def detached(self) -> None:
        await self._something.wait()


async def leave(sandbox: Sandbox, text: str, **more: Any) -> Ran:
    """Start process 7, and leave it running once it has said something."""
    request = {"argv": ["sh", "-c", text], "env": {}, "cwd": None, "user": None, "timeout_s": 20.0, "tag": "", **more}
    return Ran(await execute(sandbox, ToolCall("process", "run", {**request, "process": 7}), Audience()))


class ProcessesSuite:
    """Subclass with a `driver` fixture, and where sandboxes have other specs, `spec`."""

    spec = SPEC

    def driven(self, driver: Driver, test: Callable[[Sandbox], Awaitable[None]]) -> None:
        async def go(driver: Driver) -> None:
            await test(await driver.start(self.spec))

        driven(driver, go)

    def test_streams_stay_apart_and_stdin_ends(self, driver: Driver) -> None:
        """Stdout and stderr are kept apart, and stdin is read to its end."""

        async def test(sandbox: Sandbox) -> None:
            data = b"0123456789abcdef" * (1 << 16)
            result = await ran(sandbox, "sh", "-c", "cat; echo err >&2", stdin=data)
            assert (result.out == data, result.err, result.ending.truncated) == (True, b"err\n", False)
            assert (await ran(sandbox, "cat")).out == b""

        self.driven(driver, test)

    def test_its_environment_is_what_docker_gives_one(self, driver: Driver) -> None:
        async def test(sandbox: Sandbox) -> None:
            result = (await ran(sandbox, "env", env={"A": "b c'd\n", "É": "ü"})).out.decode()
            lines = result.splitlines()
            assert lines[0].startswith("PATH=")
            assert lines[1] == f"HOSTNAME={(await ran(sandbox, 'hostname')).out.decode().strip()}"
            assert result.endswith("A=b c'd\n\nÉ=ü\nHOME=/root\n")
            assert not {"_", "SHLVL", "PWD", "TERM"} & {line.partition("=")[0] for line in lines}
            assert (await ran(sandbox, "sh", "-c", 'echo "$0" "$#" "$@"', "zero", "a b", "'")).out == b"zero 2 a b '\n"

        self.driven(driver, test)

    def test_what_cannot_start_says_why_as_docker_does(self, driver: Driver) -> None:
        async def test(sandbox: Sandbox) -> None:
            start = b"OCI runtime exec failed: exec failed: unable to start container process: "
            answers = [
                await ran(sandbox, "nosuch"),
                await ran(sandbox, "/no/such"),
                await ran(sandbox, "/etc/passwd"),
                await ran(sandbox, "pwd", cwd="/no/such"),
                await ran(sandbox, "id", user="nosuch"),
            ]
            assert [(t.out, t.ending.exit_code) for t in answers] == [
                (start + b'exec: "nosuch": executable file not found in $PATH: unknown\r\n', 126),
                (start + b'exec: "/no/such": stat /no/such: no such file or directory: unknown\r\n', 126),
                (start + b'exec: "/etc/passwd": permission denied: unknown\r\n', 126),
                (start + b'chdir to cwd ("/no/such") set in config.json failed: no such file or directory: unknown\r\n',
                 126),
                (b"unable to find user nosuch: no matching entries in passwd file\r\n", 126),
            ]  # fmt: skip

        self.driven(driver, test)

    def test_process_beside_a_starting_shell_changes_nothing(self, driver: Driver) -> None:
        """A process that only reads has no effect, although a shell is still being started beside it."""

        async def test(sandbox: Sandbox) -> None:
            # So large a session that its next shell, begun after each call, takes longer than a process.
            large = "i=0; while [ $i -lt 6000 ]; do eval v$i=$i; i=$((i+1)); done; echo text >/tmp/f"
            assert (await run(sandbox, large, timeout_s=60.0)).effect is Effect.FILES | Effect.SESSION
            for _ in range(2):
                assert (await run(sandbox, "cat /tmp/f")).effect is Effect.NONE
                result = await ran(sandbox, "cat", "/tmp/f")
                assert (result.out, result.effect) == (b"text\n", Effect.NONE)

        self.driven(driver, test)

    def test_it_runs_as_whom_it_is_told(self, driver: Driver) -> None:
        async def test(sandbox: Sandbox) -> None:
            look = "id -u; id -g; echo $HOME"
            assert (await ran(sandbox, "sh", "-c", look, user="daemon")).out == b"1\n1\n/usr/sbin\n"
            assert (await ran(sandbox, "sh", "-c", look, user="1234:5")).out == b"1234\n5\n/\n"

        self.driven(driver, test)

    def test_a_terminal_is_its_own(self, driver: Driver) -> None:
        async def test(sandbox: Sandbox) -> None:
            result = await ran(sandbox, "sh", "-c", "test -t 0 && test -t 2 && echo $TERM >/dev/tty; exit 4", tty=True)
            assert (result.out, result.err, result.ending.exit_code) == (b"xterm\r\n", b"", 4)

        self.driven(driver, test)

    def test_background_terminal_takes_input_and_prevents_freezing(self, driver: Driver) -> None:
        """A background process on a terminal takes input, sizes and signals; its state cannot be frozen."""

        async def test(sandbox: Sandbox) -> None:
            text = "trap 'echo resized' WINCH; sleep 1000 & echo up; while :; do read -r line && echo heard $line; done"
            answer = await leave(sandbox, text, tty=True, size=[24, 80])
            assert (answer.out, answer.ending.exit_code, answer.shareable) == (b"up\r\n", None, False)
            with pytest.raises(NotFreezableError):
                await sandbox.freeze()
            assert await tend(sandbox, "resize", size=[30, 100]) == 200
            assert await tend(sandbox, "write", b"for its stdin\n") == 409
            assert await tend(sandbox, "close") == 409
            assert await tend(sandbox, "write", b"it\n", typed=True) == 200
            heard = (await said(sandbox, b"heard it\r\n")).split()
            assert sorted(heard) == [b"heard", b"it", b"it", b"resized"]
            assert await tend(sandbox, "signal", signal=9) == 200
            request = {"process": 7, "until": {"1": 0, "2": 0, "ended": True}}
            ended = await sandbox.execute(ToolCall("process", "attend", request))
            assert ending(ended.result.body).signal == 9
            await sleepers(sandbox, 0)

        self.driven(driver, test)

    def test_overdue_background_process_ends_without_its_children(self, driver: Driver) -> None:
        """A background process is killed at its time limit; the processes that it started continue."""

        async def test(sandbox: Sandbox) -> None:
            text = "(sleep 3.3; echo on >/tmp/on) >/dev/null 2>&1 & echo up; sleep 1000"
            assert (await leave(sandbox, text, tty=False, stdin=False, timeout_s=3.0)).ending.exit_code is None
            request = {"process": 7, "until": {"1": 0, "2": 0, "ended": True}}
            ended = await sandbox.execute(ToolCall("process", "attend", request))
            assert ending(ended.result.body).signal == 9
            assert (await run(sandbox, "until [ -s /tmp/on ]; do sleep 0.02; done; cat /tmp/on")).out == "on\n"

        self.driven(driver, test)

    def test_directory_watch_reports_each_event_once(self, driver: Driver) -> None:
        """A directory is watched with its user's rights, and each event is reported once."""

        async def test(sandbox: Sandbox) -> None:
            await run(sandbox, "mkdir -p /tmp/w/sub; mkdir -m 700 /tmp/own; ln -s /tmp/w /tmp/to; echo old >/tmp/w/old")
            request = {"path": "/tmp/to", "user": "", "recursive": True, "process": 7}
            begun = await sandbox.execute(ToolCall("process", "watch", request))
            assert (begun.result.status, begun.effect, begun.shareable) == (200, Effect.PROCESSES, False)
            with pytest.raises(NotFreezableError):
                await sandbox.freeze()
            await run(sandbox, "cd /tmp/w; echo 1 >sub/f; mv sub/f g; rm g; mkdir new; chmod 700 old")
            await run(sandbox, "echo 2 >/tmp/w/new/h")
            heard = [json.loads(line) for line in (await said(sandbox, b"}\n")).splitlines()]
            assert [f"{event['type']} {event['name']}" for event in heard] == [
                "create sub/f", "write sub/f", "rename sub/f", "create g", "remove g", "create new", "chmod old",
                "create new/h", "write new/h",
            ]  # fmt: skip
            attended = await sandbox.execute(ToolCall("process", "attend", {"process": 7}))
            assert (attended.is_empty, output(attended.result.body, OUT)) == (True, b"")
            assert [await tend(sandbox, tool) for tool in ("close", "unwatch", "unwatch", "attend")] == [
                404,
                200,
                404,
                404,
            ]
            for path, user, kind in (
                ("/tmp/none", "", "not_found"), ("/tmp/w/old", "", "invalid"), ("/tmp/own", "daemon", "denied"),
                ("/tmp/w", "nobody-here", "user"),
            ):  # fmt: skip
                answer = await sandbox.execute(ToolCall("process", "watch", {**request, "path": path, "user": user}))
                assert (json.loads(answer.result.body)["kind"], answer.effect) == (kind, Effect.NONE)
            await sandbox.freeze()

        self.driven(driver, test)

    def test_write_to_background_process_is_a_change(self, driver: Driver) -> None:
        """A write to a background process is a change, although the process reads nothing."""

        async def test(sandbox: Sandbox) -> None:
            answer = await leave(sandbox, "echo up; sleep 1000", tty=False, stdin=True)
            assert (answer.out, answer.ending.exit_code, answer.shareable) == (b"up\n", None, True)
            request = {"process": 7}
            for _ in range(2):
                done = await sandbox.execute(ToolCall("process", "write", request, b"same\n"))
                assert (done.result.status, done.effect) == (200, Effect.PROCESSES)
            assert (await sandbox.execute(ToolCall("process", "list", {}))).effect is Effect.NONE

        self.driven(driver, test)

    def test_child_with_open_output_delays_no_end(self, driver: Driver) -> None:
        """A child that keeps the output open does not delay the end of its process."""

        async def test(sandbox: Sandbox) -> None:
            result = await ran(sandbox, "sh", "-c", "sleep 1000 & echo started")
            assert (result.out, result.ending.exit_code, result.effect) == (b"started\n", 0, Effect.PROCESSES)
            await sleepers(sandbox, 1)

        self.driven(driver, test)

    def test_overdue_process_is_killed_with_its_children(self, driver: Driver) -> None:
        """A process that exceeds its time limit is killed together with all that it started, and does nothing more."""

        async def test(sandbox: Sandbox) -> None:
            await run(sandbox, "x=5")
            waiting = "echo on; for i in 1 2 3 4 5 6 7 8; do (sleep 1000; echo never) & done; sleep 1000; echo never"
            for _ in range(2):
                result = await ran(sandbox, "sh", "-c", waiting, timeout_s=3.0)
                assert (result.out, result.ending.timed_out, result.shareable) == (b"on\n", True, False)
            assert (await run(sandbox, "grep -cax 'sleep.1000.' /proc/[0-9]*/cmdline | grep -c :1")).out == "0\n"

        self.driven(driver, test)

    def test_a_signal_is_an_exit_code(self, driver: Driver) -> None:
        async def test(sandbox: Sandbox) -> None:
            assert (await ran(sandbox, "sh", "-c", "kill -9 $$")).ending.exit_code == 137

        self.driven(driver, test)

    def test_process_without_client_continues_unshared(self, driver: Driver) -> None:
        """A process whose client disconnects continues, and its result is shared with no other rollout."""

        async def test(sandbox: Sandbox) -> None:
            audience = Audience()
            loop = "echo go; while :; do echo tick; echo t >>/tmp/ticks; sleep 0.05; done"
            result = await ran(sandbox, "sh", "-c", loop, listener=audience)
            assert (audience.heard[0][8:].startswith(b"go\n"), result.ending.exit_code) == (True, None)
            assert (result.shareable, result.effect & Effect.PROCESSES) == (False, Effect.PROCESSES)
            look = "a=$(wc -l </tmp/ticks); while [ $(wc -l </tmp/ticks) = $a ]; do sleep 0.02; done; echo more"
            assert (await run(sandbox, look)).out == "more\n"

        self.driven(driver, test)

    def test_a_detached_one_is_only_started(self, driver: Driver) -> None:
        async def test(sandbox: Sandbox) -> None:
            result = await ran(sandbox, "sleep", "1000", detach=True)
            assert (result.ending.exit_code, result.shareable, result.effect) == (None, True, Effect.PROCESSES)
            assert (await ran(sandbox, "nosuch", detach=True)).ending.exit_code == 126

        self.driven(driver, test)

    def test_archives_keep_owners_modes_links_and_times(self, driver: Driver) -> None:
        """Archives keep owners, modes, links and times, in both directions."""

        async def test(sandbox: Sandbox) -> None:
            await run(sandbox, "mkdir -p /tmp/in/sub; echo old > /tmp/in/f; ln -s nowhere /tmp/in/link")
            assert await archive(sandbox, "extract", "/tmp/in", _tar()) == (200, b"")
            look = "cd /tmp/in; stat -c '%n %a %u:%g %Y' f sub; readlink link; cat f link"
            assert (await run(sandbox, look)).out == "f 640 7:8 1000\nsub 755 0:0 2000\nf\nnew\nnew\n"
            status, body = await archive(sandbox, "pack", "/tmp/in")
            head, _, packed = body.partition(b"\n")
            with tarfile.open(fileobj=io.BytesIO(packed)) as found:
                members = {m.name: (m.type, m.mode, m.uid, m.mtime, m.linkname) for m in found}
            assert (status, json.loads(head)["name"]) == (200, "in")
            assert members["in/f"] == (tarfile.REGTYPE, 0o640, 7, 1000, "")
            assert members["in/link"][4] == "f"
            assert (await archive(sandbox, "stat", "/no/such"))[0] == 404
            assert (await archive(sandbox, "extract", "/tmp/in/f", _tar()))[0] == 400
            assert (await archive(sandbox, "extract", "/tmp/in", _tar()[:700]))[0] == 400
            assert (await archive(sandbox, "extract", "/tmp", b"no archive"))[0] == 400
            payload = json.loads((await archive(sandbox, "stat", "/tmp/in/link"))[1])
            assert (payload["name"], payload["link"]) == ("link", "/tmp/in/f")
            assert await archive(sandbox, "extract", "/tmp/in/sub", gzip.compress(_tar())) == (200, b"")
            assert await archive(sandbox, "extract", "/tmp/in/sub", lzma.compress(_tar())) == (200, b"")
            assert (await run(sandbox, "cat /tmp/in/sub/f")).out == "new\n"

        self.driven(driver, test)


def _tar() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as made:
        for name, kind, mode, mtime in (("sub", tarfile.DIRTYPE, 0o755, 2000), ("f", tarfile.REGTYPE, 0o640, 1000)):
            member = tarfile.TarInfo(name)
            member.type, member.mode, member.mtime = kind, mode, mtime
            if name == "f":
                member.size, member.uid, member.gid = 4, 7, 8
            made.addfile(member, io.BytesIO(b"new\n"))
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "f"
        made.addfile(link)
    return buffer.getvalue()
