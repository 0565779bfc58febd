"""The anchor: one contract for the program of ours, for a bash that forks its shells, and for any other bash."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from sandboxes.guest.anchors.anchor import Anchor
from sandboxes.guest.anchors.bash_anchor import BashAnchor
from sandboxes.guest.anchors.native_anchor import NativeAnchor
from sandboxes.guest.anchors.programs import adopted_anchor
from sandboxes.guest.anchors.starter import AnchorLostError
from sandboxes.guest.bash import session as session_texts
from sandboxes.linux import processes
from sandboxes.linux.processes import parent
from tests.machine import wait_until
from tests.sandboxes.box import needs_root
from tests.sandboxes.guest import forking_anchor
from tests.sandboxes.guest.forking_anchor import EXECUTABLE, FORK, PROGRAM, SHOWN

EXECUTED, FORKED = "an argument", "a descriptor"
"""How a bash gets its program. Sessions' shells read it from a descriptor, and only these can be forks."""


@pytest.fixture(params=["native", "forking", "bash"])
def anchor(request: pytest.FixtureRequest) -> Iterator[Anchor]:
    if request.param == "bash":
        started: Anchor = BashAnchor.start()
    elif request.param == "native":
        started = NativeAnchor.start(str(request.getfixturevalue("anchor_helper")))
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
    anchor: Anchor, program: str, environment: Mapping[str, str] = {}, way: str = FORKED, more: Mapping[int, int] = {}
) -> Iterator[tuple[int, int]]:
    """Start a program that prints to a pipe; yield its pid and our end."""
    null, text, (reading, writing) = os.open("/dev/null", os.O_RDONLY), os.memfd_create("text"), os.pipe()
    given = {0: null, 1: writing, 2: writing, **more}
    try:
        if way == FORKED:
            os.write(text, os.fsencode(program))
            pid = anchor.start_on(environment, {**given, session_texts.LOOP_FD: text})
        else:
            pid = anchor.start_on(environment, given, program)
        os.close(writing)
        yield pid, reading
    finally:
        os.close(reading)
        os.close(text)
        os.close(null)


def printed(
    anchor: Anchor, program: str, environment: Mapping[str, str] = {}, way: str = FORKED, more: Mapping[int, int] = {}
) -> str:
    """Return what a program prints until it has ended well."""
    with (
        output_of(anchor, program, environment, way, more) as (pid, reading),
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


@pytest.mark.parametrize("way", [EXECUTED, FORKED])
def test_process_has_what_it_was_given_and_no_more(anchor: Anchor, way: str) -> None:
    """A shell passes on a variable with any bytes, but neither functions nor its own options."""
    odd = "two\nlines '\"$x`\udcff"
    given = {"ODD": odd, "BASH_FUNC_f%%": "() { echo; }", "SHELLOPTS": "xtrace", "PATH": os.environ["PATH"]}
    program = 'printf %s "$ODD"; cd /proc/self/fd; echo; echo *; tr "\\0" " " </proc/$$/cmdline; :'
    shown = printed(anchor, program, given, way)
    assert odd in shown
    *_, numbers, command = shown.splitlines()
    # 3 is the directory of the pattern itself.
    assert set(numbers.split()) - {"3"} == {"0", "1", "2"} | ({"30"} if way == FORKED else set())
    argument = session_texts.START if way == FORKED else program
    assert command == f"bash --noprofile --norc -c {argument} bash "
    assert "f ()" not in printed(anchor, "declare -f", given, way)


@pytest.mark.parametrize("way", [EXECUTED, FORKED])
def test_process_leads_a_group_and_its_parent_is_the_anchor(anchor: Anchor, way: str) -> None:
    """It is in the anchor's session, and no signal is blocked or ignored in it."""
    shows = "echo $$ $PPID $BASHPID; ps -o pgid=,sid= $$; exec grep -E '^Sig(Blk|Ign)' /proc/$$/status"
    pid, parent, same, group, session, *masks = printed(anchor, shows, way=way).split()
    assert (group, same, int(parent), int(session)) == (pid, pid, anchor.pid, anchor.pid)
    assert {int(mask, 16) for mask in masks[1::2]} == {0}


@pytest.mark.parametrize(
    "given", [{}, {"SHELL": ""}, {"A": "1", "PATH": os.environ["PATH"], "SHLVL": "4", "_": "/x", "LANG": "C.UTF-8"}]
)
def test_a_fork_shows_what_an_executed_shell_does(forking: NativeAnchor, given: Mapping[str, str]) -> None:
    """A shell with the descriptor 4 is executed, because a fork needs that one for its answer."""
    shows = f"exec 4<&-; {PROGRAM}; {SHOWN}"
    null = os.open("/dev/null", os.O_RDONLY)
    (forked, fork), (program, executed) = (
        printed(forking, shows, given, more=more).split("\n", 1) for more in ({}, {4: null})
    )
    os.close(null)
    assert (forked, program) == (FORK, EXECUTABLE)
    assert fork == executed


@pytest.mark.parametrize("variable", ["LD_LIBRARY_PATH", "GLIBC_TUNABLES", "MALLOC_ARENA_MAX"])
def test_a_shell_with_a_variable_for_the_loader_is_executed(forking: NativeAnchor, variable: str) -> None:
    shows = f"{PROGRAM}; echo ${variable}"
    assert printed(forking, shows, {"A": "1", variable: "/nowhere", "B": "2"}) == f"{EXECUTABLE}\n/nowhere\n"
    assert printed(forking, shows, {f"A_{variable}": "/nowhere"}) == f"{FORK}\n\n"


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


@pytest.mark.parametrize("program", [session_texts.START, ":"], ids=["forked", "executed"])
def test_a_descriptor_that_cannot_be_opened_is_no_shell(forking: NativeAnchor, program: str) -> None:
    """The next one is started all the same."""
    forking.send(forking._request({}, {0: "/nowhere"}, program))
    assert forking.receive() == 0
    assert printed(forking, "echo on") == "on\n"


def test_a_fork_needs_known_files_and_no_other_process(
    shell_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The files are read through a path of the machine here, which has no such directory."""
    files = shell_folder / "files"
    assert NativeAnchor.start_with_bash(str(files)) is None, "beside processes"
    monkeypatch.setattr(processes, "list_processes", set)
    assert NativeAnchor.start_with_bash(str(tmp_path)) is None, "without files"
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    facts = (tmp_path / "facts").read_bytes()
    (tmp_path / "facts").write_bytes(facts[:-1] + bytes([facts[-1] ^ 1]))
    assert NativeAnchor.start_with_bash(str(tmp_path)) is None, "of another bash"


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


def test_anchor_beside_processes_does_not_stay(anchor_helper: Path) -> None:
    """They could have entered it before it hid. Beside this test there are always some."""
    anchor = NativeAnchor.start(str(anchor_helper))
    assert not anchor.stays
    anchor.close()


_REUSED_PID = """
import os, sys, time
from sandboxes.guest.anchors.native_anchor import NativeAnchor

def run(text):
    pid = anchor.start_on({}, {0: null, 1: null, 2: null}, text)
    while os.path.exists(f"/proc/{pid}"):
        time.sleep(0.001)
    return pid

anchor, null = NativeAnchor.start(sys.argv[1]), os.open("/dev/null", os.O_RDWR)
pid = run("exit 7")
run(f"echo {pid - 1} >/proc/sys/kernel/ns_last_pid; (sleep 0.1; exit 9) & [ $! = {pid} ] && touch {sys.argv[2]}")
while os.path.exists(f"/proc/{pid}"):
    time.sleep(0.001)
print(anchor.wait(pid))
anchor.close()
"""


@needs_root
def test_exit_code_is_that_of_the_process_that_had_the_pid_first(anchor_helper: Path, tmp_path: Path) -> None:
    """An orphan gets the pid before pid 1 asks, and the anchor collects it too."""
    arguments = [sys.executable, "-c", _REUSED_PID, str(anchor_helper), str(tmp_path / "reused")]
    root = Path(__file__).parents[3]
    in_namespace = ["unshare", "--pid", "--mount-proc", "--fork", *arguments]
    assert subprocess.check_output(in_namespace, cwd=root, timeout=60) == b"7\n"
    assert (tmp_path / "reused").exists()
