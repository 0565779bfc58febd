"""What a sandbox's processes may not do: capabilities, seccomp, resource limits.

Docker's default profile in spirit, less CAP_NET_RAW and CAP_MKNOD; stricter where agents have no need.
pid 1 confines itself before it runs anything, so whatever it starts is born confined.
"""

import resource
import struct

from sandboxes.linux import syscalls as kernel

# CHOWN DAC_OVERRIDE FOWNER FSETID KILL SETGID SETUID SETPCAP NET_BIND_SERVICE SYS_CHROOT AUDIT_WRITE SETFCAP
CAPABILITIES = (0, 1, 3, 4, 5, 6, 7, 8, 10, 18, 29, 31)
LAST_CAPABILITY = 40

EPERM, ENOSYS = 1, 38
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_LOAD, _EQUAL, _SET, _RETURN = 0x20, 0x15, 0x45, 0x06
_NEW_NAMESPACES = 0x7E020080

_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE = {"x86_64": 56, "aarch64": 220}
_X32_BIT = 0x40000000

# name: (x86_64, aarch64); None where that machine has no such call.
_REFUSED: dict[str, tuple[int | None, int | None]] = {
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
    "mq_open": (240, 180),
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
    "move_pages": (279, 239),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "migrate_pages": (256, 238),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
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
    "open_tree_attr": (467, 467),
}
_CLONE3 = 435


def _step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("=HBBI", code, yes, no, value)


def program(machine: str) -> bytes:
    """Return the BPF program that refuses what agents have no business with (pure).

    EPERM for the refused; ENOSYS for clone3, whose flags a filter cannot see (libc then uses clone), and for system
    calls of another instruction set.
    """
    column = list(_AUDIT).index(machine)
    numbers = sorted(pair[column] for pair in _REFUSED.values() if pair[column] is not None)  # type: ignore[type-var]
    foreign = _step(_RETURN, _ERRNO | ENOSYS)
    steps = [_step(_LOAD, 4), _step(_EQUAL, _AUDIT[machine], 1, 0), foreign, _step(_LOAD, 0)]
    if machine == "x86_64":
        steps += [_step(0x35, _X32_BIT, 0, 1), foreign]
    steps += [_step(_EQUAL, _CLONE3, 0, 1), foreign]
    for number in numbers:
        steps += [_step(_EQUAL, number or 0, 0, 1), _step(_RETURN, _ERRNO | EPERM)]
    steps += [_step(_EQUAL, _CLONE[machine], 0, 3), _step(_LOAD, 16)]
    steps += [_step(_SET, _NEW_NAMESPACES, 0, 1), _step(_RETURN, _ERRNO | EPERM), _step(_RETURN, _ALLOW)]
    return b"".join(steps)


def limit_resources(disk_bytes: int, memory_bytes: int | None, pids: int | None) -> None:
    """Set what every process inherits. memory_bytes and pids are given only where no cgroup holds those limits."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (disk_bytes, disk_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    ceiling = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, ceiling), ceiling))
    resource.setrlimit(resource.RLIMIT_MSGQUEUE, (0, 0))
    if memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    if pids is not None:
        resource.setrlimit(resource.RLIMIT_NPROC, (pids, pids))


def confine() -> None:
    """Give up, for this process and all it starts, what `CAPABILITIES` and `program` do not leave. For good."""
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    for capability in range(LAST_CAPABILITY + 1):
        if capability not in CAPABILITIES:
            _drop_bounding(capability)
    kernel.prctl(kernel.PR_CAP_AMBIENT, kernel.PR_CAP_AMBIENT_CLEAR_ALL)
    kernel.capset(sum(1 << capability for capability in CAPABILITIES))
    kernel.seccomp(program(kernel.MACHINE))
    # Not dumpable: nobody in the sandbox may ptrace pid 1 or look through /proc/1 at its descriptors and memory.
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)


def _drop_bounding(capability: int) -> None:
    try:
        kernel.prctl(kernel.PR_CAPBSET_DROP, capability)
    except OSError as error:
        # EINVAL: this kernel does not know the capability.
        if error.errno != 22:
            raise
