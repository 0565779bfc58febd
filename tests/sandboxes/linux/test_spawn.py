"""Starting a program as the leader of a session: one contract for the native helper and for a fork of Python."""

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from hatch_build import COMPILED, FLAGS, HELPER, compile_helper
from sandboxes.linux.spawn import Spawn, fork_leader, native_leader
from tests.machine import wait_until

REPOSITORY = Path(__file__).parents[3]
CAT = "/bin/cat"


@pytest.fixture(params=["native", "forked"])
def spawn(request: pytest.FixtureRequest) -> Spawn:
    if request.param == "forked":
        return fork_leader
    native = native_leader(str(request.getfixturevalue("spawn_helper")))
    assert native is not None
    return native


@contextmanager
def running(spawn: Spawn, path: str, arguments: Sequence[str], fds: Mapping[int, int]) -> Iterator[int]:
    pid = spawn(path, arguments, fds)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@contextmanager
def a_cat(spawn: Spawn, more: Mapping[int, int]) -> Iterator[int]:
    """Run `cat` between two pipes, with more descriptors; it has loaded everything when this yields its pid."""
    (stdin, into), (out_of, stdout) = os.pipe(), os.pipe()
    try:
        with running(spawn, CAT, ["feline", "-u", "-"], {0: stdin, 1: stdout, **more}) as pid:
            os.write(into, b"purr")
            assert os.read(out_of, 4) == b"purr"
            yield pid
    finally:
        for fd in (stdin, into, out_of, stdout):
            os.close(fd)


def status(pid: int, name: str) -> str:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line.split(":\t")[1] for line in lines if line.startswith(f"{name}:"))


def test_program_leads_a_session_with_its_own_name(spawn: Spawn) -> None:
    with a_cat(spawn, {}) as pid:
        assert (os.getsid(pid), os.getpgid(pid)) == (pid, pid)
        assert Path(f"/proc/{pid}/cmdline").read_bytes() == b"feline\0-u\0-\0"
        assert Path(f"/proc/{pid}/environ").read_bytes() == b""


def test_program_has_the_named_descriptors_only(spawn: Spawn) -> None:
    """Two descriptors change their numbers with each other, and there are gaps between the numbers."""
    first, second, other = (os.memfd_create(name, 0) for name in ("first", "second", "other"))
    try:
        with a_cat(spawn, {first: second, second: first, 50: first}) as pid:
            folder = Path(f"/proc/{pid}/fd")
            links = {int(path.name): str(path.readlink()).split()[0] for path in folder.iterdir()}
    finally:
        for fd in (first, second, other):
            # All are still open here.
            os.close(fd)
    assert links.keys() == {0, 1, first, second, 50}
    assert (links[first], links[second], links[50]) == ("/memfd:second", "/memfd:first", "/memfd:first")


def test_program_handles_signals_as_a_new_process(spawn: Spawn) -> None:
    """Python ignores SIGPIPE. The parent's own handling is as before afterwards."""
    ignored = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    try:
        with a_cat(spawn, {}) as pid:
            assert {int(status(pid, name), 16) for name in ("SigBlk", "SigIgn", "SigCgt")} == {0}
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        signal.signal(signal.SIGUSR1, ignored)


def test_program_inherits_orphans_below_it(spawn: Spawn) -> None:
    out_of, stdout = os.pipe()
    script = "( sleep 1000 & echo $! ); read -r -u 3"
    closed, never = os.pipe()
    try:
        with running(spawn, "/bin/bash", ["bash", "--norc", "-c", script], {1: stdout, 3: closed}) as pid:
            orphan = int(os.read(out_of, 16))
            try:
                wait_until(lambda: status(orphan, "PPid") == str(pid))
            finally:
                os.kill(orphan, signal.SIGKILL)
    finally:
        for fd in (out_of, stdout, closed, never):
            os.close(fd)


def test_missing_program_ends_with_127(spawn: Spawn) -> None:
    pid = spawn("/nowhere/program", ["program"], {0: 0})
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 127


def test_without_a_library_python_forks(tmp_path: Path) -> None:
    broken = tmp_path / "libvfork.so"
    broken.write_bytes(b"of another machine")
    assert native_leader(str(broken)) is None
    assert native_leader(str(tmp_path / "missing.so")) is None


@pytest.mark.parametrize("compiler", ["false", "/nowhere/cc"])
def test_building_needs_no_compiler(compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", compiler)
    assert not compile_helper(REPOSITORY / HELPER, tmp_path / "libvfork.so")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("source", "target"), COMPILED.items(), ids=[source.stem for source in COMPILED])
def test_source_compiles_without_warnings(spawn_helper: Path, source: Path, target: Path) -> None:  # noqa: ARG001 - for the skip
    with TemporaryDirectory(prefix="forkpoint-helper-") as folder:
        command = ["cc", *FLAGS[target], "-Wall", "-Wextra", "-Werror", "-o", f"{folder}/out"]
        subprocess.run([*command, str(REPOSITORY / source)], check=True)
