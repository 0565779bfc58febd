"""Attacks from inside a sandbox, as data: `tests` assert each of them, `python -m bench.attacks` prints the table.

A command gets through if it ends with 0. A probe is a Python program that prints the names of its attacks that got
through; names that it does not print were contained.
"""

# Each command is one line, as an agent sends it.
# ruff: noqa: E501

from typing import NamedTuple

COMMANDS: dict[str, str] = {
    "mount": "mount -t tmpfs none /mnt",
    "bind mount": "mount --bind /etc /mnt",
    "remount /proc/sys": "mount -o remount,rw /proc/sys",
    "umount": "umount /dev",
    "unshare": "unshare -r true",
    "user namespace": "unshare -Ur true",
    "nsenter": "nsenter -t 1 -m true",
    "chroot escape by descriptor": "ls -L /proc/1/root/",
    "pid 1's descriptors": "ls -lL /proc/1/fd/",
    "pid 1's environment": "cat /proc/1/environ",
    "pid 1's memory": "head -c 1 /proc/1/mem",
    "pid 1's maps": "cat /proc/1/maps | grep .",
    "pid 1's working directory": "readlink /proc/1/cwd",
    "niceness of the launcher's session (/proc/1/autogroup)": "cut -d' ' -f6 /proc/1/stat | grep -x 0",
    "ptrace of pid 1": "python3 -c 'import ctypes,sys; sys.exit(ctypes.CDLL(None).ptrace(16, 1, 0, 0) == -1)'",
    "kernel settings": "echo 1 > /proc/sys/kernel/panic",
    "core_pattern": "echo '|/bin/sh' > /proc/sys/kernel/core_pattern",
    "sysrq": "echo b > /proc/sysrq-trigger",
    "kernel log": "dmesg",
    "kernel memory": "head -c 1 /proc/kcore | grep -q . ",
    "a disk's device node": "mknod /tmp/disk b 254 0",
    "a character device": "mknod /tmp/mem c 1 1",
    "a hidden device": "ls /dev/mem /dev/kmsg /dev/vda /dev/fuse /dev/kvm 2>/dev/null | grep .",
    "files in /dev": "touch /dev/left-behind",
    "chmod in /dev": "chmod 600 /dev/null",
    "/sys": "touch /sys/x || mkdir /sys/kernel/x || chmod 777 /sys/kernel || mount -o remount,rw /sys",
    "hidden parts of /sys": "ls -A /sys/firmware /sys/devices/virtual/{powercap,dmi} 2>/dev/null | grep -v -e : -e '^$'",
    "modes of kernel files": 'python3 -c \'import os,sys\nfor n in os.listdir("/proc"):\n p="/proc/"+n\n if n.isdigit() or os.path.islink(p): continue\n try: os.chmod(p, os.stat(p).st_mode & 0o7777); sys.exit(0)\n except OSError: pass\nsys.exit(1)\'',
    "owners of kernel files": "cd /proc; for f in *; do [[ $f == [0-9]* || -L $f ]] || ! chown root $f || exit 0; done; exit 1",
    "hostname": "hostname other",
    "the clock": "date -s 2001-01-01",
    "raw sockets": "python3 -c 'import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)'",
    "a network address": "ip addr add 10.0.0.1/8 dev lo",
    "lifting a hard limit": "ulimit -Hf unlimited",
    "a module": "insmod /dev/null",
    "kernel's view of memory": "cd /proc; cat kpageflags kpagecount slabinfo vmallocinfo iomem timer_list | grep -q .",
    "kernel's addresses": "cd /proc; cat kallsyms modules keys key-users sched_debug | grep -q .",
    "machine's disks and boot line": "cd /proc; cat cmdline partitions diskstats interrupts | grep -q .; ",
    "file systems and drivers": "ls /proc/fs /proc/driver /proc/scsi /proc/acpi /proc/tty/driver | grep -v : | grep .",
    "layers' paths": "grep -q -e layers -e uppers -e forkpoint /proc/self/mountinfo",
    "audit": "python3 -c 'import socket; socket.socket(16, 3, 9)'",
    "vsock": "python3 -c 'import socket; socket.socket(40, 1)'",
    "userfaultfd": "python3 -c 'import ctypes,sys; sys.exit(ctypes.CDLL(None).syscall(323, 0) == -1)'",
    "more terminals than its share": "python3 -c 'import os; [os.openpty() for _ in range(300)]'",
    "shadow": "cat /etc/shadow /etc/shadow- /etc/gshadow 2>/dev/null | grep .",
    "host keys": "ls /etc/ssh 2>/dev/null | grep '_key$'",
    "private keys": "ls /etc/ssl/private 2>/dev/null | grep .",
    "sudoers": "cat /etc/sudoers 2>/dev/null | grep .",
    "homes": "ls -A /root /home | grep -v : | grep .",
    "run, tmp, mnt": "find /run /tmp /mnt /srv /boot /media -not -type d | grep .",
    "logs and spools": "find /var/log /var/spool /var/mail /var/cache /var/backups -type f | grep .",
    "the data directory": "find / -xdev -name 'forkpoint-test-*' | grep .",
    "privilege by setuid": "grep -q 'NoNewPrivs:.0' /proc/self/status",
    "keyring": "python3 -c 'import ctypes,sys; sys.exit(ctypes.CDLL(None).syscall(250, 0, -3, 1) == -1)'",
    "io_uring": "python3 -c 'import ctypes,sys; sys.exit(ctypes.CDLL(None).syscall(425, 1, 0) == -1)'",
    "bpf": "python3 -c 'import ctypes,sys; sys.exit(ctypes.CDLL(None).syscall(321, 0, 0, 0) == -1)'",
    "clone3": "python3 -c 'import ctypes,sys; sys.exit(ctypes.CDLL(None).syscall(435, 0, 0) == -1)'",
    "clone into a namespace": "python3 -c 'import ctypes,sys; sys.exit(ctypes.CDLL(None).syscall(56, 0x10000011, 0, 0, 0, 0) == -1)'",
    "core dump handler": "echo '|/tmp/x' > /proc/sys/kernel/core_pattern",
    "module loader": "echo /tmp/x > /proc/sys/kernel/modprobe",
    "binary formats": "ls /proc/sys/fs/binfmt_misc/register || mount -t binfmt_misc none /proc/sys/fs/binfmt_misc",
    "release agent": "mkdir /tmp/g && mount -t cgroup -o none,name=x none /tmp/g",
    "cgroup v2": "mkdir /tmp/g2 && mount -t cgroup2 none /tmp/g2",
    "fuse": 'test -c /dev/fuse || python3 -c \'import os; os.mknod("/tmp/fuse", 0o20600, os.makedev(10, 229)); os.open("/tmp/fuse", 2)\'',
    "fuse by mount": 'python3 -c \'import ctypes,sys; sys.exit(ctypes.CDLL(None).mount(b"x", b"/mnt", b"fuse", 0, b"fd=0,rootmode=40000,user_id=0,group_id=0") == -1)\'',
    "overlay mount": "mkdir -p /tmp/o/{a,b,c,d}; mount -t overlay o -o lowerdir=/tmp/o/a,upperdir=/tmp/o/b,workdir=/tmp/o/c /tmp/o/d",
    "trusted attributes": 'python3 -c \'import os; os.setxattr("/tmp", "trusted.overlay.opaque", b"y")\'',
    "opaque mark": 'python3 -c \'import os; os.setxattr("/etc", "user.overlay.opaque", b"y")\'; test -z "$(ls /etc)"',
    "a whiteout by hand": "mknod /tmp/w c 0 0",
    "chroot and back": 'python3 -c \'import os; f=os.open("/", 0); os.mkdir("/tmp/cr"); os.chroot("/tmp/cr"); os.fchdir(f); [os.chdir("..") for _ in range(50)]; os.chroot("."); open("/proc/1/environ").read()\'',
    "file handles": "python3 -c 'import ctypes,sys; sys.exit(ctypes.CDLL(None).syscall(304, -100, 0, 0) == -1)'",
    "host's pids by signal": "for p in 2 3 $(seq 300 20000); do kill -0 $p 2>/dev/null && test ! -d /proc/$p && exit 0; done; exit 1",
    "descriptors of pid 1 by pidfd": "python3 -c 'import ctypes,os,sys; sys.exit(ctypes.CDLL(None).syscall(438, os.pidfd_open(1), 4, 0) == -1)'",
    "memory of pid 1 by process_vm_readv": "python3 -c 'import ctypes,sys; b=(ctypes.c_char*8)(); v=(ctypes.c_ulong*2)(ctypes.addressof(b),8); r=(ctypes.c_ulong*2)(0x400000,8); sys.exit(ctypes.CDLL(None).process_vm_readv(1, v, 1, r, 1, 0) == -1)'",
    "oom shield": "for n in $(seq -1000 -1); do for p in self 1 $PPID; do echo $n > /proc/$p/oom_score_adj && exit 0; done; done; exit 1",
    "no address randomization": "setarch -R true || python3 -c 'import ctypes,sys; sys.exit(ctypes.CDLL(None).syscall(135, 0x40000) == -1)'",
    "real-time priority": "chrt -f 50 true",
    "clock by adjtimex": "python3 -c 'import ctypes,sys; b=(ctypes.c_char*300)(1); sys.exit(ctypes.CDLL(None).adjtimex(b) == -1)'",
    "quota": "python3 -c 'import ctypes,sys; sys.exit(ctypes.CDLL(None).quotactl(0, 0, 0, 0) == -1)'",
    "swap": "truncate -s 1M /tmp/swap; mkswap /tmp/swap; swapon /tmp/swap",
    "immutable file": "touch /tmp/i; chattr +i /tmp/i",
    "abstract sockets of the host": "grep -c @ /proc/net/unix | grep -v '^0$' | grep -v '^1$'",
    "System V memory of the host": "tail -n +2 /proc/sysvipc/shm | grep .",
    "set-user-id file gains rights": "cp /bin/cat /tmp/cat; chmod u+s /tmp/cat; cat /proc/1/environ",
    "file capability gains rights": "cp /bin/cat /tmp/cat2; setcap cap_sys_ptrace,cap_sys_admin+eip /tmp/cat2 && /tmp/cat2 /proc/1/environ",
    "terminal injection into pid 1": "python3 -c 'import fcntl; fcntl.ioctl(0, 0x5412, b\"x\")' < /dev/tty",
}
"""Attacks in one command each, by what they attack: escapes, privileges, other processes, files of the host."""


class Probe(NamedTuple):
    """Many attacks of one kind in one program.

    Attributes:
        names: What it tries.
        script: A Python program that prints each name that got through on a line.
    """

    names: tuple[str, ...]
    script: str


_CALLS = {
    "kexec_load": 246, "reboot": 169, "swapon": 167, "mount": 165, "umount2": 166, "pivot_root": 155, "setns": 308,
    "unshare": 272, "clone3": 435, "init_module": 175, "finit_module": 313, "delete_module": 176, "bpf": 321,
    "perf_event_open": 298, "userfaultfd": 323, "io_uring_setup": 425, "io_uring_enter": 426,
    "io_uring_register": 427, "keyctl": 250, "add_key": 248, "request_key": 249, "open_by_handle_at": 304,
    "name_to_handle_at": 303, "fanotify_init": 300, "syslog": 103, "acct": 163, "quotactl": 179, "kcmp": 312,
    "pidfd_getfd": 438, "mbind": 237, "move_pages": 279, "migrate_pages": 256, "set_mempolicy": 238, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "mount_setattr": 442,
    "settimeofday": 164, "clock_settime": 227, "clock_adjtime": 305, "adjtimex": 159, "lookup_dcookie": 212,
    "vhangup": 153, "iopl": 172, "ioperm": 173, "sethostname": 170, "setdomainname": 171,
    "process_madvise": 440, "statmount": 457, "listmount": 458, "nfsservctl": 180, "kexec_file_load": 320,
    "uselib": 134, "sysfs": 139, "ustat": 136, "_sysctl": 156, "listns": 470, "file_setattr": 469,
}  # fmt: skip
SYSTEM_CALLS = Probe(
    tuple(_CALLS),
    f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for name, number in {_CALLS!r}.items():
    ctypes.set_errno(0)
    done = libc.syscall(number, -1, -1, -1, -1, -1)
    if ctypes.get_errno() not in (1, 38):
        print(name)
""",
)
"""Calls of the kernel that a sandbox must not make, on x86_64. They must fail before their arguments are looked at."""

SOCKET_FAMILIES = Probe(
    tuple(f"family {number}" for number in range(3, 46) if number not in (10, 16))
    + tuple(f"netlink {number}" for number in range(1, 32))
    + tuple(f"protocol {number}" for number in (33, 115, 132, 136, 256, 262)),
    """
import socket
def tried(name, *arguments):
    try:
        socket.socket(*arguments)
        print(name)
    except OSError as error:
        if error.errno not in (1, 93, 97):
            print(name)
for number in range(3, 46):
    if number not in (10, 16):
        for kind in (1, 2, 3, 5):
            tried(f"family {number}", number, kind)
for number in range(1, 32):
    tried(f"netlink {number}", 16, 3, number)
for number in (33, 115, 132, 136, 256, 262):
    tried(f"protocol {number}", 2, 1, number)
""",
)
"""Sockets of other kinds than programs need."""

_HIDDEN = (
    "kcore", "keys", "key-users", "timer_list", "kallsyms", "kpageflags", "kpagecount", "kpagecgroup", "slabinfo",
    "vmallocinfo", "pagetypeinfo", "iomem", "ioports", "interrupts", "softirqs", "cmdline", "modules", "partitions",
    "diskstats", "sched_debug", "1/environ", "1/maps", "1/mem", "1/stack", "1/io", "sys/kernel/core_pattern (write)",
    "sys/kernel/modprobe (write)", "sys/vm/overcommit_memory (write)", "sysrq-trigger (write)", "irq (write)",
)  # fmt: skip
PROC_LEAKS = Probe(
    _HIDDEN,
    f"""
for name in {_HIDDEN!r}:
    path, _, write = name.partition(" ")
    try:
        if write:
            open("/proc/" + path, "w").write("1")
            print(name)
        elif open("/proc/" + path, "rb").read(64):
            print(name)
    except OSError:
        pass
""",
)
"""What /proc tells about the machine or about pid 1, and what it lets write."""

PROBES = {"system calls": SYSTEM_CALLS, "sockets": SOCKET_FAMILIES, "/proc": PROC_LEAKS}

_HELD = "until [ -e /tmp/held ] || ! kill -0 $!; do sleep 0.1; done; sleep 1"
"""Waits until a process in the background has taken all that it gets, and then long enough to be noticed."""
_TAKERS: dict[str, str] = {
    "inotify instances": "python3 -c 'import ctypes,os,time; l=ctypes.CDLL(None); [l.inotify_init() for _ in range(5000)]; os.mkdir(\"/tmp/held\"); time.sleep(30)'",
    "terminals": "python3 -c 'import os,time\ntry:\n while True: os.openpty()\nexcept OSError: os.mkdir(\"/tmp/held\"); time.sleep(30)'",
    "descriptors": "ulimit -n 65536; python3 -c 'import os,time\ntry:\n while True: os.dup(0)\nexcept OSError: os.mkdir(\"/tmp/held\"); time.sleep(30)'",
    "queued signals": "python3 -c 'import signal,os,time,ctypes; signal.pthread_sigmask(0, {40}); l=ctypes.CDLL(None); [l.sigqueue(os.getpid(), 40, 0) for _ in range(200000)]; os.mkdir(\"/tmp/held\"); time.sleep(30)'",
    "descriptors in flight": 'python3 -c \'import os,socket,time\na=[]\ntry:\n while len(a) < 400:\n  p=socket.socketpair(); a.append(p)\n  for _ in range(10): socket.send_fds(p[0], [b"x"], [0]*250)\nexcept OSError: pass\nos.mkdir("/tmp/held"); time.sleep(30)\'',
    "pipes": "ulimit -n 65536; python3 -c 'import os,time\na=[]\ntry:\n while len(a) < 4000: a.append(os.pipe())\nexcept OSError: pass\nos.mkdir(\"/tmp/held\"); time.sleep(30)'",
    "epoll watches": "ulimit -n 8192; python3 -c 'import select,os,time\nf=[os.pipe()[0] for _ in range(3000)]\ne=[select.epoll() for _ in range(100)]\ntry:\n [x.register(y) for x in e for y in f]\nexcept OSError: pass\nos.mkdir(\"/tmp/held\"); time.sleep(30)'",
}
HOLDERS: dict[str, str] = {
    "processes": "bomb() { bomb | bomb & }; bomb; sleep 3",
    "memory": "python3 -c 'b = []\nwhile True: b.append(bytearray(1 << 24))'",
    "System V segments": "for i in $(seq 5000); do ipcmk -M 4096 >/dev/null 2>&1 || break; done; sleep 30 & sleep 1",
    "empty files": 'python3 -c \'import os; os.mkdir("/tmp/many"); os.chdir("/tmp/many"); [os.close(os.open(str(n), 66)) for n in range(3000000)]\'',
    "sparse files": "cd /tmp; for i in $(seq 40); do truncate -s 60M s$i; sync; done",
    "a full disk": "head -c 3G /dev/zero > /tmp/full",
    "endless output": "timeout 3 yes",
    "file locks": 'python3 -c \'import fcntl,time; f=open("/tmp/l","w")\ntry:\n [fcntl.lockf(f, 2, 1, n*2) for n in range(200000)]\nexcept OSError: pass\ntime.sleep(30)\' & sleep 2',
    **{name: f"{command} & {_HELD}" for name, command in _TAKERS.items()},
}
"""Commands that take as much as they can of what sandboxes share. Afterwards others must work."""

_FILL = "python3 -c 'import os,time\nf=[]\nfor n in range(100):\n p=f\"/tmp/fill{{n}}\"; f.append(os.open(p,66)); {}\n os.write(f[n],bytes(8<<20)); time.sleep(0.1)'"
FILLERS: dict[str, str] = {
    "files in the background": f"{{ {_FILL.format('pass')}; sleep 60; }} >/dev/null 2>&1 &",
    "deleted files": _FILL.format("os.unlink(p)"),
    "deleted files in the background": f"{{ {_FILL.format('os.unlink(p)')}; sleep 60; }} >/dev/null 2>&1 &",
}
"""Commands that write 800 MB in ways that no directory or no call shows. With a smaller limit, they must be stopped."""

NEIGHBOUR = """
import ctypes, os, select, signal, socket
assert ctypes.CDLL(None).inotify_init() >= 0, "inotify"
os.openpty()
a, b = socket.socketpair(); socket.send_fds(a, [b"x"], [0])
signal.pthread_sigmask(0, {40})
assert ctypes.CDLL(None).sigqueue(os.getpid(), 40, 0) == 0, "signals"
select.epoll().register(os.pipe()[0])
open("/tmp/neighbour", "w").write("x" * 100000)
print("works")
"""
"""A program of another sandbox that uses a little of everything that is shared."""

SHAPES: dict[str, str] = {
    **{
        f"{levels} nested folders": f'cd /tmp; python3 -c \'import os\nfor i in range({levels}): os.mkdir("d"); os.chdir("d")\''
        for levels in (300, 1_500, 100_000)
    },
    "paths longer than the kernel takes": 'cd /tmp; python3 -c \'import os\nfor i in range(40): os.mkdir("n"*255); os.chdir("n"*255)\'',
    "names that are no text": "cd /tmp; touch $'\\xff\\xfe' $'new\\nline' $'\\x1b[31m' -- '-rf' ' '; mkdir $'\\x80'",
    "20,000 files": "mkdir /tmp/m; cd /tmp/m; seq 20000 | xargs touch",
    "modes that forbid everything": "mkdir -p /tmp/c/d; touch /tmp/c/d/f; chmod 0 /tmp/c/d/f /tmp/c/d /tmp/c",
    "links in circles": "cd /tmp; ln -s b a; ln -s a b; ln -s . self; mkdir x; ln -s ../x x/up",
    "FIFOs and sockets": "cd /tmp; mkfifo p; python3 -c 'import socket; socket.socket(1).bind(\"/tmp/s\")'",
    "sparse file of the largest size": "truncate -s 60M /tmp/hole; echo x >> /tmp/hole",
    "attributes": 'python3 -c \'import os\nfor n in range(40): os.setxattr("/root", f"user.a{n}", b"v"*60)\'',
}
"""Trees of files that are hard to walk, copy or remove. Afterwards the sandbox, its freeze and its end must work."""
