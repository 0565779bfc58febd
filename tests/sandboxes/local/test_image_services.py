"""Side services of a container: one state with the calls' container, and no way out."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from sandboxes.container.services import service_orders
from sandboxes.effects import Effect
from sandboxes.errors import NotFreezableError, SandboxError, ServerError, SpecError
from sandboxes.spec import EnvironmentSpec
from tests.machine import require_criu
from tests.sandboxes.box import opened, run
from tests.sandboxes.docker import BASH_IMAGE, OnImage

STORE = r"""
import os, socket, socketserver
memory = {}
if os.environ.get("SOCKET"):
    bound = socket.socket(socket.AF_UNIX)
    bound.bind(os.environ["SOCKET"])
class Answer(socketserver.StreamRequestHandler):
    def handle(self):
        line = self.rfile.readline().decode().split()
        # The look whether the service is ready sends nothing. An error would import more modules, which writes files.
        if not line:
            return
        verb, *words = line
        if verb == "set":
            memory[words[0]] = words[1]
            with open("/data/log", "a") as log:
                log.write(words[0] + "\n")
        self.wfile.write(memory.get(words[0], "none").encode() + b"\n")
server = socketserver.TCPServer(("0.0.0.0", 7000), Answer)
while True:
    server.handle_request()
"""
"""A server that remembers words in its memory, and the keys that were set in a file."""
CLIENT = r"""
import socket, sys
with socket.create_connection((sys.argv[1].encode(), 7000)) as connection:
    connection.sendall((" ".join(sys.argv[2:]) + "\n").encode())
    print(connection.makefile().readline().strip())
"""
FILES = {"/client.py": CLIENT, "/.services/store/store.py": STORE, "/.services/store/data/.keep": ""}
STORE_SERVICE: Mapping[str, Any] = {"image": BASH_IMAGE, "command": ["python3", "/store.py"], "port": 7000}


def spec(**more: Any) -> EnvironmentSpec:
    members = {"files": FILES, "services": {"store": STORE_SERVICE}, **more}
    return EnvironmentSpec(image=BASH_IMAGE, **members)


def driven(folder: Path, test: Callable[[OnImage], Awaitable[None]], *, checkpoints: bool = False) -> None:
    async def go() -> None:
        async with opened(OnImage(folder, checkpoints=checkpoints)) as driver:
            assert isinstance(driver, OnImage)
            await test(driver)

    asyncio.run(go())


async def store(sandbox: Any, *words: str) -> str:
    answer = await run(sandbox, f"python3 /client.py store {' '.join(words)}")
    assert answer.code == 0, answer.err
    return str(answer.out.strip())


@pytest.mark.parametrize("services", [{}, {"store": STORE_SERVICE}])
@pytest.mark.parametrize(
    "line", [r"/proc\t/x", r"/proc/sys\t/x", r"/link\t/x", r"/x\t/proc/sys", r"/dev\t/x", r"/x\t/link/sys"]
)
def test_image_names_no_shared_directory_of_the_kernel(data_dir: Path, services: dict[str, Any], line: str) -> None:
    """An image or a set-up may write the list itself: without its masks, /proc would lead to the machine."""

    async def test(driver: OnImage) -> None:
        setup = ("mkdir -p /x /.services/evil", "ln -s /proc /link", f"printf '{line}\\n' > /.services/.shared")
        with pytest.raises(SandboxError, match="could not be narrowed"):
            await driver.start(spec(services=services, setup=setup))

    driven(data_dir, test)


def test_services_and_calls_are_one_state(data_dir: Path) -> None:
    """Memory of a service, its files and a shared volume are frozen, restored and forked with the calls' container."""
    require_criu()

    async def test(driver: OnImage) -> None:
        logger = {
            "image": BASH_IMAGE, "command": "sleep 1000", "depends_on": ["store"],
            "healthcheck": "test -e /logs/.keep && test ! -e /client.py && test $HOSTNAME = logger",
        }  # fmt: skip
        wanted = spec(
            services={"store": STORE_SERVICE, "logger": logger},
            volumes={"logs": {"store": "/data", "main": "/logs", "logger": "/logs"}},
        )
        sandbox = await driver.start(wanted)
        assert await store(sandbox, "set", "x", "1") == "1"
        frozen = await sandbox.freeze()
        assert frozen.kind == "processes"
        assert await store(sandbox, "set", "x", "2") == "2"
        fork = await driver.restore(wanted, frozen)
        assert await store(fork, "get", "x") == "1"
        assert await store(fork, "set", "y", "3") == "3"
        assert (await run(fork, "cat /logs/log")).out == "x\ny\n"
        assert (await run(sandbox, "cat /logs/log")).out == "x\nx\n"
        assert await store(sandbox, "get", "y") == "none"

    driven(data_dir, test, checkpoints=True)


def test_changes_in_a_service_are_effects_of_the_call(data_dir: Path) -> None:
    """A call that changes a service's memory or files changes the sandbox; a call that reaches no service does not."""

    async def test(driver: OnImage) -> None:
        sandbox = await driver.start(spec())
        assert (await run(sandbox, "python3 /client.py store get x")).effect is Effect.PROCESSES
        assert (await run(sandbox, "python3 /client.py store set x 1")).effect is Effect.PROCESSES | Effect.FILES
        # The service may still be closing the client's connection when the next calls begin.
        effects = [(await run(sandbox, "sleep 0.1")).effect for _ in range(20)]
        assert Effect.NONE in effects
        # Without CRIU no copy of the files alone may pass for the state.
        with pytest.raises(NotFreezableError):
            await sandbox.freeze()

    driven(data_dir, test)


def test_services_have_no_way_out(data_dir: Path) -> None:
    """A service has what the container has: loopback only, and /proc, /sys and /dev as narrow as the container's."""

    async def test(driver: OnImage) -> None:
        sandbox = await driver.start(spec())
        inside = "chroot /.services/store"
        assert len((await run(sandbox, f"{inside} cat /proc/net/route")).out.splitlines()) == 1
        assert "lo:" in (await run(sandbox, f"{inside} sed -n 3,9p /proc/net/dev")).out
        names = (await run(sandbox, f"cat /etc/hosts; {inside} cat /etc/hosts; {inside} cat /etc/resolv.conf")).out
        assert names.count("127.0.0.1 main store\n") == 2
        assert "nameserver" not in names
        for attack in (
            "echo 1 > /proc/sys/kernel/panic", "echo x > /dev/x", "mkdir /sys/fs/cgroup/x", "mount -t tmpfs x /tmp",
            "umount /proc", "mknod /tmp/disk b 8 0", "head -c 1 /proc/kcore | grep .",
        ):  # fmt: skip
            refused = await run(sandbox, f"{inside} /bin/bash -c '{attack}'")
            assert refused.code != 0, attack
        # Each mount below /proc, /sys and /dev is there once more for the service, with the same options.
        listed = (await run(sandbox, "cut -d' ' -f5,6 /proc/self/mountinfo")).out.splitlines()
        own = {line for line in listed if line.startswith(("/proc", "/sys", "/dev"))}
        assert {f"/.services/store{line}" for line in own} <= set(listed)

    driven(data_dir, test)


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"command": "/bin/bash -c 'echo no such luck; exit 3'"}, "no such luck"),
        ({"healthcheck": "echo still starting; exit 1", "ready_s": 2}, "(?s)not healthy within 2 s.*still starting"),
        ({"port": 7001, "ready_s": 2}, "7001"),
    ],
)
def test_an_unhealthy_service_ends_its_sandbox(data_dir: Path, more: Any, problem: str) -> None:
    """No call runs beside a service that did not get ready; the error has what it printed."""

    async def test(driver: OnImage) -> None:
        with pytest.raises(ServerError, match=problem):
            await driver.start(spec(services={"store": {**STORE_SERVICE, **more}}))
        assert not list(driver.sandboxes)

    driven(data_dir, test)


def test_a_socket_below_another_root_is_not_dumped(data_dir: Path) -> None:
    """CRIU would bind it at the same name of the main container, and the service's clients would not reach it."""
    require_criu()

    async def test(driver: OnImage) -> None:
        wanted = spec(services={"store": {**STORE_SERVICE, "environment": {"SOCKET": "/tmp/x.sock"}}})
        sandbox = await driver.start(wanted)
        # A file of the same name in the main container must not be taken for it.
        await run(sandbox, "touch /tmp/x.sock")
        with pytest.raises(NotFreezableError, match="another root"):
            await sandbox.freeze()

    driven(data_dir, test, checkpoints=True)


def test_files_of_the_kernel_are_not_dumped_through_a_service(data_dir: Path) -> None:
    """CRIU would open the name with its own rights, and /proc leads to its own descriptors."""
    require_criu()

    async def test(driver: OnImage) -> None:
        sandbox = await driver.start(spec())
        await run(sandbox, "sleep 1000 </.services/store/proc/1/status >/dev/null 2>&1 &")
        with pytest.raises(NotFreezableError, match="a file of the kernel"):
            await sandbox.freeze()

    driven(data_dir, test, checkpoints=True)


def test_a_missing_image_of_a_service_is_named(data_dir: Path) -> None:
    async def test(driver: OnImage) -> None:
        wrong = spec(services={"store": {**STORE_SERVICE, "image": "forkpoint-no-such-image"}})
        with pytest.raises(SpecError, match="forkpoint-no-such-image"):
            await driver.identity(wrong)

    driven(data_dir, test)


def orders(config: Mapping[str, Any], **more: Any) -> Any:
    wanted = spec(files={}, services={"db": {"image": "x", **more}})
    (order,) = service_orders(wanted, {"db": config})
    return order


def test_orders_follow_the_image_as_compose_does() -> None:
    config = {
        "Entrypoint": ["/entry"], "Cmd": ["serve"], "Env": ["A=1", "B=2"], "User": "7", "WorkingDir": "/w",
        "ExposedPorts": {"80/tcp": {}, "53/udp": {}},
    }  # fmt: skip
    order = orders(config, environment={"B": "3 $(x)"})
    assert order.port == 80
    assert order.health == ""
    assert order.command.endswith(' --userspec=7 /.services/db /bin/sh -c \'cd -- "$0" && exec "$@"\' /w /entry serve')
    assert " A=1 'B=3 $(x)' " in order.command
    assert orders(config, command="other").command.endswith(" /w /entry other")
    assert orders(config, entrypoint="/mine").command.endswith(" /w /mine")
    assert orders({"Healthcheck": {"Test": ["CMD", "check", "it"]}}, command="x").health.endswith(
        "/.services/db check it"
    )


@pytest.mark.parametrize(
    ("config", "problem"),
    [({"ExposedPorts": {"80/tcp": {}}}, "no command"), ({"Cmd": ["x"]}, "ready"),
     ({"Cmd": ["x"], "ExposedPorts": {"80/tcp": {}, "81/tcp": {}}}, "ready")],
)  # fmt: skip
def test_services_that_cannot_be_awaited_are_refused(config: Mapping[str, Any], problem: str) -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.raises(SpecError, match=problem))
        orders(config)
