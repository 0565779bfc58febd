"""Confinement of a sandbox's processes: capabilities, a seccomp filter and resource limits.

The rules follow Docker's default profile, without CAP_NET_RAW, CAP_MKNOD and CAP_AUDIT_WRITE, and are stricter where
agents need less. pid 1 confines itself before it starts any process, and a process inherits all of it.

Theory of operation of the filter. seccomp runs a BPF program on each system call. The program sees `struct
seccomp_data`: the call's number at offset 0, the architecture at offset 4, the arguments from offset 16 on. It checks
in this order:

1. The architecture, because the same number is another call in another instruction set.
2. The x32 bit, which on x86_64 marks yet another table of numbers.
3. clone3, whose flags lie in memory that a filter cannot read, and io_setup, whose requests one counter of the machine
   bounds for everybody. ENOSYS makes programs fall back to clone, and to other input and output.
4. Calls that are newer than this list, which fail with ENOSYS like on an older kernel.
5. The refused calls, which fail with EPERM, and what a checkpoint of CRIU loses without a trace, so that a restored
   program would end or go on wrongly (V8's WebAssembly code is behind protection keys). That fails as on a processor or
   a kernel without it.
6. The flags of clone, which must not make namespaces: in a new user namespace a process has every capability again.
7. The families and protocols of sockets. Only those are made that network namespaces separate and that programs use.
   Each other one is code of the kernel that an attacker need not reach, and AF_VSOCK leads out of a virtual machine.
"""

import functools
import os
import resource
import struct
from collections.abc import Mapping, Sequence

from sandboxes.linux import syscalls as kernel

# CHOWN DAC_OVERRIDE FOWNER FSETID KILL SETGID SETUID SETPCAP NET_BIND_SERVICE SYS_CHROOT SETFCAP
CAPABILITIES = (0, 1, 3, 4, 5, 6, 7, 8, 10, 18, 31)
"""The capabilities that processes keep, by number (linux/capability.h)."""
LOOKING = 19
"""CAP_SYS_PTRACE, which only pid 1 keeps: with it /proc shows what processes of other users hold (ptrace(2))."""
LAST_CAPABILITY = 40
"""The highest capability of Linux 5.9 to 6.x. Older kernels have fewer, and refuse to drop those with EINVAL."""

EPERM, ENOSYS, EINVAL, EPROTONOSUPPORT, EAFNOSUPPORT, ENOSPC = 1, 38, 22, 93, 97, 28
# Return values and instruction codes of classic BPF (linux/seccomp.h, linux/bpf_common.h).
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_OFFSET, _ARCHITECTURE_OFFSET = 0, 4
_FIRST_ARGUMENT_OFFSET, _SECOND_ARGUMENT_OFFSET, _THIRD_ARGUMENT_OFFSET = 16, 24, 32
NEW_NAMESPACES = 0x7E020080
"""The flags of clone that make namespaces."""

_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""The numbers of the architectures (linux/audit.h)."""
_CLONE = {"x86_64": 56, "aarch64": 220}
_PERSONALITY = {"x86_64": 135, "aarch64": 92}
PERSONALITIES = (0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)
"""The values of personality(2) that Docker's profile allows: Linux, its 32-bit form, both with the release 2.6, and the
question which one it is. Others switch off address randomization, or map the first page."""
_SOCKET = {"x86_64": 41, "aarch64": 198}
_SOCKETPAIR = {"x86_64": 53, "aarch64": 199}
AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16
NETLINK_ROUTE = 0
"""The one protocol of AF_NETLINK that programs need: libc lists interfaces and addresses with it."""
INTERNET_PROTOCOLS = (0, 1, 6, 17, 58)
"""The protocols of AF_INET and AF_INET6: the default, ICMP, TCP, UDP and ICMPv6. Others load modules of the kernel."""
_FAMILIES: dict[int, tuple[int, ...]] = {
    AF_UNIX: (),
    AF_INET: INTERNET_PROTOCOLS,
    AF_INET6: INTERNET_PROTOCOLS,
    AF_NETLINK: (NETLINK_ROUTE,),
}
"""The families of sockets that a sandbox's processes make, and their protocols; an empty tuple means all."""
_LAST_CALL = 466
"""The newest call, removexattrat, that this list was made for (Linux 6.13). The calls of later kernels were
not reviewed yet, so they do not exist in a sandbox."""
_PENDING_SIGNALS = 4_096
"""The most queued signals and timers of one user, for sandboxes. All sandboxes of a proxy with root share the count of
uid 0. The machine's own limit is higher, and leaves the rest to the machine's root."""
_RLIMIT_SIGPENDING = 11
"""Python 3.11 has no name for it (asm-generic/resource.h)."""
_CLONE3 = 435
_MSEAL = 462
"""Sealed memory: no checkpoint holds that."""
_PKEY_ALLOC = {"x86_64": 330, "aarch64": 289}
_MODIFY_LDT = {"x86_64": 154}
_LOST_OPTIONS = {
    # prctl: PR_SET_TSC, PR_MCE_KILL, PR_SET_SPECULATION_CTRL, PR_SET_SYSCALL_USER_DISPATCH, PR_SCHED_CORE, PR_SET_MDWE,
    # PR_SET_MEMORY_MERGE.
    "prctl": ({"x86_64": 157, "aarch64": 167}, (26, 33, 53, 59, 62, 65, 67)),
    # mlockall: MCL_FUTURE, alone and with the others.
    "mlockall": ({"x86_64": 151, "aarch64": 230}, (2, 3, 6, 7)),
    # arch_prctl: ARCH_SET_CPUID, ARCH_REQ_XCOMP_PERM and its form for guests (AMX), ARCH_SHSTK_ENABLE.
    "arch_prctl": ({"x86_64": 158}, (0x1012, 0x1023, 0x1025, 0x5001)),
}
"""First arguments of calls that a checkpoint loses, by the calls' numbers (linux/prctl.h, asm/prctl.h, sys/mman.h)."""
_FCNTL = {"x86_64": 72, "aarch64": 25}
_LOST_COMMANDS = (1036, 1038)
"""Second arguments of fcntl that it loses: F_SET_RW_HINT and F_SET_FILE_RW_HINT (linux/fcntl.h)."""
_IO_SETUP = {"x86_64": 206, "aarch64": 0}
_X32_BIT = 0x40000000
_QUEUE_BYTES = 819_200
"""The most bytes of POSIX message queues that one user may hold: the kernel's default, which containers have."""
_MAX_FILES = 65536
"""The highest limit of open files that a process may give itself. Docker's is 1,048,576, which makes old programs that
close every descriptor very slow."""

# name: (x86_64, aarch64); None where that machine has no such call.
REFUSED: dict[str, tuple[int | None, int | None]] = {
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "iopl": (172, None),
    "ioperm": (173, None),
    "init_module": (175, 105),
    "delete_module": (176, 106),
    "quotactl": (179, 60),
    "acct": (163, 89),
    "settimeofday": (164, 170),
    "adjtimex": (159, 171),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "unshare": (272, 97),
    "perf_event_open": (298, 241),
    "fanotify_init": (300, 262),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "setns": (308, 268),
    "finit_module": (313, 273),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "lookup_dcookie": (212, 18),
    "vhangup": (153, 58),
    "syslog": (103, 116),
    "uselib": (134, None),
    "sysfs": (139, None),
    "ustat": (136, None),
    "_sysctl": (156, None),
    "nfsservctl": (180, 42),
    "get_mempolicy": (239, 236),
    "set_mempolicy_home_node": (450, 450),
    "process_madvise": (440, 440),
    "statmount": (457, 457),
    "listmount": (458, 458),
    "lsm_set_self_attr": (460, 460),
    "move_pages": (279, 239),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "migrate_pages": (256, 238),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    # It changes the memory of a process that sleeps, and nothing shows that (`live_state`).
    "process_vm_writev": (311, 271),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "quotactl_fd": (443, 443),
}


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


@functools.cache
def program(machine: str, *, sockets: bool = True) -> bytes:
    """Return the filter for `x86_64` or `aarch64`, as a BPF program (pure); without `sockets`, none can be made."""
    column = list(_AUDIT).index(machine)
    numbers = sorted(pair[column] for pair in REFUSED.values() if pair[column] is not None)  # type: ignore[type-var]
    unknown, refused = _instruction(_RETURN, _ERRNO | ENOSYS), _instruction(_RETURN, _ERRNO | EPERM)
    instructions = [_instruction(_LOAD, _ARCHITECTURE_OFFSET), _instruction(_EQUAL, _AUDIT[machine], 1, 0), unknown]
    instructions += [_instruction(_LOAD, _NUMBER_OFFSET)]
    if machine == "x86_64":
        instructions += [_instruction(_AT_LEAST, _X32_BIT, 0, 1), unknown]
    for absent in (_CLONE3, _MSEAL, _IO_SETUP[machine]):
        instructions += [_instruction(_EQUAL, absent, 0, 1), unknown]
    instructions += [_instruction(_AT_LEAST, _LAST_CALL + 1, 0, 1), unknown]
    for number in numbers:
        instructions += [_instruction(_EQUAL, number or 0, 0, 1), refused]
    instructions += [_instruction(_EQUAL, _PKEY_ALLOC[machine], 0, 1), _instruction(_RETURN, _ERRNO | ENOSPC)]
    if machine in _MODIFY_LDT:
        instructions += [_instruction(_EQUAL, _MODIFY_LDT[machine], 0, 1), unknown]
    # Each of the next rules is skipped as a whole if the call is another one.
    for number, rule in (
        (
            _CLONE[machine],
            [_instruction(_LOAD, _FIRST_ARGUMENT_OFFSET), _instruction(_ANY_BIT, NEW_NAMESPACES, 0, 1), refused],
        ),
        (
            _PERSONALITY[machine],
            [
                _instruction(_LOAD, _FIRST_ARGUMENT_OFFSET),
                *(
                    instruction
                    for value in PERSONALITIES
                    for instruction in (_instruction(_EQUAL, value, 0, 1), _instruction(_RETURN, _ALLOW))
                ),
                refused,
            ],
        ),
        *(
            (numbers_of[machine], _refuse_options(_FIRST_ARGUMENT_OFFSET, lost))
            for numbers_of, lost in _LOST_OPTIONS.values()
            if machine in numbers_of
        ),
        (_FCNTL[machine], _refuse_options(_SECOND_ARGUMENT_OFFSET, _LOST_COMMANDS)),
        (_SOCKETPAIR[machine], _allow_sockets({AF_UNIX: ()})),
        (_SOCKET[machine], _allow_sockets(_FAMILIES if sockets else {})),
    ):
        instructions += [_instruction(_EQUAL, number, 0, len(rule)), *rule]
    return b"".join([*instructions, _instruction(_RETURN, _ALLOW)])


def _refuse_options(place: int, options: Sequence[int]) -> list[bytes]:
    refused = [_instruction(_RETURN, _ERRNO | EINVAL)]
    checks = [part for option in options for part in (_instruction(_EQUAL, option, 0, 1), *refused)]
    return [_instruction(_LOAD, place), *checks, _instruction(_RETURN, _ALLOW)]


def _allow_sockets(families: Mapping[int, tuple[int, ...]]) -> list[bytes]:
    """Return the rule that lets through sockets of these families with these protocols; an empty tuple means all."""
    allowed = _instruction(_RETURN, _ALLOW)
    rule = [_instruction(_LOAD, _FIRST_ARGUMENT_OFFSET)]
    for family, protocols in families.items():
        checks = [allowed]
        if protocols:
            checks = [_instruction(_LOAD, _THIRD_ARGUMENT_OFFSET)]
            for protocol in protocols:
                checks += [_instruction(_EQUAL, protocol, 0, 1), allowed]
            checks += [_instruction(_RETURN, _ERRNO | EPROTONOSUPPORT)]
        # The rule of a family ends with a return, so the family is still loaded for the next one.
        rule += [_instruction(_EQUAL, family, 0, len(checks)), *checks]
    return [*rule, _instruction(_RETURN, _ERRNO | EAFNOSUPPORT)]


def limit_resources(disk_bytes: int, memory_bytes: int | None, pids: int | None) -> None:
    """Set this process's limits: largest file, address space, and processes of one user (None: a cgroup has it)."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (disk_bytes, disk_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    ceiling = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, ceiling), ceiling))
    resource.setrlimit(resource.RLIMIT_MSGQUEUE, (_QUEUE_BYTES, _QUEUE_BYTES))
    pending = resource.getrlimit(_RLIMIT_SIGPENDING)[1]
    pending = _PENDING_SIGNALS if pending == resource.RLIM_INFINITY else min(pending, _PENDING_SIGNALS)
    resource.setrlimit(_RLIMIT_SIGPENDING, (pending, pending))
    if memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    if pids is not None:
        resource.setrlimit(resource.RLIMIT_NPROC, (pids, pids))


def confine() -> None:
    """Give up every capability but `CAPABILITIES` and `LOOKING`, and every call that `program` refuses, for good."""
    # No program that this process executes has `LOOKING`, because it is not in the bounding set (capabilities(7)). The
    # order matters: seccomp without CAP_SYS_ADMIN needs no_new_privs, and dropping from the bounding set needs
    # CAP_SETPCAP, so both come before their preconditions are given up.
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    for capability in range(LAST_CAPABILITY + 1):
        if capability not in CAPABILITIES:
            _drop_bounding(capability)
    kernel.prctl(kernel.PR_CAP_AMBIENT, kernel.PR_CAP_AMBIENT_CLEAR_ALL)
    kernel.capset(sum(1 << capability for capability in (*CAPABILITIES, LOOKING)))
    kernel.seccomp(program(kernel.MACHINE))
    # Not dumpable: no process of the sandbox can ptrace pid 1, or read its memory and descriptors through /proc/1.
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)


def stop_looking() -> None:
    """Give up `LOOKING`, in a fork of pid 1 that executes no program."""
    kernel.capset(sum(1 << capability for capability in CAPABILITIES))


def become_user_with(capabilities: Sequence[int], uid: int, gid: int) -> None:
    """Give this process, and what it executes, another user and these capabilities at most, for good."""
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    for capability in range(LAST_CAPABILITY + 1):
        if capability not in capabilities:
            _drop_bounding(capability)
    kernel.prctl(kernel.PR_SET_KEEPCAPS, 1)
    become_user(uid, gid, [gid])
    kept = sum(1 << capability for capability in capabilities)
    kernel.capset(kept, kept, kept)
    for capability in capabilities:
        kernel.prctl(kernel.PR_CAP_AMBIENT, kernel.PR_CAP_AMBIENT_RAISE, capability)


def become_user(uid: int, gid: int, groups: Sequence[int]) -> None:
    """Give this process another user and its groups, for good; `OSError` without the right to it (credentials(7))."""
    # The user comes last: afterwards this process has no right to change its groups.
    os.setgroups(groups)
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def _drop_bounding(capability: int) -> None:
    try:
        kernel.prctl(kernel.PR_CAPBSET_DROP, capability)
    except OSError as error:
        # EINVAL: this kernel does not know the capability.
        if error.errno != EINVAL:
            raise
