"""System calls that another process makes for us, while all its threads stand still (ptrace(2)). x86-64 only."""

# Theory of operation. A process makes a call for us without noticing it:
#
# 1. Its threads are seized and stopped. They may be frozen by a control group, and stay stopped when that thaws.
# 2. Its registers, its mask of signals and a few bytes at its stack pointer are noted. It gets registers with which a
#    `syscall` instruction of its own makes the call. Without a number of a call in them (`orig_rax`), the kernel begins
#    none again that was interrupted. No signal is delivered meanwhile: all are blocked.
# 3. It runs from the stop before the call to the stop after it. The result is in a register.
# 4. Everything that was noted is written back. A call that was interrupted is begun again when the process runs.
#
# If this process ends without `release`, the kernel kills all that it holds (PTRACE_O_EXITKILL).

import contextlib
import ctypes
import os
import signal
import struct
from collections.abc import Iterable, Sequence

from sandboxes.linux import syscalls as kernel

WORKS = kernel.MACHINE == "x86_64"
"""Whether this machine's registers are known here."""
_DETACH, _UNTIL_CALL = 17, 24
_GET_REGISTERS, _SET_REGISTERS, _SEIZE, _INTERRUPT, _GET_MASK, _SET_MASK = (*range(0x4204, 0x4208), 0x420A, 0x420B)
_MARKED_CALLS, _EXIT_KILL = 1, 1 << 20
"""Options: stops at calls differ from those by signals, and what is traced ends with this process."""
_EVENT_STOP, _CALL_STOP = 128, signal.SIGTRAP | 0x80
_ANY_CHILD = 0x40000000
"""Has waitpid(2) wait for threads too (__WALL)."""
_GENERAL = 1
"""The general registers (NT_PRSTATUS), which are 27 numbers (`user_regs_struct` of sys/user.h)."""
_REGISTERS = struct.Struct("<27Q")
_RAX, _RDX, _RSI, _RDI, _CALL, _RIP, _RSP = 10, 12, 13, 14, 15, 16, 19
_NO_CALL = (1 << 64) - 1
_ARGUMENTS = (_RDI, _RSI, _RDX)
_INSTRUCTION = b"\x0f\x05"
_SEARCHED_BYTES = 1 << 20
"""How much of each part of memory is searched for the instruction: a program may map any number of bytes."""
DATA_BYTES = 64
"""The most bytes that a call may point to. Rounded down to it, the stack pointer stays in its page."""


def with_call(registers: Sequence[int], at: int, number: int, arguments: Sequence[int]) -> tuple[int, ...]:
    """Return registers with which a process makes a call, by the instruction at an address. Pure."""
    changed = {_RIP: at, _RAX: number, _CALL: _NO_CALL, **dict(zip(_ARGUMENTS, arguments, strict=True))}
    return tuple(changed.get(index, value) for index, value in enumerate(registers))


def executable(maps: bytes) -> list[tuple[int, int]]:
    """Return the beginnings and ends of executable memory, in the order of /proc/PID/maps, the kernel's first. Pure."""
    rows = [line.split(maxsplit=5) for line in maps.splitlines()]
    rows.sort(key=lambda row: row[-1] != b"[vdso]")
    pairs = [row[0].split(b"-") for row in rows if row[1][0:1] == b"r" and row[1][2:3] == b"x"]
    return [(int(begin, 16), int(end, 16)) for begin, end in pairs]


class Held:
    """Processes whose threads are all traced and stopped, until `release`."""

    def __init__(self, pids: Iterable[int]) -> None:
        """Seize and stop all threads. `OSError` says that one cannot be; those that have ended are left out."""
        self._threads: list[int] = []
        self._signals: dict[int, int] = {}
        for pid in pids:
            # Those of a process that is frozen or traced stay the same.
            for thread in _threads(pid):
                _trace(_SEIZE, thread, data=_MARKED_CALLS | _EXIT_KILL)
                self._threads.append(thread)
        for thread in self._threads:
            _trace(_INTERRUPT, thread)
        for thread in self._threads:
            _, status = os.waitpid(thread, _ANY_CHILD)
            if status >> 16 != _EVENT_STOP:
                raise OSError(f"thread {thread} does not stop: {status:#x}")

    def call(self, pid: int, number: int, arguments: Sequence[int], data: bytes) -> None:
        """Have a process make a system call, whose last argument is the address of the data."""
        if len(data) > DATA_BYTES:
            raise ValueError(f"{len(data)} bytes are too many: a call takes {DATA_BYTES}")
        registers, mask = _registers(pid), ctypes.create_string_buffer(8)
        _trace(_GET_MASK, pid, 8, mask)
        place = registers[_RSP] // DATA_BYTES * DATA_BYTES
        with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:  # noqa: PTH123
            instruction = _instruction(pid, memory.fileno())
            before = os.pread(memory.fileno(), len(data), place)
            os.pwrite(memory.fileno(), data, place)
            _trace(_SET_MASK, pid, 8, ctypes.create_string_buffer(b"\xff" * 8, 8))
            _set_registers(pid, with_call(registers, instruction, number, (*arguments, place)))
            # To the stop before the call, and to the one after it.
            self._run(pid)
            self._run(pid)
            result = _registers(pid)[_RAX]
            _set_registers(pid, registers)
            _trace(_SET_MASK, pid, 8, mask)
            os.pwrite(memory.fileno(), before, place)
        if result:
            # A failed call returns its negative error.
            error = (1 << 64) - result
            raise OSError(error, f"call {number} of process {pid}: {os.strerror(error & 0xFFF)}")

    def _run(self, pid: int) -> None:
        while True:
            _trace(_UNTIL_CALL, pid)
            _, status = os.waitpid(pid, _ANY_CHILD)
            if not os.WIFSTOPPED(status):
                raise OSError(f"process {pid} has ended: {status:#x}")
            if status >> 8 == _CALL_STOP:
                return
            if status >> 8 != signal.SIGSTOP:
                raise OSError(f"process {pid} does not come to its call: {status:#x}")
            # No mask holds it back; it is delivered at the end.
            self._signals[pid] = signal.SIGSTOP

    def release(self) -> None:
        """Let all threads go on where they were."""
        for thread in self._threads:
            _trace(_DETACH, thread, data=self._signals.get(thread, 0))
        self._threads = []


def _trace(request: int, thread: int, address: object = 0, data: object = 0) -> None:
    pointers = [ctypes.c_long(value) if isinstance(value, int) else value for value in (address, data)]
    kernel.syscall("ptrace", ctypes.c_long(request), ctypes.c_long(thread), *pointers, about=f"{request:#x} {thread}")


class _Place(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _registers(thread: int) -> tuple[int, ...]:
    held = ctypes.create_string_buffer(_REGISTERS.size)
    span = _Place(ctypes.addressof(held), _REGISTERS.size)
    _trace(_GET_REGISTERS, thread, _GENERAL, ctypes.byref(span))
    if span.length != _REGISTERS.size:
        raise OSError(f"thread {thread} runs a program of 32 bits")
    return _REGISTERS.unpack(held.raw)


def _set_registers(thread: int, registers: Sequence[int]) -> None:
    held = ctypes.create_string_buffer(_REGISTERS.pack(*registers), _REGISTERS.size)
    span = _Place(ctypes.addressof(held), _REGISTERS.size)
    _trace(_SET_REGISTERS, thread, _GENERAL, ctypes.byref(span))


def _instruction(pid: int, memory: int) -> int:
    with open(f"/proc/{pid}/maps", "rb") as file:  # noqa: PTH123
        parts = executable(file.read())
    for begin, end in parts:
        # Parts that the kernel does not show, such as `[vsyscall]`.
        with contextlib.suppress(OSError, OverflowError):
            if (offset := os.pread(memory, min(end - begin, _SEARCHED_BYTES), begin).find(_INSTRUCTION)) >= 0:
                return begin + offset
    raise OSError(f"process {pid} has no instruction for system calls")


def _threads(pid: int) -> list[int]:
    with contextlib.suppress(FileNotFoundError):
        names = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208 - pathlib is not loaded in pid 1
        return [thread for thread in map(int, names) if not _has_ended(thread)]
    return []


def _has_ended(thread: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{thread}/stat", "rb") as file:  # noqa: PTH123
        return file.read().rpartition(b")")[2].split()[0] in {b"Z", b"X"}
    return True
