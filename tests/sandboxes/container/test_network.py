"""The network of containers: what the keeper accepts as one, and what an agent finds in it."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from sandboxes.container.keeper.network import require_loopback_only
from sandboxes.spec import EnvironmentSpec
from tests.machine import needs_root
from tests.sandboxes.box import opened, run
from tests.sandboxes.docker import OnImage

LOOK = f"from {require_loopback_only.__module__} import require_loopback_only as look; look()"


def look_beside(setup: str) -> subprocess.CompletedProcess[str]:
    """Look at a new network namespace in which commands have run."""
    script = f"{setup} || exit 77; exec {sys.executable} -c '{LOOK}'"
    looked = subprocess.run(["unshare", "--net", "sh", "-c", script], capture_output=True, text=True, check=False)
    if looked.returncode == 77:
        pytest.skip(f"no interface can be made here: {looked.stderr.strip()}")
    return looked


@needs_root
def test_network_with_an_interface_that_is_up_is_refused() -> None:
    """A container in a machine's own network must never become a sandbox."""
    looked = look_beside("ip link add type veth && ip link set veth0 up")
    assert looked.stderr.endswith("the interface veth0 is up in the network of a container\n")


@needs_root
def test_interfaces_that_are_down_are_allowed() -> None:
    """Kernels put tunnels that are down into each network namespace."""
    looked = look_beside("ip link add type veth && ip link set lo up")
    assert looked.returncode == 0, looked.stderr


@pytest.mark.parametrize("docker_starts", [False, True])
def test_container_has_loopback_alone(container_dir: Path, docker_starts: bool) -> None:
    """It is up, has no address of IPv6 and no route, whatever the version of Docker, and whatever starts it."""

    async def go() -> None:
        async with opened(OnImage(container_dir, docker_starts=docker_starts)) as driver:
            sandbox = await driver.start(EnvironmentSpec())
            look = "tail -n +3 /proc/net/dev | cut -d: -f1; cat /proc/net/if_inet6; wc -l < /proc/net/route"
            assert (await run(sandbox, look)).out.split() == ["lo", "1"]
            # Refused, not unreachable: the interface is up.
            assert "Connection refused" in (await run(sandbox, "bash -c 'exec 3<>/dev/tcp/127.0.0.1/9'")).err

    asyncio.run(go())
