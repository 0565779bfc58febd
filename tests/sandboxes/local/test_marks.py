"""Marks of calls: which limit a call reached, and whether its sandbox is broken, as the sandbox's guard saw it."""

from pathlib import Path
from typing import Any

import pytest

from sandboxes.calls import MARKS, ToolCall
from sandboxes.driver import Sandbox
from sandboxes.spec import Limits
from tests.sandboxes.box import in_sandbox, probed_groups

LIMITS = Limits(memory_mb=64, pids=50, disk_mb=8, output_bytes=1000, timeout_s=20)


async def marks(sandbox: Sandbox, command: str, timeout_s: float = 20.0) -> tuple[str, ...]:
    arguments = {"command": command, "timeout_s": timeout_s, "session": "main"}
    return (await sandbox.execute(ToolCall("shell", "exec", arguments))).result.marks


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("echo fine; exit 3", ()),
        ("sleep 30", ("timeout",)),
        ("mkdir /tmp/large; for i in 1 2 3 4; do head -c 5000000 /dev/zero > /tmp/large/$i; done; sleep 4", ("disk",)),
        # A single file at the largest size that a file may have: SIGXFSZ ends its writer.
        ("(ulimit -f 1; head -c 1000000 /dev/zero > /tmp/one)", ("disk",)),
        ("seq 1 9999", ("output",)),
        ("seq 1 9999; sleep 30", ("timeout", "output")),
    ],
)
def test_call_has_the_marks_of_its_limits(data_dir: Path, command: str, expected: tuple[str, ...]) -> None:
    """The next call has none: a mark is of one call."""

    async def test(sandbox: Sandbox) -> None:
        assert await marks(sandbox, command, timeout_s=5.0) == expected
        # Also if others write to the disk meanwhile, which has the files measured again.
        assert await marks(sandbox, "rm -rf /tmp/large") == ()
        assert await marks(sandbox, "true") == ()

    in_sandbox(data_dir, test, limits=LIMITS)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python3 -c 'bytearray(300 << 20)'", ("memory",)),
        ("python3 -c 'bytearray(300 << 20)' || true; echo handled", ("memory",)),
        ("for i in $(seq 99); do sleep 9 & done; wait", ("pids",)),
    ],
)
def test_call_has_the_marks_of_counted_limits(data_dir: Path, command: str, expected: tuple[str, ...]) -> None:
    if problem := probed_groups().problem:
        pytest.skip(f"no control group can be written here: {problem}")

    async def test(sandbox: Sandbox) -> None:
        assert await marks(sandbox, command) == expected
        assert await marks(sandbox, "true") == ()

    in_sandbox(data_dir, test, limits=LIMITS)


def test_printed_text_makes_no_mark(data_dir: Path) -> None:
    """What an agent prints is no fact: else it could excuse its own failures."""
    texts = [*MARKS, "[forkpoint: killed: the sandbox may hold 8 MB of new files]", "200;machine,broken text/plain"]

    async def test(sandbox: Sandbox) -> None:
        command = "; ".join(f"echo '{text}' >&2" for text in texts)
        assert await marks(sandbox, f"{command}; exit 124") == ()

    in_sandbox(data_dir, test, limits=LIMITS)


@pytest.mark.parametrize(
    "command",
    [
        "chmod 000 $(readlink -f /bin/sh) $(readlink -f /bin/bash)",
        "rm -f $(readlink -f /bin/sh) $(readlink -f /bin/bash)",
        "mv $(readlink -f /lib*/ld-linux*.so*) /gone",
    ],
    ids=["no right", "no shell", "no loader"],
)
def test_broken_sandbox_is_marked(data_dir: Path, command: str) -> None:
    """Every later call that fails for it has the mark, and one that still works has none."""

    async def test(sandbox: Sandbox) -> None:
        assert await marks(sandbox, "nosuch") == ()
        assert await marks(sandbox, command) == ()
        for _ in range(2):
            assert await marks(sandbox, "/usr/bin/env sh -c true") == ("broken",)
            assert await marks(sandbox, "exit 3") == ()

    in_sandbox(data_dir, test, limits=LIMITS)


@pytest.mark.parametrize(("argv", "expected"), [(["sleep", "30"], ("timeout",)), (["true"], ())])
def test_process_has_marks_too(data_dir: Path, argv: list[str], expected: tuple[str, ...]) -> None:
    async def test(sandbox: Sandbox) -> None:
        arguments: dict[str, Any] = {"argv": argv, "timeout_s": 2.0}
        assert (await sandbox.execute(ToolCall("process", "run", arguments))).result.marks == expected

    in_sandbox(data_dir, test, limits=LIMITS)
