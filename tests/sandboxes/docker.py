"""Drivers that give specs without an image one, and Docker for the tests that need a daemon."""

import functools
import os
import subprocess
from pathlib import Path

import pytest

from sandboxes.driver import FrozenState
from sandboxes.errors import SandboxError
from sandboxes.images.daemon import ImageDaemon
from sandboxes.local.driver import LocalDriver
from sandboxes.local.sandbox import LocalSandbox
from sandboxes.spec import EnvironmentSpec
from snapshots.criu.checkpoints import CriuCheckpointer
from tests.sandboxes.image_archives import AGENT_COMMANDS, COMMANDS, bash_image, root_tar

BASH_IMAGE, AGENT_IMAGE = (f"test-{kind}:1" for kind in ("bash", "agent"))
"""Images of the daemon's, which `require_docker` and `make_agent_image` make."""


def require_docker() -> None:
    """Skip the test, with the reason, where no daemon is; in this project's CI one must be."""
    if missing := _missing():
        assert not os.environ.get("FORKPOINT_NEEDS_DOCKER"), missing
        pytest.skip(f"no images of Docker can be had here: {missing}")


@functools.cache
def _missing() -> str:
    daemon = ImageDaemon()
    try:
        daemon.check()
    except SandboxError as error:
        return str(error)
    finally:
        daemon.close()
    make_bash_image()
    return ""


def make_bash_image() -> None:
    """Import the image that has bash and Python into the daemon that DOCKER_HOST names."""
    _make_image(BASH_IMAGE, COMMANDS)


def make_agent_image() -> None:
    """Import the image that also has git, make and what else agents use."""
    _make_image(AGENT_IMAGE, [*COMMANDS, *AGENT_COMMANDS])


def derive(name: str, changes: list[str]) -> str:
    """Make an image out of the one that has bash, with changes in a Dockerfile's words; return its name."""
    options = [word for change in changes for word in ("--change", change)]
    made = subprocess.run(["docker", "create", BASH_IMAGE, "/bin/true"], capture_output=True, text=True, check=True)
    container = made.stdout.strip()
    subprocess.run(["docker", "commit", *options, container, name], capture_output=True, check=True)
    subprocess.run(["docker", "rm", container], capture_output=True, check=True)
    return name


def _make_image(name: str, commands: list[str]) -> None:
    if subprocess.run(["docker", "image", "inspect", name], capture_output=True, check=False).returncode == 0:
        return
    subprocess.run(["docker", "import", "-", name], input=root_tar("bash", commands), capture_output=True, check=True)


class OnImage(LocalDriver):
    """A driver that gives specs without an image one."""

    def __init__(self, data_dir: Path, image: str = "", *, checkpoints: bool = False) -> None:
        super().__init__(data_dir, CriuCheckpointer(data_dir) if checkpoints else None)
        self.of_image = image or bash_image()

    def _named(self, spec: EnvironmentSpec) -> EnvironmentSpec:
        # The contracts begin in /root, as without an image.
        return spec if spec.image else spec.model_copy(update={"image": self.of_image, "workdir": spec.directory})

    async def identity(self, spec: EnvironmentSpec) -> str:
        return await super().identity(self._named(spec))

    async def start(self, spec: EnvironmentSpec) -> LocalSandbox:
        return await super().start(self._named(spec))

    async def restore(self, spec: EnvironmentSpec, frozen: FrozenState) -> LocalSandbox:
        return await super().restore(self._named(spec), frozen)
