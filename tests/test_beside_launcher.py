"""A proxy that is not root, beside a launcher that is: it serves as root does, with no other right than it needs."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from forkpoint.ephemeral_proxy import free_port
from sandboxes.ipc.launched_process import _launch
from sandboxes.linux import oom_score
from sandboxes.rights import held
from tests.beside import BESIDE, UID, USER, launcher_beside
from tests.machine import PLAIN, Proxy, assert_nothing_left, data_directory, needs_root, serving, wait_until
from tests.rights import CAPABILITIES, Rights, capabilities_here, least_rights

pytestmark = needs_root
FORBIDDEN = {"SYS_ADMIN", "SYS_PTRACE", "NET_ADMIN", "SYS_MODULE", "SETUID", "SETGID", "SETPCAP", "MKNOD"}
"""With any of these a proxy that was taken over could become root of the machine by itself."""


def shell(proxy: Proxy, rollout: str, command: str) -> tuple[str, str]:
    """Run a command, and return its output and how the proxy answered it."""
    answer = httpx.post(
        f"{proxy.url}/t/demo/r/{rollout}/shell/exec", json={"command": command}, timeout=60, verify=PLAIN
    )
    assert answer.is_success, answer.text
    assert answer.json()["exit_code"] == 0, answer.text
    return answer.json()["stdout"], answer.headers["cache-status"]


def rights_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def capabilities_of(pid: int, kind: str) -> set[str]:
    mask = int(rights_of(pid)[kind], 16)
    return {name for number, name in enumerate(CAPABILITIES) if mask >> number & 1}


def test_proxy_without_root_serves_like_root() -> None:
    """Calls of README, a branch, several users, a live process, and a restart; all files have the owners they got."""
    with data_directory() as folder, launcher_beside(folder) as path:
        proxy = Proxy(folder, {"launcher": str(path)}, BESIDE.wrapper)
        with serving(proxy):
            assert proxy.process is not None
            assert capabilities_of(proxy.process.pid, "CapBnd") == set(held.NEEDED)
            build = "echo built > app; chown 1234:4321 app; date +%N"
            first = shell(proxy, "1", build)
            assert "stored" in first[1]
            assert shell(proxy, "2", build) == (first[0], "forkpoint; hit")
            branch = "stat -c '%u %g' app . / /etc/hosts; id -u; "
            branch += "setpriv --reuid 1 --clear-groups sh -c 'id -u; touch /tmp/mine'"
            assert shell(proxy, "2", branch)[0] == "1234 4321\n0 0\n0 0\n0 0\n0\n1\n"
            shell(proxy, "2", "sleep 1000 & echo $! > pid")
            shell(proxy, "3", build)
            shell(proxy, "3", branch)
            shell(proxy, "3", "sleep 1000 & echo $! > pid")
            # Without CRIU the live process is there by replay.
            assert shell(proxy, "3", "kill -0 $(cat pid) && stat -c %u /tmp/mine; : 3")[0] == "1\n"
            proxy.stop()
        with serving(proxy):
            assert shell(proxy, "4", build) == (first[0], "forkpoint; hit")
            assert shell(proxy, "4", "cat app; : after")[0] == "built\n"
            processes, groups = proxy.processes(), proxy.groups()
            proxy.stop()
            assert_nothing_left(proxy, processes, groups)


def run_beside(granted: Rights, path: Path, folder: Path) -> "subprocess.CompletedProcess[str]":
    command = [*granted.wrapper, sys.executable, "-m", "tests.beside", str(folder)]
    environment = {**os.environ, held.LAUNCHER: str(path)}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)


def test_files_keep_their_owners() -> None:
    with data_directory() as folder, launcher_beside(folder) as path:
        done = run_beside(BESIDE, path, folder / "data" / "all")
        assert done.returncode == 0, done.stderr


def test_files_keep_their_owners_for_root() -> None:
    """The same look, by a proxy that is root and starts its own launcher."""
    with data_directory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "tests.beside", str(folder / "root")], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


def test_local_driver_keeps_its_contract() -> None:
    """Each test of the contract is run by a process with the rights of the unit's proxy."""
    with data_directory() as folder, launcher_beside(folder) as path:
        tests = [
            "test_contract.py::TestLocalDriver", "test_hard_links.py::test_links_of_set_up_stay_links",
            "test_processes.py::TestLocalProcesses::test_overdue_process_is_killed_with_its_children",
        ]  # fmt: skip
        command = [*BESIDE.wrapper, sys.executable, "-m", "pytest", "-n0", "-q", "-p", "no:cacheprovider", "-rs"]
        command += [f"tests/sandboxes/local/{test}" for test in tests]
        done = subprocess.run(
            [*command, f"--basetemp={folder}/data/tmp"], capture_output=True, text=True, check=False, timeout=400,
            env={**os.environ, held.LAUNCHER: str(path), "TEST_DATA": str(folder / "data")},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-5000:]
        assert "SKIPPED" not in done.stdout, done.stdout[-5000:]


@pytest.mark.parametrize("capability", held.NEEDED)
def test_proxy_needs_each_capability(capability: str) -> None:
    """What the driver refuses to start without fails without it."""
    lesser = Rights(tuple(name for name in held.NEEDED if name != capability), uid=UID)
    with data_directory() as folder, launcher_beside(folder) as path:
        done = run_beside(lesser, path, folder / "data" / "less")
        assert done.returncode != 0


def test_proxy_says_which_capability_it_lacks() -> None:
    with data_directory() as folder, launcher_beside(folder) as path:
        lesser = Rights(("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "SETFCAP"), uid=UID)
        proxy = Proxy(folder, {"launcher": str(path), "drivers": '["local"]'}, lesser.wrapper)
        proxy.launch()
        assert proxy.process is not None
        assert proxy.process.wait(60) == 1
        assert f"namespaces: root, by the launcher at {path}; the capabilities KILL are missing" in proxy.log()


def test_proxy_needs_no_right_to_become_root() -> None:
    assert not FORBIDDEN.intersection(held.NEEDED)
    assert {name: CAPABILITIES.index(name) for name in held.NEEDED} == held.NEEDED


def test_container_runs_both_by_one_command() -> None:
    """The first process is the proxy, without root and for good; its signals and exit code are the container's.

    A container has its control groups read-only.
    """
    granted = Rights(tuple(least_rights()), masked=True)
    with data_directory() as folder:
        data, url = folder / "data", f"http://127.0.0.1:{(port := free_port())}"
        launcher = ["launcher", "--user", USER, "--data", str(data), "--socket", str(folder / "run" / "launcher")]
        process = subprocess.Popen(
            [*granted.wrapper, sys.executable, "-m", "forkpoint", *launcher, "serve"], cwd=folder,
            env={**os.environ, "FORKPOINT_PORT": str(port)},
        )  # fmt: skip
        try:
            wait_until(lambda: _is_ready(url, process), within_s=60)
            shown = rights_of(process.pid)
            assert (shown["Uid"].split(), shown["NoNewPrivs"]) == ([str(UID)] * 4, "1")
            for kind in ("CapPrm", "CapEff", "CapBnd", "CapAmb"):
                assert capabilities_of(process.pid, kind) == set(held.NEEDED)
            answer = httpx.post(f"{url}/t/t/r/1/shell/exec", json={"command": "id -u"}, timeout=60, verify=PLAIN)
            assert answer.json()["stdout"] == "0\n"
            assert json.loads((data / "local" / "instance.json").read_bytes())["cgroups"]
            assert oom_score.read(process.pid) == (oom_score.PROXY if "SYS_RESOURCE" in capabilities_here() else 0)
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) in (0, -signal.SIGTERM)
            # The launcher's service ends with the proxy.
            wait_until(lambda: not any(Path("/proc", child).exists() for child in children))
        finally:
            process.kill()
            process.wait()


def _is_ready(url: str, process: "subprocess.Popen[bytes]") -> bool:
    assert process.poll() is None
    try:
        return httpx.get(f"{url}/readyz", timeout=30, verify=PLAIN).is_success
    except httpx.TransportError:
        return False


ASK = """
import socket, sys
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect(sys.argv[1])
pair = socket.socketpair()
socket.send_fds(connection, [b'["/x"]'], [pair[0].fileno()])
print(len(connection.recv(100)))
"""


def ask(path: Path, granted: Rights, program: str = ASK) -> "subprocess.CompletedProcess[str]":
    """Ask the service for a launcher with some rights; the program prints the length of the answer."""
    command = [*granted.wrapper, sys.executable, "-c", program, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_nobody_else_gets_a_launcher() -> None:
    """Not even root: the kernel lets it connect, and the service asks the kernel who it is."""
    with data_directory() as folder, launcher_beside(folder) as path:
        folder.chmod(0o755)
        refused = ask(path, Rights())
        assert (refused.stdout, refused.returncode) == ("", 1), refused.stderr
        # Another user cannot connect.
        assert "PermissionError" in ask(path, Rights((), uid=1000)).stderr
        # After both the service goes on.
        done = ask(path, BESIDE)
        assert int(done.stdout) > 0, done.stderr


WRONG = """
import json, socket, sys
for request in (b"", b"{", b"[]", b'["a", "b"]', b"[1]", json.dumps(["x" * 9000]).encode()):
    pair = socket.socketpair()
    for descriptors in ([pair[0].fileno()], [], [0, 1, 2]):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(sys.argv[1])
        socket.send_fds(connection, [request], descriptors)
        print(len(connection.recv(100)))
"""


def test_service_outlives_any_request() -> None:
    with data_directory() as folder, launcher_beside(folder) as path:
        wrong = ask(path, BESIDE, WRONG)
        assert (wrong.returncode, len(wrong.stdout.split())) == (0, 6 * 3), wrong.stderr
        done = ask(path, BESIDE)
        assert int(done.stdout) > 0, done.stderr


def test_missing_service_is_named(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(OSError, match=f"{tmp_path}/none: No such file"):
        _launch(f"{tmp_path}/none", theirs, [])
