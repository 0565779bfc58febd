"""The images of docker/ are built from Debian's and Python's packages alone, and work together as compose has them."""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from forkpoint.ephemeral_proxy import free_port
from tests.dockerd import dockerd
from tests.machine import alive, data_directory
from tests.sandboxes.docker import require_docker
from tests.test_compose_run import ROOT, ComposedProxy, proxy_service, run

BASE, PROXY, SANDBOX = (f"forkpoint-test-{name}:1" for name in ("debian", "proxy", "sandbox"))
BUILDS = ((PROXY, "docker/Dockerfile", "."), (SANDBOX, "docker/sandbox.Dockerfile", "docker"))
WITHIN_S = 600.0
"""Longest time for one image. A minute is usual; a package index may be slow."""


def import_debian(folder: Path) -> None:
    """Make a minimal Debian 12 an image, which stands for the one of a registry."""
    made = subprocess.run(
        ["debootstrap", "--variant=minbase", "bookworm", folder],
        capture_output=True, text=True, check=False, timeout=WITHIN_S,
    )  # fmt: skip
    if made.returncode:
        pytest.skip(f"debootstrap: {made.stdout.strip().splitlines()[-1]}")
    # Where pip needs a certificate to reach its index, it needs it in the image too.
    if certificate := os.environ.get("PIP_CERT"):
        shutil.copyfile(certificate, folder / "etc" / "pip-certificates.crt")
        (folder / "etc" / "pip.conf").write_text("[global]\ncert = /etc/pip-certificates.crt\n")
    with subprocess.Popen(["tar", "--create", "--directory", folder, "."], stdout=subprocess.PIPE) as files:
        subprocess.run(["docker", "import", "-", BASE], stdin=files.stdout, capture_output=True, check=True)
    assert files.returncode == 0


def build(name: str, file: str, context: str) -> None:
    # The tests' daemon has no bridge.
    build = ["build", "--quiet", "--network", "host", "--build-arg", f"BASE={BASE}", "--tag", name]
    command = [*build, "--file", str(ROOT / file), str(ROOT / context)]
    try:
        run(command, within_s=WITHIN_S)
    except AssertionError:
        # A package index may have failed for a moment. What was built before stays.
        run(command, within_s=WITHIN_S)


def test_images_are_built_and_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy's image answers calls in sandboxes of the other image, and stops in order."""
    if not os.environ.get("FORKPOINT_BUILD_IMAGES"):
        pytest.skip("builds images for two minutes: FORKPOINT_BUILD_IMAGES=1 runs it")
    require_docker()
    if shutil.which("debootstrap") is None:
        pytest.skip("debootstrap is not installed")
    with ExitStack() as stack:
        daemon = stack.enter_context(dockerd())
        monkeypatch.setenv("DOCKER_HOST", daemon.host)
        folder = stack.enter_context(data_directory())
        import_debian(folder / "debian")
        # Beside each other: they mostly wait for packages.
        with ThreadPoolExecutor() as threads:
            list(threads.map(build, *zip(*BUILDS, strict=True)))
        spec = {"image": SANDBOX}
        proxy = ComposedProxy(daemon, folder / "data", free_port(), proxy_service(), PROXY, spec)
        proxy.start()
        compile_and_run = "printf 'int main(){return 7;}' > a.c && gcc a.c && ./a.out; echo $?"
        assert proxy.exec("a", compile_and_run).json()["stdout"] == "7\n"
        again = proxy.exec("b", compile_and_run)
        assert (again.json()["stdout"], again.headers["cache-status"]) == ("7\n", "forkpoint; hit")
        running = proxy.processes()
        daemon.ask("stop", "--time", "40", "proxy")
        assert not alive(running)
