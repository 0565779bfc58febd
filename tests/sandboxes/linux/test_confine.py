"""The seccomp filter: each call and socket is tried in a process that has installed it."""

import ctypes
import errno
import os
import socket
from collections.abc import Callable

import pytest

from sandboxes.linux import confine
from sandboxes.linux import syscalls as kernel

UDP = socket.SOCK_DGRAM


def confined(attempt: Callable[[], object]) -> int:
    """Return the error of an attempt in a process with the filter; 0 if it succeeds."""
    child = os.fork()
    if child == 0:
        code = 255
        try:
            kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
            kernel.seccomp(confine.program(kernel.MACHINE))
            attempt()
            code = 0
        except OSError as error:
            code = error.errno or 255
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def call(number: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(number), -1, -1, -1, -1, -1) < 0:
        raise OSError(ctypes.get_errno(), "call")


@pytest.mark.parametrize("family", sorted(set(range(1, 46)) - {1, 2, 10, 16}))
def test_other_families_of_sockets_do_not_exist(family: int) -> None:
    """AF_VSOCK leads out of a virtual machine; the others are code of the kernel that no program here needs."""
    assert confined(lambda: socket.socket(family, UDP, 0)) == errno.EAFNOSUPPORT
    assert confined(lambda: socket.socketpair(family, UDP, 0)) == errno.EAFNOSUPPORT


@pytest.mark.parametrize("protocol", range(1, 32))
def test_other_protocols_of_netlink_do_not_exist(protocol: int) -> None:
    assert confined(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol)) == errno.EPROTONOSUPPORT


@pytest.mark.parametrize("protocol", [2, 33, 115, 132, 136, 262, 256])
def test_other_protocols_of_the_internet_do_not_exist(protocol: int) -> None:
    for family in (socket.AF_INET, socket.AF_INET6):
        assert confined(lambda: socket.socket(family, socket.SOCK_STREAM, protocol)) == errno.EPROTONOSUPPORT  # noqa: B023


def test_sockets_of_programs_work() -> None:
    for family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6):
        assert [confined(lambda: socket.socket(family, kind)) for kind in (socket.SOCK_STREAM, UDP)] == [0, 0]  # noqa: B023
    assert confined(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)) == 0
    assert confined(socket.socketpair) == 0


def test_bits_above_the_family_do_not_matter() -> None:
    """The kernel reads 32 bits of the argument, so the filter must read the same ones."""

    def attempt() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        number = {"x86_64": 41, "aarch64": 198}[kernel.MACHINE]
        if libc.syscall(ctypes.c_long(number), ctypes.c_ulong(1 << 32 | 40), ctypes.c_ulong(1), ctypes.c_ulong(0)) < 0:
            raise OSError(ctypes.get_errno(), "socket")

    assert confined(attempt) == errno.EAFNOSUPPORT


@pytest.mark.parametrize("name", sorted(confine.REFUSED))
def test_refused_calls_fail_before_they_look_at_arguments(name: str) -> None:
    number = confine.REFUSED[name][["x86_64", "aarch64"].index(kernel.MACHINE)]
    if number is not None:
        assert confined(lambda: call(number)) == errno.EPERM


@pytest.mark.skipif(kernel.MACHINE != "x86_64", reason="the numbers are those of x86-64")
@pytest.mark.parametrize(
    ("number", "option", "error"),
    [(330, 0, errno.ENOSPC), (154, 1, errno.ENOSYS)]
    + [(157, option, errno.EINVAL) for option in (26, 33, 53, 59, 62, 65, 67)]
    + [(151, flags, errno.EINVAL) for flags in (2, 3, 6, 7)]
    + [(72, command << 32, errno.EINVAL) for command in (1036, 1038)]
    + [(158, option, errno.EINVAL) for option in (0x1012, 0x1023, 0x1025, 0x5001)],
)
def test_what_a_checkpoint_loses_cannot_be_had(number: int, option: int, error: int) -> None:
    """The programs that use it go on without it, as on an older kernel or another processor."""

    def attempt() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        first, second = option % (1 << 32), option >> 32
        if libc.syscall(ctypes.c_long(number), *map(ctypes.c_ulong, (first, second, 0, 0, 0))) < 0:
            raise OSError(ctypes.get_errno(), "call")

    assert confined(attempt) == error


def test_other_options_of_a_process_can_be_set() -> None:
    assert confined(lambda: kernel.prctl(36, 1)) == 0


@pytest.mark.parametrize("number", [435, 467, 470, 500, 1023, 1 << 20])
def test_calls_of_later_kernels_do_not_exist(number: int) -> None:
    assert confined(lambda: call(number)) == errno.ENOSYS


@pytest.mark.parametrize(
    ("value", "error"),
    [(0, 0), (0x8, 0), (0xFFFFFFFF, 0), (0x40000, errno.EPERM), (0x100000, errno.EPERM), (0x40008, errno.EPERM)],
)
def test_personalities_are_those_of_docker(value: int, error: int) -> None:
    """ADDR_NO_RANDOMIZE and MMAP_PAGE_ZERO make attacks on programs easier."""

    def attempt() -> None:
        number = {"x86_64": 135, "aarch64": 92}[kernel.MACHINE]
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.syscall(ctypes.c_long(number), ctypes.c_ulong(value)) < 0:
            raise OSError(ctypes.get_errno(), "personality")

    assert confined(attempt) == error
