"""The anchor: one contract for a bash that forks its shells, and for one that executes them."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import Any

import pytest

from sandboxes.guest.anchors.anchor import Anchor
from sandboxes.guest.anchors.bash_anchor import BashAnchor
from sandboxes.guest.anchors.native_anchor import NativeAnchor
from sandboxes.guest.anchors.programs import adopted_anchor
from sandboxes.guest.anchors.starter import AnchorLostError
from sandboxes.guest.bash import session as session_texts
from sandboxes.guest.users import ROOT, User
from sandboxes.linux import processes, spawn
from sandboxes.linux.processes import parent
from tests.machine import wait_until
from tests.sandboxes.box import needs_root
from tests.sandboxes.guest import forking_anchor
from tests.sandboxes.guest.forking_anchor import EXECUTABLE, FORK, PROGRAM, SHOWN

ARGUMENT, DESCRIPTOR = "an argument", "a descriptor"
"""How a bash gets its program. Sessions' shells read it from a descriptor."""


@pytest.fixture(params=["forking", "executing"])
def anchor(request: pytest.FixtureRequest) -> Iterator[Anchor]:
    if request.param == "executing":
        started: Anchor = BashAnchor.start()
    else:
        started = forking_anchor.start(request.getfixturevalue("shell_folder"))
    yield started
    started.close()


@pytest.fixture
def forking(shell_folder: Path) -> Iterator[NativeAnchor]:
    anchor = forking_anchor.start(shell_folder)
    yield anchor
    anchor.close()


@contextmanager
def output_of(
    anchor: Anchor, program: str, environment: Mapping[str, str] = {}, way: str = DESCRIPTOR,
    *, user: User | None = None, start: str | None = None, folder: str = "",
) -> Iterator[tuple[int, int]]:  # fmt: skip
    """Start a program that prints to a pipe; yield its pid and our end.

    Args:
        anchor: What starts it.
        program: It may be an argument, or what a session's shell reads.
        environment: Its variables.
        way: Which of the two it is.
        user: Its user.
        folder: The directory that it begins in.
        start: What bash runs in the place of both, with the same descriptors.
    """
    null, text, (reading, writing) = os.open("/dev/null", os.O_RDONLY), os.memfd_create("text"), os.pipe()
    given = {0: null, 1: writing, 2: writing}
    if way == DESCRIPTOR:
        os.write(text, os.fsencode(program))
        given[session_texts.LOOP_FD] = text
    try:
        pid = anchor.start_on(environment, given, start or (program if way == ARGUMENT else None), user, folder)
        os.close(writing)
        yield pid, reading
    finally:
        os.close(reading)
        os.close(text)
        os.close(null)


def printed(anchor: Anchor, *arguments: Any, **more: Any) -> str:
    """Return what a program prints until it has ended well; see `output_of`."""
    with (
        output_of(anchor, *arguments, **more) as (pid, reading),
        os.fdopen(os.dup(reading), errors="surrogateescape") as output,
    ):
        text = output.read()
        assert anchor.wait(pid) == 0, text
    return text


@pytest.mark.parametrize(("text", "code"), [("exit 7", 7), ("kill -9 $$", 137), ("exec /nowhere 2>/dev/null", 127)])
def test_exit_code_is_told_once_it_is_known(anchor: Anchor, code: int, text: str) -> None:
    with output_of(anchor, text) as (pid, _):
        assert anchor.wait(pid) == code


def test_an_anchor_knows_its_own_processes_only(anchor: Anchor) -> None:
    """Not 127, which a shell tells of any other process: a program may have ended with that."""
    assert anchor.wait(os.getpid()) is None


@pytest.mark.parametrize("way", [ARGUMENT, DESCRIPTOR])
def test_process_has_what_it_was_given_and_no_more(anchor: Anchor, way: str) -> None:
    """A shell passes on a variable with any bytes, but neither functions nor its own options."""
    odd = "two\nlines '\"$x`\udcff"
    given = {"ODD": odd, "BASH_FUNC_f%%": "() { echo; }", "SHELLOPTS": "xtrace", "PATH": os.environ["PATH"]}
    program = 'printf %s "$ODD"; cd /proc/self/fd; echo; echo *; tr "\\0" " " </proc/$$/cmdline; :'
    shown = printed(anchor, program, given, way)
    assert odd in shown
    *_, numbers, command = shown.splitlines()
    # 3 is the directory of the pattern itself.
    assert set(numbers.split()) - {"3"} == {"0", "1", "2"} | (
        {str(session_texts.LOOP_FD)} if way == DESCRIPTOR else set()
    )
    argument = session_texts.START if way == DESCRIPTOR else program
    assert command == f"bash --noprofile --norc -c {argument} bash "
    assert "f ()" not in printed(anchor, "declare -f", given, way)


@pytest.mark.parametrize("way", [ARGUMENT, DESCRIPTOR])
def test_process_leads_a_group_and_its_parent_is_the_anchor(anchor: Anchor, way: str) -> None:
    """It is in the anchor's session, and no signal is blocked or ignored in it."""
    shows = "echo $$ $PPID $BASHPID; ps -o pgid=,sid= $$; exec grep -E '^Sig(Blk|Ign)' /proc/$$/status"
    pid, parent, same, group, session, *masks = printed(anchor, shows, way=way).split()
    assert (group, same, int(parent), int(session)) == (pid, pid, anchor.pid, anchor.pid)
    assert {int(mask, 16) for mask in masks[1::2]} == {0}


_EXECUTE = """import os, signal
for number in (signal.SIGPIPE, signal.SIGXFSZ):
    signal.signal(number, signal.SIG_DFL)
os.execve({!r}, {!r}, {!r})"""
"""Executes a bash with exactly these arguments and variables."""


@pytest.mark.parametrize(
    "given", [{}, {"SHELL": ""}, {"A": "1", "PATH": os.environ["PATH"], "SHLVL": "4", "_": "/x", "LANG": "C.UTF-8"}]
)
@pytest.mark.parametrize("way", [ARGUMENT, DESCRIPTOR])
def test_a_fork_shows_what_an_executed_shell_does(forking: NativeAnchor, given: Mapping[str, str], way: str) -> None:
    # A fork hides the descriptor that it reads this from, and an executed shell is started with it.
    text = session_texts.LOOP_FD
    shows = f"exec {text}<&-; {PROGRAM}; {SHOWN}"
    words = ["bash", "--noprofile", "--norc", "-c", shows if way == ARGUMENT else session_texts.START, "bash"]
    execute = f"exec {quote(sys.executable)} -ISc {quote(_EXECUTE.format(spawn.BASH, words, dict(given)))}"
    execute += f" {text}</proc/self/fd/{text}" if way == DESCRIPTOR else ""
    forked, fork = printed(forking, shows, given, way).split("\n", 1)
    program, executed = printed(forking, shows, given, way, start=execute).split("\n", 1)
    assert (forked, program) == (FORK, EXECUTABLE)
    assert fork == executed


@pytest.mark.parametrize("variable", ["LD_LIBRARY_PATH", "LD_PRELOAD", "GLIBC_TUNABLES", "MALLOC_ARENA_MAX"])
def test_a_variable_for_the_loader_concerns_children_alone(forking: NativeAnchor, variable: str) -> None:
    shows = f"exec 2>/dev/null; {PROGRAM}; echo ${variable}; env | grep ^{variable}="
    assert printed(forking, shows, {**os.environ, variable: "/no"}) == f"{FORK}\n/no\n{variable}=/no\n"


def test_forking_anchor_shows_nothing_but_its_name(forking: NativeAnchor) -> None:
    """It was started with the arguments of a shell, and with variables for the loader. Forks show their own."""
    printed(forking, "true", {"A": "1"})
    shown = [Path(f"/proc/{forking.pid}/{name}").read_bytes() for name in ("comm", "cmdline", "environ")]
    assert shown == [b"anchor\n", b"anchor\0", b""]


def test_a_fork_knows_nothing_of_another(forking: NativeAnchor) -> None:
    """Not even its random numbers are alike, nor the variables that the other one was born with."""
    draws = "echo $x$GIVEN; echo $RANDOM $RANDOM $RANDOM; x=1"
    first, second = (printed(forking, draws, given).split("\n", 1) for given in ({"GIVEN": "given"}, {}))
    assert (first[0], second[0]) == ("given", "")
    assert first[1] != second[1]


def test_a_descriptor_that_cannot_be_opened_is_no_shell(forking: NativeAnchor) -> None:
    """The next one is started all the same."""
    forking.send(forking._request({}, {0: "/nowhere"}, ":", None, ""))
    assert forking.receive() == 0
    assert printed(forking, "echo on") == "on\n"


USERS = {
    "a number": User(1234, 5, (5,), "/"),
    "groups": User(1, 2, (2, 3, 4), "/"),
    "none of root's": User(7, 0, (), "/"),
}


@needs_root
@pytest.mark.parametrize("name", USERS)
def test_a_process_starts_as_its_user_with_no_rights_of_root(forking: NativeAnchor, name: str) -> None:
    user = USERS[name]
    lines = printed(forking, "exec cat /proc/self/status", user=user).splitlines()
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    assert status["Uid"].split() == 4 * [str(user.uid)]
    assert status["Gid"].split() == 4 * [str(user.gid)]
    assert status["Groups"].split() == [str(group) for group in user.groups]
    assert {status[kind] for kind in ("CapPrm", "CapEff", "CapAmb")} == {"0000000000000000"}
    assert printed(forking, "echo $UID $(id -u)") == "0 0\n", "the next one is root again"


@needs_root
def test_shells_on_the_kit_have_the_anchors_user(forking: NativeAnchor) -> None:
    forking.user = User(1234, 5, (5,), "/")
    assert printed(forking, "echo $UID $EUID $GROUPS") == "1234 1234 5\n"
    assert printed(forking, "echo $UID", user=ROOT) == "0\n"


@needs_root
def test_a_process_begins_where_its_user_may_not_go(forking: NativeAnchor, tmp_path: Path) -> None:
    """As with container runtimes. From a directory that cannot be entered at all, it begins in the root."""
    tmp_path.chmod(0o700)
    for folder, shown in ((str(tmp_path), str(tmp_path)), ("/nowhere", "/"), (f"{tmp_path}\0u0 0", "/")):
        assert printed(forking, "echo $UID $PWD", user=User(7, 7, (), "/"), folder=folder) == f"7 {shown}\n"


def test_without_files_no_anchor_forks(tmp_path: Path) -> None:
    assert NativeAnchor.start(str(tmp_path)) is None


def test_orphans_are_the_anchors_and_are_collected(anchor: Anchor) -> None:
    with output_of(anchor, "(sleep 1000 >&- 2>&- & echo $!)") as (pid, reading):
        orphan = int(os.read(reading, 16))
        assert anchor.wait(pid) == 0
        wait_until(lambda: parent(orphan) == anchor.pid)
        os.kill(orphan, signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{orphan}").exists())


def test_shell_on_the_kit_runs_commands(anchor: Anchor) -> None:
    """It goes on when the anchor has closed the kit, for which a checkpoint cannot wait."""
    kit = anchor.kit
    assert kit is not None
    ours = kit.lend(b":\n")
    anchor.request_shell({"GIVEN": "variable"})
    pid = anchor.started()
    anchor.close_kit()
    assert anchor.kit is None
    os.pwrite(ours[session_texts.COMMAND_FD], b"echo $GIVEN; exit 4", 0)
    os.write(ours[session_texts.GO_FD], b"\n")
    os.set_blocking(ours[1], True)
    assert os.read(ours[1], 64) == b"variable\n"
    assert anchor.wait(pid) == 4
    held = {path.name for path in Path(f"/proc/{anchor.pid}/fd").iterdir()}
    assert not {str(number) for number in range(40, 50)} & held
    for fd in ours.values():
        os.close(fd)


def test_lost_anchor_is_reported(anchor: Anchor) -> None:
    os.kill(anchor.pid, signal.SIGKILL)
    with pytest.raises(AnchorLostError):
        printed(anchor, "echo")


def test_restored_anchor_is_spoken_to_as_it_understands(anchor: Anchor) -> None:
    again = adopted_anchor(anchor.remember(), anchor.ends)
    assert again.remember() == anchor.remember()
    assert printed(again, "echo hello") == "hello\n"
    assert not again.stays


def test_anchor_beside_processes_does_not_stay(shell_folder: Path) -> None:
    """They could have entered it before it hid."""
    for others, stays in (set[processes.Process](), True), ({(2, 1)}, False):
        anchor = forking_anchor.start(shell_folder, others=others)
        anchor.close()
        assert anchor.stays == stays


_REUSED_PID = """
import os, sys, time
from pathlib import Path
from tests.sandboxes.guest import forking_anchor

def run(text):
    pid = anchor.start_on({}, {0: null, 1: last_pid, 2: null}, text)
    while os.path.exists(f"/proc/{pid}"):
        time.sleep(0.001)
    return pid

anchor, null = forking_anchor.start(Path(sys.argv[1])), os.open("/dev/null", os.O_RDWR)
# No process of a sandbox may write to it.
last_pid = os.open("/proc/sys/kernel/ns_last_pid", os.O_WRONLY)
pid = run("exit 7")
run(f"echo {pid - 1}; (sleep 0.1; exit 9) & [ $! = {pid} ] && touch {sys.argv[2]}")
while os.path.exists(f"/proc/{pid}"):
    time.sleep(0.001)
print(anchor.wait(pid))
anchor.close()
"""


@needs_root
def test_exit_code_is_that_of_the_process_that_had_the_pid_first(shell_folder: Path, tmp_path: Path) -> None:
    """An orphan gets the pid before pid 1 asks, and the anchor collects it too."""
    arguments = [sys.executable, "-c", _REUSED_PID, str(shell_folder), str(tmp_path / "reused")]
    root = Path(__file__).parents[3]
    in_namespace = ["unshare", "--pid", "--mount-proc", "--fork", *arguments]
    assert subprocess.check_output(in_namespace, cwd=root, timeout=60) == b"7\n"
    assert (tmp_path / "reused").exists()
