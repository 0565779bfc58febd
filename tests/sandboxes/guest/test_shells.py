"""The shells of a local sandbox, and the anchor that starts them."""

import os
import select
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sandboxes.driver import Sandbox
from sandboxes.effects import Effect
from sandboxes.guest import anchored_processes
from sandboxes.guest.anchored_processes import known
from sandboxes.guest.anchors.anchor import ShellStartError
from sandboxes.guest.anchors.programs import start_anchor
from sandboxes.guest.anchors.shell_kit import ShellKit
from sandboxes.guest.shell import Shell
from sandboxes.guest.shells import Shells
from sandboxes.guest.survivors import kept
from sandboxes.guest.users import ROOT
from sandboxes.linux import processes, spawn
from sandboxes.linux.descriptors import Opened
from sandboxes.linux.live_state import passed_on
from sandboxes.local.pid_one import PidOne
from tests.machine import require_sandboxes
from tests.sandboxes.box import in_sandbox, run
from tests.sandboxes.guest import forking_anchor

WITH_THE_KEY = r"""cat > /tmp/touch.py <<'END'
import collections, os, re, sys
anchor = sys.argv[1]
heap = next(line.split()[0] for line in open(f"/proc/{anchor}/maps") if line.endswith("[heap]\n"))
start, end = (int(address, 16) for address in heap.split("-"))
memory = os.pread(os.open(f"/proc/{anchor}/mem", os.O_RDONLY), end - start, start)
[(key, _)] = collections.Counter(re.findall(rb"\0([0-9a-f]{16})\0", memory)).most_common(1)
open(f"/proc/{anchor}/fd/3", "wb").write(key + b" export FOO=bar; umask 077\n")
END
python3 /tmp/touch.py $PPID; rm /tmp/touch.py"""
TOUCHES = {
    "a line of bash": "echo 'export FOO=bar; umask 077' > /proc/$PPID/fd/3",
    "a line of bash with the key": WITH_THE_KEY,
    "a number": "echo 7 > /proc/$PPID/fd/4",
    "limits": "prlimit --pid $PPID --nofile=90:90",
    "niceness": "renice -n 3 -p $PPID >/dev/null",
    "a signal": "kill -STOP $PPID",
}
"""Commands that change the anchor."""
FORKS = Path(spawn.ANCHOR).exists()
"""Whether the anchor is one that forks."""


@pytest.mark.parametrize("name", TOUCHES)
def test_a_touched_anchor_changes_no_later_call(data_dir: Path, name: str) -> None:
    """Later shells are forked from the anchor, and their answers are recorded for rollouts that have not touched it."""
    require_sandboxes()
    look = 'echo "$FOO"; umask; nice; ulimit -n'

    async def test(sandbox: Sandbox) -> None:
        before = await run(sandbox, look)
        touch = await run(sandbox, TOUCHES[name])
        # An anchor that forks cannot be written to.
        assert touch.effect is Effect.NONE
        assert touch.code == 0 or (FORKS and "denied" in touch.err), touch.err
        assert (await run(sandbox, look)).outcome == before.outcome

    in_sandbox(data_dir, test)


@pytest.mark.parametrize("lost", [False, True], ids=["it runs", "its anchor is lost"])
def test_a_shell_that_was_begun_is_taken_over(lost: bool) -> None:
    shells = Shells({"PATH": os.environ["PATH"], "GIVEN": "x"}, "/", {}, None)
    shells.anchor = begun = start_anchor(ROOT)
    if lost:
        # Otherwise it may have started the shell before it is killed.
        os.kill(begun.pid, signal.SIGSTOP)
    shells.begin("main")
    if lost:
        os.kill(begun.pid, signal.SIGKILL)
    shells.renew(["main"])
    shell = shells.ready("main")
    assert (shells.anchor is begun) != lost
    assert shell.baseline is not None
    assert 'declare -x GIVEN="x"' in shell.baseline["variables"]
    shells.end()
    if shells.anchor is not None:
        shells.anchor.close()


def test_an_exit_code_that_nobody_knows_is_no_result() -> None:
    """The process has been collected by one that was killed then. Any code would be made up."""
    ended = subprocess.Popen(["/bin/true"])
    ended.wait()
    status = Shells({}, "/", {}, None).status_of(ended.pid)
    assert status is None
    with pytest.raises(ShellStartError, match="exit code"):
        known(status)


def test_an_orphan_is_waited_for() -> None:
    """It becomes a child of this process a moment after its parent's end, and is collected then."""
    orphan = subprocess.Popen(["/bin/sh", "-c", "sleep 0.2; exit 4"])
    assert Shells({}, "/", {}, None).status_of(orphan.pid) == 4
    orphan.returncode = 4


def test_a_template_ends_with_its_anchor(shell_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command kills all processes, and the anchor is found lost before its shells have ended."""
    monkeypatch.setattr(processes, "list_processes", lambda _=(): set[processes.Process]())
    shells = Shells({"PATH": "/usr/bin:/bin"}, "/", {}, None)
    shells.anchor = first = forking_anchor.start(shell_folder)
    shell = shells.for_command("main")
    assert isinstance(shell, Shell)
    assert shell.forked
    assert len(shells.anchor_pids) == 2
    os.kill(first.pid, signal.SIGKILL)
    assert shells.status_of(os.getpid()) is None
    assert not shells.anchor_pids
    assert not shells.anchor_was_touched()
    shells.end_idle(None)
    assert shells.ready("main").baseline is not None
    assert shells.anchor not in (None, first)
    shells.end()
    if shells.anchor is not None:
        shells.anchor.close()


def test_halted_shells_run_nothing_more(shell_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state is reported before they are waited for, and a shell that runs on could change it."""
    monkeypatch.setattr(processes, "list_processes", lambda _=(): set[processes.Process]())
    # Without the niceness of the session: pid 1 and its anchor are born with 0, and this process may have another one.
    monkeypatch.setattr(anchored_processes, "passed_on", lambda pid: passed_on(pid)[:-1])
    shells = Shells({"PATH": "/usr/bin:/bin"}, "/", {}, None)
    shells.anchor = forking_anchor.start(shell_folder)
    shell = shells.for_command("main")
    assert isinstance(shell, Shell)
    assert shell.forked
    shells.halt()
    assert select.select([shell.death], [], [], 10.0)[0]
    assert len(shells.anchor_pids) == 2, "the template stays"
    assert not shells.anchor_was_touched()
    shells.end()
    again = shells.ready("main")
    assert again is shell
    assert shell.waits_as_template
    shells.halt()
    assert not select.select([shell.death], [], [], 0.05)[0]
    shells.end()
    shells.drop_templates()
    shells.anchor.close()


def test_a_shell_that_is_being_killed_has_not_moved() -> None:
    """Its directory is gone before it has ended, and its session goes on in a fresh shell."""
    process = subprocess.Popen(["bash", "-c", "for ((i = 0; i < 30000; i++)); do :; done"])
    killed: list[object] = []

    class Dying(SimpleNamespace):
        pid, runs, name, baseline, session = process.pid, 1, "other", {"cwd": "/"}, {"cwd": "/"}

        @property
        def ended(self) -> bool:
            return bool(select.select([death], [], [], 0)[0])

        def stands_at(self, folder: str) -> bool:
            return folder != "/"

    class Group(list[Dying]):
        kill = killed.append

    with Opened(os.pidfd_open(process.pid)) as death:
        assert kept(cast("Shells", Group([dying := Dying()]))) == frozenset()
    assert killed == [dying]
    process.wait()


@pytest.mark.parametrize(("links", "let_go"), [("", []), ("regular", ["let go"])])
def test_a_state_is_reported_when_no_shell_runs_any_more(links: str, let_go: list[str]) -> None:
    """And when nothing looks at the old layers, over which the kernel would make no index of hard links."""
    order: list[str] = []
    platform = SimpleNamespace(
        _changes=SimpleNamespace(links=links),
        _switches=SimpleNamespace(keep=lambda _: order.append("let go")),
        _shells=SimpleNamespace(halt=lambda: order.append("halt"), end=lambda: order.append("end")),
        _send_layer_state=lambda _: order.append("state"),
        _await_switch=lambda: order.append("switch"),
    )
    PidOne._move(cast("Any", platform), cast("Any", None))
    assert order == ["halt", *let_go, "state", "end", "switch"]


def test_a_kit_that_is_closed_is_not_lent() -> None:
    kit = ShellKit()
    assert kit.is_as_made()
    kit.close()
    assert not kit.is_as_made()
