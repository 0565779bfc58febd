"""compose.yaml's proxy, run in a container of its own: sandboxes start, and none outlives a killed proxy.

The image is empty and sees this machine's programs read-only, because no registry is needed then. All flags of the
container come from compose.yaml.
"""

import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from proxy.workloads.ephemeral_proxy import free_port
from tests.dockerd import Dockerd, dockerd
from tests.machine import data_directory, wait_until
from tests.sandboxes.docker import BASH_IMAGE, first_processes, make_bash_image, require_docker

ROOT = Path(__file__).parents[1]
IMAGE = "forkpoint-test-empty:1"
TOKEN = secrets.token_hex(16)
PROGRAMS = ("/usr", "/bin", "/lib", "/lib64", "/sbin", "/etc")
SPEC = {"driver": "container", "image": BASH_IMAGE}


@dataclass
class ComposedProxy:
    """The proxy's service of compose.yaml, started with `docker run`.

    Attributes:
        daemon: The Docker daemon.
        data: The data directory, whose path is the same inside and outside.
        port: The port on loopback.
        service: The service in compose.yaml.
        image: The proxy's image. The empty one sees this machine's programs.
        spec: The environment of tasks without one.
    """

    daemon: Dockerd
    data: Path
    port: int
    service: dict[str, Any]
    image: str = IMAGE
    spec: dict[str, str] = field(default_factory=lambda: SPEC)

    def start(self) -> None:
        """Start the container, and return when the proxy is ready."""
        run(self._command())
        wait_until(self._ready, self.log(), within_s=60)

    def log(self) -> str:
        return subprocess.run(["docker", "logs", "proxy"], capture_output=True, text=True, check=False).stderr

    def sandboxes(self, *which: str) -> list[str]:
        """Return the sandboxes that run; with `-a` also those that Docker has created and not started."""
        listed = self.daemon.ask("ps", *which, "--filter", "label=forkpoint.instance", "--format", "{{.Names}}").split()
        return listed + self.of_runtime()

    def of_runtime(self) -> list[str]:
        """Return the sandboxes that run and that Docker does not know."""
        return [name for name in first_processes(self.data / "container") if name.startswith("forkpoint-")]

    def exec(self, rollout: str, command: str) -> httpx.Response:
        url = f"http://127.0.0.1:{self.port}/t/demo/r/{rollout}/shell/exec"
        return httpx.post(url, json={"command": command}, headers={"x-forkpoint-token": TOKEN}, timeout=60)

    def _ready(self) -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/readyz").is_success
        except httpx.TransportError:
            return False

    def _command(self) -> list[str]:
        service = self.service
        assert service["pid"] == service["cgroup"] == "host"
        flags = ["--name", "proxy", "--hostname", service["hostname"], "--pid", "host", "--network", "host"]
        # Not `--privileged`: this machine may lack a capability, and a container cannot be given what is not here.
        flags += ["--cap-add", "ALL", "--security-opt", "seccomp=unconfined"]
        flags += [word for name in _missing_capabilities() for word in ("--cap-drop", name)]
        environment = service["environment"] | {
            "FORKPOINT_HOST": "127.0.0.1",
            "FORKPOINT_PORT": str(self.port),
            "FORKPOINT_TOKEN": TOKEN,
            "FORKPOINT_DATA": str(self.data),
            "FORKPOINT_DEFAULT_SPEC": json.dumps(self.spec),
        }
        flags += [word for name, value in environment.items() for word in ("--env", f"{name}={value}")]
        elsewhere = {
            "/var/run/docker.sock": self.daemon.host.removeprefix("unix://"),
            "/var/lib/forkpoint": f"{self.data}:{self.data}",
            "/var/lib/docker": f"{self.daemon.folder}:{self.daemon.folder}",
        }
        for volume in service["volumes"]:
            outer, inner = volume.split(":")
            replaced = elsewhere.get(outer, outer)
            flags += ["--volume", replaced if ":" in replaced else f"{replaced}:{inner}"]
        program = []
        if self.image == IMAGE:
            program = [sys.executable, "-m", "forkpoint", "serve"]
            for path in {*PROGRAMS, sys.base_prefix, sys.prefix, str(ROOT)}:
                flags += ["--volume", f"{path}:{path}:ro"] if Path(path).is_dir() else []
        return ["run", "--detach", "--init=false", *flags, self.image, *program]


def run(command: list[str], *, within_s: float = 60) -> None:
    """Run a `docker` command, which must succeed."""
    done = subprocess.run(["docker", *command], capture_output=True, text=True, check=False, timeout=within_s)
    assert done.returncode == 0, f"{done.stdout[-3000:]}{done.stderr[-3000:]}"


def proxy_service() -> dict[str, Any]:
    """Return the proxy's service of compose.yaml."""
    service: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["proxy"]
    return service


def _missing_capabilities() -> list[str]:
    """Return the capabilities that this machine cannot give; only one has been seen to be missing."""
    status = Path("/proc/self/status").read_text().splitlines()
    bounding = int(next(line for line in status if line.startswith("CapBnd:")).split()[1], 16)
    return [] if bounding >> 24 & 1 else ["SYS_RESOURCE"]


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[ComposedProxy]:
    require_docker()
    with ExitStack() as stack:
        daemon = stack.enter_context(dockerd())
        monkeypatch.setenv("DOCKER_HOST", daemon.host)
        make_bash_image()
        empty = subprocess.run(["tar", "--create", "--files-from", os.devnull], capture_output=True, check=True).stdout
        subprocess.run(["docker", "import", "-", IMAGE], input=empty, check=True, capture_output=True)
        folder = stack.enter_context(data_directory())
        folder.chmod(0o711)
        running = ComposedProxy(daemon, folder / "data", free_port(), proxy_service())
        running.start()
        yield running


def test_killed_proxy_leaves_no_sandbox(proxy: ComposedProxy) -> None:
    """A call, a hit and a fork work; `docker kill` ends the sandboxes too; a restart continues the rollouts."""
    first = proxy.exec("a", "X=1; echo kept > /tmp/f; cat /tmp/f")
    assert first.json()["stdout"] == "kept\n", first.text
    assert proxy.exec("b", "X=1; echo kept > /tmp/f; cat /tmp/f").headers["cache-status"] == "forkpoint; hit"
    assert proxy.exec("b", "echo $X; cat /tmp/f").json()["stdout"] == "1\nkept\n"
    if shutil.which("runc"):
        assert proxy.of_runtime() != []
    assert proxy.sandboxes() != []
    proxy.daemon.ask("kill", "proxy")
    # The kill may come before a spare is started: then it never runs, and the next start removes it.
    wait_until(lambda: proxy.sandboxes() == [], "sandboxes outlive the proxy")
    proxy.daemon.ask("rm", "proxy")
    proxy.start()
    assert proxy.exec("a", "echo $X; cat /tmp/f").json()["stdout"] == "1\nkept\n"
    proxy.daemon.ask("stop", "--time", "40", "proxy")
    assert proxy.sandboxes("-a") == []


def test_proxy_without_control_groups_says_so(proxy: ComposedProxy) -> None:
    """Without the volume, no sandbox could start: the proxy does not become ready, and its log says what to mount."""
    proxy.daemon.ask("rm", "--force", "proxy")
    if "/sys/fs/cgroup cgroup2 " in Path("/proc/mounts").read_text():
        pytest.skip("version 2 shows all groups to a container that shares the machine's cgroup namespace")
    proxy.service["volumes"] = [volume for volume in proxy.service["volumes"] if "cgroup" not in volume]
    run(proxy._command())
    wait_until(lambda: proxy.daemon.ask("ps", "--quiet").split() == [], "the proxy serves without sandboxes")
    shown = subprocess.run(["docker", "logs", "proxy"], capture_output=True, text=True, check=True)
    assert "mount /sys/fs/cgroup from the machine" in shown.stdout + shown.stderr
