"""What the guest has to show: `python -m tests.guest.checks NAME` in the guest prints one line with the result.

A check is a function. Its text is the detail of an `ok` line; what it asserts is the detail of a `FAILED` line.
The proxy is the service of docs/deploying.md, from the wheel, unless a check starts another one.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from sandboxes.rights import held
from tests.guest.image import CHECKOUT, INSTALLED

URL = "http://127.0.0.1:8700"
GROUPS = Path("/sys/fs/cgroup")
UNITS = Path("/etc/systemd/system")
UNIT, CHANGES = UNITS / "forkpoint.service", UNITS / "forkpoint.service.d" / "root.conf"
DATA = Path("/var/lib/forkpoint")
_READY_S = 180.0
_CALL_S = 240.0
_NEEDS = {"CI": "true", "FORKPOINT_NEEDS_CRIU": "1"}
"""Variables with which tests fail instead of being skipped."""
_JSON = ("-H", "Content-Type: application/json", "-o", "/dev/null")


def doctor() -> str:
    """`forkpoint doctor` finds all that sandboxes require."""
    done = subprocess.run([f"{INSTALLED}/bin/forkpoint", "doctor"], capture_output=True, text=True, check=False)
    print(done.stdout + done.stderr)
    assert done.returncode == 0, f"exit code {done.returncode}"
    return "all that sandboxes require is there"


def readme() -> str:
    """The commands of README serve, and the second rollout's equal call is a hit."""
    blocks = (Path(CHECKOUT) / "README.md").read_text().split("```sh\n")[1:]
    serve, calls = blocks[0].split("```")[0].strip(), blocks[2].split("```")[0].strip().splitlines()
    subprocess.run(["rm", "-rf", f"{CHECKOUT}/forkpoint-data"], check=True)
    with subprocess.Popen(["/bin/bash", "-c", f"exec {serve}"], cwd=CHECKOUT, stdin=subprocess.DEVNULL) as proxy:
        try:
            _wait(_is_ready, "the proxy is not ready", _READY_S)
            answers = [subprocess.check_output(["/bin/bash", "-c", call], text=True) for call in calls]
        finally:
            proxy.terminate()
    assert "forkpoint; fwd=miss; stored" in answers[0], answers[0]
    assert "forkpoint; hit" in answers[1], answers[1]
    assert answers[0].split("\n\n")[-1] == answers[1].split("\n\n")[-1], answers[:2]
    assert '"stdout":"built\\n"' in answers[2].replace('": "', '":"'), answers[2]
    return "served, a miss, a hit by the second rollout, and its next call on the restored state"


def service() -> str:
    """The unit of docs/deploying.md has its sandboxes in its own control group, and no right to become root."""
    with _served() as main:
        shown = dict(
            line.split(":\t") for line in Path(f"/proc/{main}/status").read_text().splitlines() if ":\t" in line
        )
        least = f"{sum(1 << number for number in held.NEEDED.values()):016x}"
        found = [shown[name] for name in ("CapEff", "CapPrm", "CapBnd", "NoNewPrivs")]
        assert found == [least, least, least, "1"], found
    assert _shell("owners", "touch f; chown 1234 f; stat -c %u f /etc/hosts /root")["stdout"] == "1234\n0\n0\n"
    return _has_sandboxes_inside("forkpoint")


def user() -> str:
    """The unit of an ordinary user has its sandboxes in its own control group too, with their limits."""
    return _has_sandboxes_inside("forkpoint", "user")


def root() -> str:
    """The unit with root's rights, for checkpoints, has them there too."""
    return _has_sandboxes_inside("root", "root")


def _has_sandboxes_inside(user: str, variant: str = "") -> str:
    with _served(variant) as main:
        assert _shell(f"service-{variant}", "echo $((6 * 7))")["stdout"] == "42\n"
        groups = _sandbox_groups()
        assert groups, "no sandbox has a control group"
        own = GROUPS / "system.slice" / "forkpoint.service"
        outside = [group for group in groups if not group.is_relative_to(own)]
        assert not outside, f"not in the unit's group, which systemd limits and ends: {outside[0]}"
        # A sandbox that waits for a spec has no limits yet.
        limits = [[_read(group / name) for name in ("memory.max", "pids.max")] for group in groups]
        assert any("max" not in limit for limit in limits), limits
        owner = Path(f"/proc/{main}").owner()
        assert owner == user, owner
        return f"{len(groups)} groups of sandboxes below {own}; the proxy is {owner}"


_EATERS = {
    "heap": """
b = []
while True: b.append(bytearray(1 << 24))
""",
    "shared memory": """
with open("/dev/shm/fill", "wb") as file:
    for _ in range(400): file.write(bytes(1 << 20))
""",
    "pipes": """
import fcntl, os
a = []
while len(a) < 400:
    r, w = os.pipe()
    fcntl.fcntl(w, 1031, 1 << 20); os.set_blocking(w, False); os.write(w, bytes(1 << 20)); a.append((r, w))
""",
    "unix sockets": """
import socket
a = []
while len(a) < 4000:
    p, q = socket.socketpair()
    p.setblocking(False); a.append((p, q))
    try:
        while True: p.send(bytes(65536))
    except BlockingIOError: pass
""",
    "tcp sockets": """
import socket
a, server = [], socket.create_server(("127.0.0.1", 0), backlog=512)
while len(a) < 400:
    c = socket.socket()
    c.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20); c.connect(server.getsockname())
    a.append((c, server.accept()[0])); c.setblocking(False)
    try:
        while True: c.send(bytes(65536))
    except BlockingIOError: pass
""",
}
"""Programs that take 400 MB or more of the machine's memory, by what they hold it in."""


def memory() -> str:
    """What a sandbox holds in memory of any kind is bounded; the call ends, and others live."""
    with _served():
        _shell("neighbour", "echo up > /tmp/up")
        peaks = {}
        for name, program in _EATERS.items():
            task = f"memory-{name.replace(' ', '-')}"
            _set_up(task, memory_mb=128, timeout_s=_CALL_S)
            seen = [_available_mb()]
            _shell(task, _python(program), meanwhile=partial(_note_available, seen))
            peaks[name] = seen[0] - min(seen)
            # Beside the limit, the machine has memory of its own for the sandbox, and its other programs.
            assert peaks[name] < 250, f"{name}: {peaks[name]} MB of a limit of 128 MB"
        assert _shell("neighbour", "cat /tmp/up")["stdout"] == "up\n"
        return ", ".join(f"{name} {peak} MB" for name, peak in peaks.items()) + " taken, at a limit of 128 MB"


def pids() -> str:
    """A fork bomb gets as many processes as its limit; others go on."""
    with _served():
        _set_up("pids", pids=64, timeout_s=60)
        most = [0]

        def count() -> None:
            most[0] = max([most[0], *(int(_read(group / "pids.current") or 0) for group in _sandbox_groups())])

        _shell("pids", "bomb() { bomb | bomb & }; bomb; sleep 5", meanwhile=count)
        assert 30 < most[0] <= 64 + 2, most[0]
        assert _shell("beside", "echo on")["stdout"] == "on\n"
        return f"{most[0]} processes at most, at a limit of 64 and two of ours"


def cpus() -> str:
    """A sandbox with half a CPU gets half of the time."""
    spin = """
import time
began = time.monotonic()
while time.monotonic() - began < 10: pass
print(time.process_time())
"""
    with _served():
        _set_up("cpus", cpus=0.5)
        used = float(_shell("cpus", _python(spin))["stdout"])
        # On a busy machine the guest gets less.
        assert used < 6, f"{used:.1f} s of CPU in 10 s"
        return f"{used:.1f} s of CPU in 10 s, at 0.5 CPUs"


def disk() -> str:
    """New bytes on the disk are bounded."""
    with _served():
        _set_up("disk", disk_mb=32, timeout_s=60)
        before = _free_mb()
        _shell(
            "disk", "head -c 500M /dev/zero > /tmp/a; for i in 1 2 3 4; do head -c 20M /dev/zero > /tmp/b$i; done; sync"
        )
        taken = before - _free_mb()
        assert taken < 100, f"{taken} MB"
        return f"{taken} MB taken of the disk, at a limit of 32 MB"


_SHELTER = "for n in {{-1000..-1}}; do for p in {0}; do echo $n > /proc/$p/oom_score_adj && echo took $n; done; done"


def oom_score() -> str:
    """An agent cannot give any of its processes a score below 0; the proxy's is -500."""
    with _served() as main:
        # The second rollout is restored from a checkpoint of the first one's processes.
        for rollout in ("1", "2"):
            _shell("oom", "sleep 1000 &", rollout=rollout)
            answer = _shell("oom", f": {rollout}; {_SHELTER.format('self $$ $! 1')} 2>/dev/null; true", rollout=rollout)
            assert answer["stdout"] == "", f"rollout {rollout}: {answer['stdout']}"
        scores = {int(_read(Path("/proc", pid, "oom_score_adj")) or 0) for pid in _pids_of_sandboxes()}
        assert scores, "no process of a sandbox is there"
        assert min(scores) >= 0, scores
        proxy = int(_read(Path(f"/proc/{main}/oom_score_adj")) or 0)
        assert proxy == -500, proxy
        return f"nothing below 0 was taken; sandboxes have {sorted(scores)}, the proxy {proxy}"


def oom_order() -> str:
    """When the machine's memory runs out, the kernel ends agents' processes, and the proxy lives."""
    with _served() as main:
        for task in ("eater", "bystander"):
            _set_up(task, memory_mb=8192, timeout_s=_CALL_S)
        _shell("bystander", "echo on")
        # Large pieces: the kernel gives up pages of files first, and each pause of the program brings some back.
        eat = "open('/proc/self/oom_score_adj', 'w').write('0')\nb = []\nwhile True: b.append(b'x' * (1 << 28))"
        answer = _shell("eater", _python(eat))
        assert answer.get("exit_code", 137) == 137, answer
        assert _main_pid() == main, "the proxy was ended"
        assert _shell("bystander", "echo still on")["stdout"] == "still on\n"
        return "the agent's program was ended, the proxy and another sandbox live"


def killed() -> str:
    """After `kill -9` of the proxy, the next start leaves no process and no control group of the killed one."""
    with _served() as main:
        assert _shell("killed", "sleep 100000 & sleep 100000 & disown; echo up")["stdout"] == "up\n"
        groups, left = _sandbox_groups(), _pids_of_sandboxes()
        assert groups, "no groups"
        assert left, "no processes"
        os.kill(main, signal.SIGKILL)
        _wait(lambda: _main_pid() not in {0, main} and _is_ready(), "systemd did not start the proxy again", _READY_S)
        remains = _remains(left, groups)
        assert not remains, remains
        assert _shell("after", "echo on")["stdout"] == "on\n"
        return f"{len(left)} processes and {len(groups)} groups are gone, and the next proxy answers"


def killed_alone() -> str:
    """The same without systemd and its groups: the next proxy on the data directory removes what is left."""
    subprocess.run(["systemctl", "stop", "forkpoint"], check=False, stderr=subprocess.DEVNULL)
    subprocess.run(["rm", "-rf", DATA], check=True)
    command = [f"{INSTALLED}/bin/forkpoint", "serve", "--data", str(DATA)]
    with subprocess.Popen(command) as proxy:
        _wait(_is_ready, "the proxy is not ready", _READY_S)
        assert _shell("killed", "sleep 100000 & sleep 100000 & disown; echo up")["stdout"] == "up\n"
        groups, left = _sandbox_groups(), _pids_of_sandboxes()
        assert left, "no processes"
        proxy.kill()
    with subprocess.Popen(command) as proxy:
        _wait(_is_ready, "the proxy is not ready again", _READY_S)
        remains = _remains(left, groups)
        proxy.terminate()
    assert not remains, remains
    return f"{len(left)} processes and {len(groups)} groups are gone"


def stopped() -> str:
    """`systemctl stop` leaves no process and no control group."""
    with _served():
        _shell("stopped", "sleep 100000 & echo up")
        left, groups = _pids_of_sandboxes(), _sandbox_groups()
        assert left, "no processes"
        subprocess.run(["systemctl", "stop", "forkpoint"], check=True)
    remains = _remains(left, groups)
    assert not remains, remains
    return "no process and no group is left"


def _remains(pids: list[str], groups: list[Path]) -> list[str]:
    alive = [f"process {pid}" for pid in pids if Path("/proc", pid).exists()]
    return alive + [str(group) for group in groups if group.exists()]


def _tests(*arguments: str) -> Callable[[], str]:
    """Return a check that runs tests of this repository, without the service."""

    def run() -> str:
        subprocess.run(["systemctl", "stop", "forkpoint"], check=False, stderr=subprocess.DEVNULL)
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-n0",
            "-q",
            "-p",
            "no:cacheprovider",
            "--durations",
            "5",
            *arguments,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | _NEEDS)
        if done.returncode:
            print(done.stdout[-6000:])
        last = done.stdout.strip().splitlines()[-1]
        assert done.returncode == 0, last
        return last

    return run


_SECURITY = "refused or out_of_reach or bomb or look_into or loopback"
_CHECKPOINTS = "oom_scores or restored_sandbox_is_confined or sessions_come_back"
"""Which of their tests run here: those that depend on the kernel, as many as end within minutes."""

CHECKS: dict[str, Callable[[], str]] = {
    "doctor": doctor, "readme": readme, "service": service, "memory": memory, "pids": pids, "cpus": cpus, "disk": disk,
    "oom-score": oom_score, "oom-order": oom_order, "killed": killed, "stopped": stopped, "user": user,
    "root": root, "killed-alone": killed_alone,
    "tests-groups": _tests("tests/sandboxes/linux/test_cgroups_v2.py", "tests/sandboxes/linux/test_processes.py"),
    "tests-security": _tests("tests/sandboxes/local/test_security.py", "-k", _SECURITY),
    "tests-checkpoints": _tests("tests/sandboxes/local/test_checkpoints.py", "-k", _CHECKPOINTS),
    "tests-users": _tests("tests/sandboxes/local/test_checkpoints.py", "-k", "another_user"),
}  # fmt: skip
"""The checks, in the order in which they run."""


def main(arguments: list[str]) -> int:
    """Run the named checks. Returns how many failed."""
    failed = 0
    for name in arguments:
        began = time.monotonic()
        try:
            word, detail = "ok", CHECKS[name]()
        except Exception as error:  # noqa: BLE001 - every failure is a line
            word, detail = "FAILED", f"{type(error).__name__}: {error}"
            failed += 1
        print(f"{word} {name} ({time.monotonic() - began:.0f} s): {detail}", flush=True)
    return failed


@contextmanager
def _served(variant: str = "") -> Iterator[int]:
    """Have the service run for the block, and after it; yield the proxy's pid.

    The variant is "root" for the unit with root.conf, and "user" for the same with an ordinary user.
    """
    folder = Path(CHECKOUT) / "docker" / "deploy" / "systemd"
    changes = (folder / CHANGES.name).read_text() if variant else ""
    if variant == "user":
        changes = changes.replace("User=root", "User=forkpoint\nOOMScoreAdjust=0")
    if not _is_ready() or not CHANGES.exists() or CHANGES.read_text() != changes:
        subprocess.run(["useradd", "--system", "forkpoint"], check=False, stderr=subprocess.DEVNULL)
        subprocess.run(["systemctl", "stop", "forkpoint"], check=False, stderr=subprocess.DEVNULL)
        # Without other rights, a proxy cannot use what one with them has left.
        subprocess.run(["rm", "-rf", DATA], check=True)
        for unit in folder.glob("*.service"):
            (UNITS / unit.name).write_text(unit.read_text())
        CHANGES.parent.mkdir(exist_ok=True)
        CHANGES.write_text(changes)
        subprocess.run(["systemctl", "stop", "forkpoint-launcher"], check=False, stderr=subprocess.DEVNULL)
        Path("/etc/forkpoint.env").write_text("FORKPOINT_AUDIT_SHARE=0\n")
        subprocess.run(["systemctl", "daemon-reload"], check=True)
        subprocess.run(["systemctl", "start", "forkpoint"], check=True)
    try:
        _wait(_is_ready, "the service is not ready", _READY_S)
        yield _main_pid()
    except BaseException:
        subprocess.run(
            ["journalctl", "-u", "forkpoint", "-u", "forkpoint-launcher", "-n", "20", "-o", "cat", "--no-pager"],
            check=False,
        )
        raise


def _main_pid() -> int:
    shown = subprocess.check_output(["systemctl", "show", "-P", "MainPID", "forkpoint"], text=True)
    return int(shown)


def _is_ready() -> bool:
    return subprocess.run(["curl", "-sf", f"{URL}/readyz"], stdout=subprocess.DEVNULL, check=False).returncode == 0


def _set_up(task: str, **limits: float) -> None:
    spec = json.dumps({"driver": "local", "limits": limits})
    subprocess.run(["curl", "-sf", "-X", "PUT", f"{URL}/api/v1/tasks/{task}", "-d", spec, *_JSON], check=True)


def _shell(
    task: str, command: str, *, rollout: str = "1", meanwhile: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Run a command as a rollout of a task; call `meanwhile` again and again until it is answered."""
    body = json.dumps({"command": command, "timeout_s": _CALL_S})
    curl = ["curl", "-s", f"{URL}/t/{task}/r/{rollout}/shell/exec", "-d", body]
    with subprocess.Popen(curl, stdout=subprocess.PIPE, text=True) as call:
        while call.poll() is None:
            meanwhile()
            time.sleep(0.05)
        assert call.stdout is not None
        answer: dict[str, Any] = json.loads(call.stdout.read())
    return answer


def _python(program: str) -> str:
    return f"python3 -c {shlex.quote(program)}"


def _wait(true: Callable[[], bool], otherwise: str, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.1)


def _sandbox_groups() -> list[Path]:
    """Return the control groups of the sandboxes of the service's proxy."""
    instance = DATA / "local" / "instance.json"
    parents = [Path(group) for group in json.loads(instance.read_bytes())["cgroups"]]
    return [group for parent in parents if parent.is_dir() for group in parent.iterdir() if group.is_dir()]


def _pids_of_sandboxes() -> list[str]:
    return [pid for group in _sandbox_groups() for pid in (_read(group / "cgroup.procs") or "").split()]


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _note_available(seen: list[int]) -> None:
    seen.append(_available_mb())


def _available_mb() -> int:
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) >> 10


def _free_mb() -> int:
    return os.statvfs("/").f_bavail * os.statvfs("/").f_frsize >> 20


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
