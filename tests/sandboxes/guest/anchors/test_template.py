"""A template by itself: when it stands for new shells, and its conversation with pid 1."""

import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandboxes.guest.anchors.native_anchor import NativeAnchor
from sandboxes.guest.anchors.starter import AnchorLostError
from sandboxes.guest.anchors.template import ShellTemplate, can_stand_for, spares
from sandboxes.guest.bash import session as session_texts
from sandboxes.guest.bash.restore import restore_script
from sandboxes.guest.shell import Shell
from sandboxes.linux.descriptors import unread_bytes
from sandboxes.shell_text import ShellSession
from tests.machine import wait_until
from tests.sandboxes.guest import forking_anchor

NEW: ShellSession = {"dirs": [], "limits": {}, "cwd": "/"}


@pytest.mark.parametrize(
    ("session", "script", "environment", "may"),
    [
        (None, b"", {}, True),
        (NEW, b"x=1", {"PATH": "/usr/bin:/bin:/sbin", "HOME": "/root"}, True),
        ({**NEW, "dirs": ["/tmp"]}, b"", {}, False),
        ({**NEW, "limits": {"RLIMIT_NPROC": [1, 1]}}, b"", {}, False),
        ({**NEW, session_texts.KEPT: "moved"}, b"", {}, False),
        (None, b"", {"BASH_ENV": ""}, False),
        (NEW, b'declare -x LOCPATH="/tmp"', {}, False),
        *(
            (None, b"", {"PATH": path}, False)
            for path in ("/tmp", "/usr/bin:/work/bin", "bin", "", "/usr/bin:", "/usrx")
        ),
    ],
)
def test_a_shell_is_a_template_only_if_nothing_else_decides_what_it_is(
    session: ShellSession | None, script: bytes, environment: dict[str, str], may: bool
) -> None:
    assert can_stand_for(session, script, environment) == may


@pytest.mark.parametrize(
    ("written", "spared"),
    [
        ([""], True),
        (["", "tmp", "tmp/etc", "home", "home/usr"], True),
        (["", "tmp", "etc", "etc/x"], False),
        (["", "usr", "usr/local", "usr/local/x"], False),
        (["", "bin"], False),
    ],
)
def test_a_template_outlives_changes_outside_of_system_directories(written: list[str], spared: bool) -> None:
    assert spares(written) == spared


@pytest.fixture
def anchor(shell_folder: Path) -> Iterator[NativeAnchor]:
    anchor = forking_anchor.start(shell_folder)
    yield anchor
    anchor.close()


class Started:
    """A template of a new session, and our ends of its pipes.

    Attributes:
        template: The template.
        ends: Our ends, by the shell's descriptors.
    """

    def __init__(self, anchor: NativeAnchor, script: bytes | None = None) -> None:
        assert anchor.kit is not None
        self.kit = anchor.kit
        self.ends = self.kit.lend(restore_script(None, "/") if script is None else script)
        anchor.request_shell({"GIVEN": "x"}, template=True)
        pid = anchor.started()
        assert ShellTemplate.is_one(self.kit)
        self.template = ShellTemplate(pid, self.kit, None)
        self.anchor = anchor

    def dump(self) -> bytes:
        """Return the next dump."""
        dump = b""
        while not dump.endswith(session_texts.END):
            assert select.select([self.ends[session_texts.DUMP_FD]], [], [], 10)[0]
            dump += os.read(self.ends[session_texts.DUMP_FD], 1 << 16)
        return dump

    def fork(self, folder: str = "/") -> int:
        pid = self.template.fork(folder)
        self.anchor.take_note_of(pid)
        return pid

    def give(self, command: bytes) -> None:
        fd = self.ends[session_texts.COMMAND_FD]
        os.pwrite(fd, command, 0)
        os.ftruncate(fd, len(command))
        os.write(self.ends[session_texts.GO_FD], b"\n")

    def printed(self) -> bytes:
        assert select.select([self.ends[1]], [], [], 10)[0]
        return os.read(self.ends[1], 1 << 16)

    def close(self) -> None:
        self.template.end()
        for fd in self.ends.values():
            os.close(fd)


@pytest.fixture
def started(anchor: NativeAnchor) -> Iterator[Started]:
    started = Started(anchor)
    yield started
    started.close()


def test_each_fork_runs_a_command_and_makes_the_dump_that_follows(started: Started) -> None:
    first = started.dump()
    dumps = set[bytes]()
    for _ in range(3):
        pid = started.fork("/usr")
        started.give(b"echo $GIVEN $$ $(readlink /proc/$$/cwd); x=1")
        assert started.printed() == f"x {pid} /usr\n".encode()
        dumps.add(started.dump())
        os.kill(pid, signal.SIGKILL)
        assert started.anchor.wait(pid) == 137
    [dump] = dumps
    assert b'declare -- x="1"' in dump
    assert b"declare -- x=" not in first


def test_exit_codes_of_forks_are_told(started: Started) -> None:
    """However soon a fork ends after pid 1 has asked the anchor to take note of it."""
    started.dump()
    for code in range(100):
        pid = started.fork()
        started.give(b"exit %d" % code)
        assert started.anchor.wait(pid) == code


def test_exit_codes_are_told_of_an_anchor_that_is_busy(started: Started) -> None:
    """It collects hundreds of orphans while it is told of a fork, and the fork ends before it is through."""
    started.dump()
    started.template.await_ready()
    null, (reading, writing) = os.open("/dev/null", os.O_RDONLY), os.pipe()
    ends = {0: null, 1: writing, 2: writing, session_texts.DUMP_FD: writing}
    program = "sleep 0.1; for ((i = 0; i < 800; i++)); do (: &); done; echo done"
    for code in range(5):
        started.anchor.start_on({}, ends, program)
        os.kill(started.anchor.pid, signal.SIGSTOP)
        assert os.read(reading, 100) == b"done\n"
        os.kill(started.anchor.pid, signal.SIGCONT)
        pid = started.fork()
        started.give(b"exit %d" % code)
        assert started.anchor.wait(pid) == code
    for fd in (null, reading, writing):
        os.close(fd)


def test_a_fork_that_ends_before_the_anchor_is_told_of_it(started: Started) -> None:
    """Its exit code is not known. It is not waited for either."""
    started.dump()
    pid = started.template.fork("/")
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{pid}").exists())
    started.anchor.take_note_of(pid)
    assert started.anchor.wait(pid) is None


def test_no_fork_begins_before_the_last_one_was_collected(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its `ps` would show the last one as a zombie."""
    started.dump()
    last = started.template.last_fork = started.fork()
    os.kill(started.anchor.pid, signal.SIGSTOP)
    os.kill(last, signal.SIGKILL)
    wait_until(lambda: Path(f"/proc/{last}/cmdline").read_bytes() == b"")
    monkeypatch.setattr("sandboxes.guest.anchors.template.PATIENCE_S", 0.1)
    with pytest.raises(AnchorLostError, match="collects"):
        started.fork()
    monkeypatch.undo()
    waking = threading.Timer(0.2, os.kill, (started.anchor.pid, signal.SIGCONT))
    waking.start()
    pid = started.fork()
    assert not Path(f"/proc/{last}").exists()
    waking.join()
    started.give(b"exit 3")
    assert started.anchor.wait(pid) == 3


def test_an_anchor_that_has_not_taken_note_yet_is_as_it_was(started: Started) -> None:
    """On a busy machine it does so after the command. Otherwise each such call would cost a new anchor."""
    started.dump()
    os.kill(started.anchor.pid, signal.SIGSTOP)
    pid = started.fork()
    assert unread_bytes(started.anchor.ends[0]) > 0
    assert not started.anchor.has_unread
    os.kill(started.anchor.pid, signal.SIGCONT)
    started.give(b"exit 4")
    assert started.anchor.wait(pid) == 4


@pytest.mark.parametrize("folder", ["/nowhere", "/etc/passwd", "/" + 4094 * "x", "/" + 5000 * "x"])
def test_a_directory_that_cannot_be_entered(started: Started, folder: str) -> None:
    """The template says so, and forks on; a name that no directory can have ends it."""
    started.dump()
    with pytest.raises(AnchorLostError):
        started.fork(folder)
    if len(folder) <= 4096:
        pid = started.fork()
        started.give(b"exit 5")
        assert started.anchor.wait(pid) == 5
    else:
        assert not started.template.is_ready


def test_a_fork_of_which_no_anchor_takes_note_ends(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would wait for good, as a process that is unknown."""
    started.dump()
    forked = list[int]()

    def lost(pid: int) -> None:
        forked.append(pid)
        raise AnchorLostError

    monkeypatch.setattr(started.anchor, "take_note_of", lost)
    shell = Shell("main", None, started.template.pid, {fd: os.dup(end) for fd, end in started.ends.items()})
    shell.template, shell.baseline = started.template, {**NEW}
    with pytest.raises(AnchorLostError):
        shell.fork(started.anchor)
    assert not shell.forked
    wait_until(lambda: not Path(f"/proc/{forked[0]}").exists())
    shell.template = None
    shell.close()


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_template_is_reported(started: Started, sent: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once if it has ended."""
    started.dump()
    started.template.await_ready()
    monkeypatch.setattr("sandboxes.guest.anchors.starter.PATIENCE_S", 60.0 if sent is signal.SIGKILL else 0.1)
    os.kill(started.template.pid, sent)
    wait_until(lambda: started.template.was_touched or not started.template.is_ready)
    began = time.monotonic()
    with pytest.raises(AnchorLostError):
        started.fork()
    assert time.monotonic() - began < 30


def test_signals_for_a_template_reach_no_fork(anchor: NativeAnchor) -> None:
    started = Started(anchor, restore_script(None, "/") + b"trap 'echo trapped' USR1 TERM\n")
    started.dump()
    started.template.await_ready()
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        os.kill(started.template.pid, number)
    pid = started.fork()
    started.give(b"kill -USR1 $$; echo on; exit 0")
    assert started.anchor.wait(pid) == 0
    assert started.printed() == b"trapped\non\n"
    started.close()


def test_a_shell_that_waits_in_another_way_is_no_template(anchor: NativeAnchor) -> None:
    """As a bash that reads without `pselect`: it says nothing more, and pid 1 does not wait for it."""
    started = Started(anchor, f"read -u {session_texts.GO_FD}\n".encode())
    with pytest.raises(AnchorLostError, match="does not stop"):
        started.template.await_ready()
    started.close()


def test_what_an_ended_template_has_left_is_for_no_other(started: Started, anchor: NativeAnchor) -> None:
    started.dump()
    started.template.await_ready()
    os.kill(started.template.pid, signal.SIGSTOP)
    started.template.send(b"\4\0\0\0/\0\0\0")
    started.template.end()
    assert [unread_bytes(fd) for fd in started.template.ends] == [0, 0]
    another = Started(anchor)
    another.dump()
    pid = another.fork()
    another.give(b"exit 6")
    assert anchor.wait(pid) == 6
    started.template, another.template = another.template, started.template


def test_only_a_shell_that_was_asked_to_be_one_is_a_template(anchor: NativeAnchor) -> None:
    assert anchor.kit is not None
    ends = anchor.kit.lend(restore_script(None, "/"))
    anchor.request_shell({})
    pid = anchor.started()
    assert not ShellTemplate.is_one(anchor.kit)
    # It closes them a moment after it has started.
    wait_until(lambda: {"1005", "1006"}.isdisjoint(path.name for path in Path(f"/proc/{pid}/fd").iterdir()))
    os.kill(pid, signal.SIGKILL)
    for fd in ends.values():
        os.close(fd)


@pytest.mark.parametrize("path", ["/etc/passwd", "/etc/nsswitch.conf"])
def test_a_shell_that_looks_users_up_elsewhere_is_no_template(anchor: NativeAnchor, tmp_path: Path, path: str) -> None:
    """In the mount namespace of the anchor, where /etc has a link in the place of the file."""
    etc = tmp_path / "etc"
    etc.mkdir()
    for name in ("passwd", "nsswitch.conf"):
        (etc / name).write_bytes(Path("/etc", name).read_bytes())
    (etc / Path(path).name).unlink()
    (etc / Path(path).name).symlink_to("/run/users")
    mount = ["mount", "--bind", str(etc), "/etc"]
    # The files that loading bash involves come along.
    for name in ("ld.so.cache", "ld.so.preload"):
        if (found := Path("/etc", name)).exists():
            (etc / name).touch()
            mount_one = ["mount", "--bind", str(found), str(etc / name)]
            subprocess.run(["nsenter", f"--mount=/proc/{anchor.pid}/ns/mnt", *mount_one], check=True)
    subprocess.run(["nsenter", f"--mount=/proc/{anchor.pid}/ns/mnt", *mount[:1], "--rbind", *mount[2:]], check=True)
    started = Started(anchor)
    started.dump()
    with pytest.raises(AnchorLostError, match="cannot stand"):
        started.template.await_ready()
    started.close()
