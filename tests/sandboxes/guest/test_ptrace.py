"""System calls that a process makes for another one: the process itself notices nothing."""

import fcntl
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandboxes.guest.checkpoints import mapped_locks, ptrace
from sandboxes.guest.checkpoints.ptrace import Held, executable, with_call

FCNTL = 72
LOCK = struct.pack("<hh4xqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 5, 7, 0)
PROGRAM = """
import os, signal, sys, threading
fd, got = os.open(sys.argv[1], os.O_RDWR), []
signal.signal(signal.SIGUSR1, lambda *_: got.append('signal'))
second = threading.Thread(target=lambda: got.append(os.read(int(sys.argv[2]), 10)))
second.start()
print(fd, flush=True)
got.append(os.read(0, 10))
second.join()
print(sorted(map(str, got)), flush=True)
"""
needs_registers = pytest.mark.skipif(not ptrace.WORKS, reason="the registers of this machine are not known")


@pytest.fixture
def program(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], int, int]]:
    """A process whose two threads read from pipes, its open file, and the pipe of the second thread."""
    (tmp_path / "file").write_bytes(bytes(100))
    reading, writing = os.pipe()
    argv = [sys.executable, "-c", PROGRAM, str(tmp_path / "file"), str(reading)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[reading]) as process:
        assert process.stdout is not None
        yield process, int(process.stdout.readline()), writing
        process.kill()
    os.close(reading)
    os.close(writing)


@needs_registers
def test_a_process_sets_a_lock_without_noticing_it(program: tuple[subprocess.Popen[bytes], int, int]) -> None:
    """Calls that it waits in go on, and a signal that came meanwhile is delivered afterwards."""
    process, fd, writing = program
    held = Held([process.pid, 1 << 22])
    process.send_signal(10)
    held.call(process.pid, FCNTL, (fd, fcntl.F_SETLK), LOCK)
    with pytest.raises(OSError, match="Bad file descriptor"):
        held.call(process.pid, FCNTL, (999, fcntl.F_SETLK), LOCK)
    held.release()
    lines = Path(f"/proc/{process.pid}/fdinfo/{fd}").read_bytes().splitlines()
    assert list(mapped_locks.record_locks(fd, lines)) == [(fd, fcntl.F_WRLCK, 5, 7)]
    os.write(writing, b"second")
    out, _ = process.communicate(b"first")
    assert out.decode() == "[\"b'first'\", \"b'second'\", 'signal']\n"


@needs_registers
def test_what_is_held_ends_with_its_holder(program: tuple[subprocess.Popen[bytes], int, int]) -> None:
    """Nothing runs on without what it should have got."""
    process, _, _ = program
    holder = os.fork()
    if holder == 0:
        try:
            Held([process.pid])
        finally:
            os._exit(0)
    os.waitpid(holder, 0)
    assert process.wait(10) == -9


def test_only_what_the_call_needs_is_changed_in_registers() -> None:
    changed = with_call(range(27), at=1000, number=72, arguments=(1, 2, 3))
    differing = {index: value for index, value in enumerate(changed) if value != index}
    assert differing == {10: 72, 12: 3, 13: 2, 14: 1, 15: (1 << 64) - 1, 16: 1000}


def test_the_kernel_s_own_program_is_searched_first() -> None:
    maps = (
        b"1000-2000 r--p 00000000 00:00 0 /bin/a b\n2000-3000 r-xp 00000000 00:00 0 /bin/a b\n3000-4000 rw-p 0 0:0 0\n"
        b"5000-6000 --xp 00000000 00:00 0 [vsyscall]\n7000-9000 r-xp 00000000 00:00 0                  [vdso]\n"
    )
    assert executable(maps) == [(0x7000, 0x9000), (0x2000, 0x3000)]


def test_locks_are_read_as_the_kernel_shows_them() -> None:
    lines = [
        b"pos:\t0\n",
        b"lock:\t1: POSIX  ADVISORY  READ 5 00:2b:123 124 124\n",
        b"lock:\t2: POSIX  ADVISORY  WRITE 5 00:2b:123 0 EOF\n",
        b"lock:\t3: FLOCK  ADVISORY  WRITE 5 00:2b:123 0 EOF\n",
        b"lock:\t4: OFDLCK ADVISORY  READ -1 00:2b:123 0 EOF\n",
    ]
    assert list(mapped_locks.record_locks(7, lines)) == [(7, fcntl.F_RDLCK, 124, 1), (7, fcntl.F_WRLCK, 0, 0)]
