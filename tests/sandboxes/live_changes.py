"""What commands can change beside a process that sleeps, one row each; the suite of every driver for machines.

A driver's test module subclasses `LiveChangesSuite` and gives it a `driver` fixture.
"""

import asyncio
from pathlib import Path

import pytest

from sandboxes.driver import Driver
from sandboxes.effects import Effect
from sandboxes.errors import NotFreezableError
from sandboxes.spec import EnvironmentSpec
from tests.sandboxes.box import opened, reads, run

SLEEPER = r"""
import ctypes, os, signal, socket, time
os.mkfifo("/root/fifo")
fifo = os.open("/root/fifo", os.O_RDWR)
reader, pipe = os.pipe()
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); udp.bind(("127.0.0.1", 5555))
tcp = socket.socket(); tcp.bind(("127.0.0.1", 5556)); tcp.listen(4)
dgram = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); dgram.bind("\0dgram")
stream = socket.socket(socket.AF_UNIX); stream.bind("/root/stream"); stream.listen(4)
pair, other = socket.socketpair()
if not (child := os.fork()):
    while True:
        signal.pause()
memory = os.memfd_create("shared", os.MFD_ALLOW_SEALING); os.ftruncate(memory, 4096)
gone = os.open("/root/gone", os.O_RDWR | os.O_CREAT); os.unlink("/root/gone")
os.write(gone, b"old")
buffer = ctypes.create_string_buffer(b"secret", 64)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGUSR2, signal.SIGRTMIN])
facts = dict(C=child, FIFO=fifo, PIPE=pipe, MEMORY=memory, GONE=gone)
facts["AT"] = ctypes.addressof(buffer)
open("/root/new", "w").write("".join(f"{name}={value}\n" for name, value in facts.items()))
os.rename("/root/new", "/root/facts")
while True:
    time.sleep(1000)
"""
"""A process with one object of each kind, which it never looks at, and a child that only waits."""
START = f"""cat > /root/sleeper.py <<'END'
{SLEEPER}
END
python3 /root/sleeper.py >/dev/null 2>/tmp/errors & export P=$!
until [ -s /root/facts ] || ! kill -0 $P; do sleep 0.02; done; cat /tmp/errors >&2; rm /tmp/errors
set -a; . /root/facts || exit; set +a"""


def python(text: str) -> str:
    """Return a command that runs Python with the modules that the rows need."""
    return f"""python3 - <<'END'
import array, ctypes, fcntl, mmap, os, resource, signal, socket, struct
P, env, libc = int(os.environ["P"]), os.environ, ctypes.CDLL(None, use_errno=True)
{text}
END"""


READS = {
    "connection that was closed": python("""
server, client = socket.socket(), socket.socket()
server.bind(("127.0.0.1", 5557)); server.listen()
client.connect(("127.0.0.1", 5557))
accepted = server.accept()[0]
accepted.close(); client.close()"""),
    "cat": "cat /root/sleeper.py",
    "ls": "ls -la /root /proc/$P/fd",
    "ps": "ps aux | grep -c python3",
    "proc": "cat /proc/$P/status /proc/$P/limits /proc/$P/oom_score_adj /proc/$P/maps >/dev/null",
    "null": "echo nothing >/dev/null 2>&1",
    "pipeline": "cat /root/facts | sort | head -2",
    "substitution": "test $(cat /root/facts | wc -l) -gt 1",
    "failing": "ls /does-not-exist; false",
    "python": python(
        "print(os.sched_getaffinity(P), resource.prlimit(P, resource.RLIMIT_NOFILE), os.getpriority(0, P))"
    ),
    "signal 0": "kill -0 $P",
    "fifo of its own": "mkfifo /tmp/f; (echo x > /tmp/f &) ; cat /tmp/f; rm /tmp/f",
    "socket of its own": python("a, b = socket.socketpair(); a.send(b'x'); b.recv(1)"),
}
"""Calls that only read. They must stay observations."""

CHANGES = {
    "fifo": "echo deploy > /root/fifo",
    "fifo by its descriptor": "echo deploy > /proc/$P/fd/$FIFO",
    "fifo taken out": "head -c 1 /root/fifo",
    "fifo with other bytes": "echo replace > /root/fifo; head -c 8 /root/fifo >/dev/null",
    "pipe": "echo deploy > /proc/$P/fd/$PIPE",
    "capacity of a pipe": python("fcntl.fcntl(os.open(f'/proc/{P}/fd/{env[\"PIPE\"]}', os.O_WRONLY), 1031, 8192)"),
    "udp": python("socket.socket(type=socket.SOCK_DGRAM).sendto(b'deploy', ('127.0.0.1', 5555))"),
    "unix datagram": python("socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b'x', '\\0dgram')"),
    "unix backlog": python("socket.socket(socket.AF_UNIX).connect('/root/stream')"),
    "tcp backlog": python("s = socket.socket(); s.connect(('127.0.0.1', 5556)); s.send(b'x')"),
    "pending signal": "kill -USR1 $P",
    "pending signal of a thread": python("libc.tgkill(P, P, signal.SIGUSR2)"),
    "stop": "kill -STOP $P",
    "continue": "kill -CONT $P",
    "stop of another": "kill -STOP $C",
    "continue of another": "kill -CONT $C",
    "renice": python("os.setpriority(os.PRIO_PROCESS, P, 5)"),
    "policy": python("os.sched_setscheduler(P, os.SCHED_BATCH, os.sched_param(0))"),
    "affinity": python("os.sched_setaffinity(P, {max(os.sched_getaffinity(P))})"),
    "priority of i/o": python("libc.syscall({'x86_64': 251, 'aarch64': 30}[os.uname().machine], 1, P, 3 << 13 | 0)"),
    "limits": python("resource.prlimit(P, resource.RLIMIT_NOFILE, (77, 88))"),
    "score of the oom killer": "echo 500 > /proc/$P/oom_score_adj",
    "filter of core dumps": "echo 0x7 > /proc/$P/coredump_filter",
    "slack of timers": "echo 1 > /proc/$P/timerslack_ns || true",
    "memory": python("os.pwrite(os.open(f'/proc/{P}/mem', os.O_RDWR), b'public', int(env['AT']))"),
    "memory by its thread": python("os.pwrite(os.open(f'/proc/{P}/task/{P}/mem', os.O_RDWR), b'open', int(env['AT']))"),
    "trace": python("""
assert libc.ptrace(16, P, 0, 0) == 0
os.waitpid(P, 0)
assert libc.ptrace(17, P, 0, 0) == 0"""),
    "shared memory": python("mmap.mmap(os.open(f'/proc/{P}/fd/{env[\"MEMORY\"]}', os.O_RDWR), 4096)[0] = 7"),
    "seals": python("fcntl.fcntl(os.open(f'/proc/{P}/fd/{env[\"MEMORY\"]}', os.O_RDWR), 1033, 4)"),
    "a file without a name": "echo new > /proc/$P/fd/$GONE",
    "own niceness": python("os.setpriority(os.PRIO_PROCESS, os.getppid(), 3)"),
    "own score": "echo 7 > /proc/$$/oom_score_adj",
    "own descriptors' flags": python("fcntl.fcntl(1, fcntl.F_SETFL, os.O_NONBLOCK | os.O_WRONLY)"),
    "lock": "exec 9>/root/lock; python3 -c 'import fcntl; fcntl.flock(9, 2)'",
    "release": "exec 9>&-; rm /root/lock",
    "another process": "sleep 1000 &",
    "its end": "kill %%; wait %% 2>/dev/null; true",
    "system v memory": python("assert libc.shmget(4711, 4096, 0o1600) >= 0"),
    "its removal": python("assert libc.shmctl(libc.shmget(4711, 0, 0), 0, None) == 0"),
    "system v semaphore": python("assert libc.semget(4712, 1, 0o1600) >= 0"),
    "its removal, too": python("assert libc.semctl(libc.semget(4712, 0, 0), 0, 0, None) == 0"),
    "system v queue": python("assert libc.msgget(4713, 0o1600) >= 0"),
    "a message": python("assert libc.msgsnd(libc.msgget(4713, 0), struct.pack('l4s', 1, b'text'), 4, 0) == 0"),
    "removal of the queue": python("assert libc.msgctl(libc.msgget(4713, 0), 0, None) == 0"),
    "session": "variable=1",
    "file": "echo x > /root/file",
}
"""Calls that change what another call or process can see. None of them may be an observation."""


REFUSED = {
    "memory at once": python("""
text = ctypes.create_string_buffer(b"public")
ours, theirs = (struct.pack("PN", at, 6) for at in (ctypes.addressof(text), int(env["AT"])))
assert libc.process_vm_writev(P, ours, 1, theirs, 1, 0) == 6"""),
    "posix queue": python("assert libc.mq_open(b'/queue', os.O_CREAT | os.O_RDWR, 0o600, None) >= 0"),
    "removal of the posix queue": python("assert libc.mq_unlink(b'/queue') == 0"),
    "descriptor of another": python("assert libc.syscall(438, os.pidfd_open(P), 3, 0) >= 0"),
    "name of the host": python("assert libc.sethostname(b'other', 5) == 0"),
    "network device": python(
        "fcntl.ioctl(socket.socket(), 0x8914, struct.pack('16sH14x', b'lo', 0))  # SIOCSIFFLAGS: down"
    ),
    "address": python(
        "fcntl.ioctl(socket.socket(), 0x8916, struct.pack('16sHH4s8x', b'lo:1', 2, 0, bytes((10, 0, 0, 1))))"
    ),
    "mount": python("assert libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0"),
    "kernel's setting": "echo 1 > /proc/sys/net/ipv4/ip_forward",
    "host name's setting": "echo other > /proc/sys/kernel/hostname",
    "key": python("assert libc.syscall({'x86_64': 248}.get(os.uname().machine, 217), b'user', b'k', b'v', 1, -4) >= 0"),
    "namespaces": python("assert libc.unshare(0x10000000) == 0"),
}
"""Calls that a sandbox may refuse. Those that it does not refuse must count as changes."""

LAST = {
    "real-time signal": python("os.kill(P, signal.SIGRTMIN)"),
    "the same once more": python("os.kill(P, signal.SIGRTMIN)"),
}
"""How many real-time signals wait cannot be seen. So whatever follows these counts as a change."""

OPAQUE = {
    "terminal": "import os, signal; master, slave = os.openpty(); print(os.ttyname(slave), flush=True); signal.pause()",
    "stopped watcher": """
import ctypes, os, signal
queue = ctypes.CDLL(None).inotify_init()
ctypes.CDLL(None).inotify_add_watch(queue, b"/root", 0x100)
print("watches", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
os.read(queue, 100)""",
}
"""Processes with a queue that nothing shows, and whose reader does not wake before a call ends."""

OF_PID_1 = {
    "limits": "python3 -c 'import resource; resource.prlimit(1, resource.RLIMIT_NOFILE, (77, 88))'",
    "score of the oom killer": "echo 500 > /proc/1/oom_score_adj",
    "filter of core dumps": "echo 0x7 > /proc/1/coredump_filter",
    # The kernel takes one such write of the machine in a tenth of a second. Not every kernel has this file.
    "niceness of its session": "(until echo 3 > /proc/1/autogroup; do :; done) 2>/dev/null",
    "terminals": "chmod 700 /dev/pts",
    "time of terminals": "touch -d 2001-01-01 /dev/pts",
    "processes": "chmod 700 /proc",
    "owner of processes": "chown 5 /proc",
    "time of processes": "touch -d 2001-01-01 /proc",
}
"""Calls that change what no file, session or process of the agent's has."""
if not Path("/proc/self/autogroup").exists():
    del OF_PID_1["niceness of its session"]

OF_IDLE_SHELLS = {
    "limits": "python3 -c 'import resource; resource.prlimit('$B', resource.RLIMIT_NOFILE, (77, 88))'",
    "stop": "kill -STOP $B",
    "a signal with a trap": "kill -USR1 $B; sleep 0.05",
    "output": "echo printed > /proc/$B/fd/1",
    "mode of its stdout": "chmod 600 /proc/$B/fd/1",
    "a dump": "for F in /proc/$B/fd/*; do [ ! -p $F ] || echo x > $F; done; unset F",
    "memory": """python3 - $B <<'END'
import os, sys
B = sys.argv[1]
[area] = [line.split()[0] for line in open(f"/proc/{B}/maps") if "[heap]" in line]
start, end = (int(address, 16) for address in area.split("-"))
memory = os.open(f"/proc/{B}/mem", os.O_RDWR)
heap = os.pread(memory, end - start, start)
assert b"FIRST" in heap
os.pwrite(memory, heap.replace(b"FIRST", b"OTHER"), start)
END""",
    "its end": "kill -9 $B",
}
"""Calls that change the idle shell $B of another session, whose next call would show it."""


def to_other_shell(command: str) -> str:
    """Return a command for $B, the newest process with a pipe as stdout. It leaves no trace in its own session."""
    return f"""B=0; for P in /proc/[0-9]*; do P=${{P#/proc/}}
case " 1 $$ $PPID " in *" $P "*) continue;; esac
if [ -p /proc/$P/fd/1 ] && [ $P -gt $B ]; then B=$P; fi; done
{command}
unset B P"""


LEAVE_UNKNOWN = {"lock", "system v memory", "system v semaphore", "system v queue", "a message", "posix queue"}
LEAVE_UNKNOWN |= LAST.keys() | {"tcp backlog"}
"""Calls after which the next call may count as a change: something stays whose changes cannot be seen, or a closed
connection becomes a lingering one only when its last packet is acknowledged."""


class LiveChangesSuite:
    def test_live_changes_are_no_observations(self, driver: Driver) -> None:
        """What a call leaves with a process that sleeps is a change; a call that only reads is none."""

        async def go() -> tuple[list[str], list[str], list[str]]:
            async with opened(driver):
                sandbox = await driver.start(EnvironmentSpec())
                started = await run(sandbox, START)
                assert started.code == 0, started.err
                counted = [name for name, command in READS.items() if not await reads(sandbox, command)]
                missed, failed = [], []
                for name, command in (CHANGES | REFUSED | LAST).items():
                    answer = await run(sandbox, command)
                    if answer.effect is Effect.NONE and not (name in REFUSED and answer.code):
                        missed.append(f"{name}: {answer.out}{answer.err}")
                    if answer.code and name not in REFUSED:
                        failed.append(f"{name}: {answer.out}{answer.err}")
                    if name not in LEAVE_UNKNOWN:
                        counted += [] if await reads(sandbox, "cat /root/facts") else [f"cat after {name}"]
                return missed, failed, counted

        missed, failed, counted = asyncio.run(go())
        assert (missed, failed, counted) == ([], [], [])

    @pytest.mark.parametrize("beside", ["nothing", "a process"])
    def test_idle_shell_of_another_session_is_untouched(self, driver: Driver, beside: str) -> None:
        """A call that changes the shell of another session counts as a change, or has no effect on later calls."""
        look = "echo $x $y; ulimit -n; stat -Lc %a /dev/stdout"
        alive = beside != "nothing"
        begin = "x=FIRST; trap y=7 USR1" + ("; sleep 1000 >/dev/null 2>&1 &" if alive else "")

        async def go() -> list[str]:
            differing = []
            async with opened(driver):
                sandbox = await driver.start(EnvironmentSpec())
                for name, command in OF_IDLE_SHELLS.items():
                    if alive:
                        await sandbox.close()
                        sandbox = await driver.start(EnvironmentSpec())
                    await run(sandbox, begin, session="other")
                    before = await run(sandbox, look, session="other")
                    answer = await run(sandbox, to_other_shell(command))
                    assert (name, answer.code) == (name, 0), answer.err
                    # The dump wakes the shell, and the fork by which it reads its command may be seen as a survivor.
                    if (alive or name == "a dump") and Effect.PROCESSES in answer.effect:
                        if not alive:
                            await sandbox.close()
                            sandbox = await driver.start(EnvironmentSpec())
                        continue
                    after = await run(sandbox, look, session="other")
                    if after.printed != before.printed or Effect.PROCESSES in answer.effect:
                        differing.append(f"{name}: {answer.effect}, {after.printed}")
            return differing

        assert asyncio.run(go()) == []

    def test_changes_of_pid_1_are_no_observations(self, driver: Driver) -> None:
        """Later calls see them (`ps -o ni= -p 1`), so the state is another one, which only a replay reaches."""

        async def go() -> None:
            async with opened(driver):
                for name, command in OF_PID_1.items():
                    sandbox = await driver.start(EnvironmentSpec())
                    answer = await run(sandbox, command)
                    assert (name, answer.code, answer.effect) == (name, 0, Effect.PROCESSES), answer.err
                    assert answer.state is None
                    assert (await run(sandbox, "true")).effect is Effect.NONE
                    with pytest.raises(NotFreezableError, match="pid 1"):
                        await sandbox.freeze()
                    await sandbox.close()

        asyncio.run(go())

    @pytest.mark.parametrize("name", OPAQUE)
    def test_calls_beside_hidden_queues_are_changes(self, driver: Driver, name: str) -> None:
        """The kernel passes on what is written to a terminal after the call; a stopped process does not wake at all."""

        async def go() -> None:
            async with opened(driver):
                sandbox = await driver.start(EnvironmentSpec())
                begin = f"python3 -c '{OPAQUE[name]}' > /root/begun & until [ -s /root/begun ]; do sleep 0.02; done"
                assert (await run(sandbox, begin)).code == 0
                stopped = "until grep -q 'State:.T' /proc/$!/status; do sleep 0.02; done"
                assert name == "terminal" or (await run(sandbox, stopped)).code == 0
                for _ in range(2):
                    assert (await run(sandbox, "cat /root/begun")).effect is Effect.PROCESSES

        asyncio.run(go())
