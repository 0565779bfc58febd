"""Templates of shells: their forks are what new shells would be, whatever happened before in the sandbox.

They are compared with shells that are executed, which have no template.
"""

import contextlib
import os
import re
from pathlib import Path

import pytest

from sandboxes.driver import Driver, Sandbox
from sandboxes.linux import processes
from sandboxes.spec import EnvironmentSpec
from tests.machine import require_sandboxes
from tests.sandboxes.box import file, in_sandbox, needs_forks, needs_root, ran, run, with_local
from tests.sandboxes.conftest import execute_shells
from tests.sandboxes.guest.forking_anchor import SHOWN_SORTED

SPEC = EnvironmentSpec()
NAMES = "ps -e -o comm="
"""Prints the names of all processes."""
ONE, NONE = "init\nanchor\nanchor\nbash\n", "init\nanchor\nbash\n"
"""How that begins with a template, and without one."""
TEMPLATE = "$(pgrep -x anchor | grep -vx $PPID)"
"""The template's pid."""

pytestmark = needs_forks


@pytest.fixture(autouse=True)
def _sandboxes() -> None:
    require_sandboxes()


def test_forks_answer_as_executed_shells_do(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they show of themselves, what each call changed, and the session; one template forks twice."""
    settings = "x=1; declare -i y=2; export z=3; cd /tmp; f() { echo $FUNCNAME; }; alias a=b; set -u; umask 077"
    settings += "; ulimit -n 500; trap 'echo trapped' USR1 EXIT; shopt -s extglob nullglob; set -- a 'b c'; RANDOM=7"
    calls = [
        SHOWN_SORTED,
        SHOWN_SORTED,
        settings,
        SHOWN_SORTED,
        SHOWN_SORTED,
        "echo $x $y; f; echo $SECONDS $!",
        "touch /tmp/f",
        SHOWN_SORTED,
    ]
    calls += [
        "echo x >>/etc/x",
        SHOWN_SORTED,
        "enable -n printf; LC_ALL=C.UTF-8",
        SHOWN_SORTED,
        SHOWN_SORTED,
        "mkdir /tmp/d; pushd /tmp/d",
    ]
    calls += [
        SHOWN_SORTED,
        SHOWN_SORTED,
        "popd",
        SHOWN_SORTED,
        "exit 3",
        SHOWN_SORTED,
        "kill -USR1 $$",
        SHOWN_SORTED,
        SHOWN_SORTED,
    ]
    answers: list[list[tuple[object, ...]]] = []

    async def test(driver: Driver) -> None:
        sandbox = await driver.start(SPEC)
        answered = [await run(sandbox, call) for call in calls]
        answers.append([(*answer.outcome, answer.state and answer.state.content) for answer in answered])

    with_local(data_dir, test)
    execute_shells(monkeypatch)
    with_local(data_dir, test)
    for call, forked, restored in zip(calls, *answers, strict=True):
        assert forked == restored, call


def test_forks_share_nothing_that_a_process_has_of_its_own(data_dir: Path) -> None:
    show = "echo $$ $BASHPID $PPID $SECONDS $RANDOM; ps -o pid=,ppid=,pgid=,sid= $$; cat /proc/self/fdinfo/0"
    spoil = (
        "python3 -c 'import fcntl, os; [fcntl.fcntl(fd, 4, os.O_NONBLOCK | os.O_APPEND) for fd in (0, 1, 2)]'; "
        "read line; sleep 1"
    )

    async def test(sandbox: Sandbox) -> None:
        first = await run(sandbox, show)
        await run(sandbox, spoil)
        pids, randoms = set[str](), set[str]()
        for _ in range(3):
            shown, second = (await run(sandbox, show)).out.split("\n", 1)
            pid, same, parent, seconds, random = shown.split()
            assert (same, parent, seconds) == (pid, "2", "0")
            assert second.split("\n")[0].split() == [pid, "2", pid, "2"]
            assert second.split("\n")[1:] == first.out.split("\n")[2:]
            pids.add(pid)
            randoms.add(random)
        assert len(pids) == len(randoms) == 3

    in_sandbox(data_dir, test)


def test_there_is_one_in_each_sandbox_with_one_session_and_no_processes(data_dir: Path) -> None:
    """Live and restored, after each kind of call."""

    async def test(driver: Driver) -> None:
        live = await driver.start(SPEC)
        first = await run(live, NAMES)
        assert first.out == f"{ONE}ps\n"
        for before in ["true", "x=5", "cd /tmp", "touch /tmp/f", "echo x >>/etc/x", "exit 3", "kill -9 $$", "set -- a"]:
            await run(live, before)
            restored = await driver.restore(SPEC, await live.freeze())
            for sandbox in (live, restored, restored, live):
                assert (await run(sandbox, NAMES)).printed == first.printed, before
        await run(live, "(sleep 1000 >/dev/null 2>&1 &)")
        restored = await driver.restore(SPEC, await live.freeze())
        beside = {(await run(sandbox, NAMES)).printed for sandbox in (live, restored, restored, live)}
        assert len(beside) == 1
        assert NONE in beside.pop()[0]
        for sandbox in (live, restored):
            await run(sandbox, "pkill sleep; until [ -z $(pgrep sleep) ]; do :; done")
            assert (await run(sandbox, NAMES)).printed == first.printed
        await run(live, "x=1", session="other")
        assert (await run(live, NAMES)).out.startswith("init\nanchor\nbash\nbash\n")

    with_local(data_dir, test)


TOUCHES = {
    "killed": "kill -9 {pid}",
    "stopped": "kill -STOP {pid}",
    "signalled": "kill -USR1 {pid}; kill -TERM {pid}; kill -CHLD {pid}; kill -WINCH {pid}",
    "niceness": "renice -n 3 -p {pid} >/dev/null",
    "limits": "prlimit --pid {pid} --nofile=90:90",
    "CPUs": "taskset -p 1 {pid} >/dev/null",
    "priority of I/O": "ionice -c 3 -p {pid}",
    "a score": "echo 7 >/proc/{pid}/oom_score_adj",
    "a filter of dumps": "echo 7 >/proc/{pid}/coredump_filter",
    # The kernel takes one such write of the machine in a tenth of a second.
    "its session": "(cd /proc/{pid}; until echo 3 >autogroup; do [ -e autogroup ] || break; done) 2>/dev/null",
    "everything killed": "kill -9 -1",
}
"""What a command may do to a template."""


@needs_root
@pytest.mark.parametrize("name", TOUCHES)
@pytest.mark.parametrize("way", ["run", "ran", "learnt"])
def test_a_touched_template_changes_no_later_call(data_dir: Path, name: str, way: str) -> None:
    """By a command of the session, by a process of its own, and by a command that follows others like it."""
    look = (
        "nice; ulimit -a; taskset -p $$ | sed 's/.*://'; ionice -p $$; "
        f"(cd /proc/$$; cat oom_score_adj coredump_filter; sed 's/.* //' autogroup); {NAMES}"
    )

    async def test(sandbox: Sandbox) -> None:
        await run(sandbox, "trap 'echo trapped; touch /tmp/trapped' USR1 TERM WINCH")
        before = await run(sandbox, look)
        assert ONE in before.out
        if way == "ran":
            script = TOUCHES[name].format(pid="$(pgrep -x anchor | sort -n | tail -1)")
            await ran(sandbox, "/bin/bash", "-c", script)
        else:
            for _ in range(3 if way == "learnt" else 0):
                await run(sandbox, "true")
            await run(sandbox, TOUCHES[name].format(pid=TEMPLATE))
        for _ in range(2):
            assert (await run(sandbox, look)).outcome == before.outcome

    in_sandbox(data_dir, test)


ENTRIES = [
    ": >>/proc/{pid}/mem", "head -c 1 /proc/{pid}/maps", "head -c 1 /proc/{pid}/environ",
    "readlink /proc/{pid}/fd/1005", "readlink /proc/{pid}/exe", "readlink /proc/{pid}/cwd",
    ": >/proc/{pid}/fd/1004", "ls /proc/{pid}/map_files/",
    "python3 -c 'import ctypes; exit(ctypes.CDLL(None).ptrace(16, {pid}, 0, 0) < 0)'",
]  # fmt: skip
"""What must fail."""


@needs_root
def test_no_command_enters_a_template(data_dir: Path) -> None:
    async def test(sandbox: Sandbox) -> None:
        for entry in ENTRIES:
            shown = await run(sandbox, f"( {entry.format(pid=TEMPLATE)} ) 2>/dev/null")
            assert shown.code != 0, entry
        assert ONE in (await run(sandbox, NAMES)).out
        shown = await run(sandbox, f"tr '\\0' ' ' </proc/{TEMPLATE}/cmdline; cat /proc/{TEMPLATE}/comm")
        assert shown.out == "anchor anchor\n"

    in_sandbox(data_dir, test)


def own_templates() -> list[int]:
    """Return the templates below this process, as this machine numbers them: anchors that anchors have started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            if path.read_text() == "anchor\n":
                found.append(int(path.parent.name))
    templates = [pid for pid in found if processes.parent(pid) in found]
    return [pid for pid in templates if descends(pid)]


def descends(pid: int) -> bool:
    return pid == os.getpid() or (pid > 1 and descends(processes.parent(pid)))


CHANGES = {
    "the shell in /etc/passwd": ("/etc/passwd", "sed -i 's#:[^:]*$#:/bin/other#' /etc/passwd", "echo $SHELL"),
    "a user's home": ("/etc/passwd", "echo 'someone:x:77:77::/nowhere:/bin/sh' >>/etc/passwd", "echo ~someone"),
    "a locale": (
        "/usr/lib/locale/C.utf8/LC_NUMERIC",
        "f=/usr/lib/locale/C.utf8/LC_NUMERIC; cp $f /tmp/f; sed -i 's/\\./,/' /tmp/f; cat /tmp/f >$f; printf %.1f 2",
        "printf '%.1f\\n' 2",
    ),
}
"""A file that bash reads before its first command, what changes it, and what shows the change."""


@needs_root
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("way", ["run", "ran", "put"])
def test_a_changed_file_is_read_by_the_next_shell(
    data_dir: Path, name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with executed shells; and in a restored sandbox as in the live one."""
    path, change, look = CHANGES[name]
    seen: list[tuple[object, ...]] = []

    async def test(driver: Driver) -> None:
        sandbox, other = await driver.start(SPEC), await driver.start(SPEC)
        for _ in range(3):
            await run(sandbox, look)
        if way == "run":
            await run(sandbox, change)
        elif way == "ran":
            await ran(sandbox, "/bin/bash", "-c", change)
        else:
            await run(other, change)
            _, content = await file(other, "get", path)
            assert (await file(sandbox, "put", path, content))[0] in {200, 201, 204}
        live = [await run(sandbox, look) for _ in range(2)]
        restored = await driver.restore(SPEC, await sandbox.freeze())
        live.append(await run(restored, look))
        assert len({answer.outcome for answer in live}) == 1
        seen.append(live[0].outcome)

    with_local(data_dir, test)
    execute_shells(monkeypatch)
    with_local(data_dir, test)
    assert seen[0] == seen[1]


FOLDERS = {
    "moved": "mv /tmp/a /tmp/b",
    "removed": "rmdir /tmp/a",
    "replaced": "mv /tmp/a /tmp/b; mkdir /tmp/a",
    "a link": "mv /tmp/a /tmp/b; ln -s b /tmp/a",
    "a file": "rmdir /tmp/a; touch /tmp/a",
    "no longer to be entered": "chmod 0 /tmp/a",
}


@needs_root
def test_a_session_stays_in_a_directory_that_another_one_moves(data_dir: Path) -> None:
    """The move copies the directory, so the other session's shell, which stood in it, is in a removed one."""

    async def test(driver: Driver) -> None:
        for mover, other in (("main", "two"), ("two", "main")) * 3:
            sandbox = await driver.start(SPEC)
            for session in ("main", "two"):
                await run(sandbox, f"mkdir -p /tmp/a; cd /tmp/a; touch {session}", session=session)
            await run(sandbox, "mv /tmp/a /tmp/b", session=mover)
            assert (await run(sandbox, "ls; pwd", session=other)).out == "/tmp/a\n"
            await sandbox.close()

    with_local(data_dir, test)


@needs_root
@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("way", ["run", "ran", "both"])
def test_a_changed_directory_of_a_session(data_dir: Path, name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Moved by the session itself, by a process of its own, and by both after each other: as with executed shells."""
    look = "pwd; pwd -P; touch x && ls; cd .; pwd"
    seen: list[list[str]] = []

    async def test(driver: Driver) -> None:
        sandbox = await driver.start(SPEC)
        answers = [await run(sandbox, command) for command in ("mkdir /tmp/a; cd /tmp/a", "pwd", "true")]
        if way != "run":
            await ran(sandbox, "/bin/bash", "-c", FOLDERS[name])
        if way != "ran":
            answers.append(await run(sandbox, FOLDERS[name]))
        answers += [await run(sandbox, look), await run(sandbox, look)]
        # A session without its directory is in the directory of an ended process.
        seen.append([re.sub(r"/proc/\d+", "/proc/PID", repr(answer.outcome)) for answer in answers])

    with_local(data_dir, test)
    execute_shells(monkeypatch)
    with_local(data_dir, test)
    assert seen[0] == seen[1]


@pytest.mark.parametrize("variable", ["BASH_ENV", "LOCPATH", "PATH"])
def test_a_shell_that_looks_elsewhere_is_no_template(data_dir: Path, variable: str) -> None:
    async def test(sandbox: Sandbox) -> None:
        counted = await run(sandbox, f"PATH=/usr/bin:/bin; {NAMES}")
        assert NONE in counted.out

    in_sandbox(data_dir, test, env={variable: "/work/env"})


def test_a_file_for_each_new_shell_is_read_by_each(data_dir: Path) -> None:
    """`BASH_ENV` names a file that each shell which is not interactive reads (bash(1))."""

    async def test(sandbox: Sandbox) -> None:
        await run(sandbox, "echo 'echo read' >/tmp/env")
        assert (await run(sandbox, "true")).out == (await run(sandbox, "true")).out
        await run(sandbox, "echo 'v=7' >/tmp/env")
        assert (await run(sandbox, "echo $v")).out == "7\n"

    in_sandbox(data_dir, test, env={"BASH_ENV": "/tmp/env"})


def assert_holds_no_file(template: int) -> None:
    process = Path(f"/proc/{template}")
    mapped = re.findall(r"^\S+ \S+ \S+ \S+ \S+ +(/.*)$", (process / "maps").read_text(), re.MULTILINE)
    assert [path for path in mapped if not path.startswith("/dev/.shell/")] == []
    held = {int(path.name): str(path.readlink()).partition(":")[0] for path in (process / "fd").iterdir()}
    assert held.keys() == {0, 1, 2, *range(1000, 1007)}
    assert {*held.values()} == {"/dev/null", "pipe", "/memfd"}
    # The anchor has the root of the present layers.
    root = Path(f"/proc/{processes.parent(template)}/root").stat()
    assert all((process / name).stat() == root for name in ("cwd", "root"))


@needs_root
def test_a_template_holds_no_file_of_the_layers(data_dir: Path) -> None:
    """So that the layers below it can change, and old ones be removed."""

    async def test(driver: Driver) -> None:
        sandbox = await driver.start(SPEC)
        await run(sandbox, "cd /usr/share; LC_ALL=C.UTF-8; true")
        found = set[int]()
        for number in range(4):
            await run(sandbox, f"echo {number} >/tmp/f")
            [template] = own_templates()
            found.add(template)
            assert_holds_no_file(template)
        assert len(found) == 1, "one template for all layers"

    with_local(data_dir, test)
