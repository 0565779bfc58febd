"""What a terminal promises, of sandboxes that are real."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path

from sandboxes.driver import Driver, Sandbox
from sandboxes.inspection import Terminal, TerminalSandbox
from sandboxes.spec import EnvironmentSpec
from tests.sandboxes.box import driven, run

WITHIN_S = 20.0


async def opened_in(sandbox: Sandbox, columns: int = 80, rows: int = 24) -> Terminal:
    assert isinstance(sandbox, TerminalSandbox)
    return await sandbox.open_terminal(columns, rows)


async def typed(terminal: Terminal, line: bytes, *words: str) -> None:
    """Type something; return when all these words have been shown."""
    await terminal.write(line)
    shown = ""
    async with asyncio.timeout(WITHIN_S):
        while not all(word in shown for word in words):
            data = await terminal.read()
            assert data, f"the terminal ended after {shown!r}"
            shown += data.decode(errors="replace")


async def rest(terminal: Terminal) -> bytes:
    """Return what is shown until the terminal ends."""
    shown = b""
    async with asyncio.timeout(WITHIN_S):
        while data := await terminal.read():
            shown += data
    return shown


async def sleeping(terminal: Terminal, sandbox: Sandbox) -> None:
    """Have something run in the terminal, and wait until it does: what is hit while it starts may behave otherwise."""
    await terminal.write(b"sleep 1000\n")
    await sleepers(sandbox, 1)


async def sleepers(sandbox: Sandbox, count: int) -> None:
    entry = "$(grep -cax 'sleep.1000.' /proc/[0-9]*/cmdline 2>/dev/null | grep -c :1)"
    result = await run(sandbox, f"while [ {entry} != {count} ]; do :; done; echo so", timeout_s=WITHIN_S)
    assert result.out == "so\n"


def open_terminals() -> list[str]:
    """Return those that this process has an end of."""
    targets = []
    for path in Path("/proc/self/fd").iterdir():
        # Others come and go meanwhile.
        with contextlib.suppress(OSError):
            targets.append(str(path.readlink()))
    return [target for target in targets if target.endswith("ptmx")]


class TerminalsSuite:
    """Subclass with a `driver` fixture."""

    functions = True
    """Whether sessions keep functions."""
    interrupts = True
    """Whether the image has what takes a shell's deafness to interrupts from it."""

    def driven(self, driver: Driver, test: Callable[[Sandbox], Awaitable[None]]) -> None:
        async def go(driver: Driver) -> None:
            await test(await driver.start(EnvironmentSpec()))

        driven(driver, go)

    def test_it_goes_on_from_the_main_session(self, driver: Driver) -> None:
        async def test(sandbox: Sandbox) -> None:
            await run(sandbox, "mkdir -p /srv/d; cd /srv/d; export SEEN=se-en; name='va lue'; alias two='echo 1-1-1'")
            await run(sandbox, "cd /tmp", session="other")
            terminal = await opened_in(sandbox)
            await typed(terminal, b'echo "<$PWD>"; echo "<$SEEN>"; echo "<$name>"\n', "</srv/d>", "<se-en>", "<va lue>")
            await typed(terminal, b"two; env | grep '^SEE[N]'; echo $TERM\n", "1-1-1", "SEEN=se-en", "xterm-256color")

        self.driven(driver, test)

    def test_it_knows_the_functions_of_the_session(self, driver: Driver) -> None:
        async def test(sandbox: Sandbox) -> None:
            await run(sandbox, "say() { echo said-$1; }")
            terminal = await opened_in(sandbox)
            await typed(terminal, b"say it\n", "said-it" if self.functions else "not found")

        self.driven(driver, test)

    def test_terminal_in_new_sandbox_begins_like_call(self, driver: Driver) -> None:
        """In a sandbox without calls a terminal begins as a call does."""

        async def test(sandbox: Sandbox) -> None:
            there = (await run(sandbox, 'echo "<$PWD|$HOME|$PATH>"')).out.strip()
            await typed(await opened_in(sandbox), b'echo "<$PWD|$HOME|$PATH>"\n', there)

        self.driven(driver, test)

    def test_its_size_is_told_and_changes(self, driver: Driver) -> None:
        async def test(sandbox: Sandbox) -> None:
            terminal = await opened_in(sandbox, 90, 30)
            await typed(terminal, b"stty size\n", "30 90")
            terminal.resize(100, 40)
            await typed(terminal, b"stty size\n", "40 100")

        self.driven(driver, test)

    def test_it_controls_what_runs_in_it(self, driver: Driver) -> None:
        async def test(sandbox: Sandbox) -> None:
            terminal = await opened_in(sandbox)
            await typed(terminal, b"test -t 0 && echo o''wn >/dev/tty\n", "own")
            await sleeping(terminal, sandbox)
            await terminal.write(b"\x03" if self.interrupts else b"\x1a")
            await typed(terminal, b"echo on-$((1+1))\n", "on-2")

        self.driven(driver, test)

    def test_its_end_is_that_of_its_shell(self, driver: Driver) -> None:
        async def test(sandbox: Sandbox) -> None:
            terminal = await opened_in(sandbox)
            await terminal.write(b"echo by-$((1+1)); exit\n")
            assert b"by-2" in await rest(terminal)
            await terminal.write(b"more\n")

        self.driven(driver, test)

    def test_it_ends_with_its_sandbox(self, driver: Driver) -> None:
        async def test(sandbox: Sandbox) -> None:
            terminal = await opened_in(sandbox)
            await typed(terminal, b"echo up-$((1+1)); sleep 1000\n", "up-2")
            await sandbox.close()
            await rest(terminal)

        self.driven(driver, test)

    def test_closed_it_hangs_up_and_leaves_nothing(self, driver: Driver) -> None:
        async def test(sandbox: Sandbox) -> None:
            before = open_terminals()
            for _ in range(2):
                terminal = await opened_in(sandbox)
                assert len(open_terminals()) == len(before) + 1
                await sleeping(terminal, sandbox)
                terminal.close()
                terminal.close()
                assert await terminal.read() == b""
                await sleepers(sandbox, 0)
                assert open_terminals() == before

        self.driven(driver, test)

    def test_what_is_written_while_nobody_reads_waits(self, driver: Driver) -> None:
        async def test(sandbox: Sandbox) -> None:
            terminal = await opened_in(sandbox)
            await terminal.write(b"stty -echo; i=0; while [ $i -lt 5000 ]; do echo line-$i; i=$((i+1)); done; exit\n")
            shown = await rest(terminal)
            assert shown.count(b"line-") == 5000 + shown.count(b"echo line-")

        self.driven(driver, test)
