"""Egress of real sandboxes: their programs reach the allowed hosts through the egress proxy, and nothing else."""

import asyncio
import io
import zipfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from sandboxes.calls import ToolCall
from sandboxes.checkpointing import Checkpointer
from sandboxes.driver import Sandbox
from sandboxes.egress.gateway import EgressGateway
from sandboxes.errors import ForbiddenSourceError, NotFreezableError, SandboxError
from sandboxes.linux.files import remove_tree
from sandboxes.local.driver import LocalDriver
from sandboxes.server_spec import Egress as Hosts
from sandboxes.sources import SourceRules
from sandboxes.spec import EnvironmentSpec
from snapshots.criu.checkpoints import CriuCheckpointer
from tests.machine import require_criu, require_sandboxes
from tests.sandboxes.box import opened
from tests.sandboxes.box import run as run_within
from tests.sandboxes.docker import OnImage
from tests.sandboxes.egress.origin import Origin, response

SPEC = EnvironmentSpec(egress=Hosts(hosts=("example.org", "rebound.example.org")))
RULES = SourceRules(egress=("example.org", "*.example.org"))
FETCH = "python3 -c \"import urllib.request as u; print(u.urlopen('http://{}').read().decode())\""
BASH_FETCH = (
    "(p=${{http_proxy#http://}}; exec 3<>/dev/tcp/${{p/://}}; "
    "printf 'GET http://{} HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n' >&3; cat <&3)"
)
"""For an image without clients of HTTP. The subshell closes the connection."""
TUNNEL = """python3 -c "
import socket
s = socket.create_connection(('127.0.0.1', 61080))
s.sendall(b'CONNECT example.org:443 HTTP/1.1\\r\\nHost: a\\r\\n\\r\\nhello\\r\\n\\r\\n')
print(b''.join(iter(lambda: s.recv(99), b'')).decode()[-8:])
" """

run = partial(run_within, timeout_s=60.0)
"""Some commands start Python, which takes seconds on a busy machine."""


@asynccontextmanager
async def outside(folder: Path) -> AsyncIterator[tuple[Origin, EgressGateway]]:
    """Run a host outside, and yield it with an egress whose names lead there."""
    async with Origin(lambda count: response(f"answer {count}".encode())).running() as origin:
        remove_tree(folder / "egress")
        (folder / "origin-port").write_text(str(origin.port))
        yield origin, EgressGateway(folder / "egress", module="tests.sandboxes.egress.origin")


def driven(
    folder: Path,
    test: Callable[[LocalDriver, Origin], Awaitable[None]],
    checkpointer: Checkpointer | None = None,
    *,
    image: bool = False,
) -> None:
    require_sandboxes()

    async def go() -> None:
        async with outside(folder) as (origin, egress):
            driver = OnImage(folder, checkpoints=True) if image else LocalDriver(folder, checkpointer, RULES)
            driver.sources, driver.machine.egress = RULES, egress
            async with opened(driver):
                await test(driver, origin)

    asyncio.run(go())


def test_images_reach_allowed_hosts_in_the_same_way(data_dir: Path) -> None:
    require_criu()

    async def test(driver: LocalDriver, origin: Origin) -> None:
        sandbox = await driver.start(SPEC)
        output, live, outcomes = await execute(sandbox, BASH_FETCH.format("example.org/x"))
        assert "answer 1" in output
        assert (live, outcomes) == (True, ["recorded"])
        frozen = await sandbox.freeze()
        again = await driver.restore(SPEC, frozen)
        output, live, outcomes = await execute(again, BASH_FETCH.format("example.org/x"))
        assert "answer 1" in output
        assert (live, outcomes) == (False, ["repeated"])
        assert "answer" not in (await run(again, BASH_FETCH.format("other.org"))).out
        assert (await run(again, f"exec 3<>/dev/tcp/127.0.0.1/{origin.port}")).code != 0
        assert (await run(again, "tail -n +3 /proc/net/dev | cut -d: -f1")).out.split() == ["lo"]
        assert (await run(again, "tail -n +2 /proc/net/route")).out == ""
        await run(again, "sleep 1000 &")
        with_processes = await driver.restore(SPEC, await again.freeze())
        assert "answer 1" in (await run(with_processes, BASH_FETCH.format("example.org/x"))).out
        without = await driver.start(EnvironmentSpec())
        assert (await run(without, "exec 3<>/dev/tcp/127.0.0.1/61080")).code != 0

    driven(data_dir, test, image=True)


async def execute(sandbox: Sandbox, command: str) -> tuple[str, bool, list[str]]:
    """Return what a command printed, whether something new came in, and the outcomes of its requests."""
    execution = await sandbox.execute(
        ToolCall("shell", "exec", {"command": command, "session": "main", "timeout_s": 60.0})
    )
    return execution.result.body.decode(), execution.live, [one.outcome for one in execution.exchanges]


def test_programs_reach_allowed_hosts_and_get_the_same_again(data_dir: Path) -> None:
    async def test(driver: LocalDriver, origin: Origin) -> None:
        sandbox = await driver.start(SPEC)
        output, live, outcomes = await execute(sandbox, FETCH.format("example.org/x"))
        assert "answer 1" in output
        assert (live, outcomes) == (True, ["recorded"])
        # Another sandbox of the spec, as in a replay.
        again = await driver.start(SPEC)
        output, live, outcomes = await execute(again, FETCH.format("example.org/x"))
        assert "answer 1" in output
        assert (live, outcomes) == (False, ["repeated"])
        for host in ("127.0.0.1:61080", "10.0.0.1", "other.org", "rebound.example.org"):
            output, _, _ = await execute(again, FETCH.format(host))
            assert "answer" not in output
        output, live, outcomes = await execute(again, TUNNEL)
        assert "answer 2" in output
        assert (live, outcomes) == (True, ["live"])
        assert len(origin.received) == 2

    driven(data_dir, test)


def test_rollouts_that_differ_share_package_downloads(data_dir: Path) -> None:
    """pip fetches index and package from their host once: a sandbox in another state gets the recorded bytes."""
    install = (
        "python3 -m pip install -q --disable-pip-version-check --no-cache-dir --no-compile --target /tmp/packages "
        "--index-url http://example.org/simple --trusted-host example.org tiny; cat /tmp/packages/tiny.py"
    )

    async def test(driver: LocalDriver, origin: Origin) -> None:
        origin.answer = lambda _count: _package_index(origin.received[-1])
        sandbox = await driver.start(SPEC)
        if (await run(sandbox, "python3 -m pip --version")).code:
            pytest.skip("the system's Python has no pip")
        output, _, outcomes = await execute(sandbox, install)
        assert "made = 1" in output, output
        assert outcomes == ["recorded", "recorded"]
        other = await driver.start(SPEC)
        await run(other, "echo another way > /tmp/other")
        output, live, outcomes = await execute(other, install)
        assert "made = 1" in output, output
        assert (live, outcomes) == (False, ["repeated", "repeated"])
        assert len(origin.received) == 2

    driven(data_dir, test)


def _package_index(head: bytes) -> bytes:
    """Answer as a package index that has one wheel."""
    if b"/simple/tiny/" in head:
        page = b'<!DOCTYPE html><html><body><a href="/tiny-1.0-py3-none-any.whl">tiny</a></body></html>'
        return response(page, headers="Content-Type: text/html\r\n")
    wheel, about = io.BytesIO(), "tiny-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny.py", "made = 1\n")
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    return response(wheel.getvalue())


def test_a_sandbox_with_egress_has_no_other_way_out(data_dir: Path) -> None:
    async def test(driver: LocalDriver, origin: Origin) -> None:
        sandbox = await driver.start(SPEC)
        devices = (await run(sandbox, "tail -n +3 /proc/net/dev | cut -d: -f1")).out.split()
        assert devices == ["lo"]
        assert (await run(sandbox, "tail -n +2 /proc/net/route")).out == ""
        assert (await run(sandbox, f"exec 3<>/dev/tcp/127.0.0.1/{origin.port}")).code != 0
        # Nothing of the egress is a process or a descriptor in there.
        assert (await run(sandbox, "ls -l /proc/*/fd 2>/dev/null | grep socket:; true")).out == ""

    driven(data_dir, test)


def test_without_egress_there_is_no_proxy(data_dir: Path) -> None:
    async def test(driver: LocalDriver, _origin: Origin) -> None:
        sandbox = await driver.start(EnvironmentSpec())
        assert (await run(sandbox, "env | grep -i proxy; true")).out == ""
        assert (await run(sandbox, "exec 3<>/dev/tcp/127.0.0.1/61080")).code != 0

    driven(data_dir, test)


def test_hosts_that_are_not_listed_start_no_sandbox(data_dir: Path) -> None:
    async def test(driver: LocalDriver, _origin: Origin) -> None:
        with pytest.raises(ForbiddenSourceError, match=r"'pypi\.org' is not allowed"):
            await driver.start(EnvironmentSpec(egress=Hosts(hosts=("example.org", "pypi.org"))))

    driven(data_dir, test)


def test_a_checkpoint_has_egress_again_but_no_connections(data_dir: Path) -> None:
    """The listening socket is no process's of the sandbox. A connection would lead nowhere after a restore."""
    require_criu()

    async def test(driver: LocalDriver, _origin: Origin) -> None:
        sandbox = await driver.start(SPEC)
        await run(sandbox, "sleep 1000 &")
        frozen = await sandbox.freeze()
        again = await driver.restore(SPEC, frozen)
        assert "answer 1" in (await run(again, FETCH.format("example.org/x"))).out
        await run(sandbox, "(exec 3<>/dev/tcp/127.0.0.1/61080; exec sleep 1000) &")
        await run(sandbox, "until grep -q ' 01 ' /proc/net/tcp; do sleep 0.01; done")
        with pytest.raises(NotFreezableError, match="connection to a host outside"):
            await sandbox.freeze()

    driven(data_dir, test, CriuCheckpointer(data_dir))


def test_a_call_whose_egress_proxy_died_has_no_result(data_dir: Path) -> None:
    async def test(driver: LocalDriver, _origin: Origin) -> None:
        sandbox = await driver.start(SPEC)
        await driver.machine.egress.close()
        with pytest.raises(SandboxError):
            await run(sandbox, "true")
        assert not sandbox.alive
        # The next sandbox has another egress proxy.
        another = await driver.start(SPEC)
        assert "answer" in (await run(another, FETCH.format("example.org/new"))).out

    driven(data_dir, test)
