"""The seccomp profile of containers, in Docker's format: it refuses what `linux.confine` refuses in local sandboxes.

Docker's own profile depends on its version: that of Debian 12 lets io_uring and AF_VSOCK through. This one is handed to
the daemon with each container, so that it is the same everywhere. Every call that it does not name fails with EPERM.
"""

import json
import platform
from functools import cache
from typing import Any

from sandboxes.linux import confine

_ALLOWED = """
accept accept4 access alarm arch_prctl bind brk cachestat capget capset chdir chmod chown chroot clock_getres
clock_gettime clock_nanosleep close close_range connect copy_file_range creat dup dup2 dup3 epoll_create
epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 epoll_wait eventfd eventfd2 execve execveat exit exit_group
faccessat faccessat2 fadvise64 fallocate fchdir fchmod fchmodat fchmodat2 fchown fchownat fcntl fdatasync fgetxattr
flistxattr flock fork fremovexattr fsetxattr fstat fstatfs fsync ftruncate futex futex_requeue futex_wait
futex_waitv futex_wake futimesat get_robust_list get_thread_area getcpu getcwd getdents getdents64 getegid geteuid
getgid getgroups getitimer getpeername getpgid getpgrp getpid getppid getpriority getrandom getresgid getresuid
getrlimit getrusage getsockname getsockopt gettid gettimeofday getuid getxattr getxattrat inotify_add_watch
inotify_init inotify_init1 inotify_rm_watch io_cancel io_destroy io_getevents io_pgetevents io_setup io_submit ioctl
ioprio_get ioprio_set kill landlock_add_rule landlock_create_ruleset landlock_restrict_self lchown lgetxattr link
linkat listen listxattr listxattrat llistxattr lremovexattr lseek lsetxattr lsm_get_self_attr lsm_list_modules lstat
madvise membarrier memfd_create memfd_secret mincore mkdir mkdirat mknod mknodat mlock mlock2 mlockall mmap mmap2
modify_ldt mprotect mremap mseal msgctl msgget msgrcv msgsnd msync munlock munlockall munmap nanosleep newfstatat
open openat openat2 pause pidfd_open pidfd_send_signal pipe pipe2 pkey_alloc pkey_free pkey_mprotect poll ppoll
prctl pread64 preadv preadv2 prlimit64 process_mrelease process_vm_readv pselect6 ptrace pwrite64
pwritev pwritev2 read readahead readlink readlinkat readv recvfrom recvmmsg recvmsg remap_file_pages removexattr
removexattrat rename renameat renameat2 restart_syscall rmdir rseq rt_sigaction rt_sigpending rt_sigprocmask
rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo sched_get_priority_max
sched_get_priority_min sched_getaffinity sched_getattr sched_getparam sched_getscheduler sched_rr_get_interval
sched_setaffinity sched_setattr sched_setparam sched_setscheduler sched_yield seccomp select semctl semget semop
semtimedop sendfile sendmmsg sendmsg sendto set_robust_list set_thread_area set_tid_address setfsgid setfsuid setgid
setgroups setitimer setpgid setpriority setregid setresgid setresuid setreuid setrlimit setsid setsockopt setuid
setxattr setxattrat shmat shmctl shmdt shmget shutdown sigaltstack signalfd signalfd4 splice stat statfs statx
symlink symlinkat sync sync_file_range syncfs sysinfo tee tgkill time timer_create timer_delete timer_getoverrun
timer_gettime timer_settime timerfd_create timerfd_gettime timerfd_settime times tkill truncate umask uname unlink
unlinkat utime utimensat utimes vfork vmsplice wait4 waitid write writev
""".split()  # noqa: SIM905 - one word a line would be three hundred lines
"""The calls that containers may use: those of Linux 6.13 on x86_64 and aarch64 without `confine.REFUSED`. Runtimes
leave out what their version of libseccomp does not know."""

_ARCHITECTURES = {"x86_64": "SCMP_ARCH_X86_64", "aarch64": "SCMP_ARCH_AARCH64"}
_PERSONALITIES = (0x0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)
"""The arguments of personality(2) that Docker allows as well: none turns address randomization off."""
_FAMILIES = range(46)
"""The families of sockets that have a number (linux/socket.h)."""
_NETLINK = range(32)
"""The protocols of AF_NETLINK that can have a number (linux/netlink.h, MAX_LINKS)."""
_TRANSPORTS = (132, 136, 262)
"""SCTP, UDP-Lite and MPTCP. Programs try them first, and fall back if the kernel says that it has them not."""


@cache
def profile() -> str:
    """Return the profile for this machine, as the option of Docker's API takes it."""
    internet = (confine.AF_INET, confine.AF_INET6)
    rules = [_rule("SCMP_ACT_ALLOW", *_ALLOWED)]
    # libc uses clone instead, whose flags a filter can see.
    rules += [_rule("SCMP_ACT_ERRNO", "clone3", errno=confine.ENOSYS)]
    no_namespaces = {"index": 0, "value": confine.NEW_NAMESPACES, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}
    rules += [_rule("SCMP_ACT_ALLOW", "clone", args=[no_namespaces])]
    rules += [_rule("SCMP_ACT_ALLOW", "personality", args=[_equal(0, value)]) for value in _PERSONALITIES]
    rules += [_rule("SCMP_ACT_ALLOW", "socket", "socketpair", args=[_equal(0, confine.AF_UNIX)])]
    for family in internet:
        protocols = confine.INTERNET_PROTOCOLS
        rules += [_socket("SCMP_ACT_ALLOW", family, protocol) for protocol in protocols]
        rules += [_socket("SCMP_ACT_ERRNO", family, protocol, confine.EPROTONOSUPPORT) for protocol in _TRANSPORTS]
    rules += [_socket("SCMP_ACT_ALLOW", confine.AF_NETLINK, confine.NETLINK_ROUTE)]
    # libaudit takes EPERM for a failure, and login programs end then. These errors mean a kernel without auditing.
    for protocol in set(_NETLINK) - {confine.NETLINK_ROUTE}:
        rules += [_socket("SCMP_ACT_ERRNO", confine.AF_NETLINK, protocol, confine.EPROTONOSUPPORT)]
    for family in set(_FAMILIES) - {confine.AF_UNIX, confine.AF_NETLINK, *internet}:
        rules += [_rule("SCMP_ACT_ERRNO", "socket", args=[_equal(0, family)], errno=confine.EAFNOSUPPORT)]
    architectures = [_ARCHITECTURES[platform.machine()]]
    return json.dumps({"defaultAction": "SCMP_ACT_ERRNO", "architectures": architectures, "syscalls": rules})


def _socket(action: str, family: int, protocol: int, errno: int | None = None) -> dict[str, Any]:
    return _rule(action, "socket", args=[_equal(0, family), _equal(2, protocol)], errno=errno)


def _rule(
    action: str, *names: str, args: list[dict[str, Any]] | None = None, errno: int | None = None
) -> dict[str, Any]:
    rule: dict[str, Any] = {"names": list(names), "action": action, "args": args or []}
    return rule if errno is None else {**rule, "errnoRet": errno}


def _equal(index: int, value: int) -> dict[str, Any]:
    return {"index": index, "value": value, "op": "SCMP_CMP_EQ"}
