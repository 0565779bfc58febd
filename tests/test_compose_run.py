"""compose.yaml's proxy, run in a container of its own: sandboxes start, and none outlives a killed proxy.

The image has a few programs and sees this machine's read-only, because no registry is needed then. All flags of the
container come from compose.yaml.
"""

import json
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

from forkpoint.ephemeral_proxy import free_port
from tests.dockerd import Dockerd, dockerd
from tests.machine import Process, alive, data_directory, process, wait_until
from tests.rights import capabilities_here
from tests.sandboxes.docker import BASH_IMAGE, make_bash_image, require_docker
from tests.sandboxes.image_archives import bash_image

ROOT = Path(__file__).parents[1]
TOKEN = secrets.token_hex(16)
USER = "nobody"
PROGRAMS = ("/usr", "/bin", "/lib", "/lib64", "/sbin", "/etc")


@dataclass
class ComposedProxy:
    """The proxy's service of compose.yaml, started with `docker run`.

    Attributes:
        daemon: The Docker daemon.
        data: The data directory, whose path is the same inside and outside.
        port: The port on loopback.
        service: The service in compose.yaml.
        image: The proxy's image. The tests' own one sees this machine's programs.
        spec: The environment of tasks without one.
    """

    daemon: Dockerd
    data: Path
    port: int
    service: dict[str, Any]
    image: str = BASH_IMAGE
    spec: dict[str, str] = field(default_factory=lambda: {"image": BASH_IMAGE})

    def start(self) -> None:
        """Start the container, and return when the proxy is ready."""
        run(self._command())
        try:
            wait_until(self._ready, within_s=60)
        except AssertionError as error:
            shown = subprocess.run(["docker", "logs", "proxy"], capture_output=True, text=True, check=False)
            raise AssertionError(shown.stdout + shown.stderr) from error

    def processes(self) -> set[Process]:
        """Return the processes in the container."""
        pids = map(int, self.daemon.ask("top", "proxy", "-eo", "pid").split()[1:])
        return {found for pid in pids if (found := process(pid))}

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
        flags = ["--name", "proxy", "--hostname", service["hostname"], "--network", "host"]
        flags += ["--cgroupns", service["cgroup"], *(["--read-only"] if service["read_only"] else [])]
        flags += [word for folder in service["tmpfs"] for word in ("--tmpfs", folder)]
        flags += [word for option in service["security_opt"] for word in ("--security-opt", option)]
        flags += [word for name in service["cap_drop"] for word in ("--cap-drop", name)]
        # This machine may lack a capability, and a container cannot be given what is not here.
        here = [name for name in service["cap_add"] if name in capabilities_here()]
        flags += [word for name in here for word in ("--cap-add", name)]
        environment = service["environment"] | {
            "FORKPOINT_HOST": "127.0.0.1",
            "FORKPOINT_PORT": str(self.port),
            "FORKPOINT_TOKEN": TOKEN,
            "FORKPOINT_DEFAULT_SPEC": json.dumps(self.spec),
        }
        flags += [word for name, value in environment.items() for word in ("--env", f"{name}={value}")]
        elsewhere = {
            "/var/run/docker.sock": self.daemon.host.removeprefix("unix://"),
            "/var/lib/forkpoint": f"{self.data}:{self.data}",
            "/var/lib/docker": f"{self.daemon.folder}:{self.daemon.folder}:ro",
        }
        for volume in service["volumes"]:
            outer, rest = volume.split(":", 1)
            replaced = elsewhere.get(outer, outer)
            flags += ["--volume", replaced if ":" in replaced else f"{replaced}:{rest}"]
        program = [str(self.data) if word == "/var/lib/forkpoint" else word for word in service["command"]]
        if self.image == BASH_IMAGE:
            # The image has this machine's users.
            program = [USER if word == "forkpoint" else word for word in program]
            program = [sys.executable, "-m", "forkpoint", *program]
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


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[ComposedProxy]:
    require_docker()
    with ExitStack() as stack:
        daemon = stack.enter_context(dockerd())
        monkeypatch.setenv("DOCKER_HOST", daemon.host)
        make_bash_image()
        folder = stack.enter_context(data_directory())
        running = ComposedProxy(daemon, folder / "data", free_port(), proxy_service())
        running.start()
        yield running


def test_killed_proxy_leaves_no_sandbox(proxy: ComposedProxy) -> None:
    """A call, a hit and a fork work; `docker kill` ends the sandboxes too; a restart continues the rollouts."""
    first = proxy.exec("a", "X=1; echo kept > /tmp/f; cat /tmp/f")
    assert first.json()["stdout"] == "kept\n", first.text
    assert proxy.exec("b", "X=1; echo kept > /tmp/f; cat /tmp/f").headers["cache-status"] == "forkpoint; hit"
    assert proxy.exec("b", "echo $X; cat /tmp/f").json()["stdout"] == "1\nkept\n"
    running = proxy.processes()
    assert len(running) > 3
    proxy.daemon.ask("kill", "proxy")
    wait_until(lambda: not alive(running), "sandboxes outlive the proxy")
    proxy.daemon.ask("rm", "proxy")
    proxy.start()
    assert proxy.exec("a", "echo $X; cat /tmp/f").json()["stdout"] == "1\nkept\n"
    running = proxy.processes()
    proxy.daemon.ask("stop", "--time", "40", "proxy")
    assert not alive(running)


def test_rights_of_the_file_are_enough(proxy: ComposedProxy) -> None:
    """Sandboxes run, and have limits by control group."""
    command = [sys.executable, "-m", "forkpoint", "doctor", "--json", "--data", f"{proxy.data}/doctor"]
    shown = {each["name"]: each for each in json.loads(proxy.daemon.ask("exec", "proxy", *command))}
    assert [name for name in ("namespaces", "control groups", "trial of local") if not shown[name]["ok"]] == []
    proxy.daemon.ask("stop", "--time", "40", "proxy")


def test_images_in_files_need_no_socket(proxy: ComposedProxy, tmp_path: Path) -> None:
    """The proxy's container has a directory with an archive, and neither Docker's socket nor its data."""
    proxy.daemon.ask("rm", "--force", "proxy")
    shutil.copyfile(bash_image(), tmp_path / "image.tar")
    proxy.service["volumes"] = ["/var/lib/forkpoint:/var/lib/forkpoint", f"{tmp_path}:/images:ro"]
    proxy.spec = {"image": "/images/image.tar"}
    proxy.start()
    assert proxy.exec("a", "hostname; cat /etc/passwd | head -n 1").json()["exit_code"] == 0
    assert proxy.exec("b", "hostname; cat /etc/passwd | head -n 1").headers["cache-status"] == "forkpoint; hit"
    proxy.daemon.ask("stop", "--time", "40", "proxy")
