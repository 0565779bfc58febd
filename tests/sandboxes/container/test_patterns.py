"""Containers that are started as a container of Docker's was: they are the same, and end when they must."""

import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sandboxes.container.boxes import Box
from sandboxes.container.oci_spec import UnfitError
from sandboxes.container.patterns import MAX_FAILURES
from sandboxes.container.sandbox import ContainerSandbox
from sandboxes.errors import SandboxError, SpecError
from sandboxes.linux.cgroups import groups_at, mount_points
from sandboxes.spec import EnvironmentSpec, Limits
from tests.machine import children, wait_until
from tests.sandboxes.box import opened, run
from tests.sandboxes.docker import BASH_IMAGE, SH_IMAGE, OnImage, containers, first_processes

SPEC = EnvironmentSpec()


@contextlib.asynccontextmanager
async def driving(folder: Path, image: str = BASH_IMAGE) -> AsyncIterator[OnImage]:
    """Open a driver without spares."""
    driver = OnImage(folder, image, spares=0)
    async with opened(driver):
        yield driver


def facts(pid: int) -> dict[str, Any]:
    """Return all that is known of a container's first process and that must not depend on what has started it."""
    proc = Path(f"/proc/{pid}")
    own = r"Name|Pid|PPid|Tgid|Ngid|NS\w+|Vm\w+|Rss\w+|Sig[QP]\w*|ShdPnd|\w*ctxt_switches|State|FDSize|Hugetlb\w*"
    status = [line for line in (proc / "status").read_text().splitlines() if not re.match(rf"({own}):", line)]
    mounts = [line.split(" - ") for line in (proc / "mountinfo").read_text().splitlines()]
    return {
        "status": status,
        "limits": (proc / "limits").read_text(),
        "variables": (proc / "environ").read_bytes(),
        "arguments": (proc / "cmdline").read_bytes(),
        "directory": (proc / "cwd").readlink(),
        "nice": os.getpriority(os.PRIO_PROCESS, pid),
        "processors": os.sched_getaffinity(pid),
        "out of memory": (proc / "oom_score_adj").read_text(),
        "session": os.getsid(pid) == pid,
        # The mount point, its flags, and the kind of file system. Options are compared of those without paths.
        "mounts": sorted((mount.split()[4], mount.split()[5], kind.split(" ")[0]) for mount, kind in mounts),
        "options": sorted(kind for _, kind in mounts if not kind.startswith(("overlay", "ext4"))),
        "namespaces": {
            path.name: path.readlink() == Path(f"/proc/self/ns/{path.name}").readlink()
            for path in (proc / "ns").iterdir()
        },
        "groups": {line.split(":")[1]: limits_of(line) for line in (proc / "cgroup").read_text().splitlines()},
    }


def limits_of(line: str) -> dict[str, str]:
    """Return what the files of a control group say that limit it."""
    _, kinds, path = line.split(":", 2)
    assert path.rpartition("/")[2], "it has a group of its own"
    folder = mount_points().get(kinds.split(",")[0])
    names = (
        "memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.max", "memory.swap.max", "pids.max",
        "devices.list", "cpu.shares", "cpu.weight", "cpuset.cpus", "cpuset.mems", "memory.swappiness",
        "memory.oom_control", "blkio.weight",
    )  # fmt: skip
    found = {}
    for name in names:
        if folder is not None and (file := folder / path.lstrip("/") / name).exists():
            found[name] = file.read_text()
    return found


LOOK = """
cat /proc/sys/net/ipv4/ping_group_range /proc/sys/net/ipv4/ip_unprivileged_port_start
cat /proc/sys/net/ipv6/conf/all/disable_ipv6 /proc/sys/kernel/hostname
stat -c '%A %u %g %s %n' / /.[a-z]* /* /dev/* /etc/*; stat -f -c '%T' /
cat /etc/hosts /etc/resolv.conf; ulimit -a; umask; nice; id; env | sort; trap; df / | tail -n +2 | wc -l
"""


@pytest.mark.parametrize("image", [BASH_IMAGE, SH_IMAGE])
def test_is_what_docker_starts(container_dir: Path, image: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rights, limits, filters, mounts, signals and files are the same, whatever the proxy inherits."""
    # What a proxy may have of its own: variables, other limits, and a signal that `nohup` has it ignore.
    old = resource.getrlimit(resource.RLIMIT_STACK)
    monkeypatch.setattr(os, "environ", {**os.environ, "SECRET": "of the proxy"})
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_STACK, (old[0] // 2, old[1]))

    async def go() -> tuple[list[Any], list[Any]]:
        looks, shown = [], []
        async with driving(container_dir, image) as driver:
            for docker_starts in (True, False):
                if docker_starts:
                    box = await driver.spares.boxes.start_by_docker(image, SPEC.limits)
                else:
                    box = await driver.spares.make(image, SPEC.limits)
                assert (box.started is not None) is docker_starts
                pid = first_processes(container_dir)[box.container]
                looks.append(facts(pid))
                await driver.spares.boxes.throw_away(box)
            numbers = set()
            for docker_starts in (True, False, False):
                sandbox = await started(driver, docker_starts=docker_starts)
                shown.append((await run(sandbox, LOOK)).out)
                if not docker_starts:
                    numbers.add((await run(sandbox, "stat -f -c %i /")).out)
                await sandbox.close()
            # Linux 6.6 and later give each overlay of Docker's a random number.
            assert len(numbers) == 1
        return looks, shown

    try:
        looks, shown = asyncio.run(go())
    finally:
        resource.setrlimit(resource.RLIMIT_STACK, old)
        signal.signal(signal.SIGHUP, before)
    for name, fact in looks[0].items():
        assert fact == looks[1][name], name
    assert looks[0]["groups"]
    assert shown[1] == shown[2]
    assert [
        pair for pair in itertools.zip_longest(*(out.splitlines() for out in shown[:2])) if len(set(pair)) > 1
    ] == []


async def started(driver: OnImage, *, docker_starts: bool) -> ContainerSandbox:
    """Start a sandbox, in a container of Docker's or of its runtime's."""
    runtime, driver.spares._patterns._runtime = driver.spares._patterns._runtime, None
    if not docker_starts:
        driver.spares._patterns._runtime = runtime
    sandbox = await driver.start(SPEC)
    driver.spares._patterns._runtime = runtime
    return sandbox


def test_ends_with_its_pattern(container_dir: Path) -> None:
    """Docker removes a layer below it then, so nothing that it would answer can be trusted."""

    async def go() -> None:
        async with driving(container_dir) as driver:
            sandbox = await driver.start(SPEC)
            [(pattern, what)] = [task.result() for task in driver.spares._patterns._tasks.values()]
            # Whatever the path of Docker's directory is, each layer takes 29 of the 4,096 bytes of a mount's options.
            assert re.match(r"lowerdir=(l/[A-Z0-9]{26}:?)+$", what.overlay[0])
            call = asyncio.create_task(run(sandbox, "sleep 30; echo no"))
            idle = await driver.start(SPEC)
            kill = ["docker", "kill", pattern.container]
            await asyncio.to_thread(subprocess.run, kill, capture_output=True, check=True)
            with pytest.raises(SandboxError, match="died"):
                await call
            with pytest.raises(SandboxError, match="died"):
                await run(idle, "echo no")
            # The next sandbox is on another pattern.
            assert (await run(await driver.start(SPEC), "echo on")).out == "on\n"

    asyncio.run(go())


def test_patterns_stay_while_they_are_in_use(container_dir: Path) -> None:
    """An image that has no spares any more loses its pattern with the last sandbox, and not before."""

    async def go() -> None:
        async with driving(container_dir) as driver:
            patterns = driver.spares._patterns
            sandbox = await driver.start(SPEC)
            patterns.trim(())
            await driver.spares.background.wait()
            assert (await run(sandbox, "echo on")).out == "on\n"
            await sandbox.close()
            assert len(containers(container_dir)) == 1
            patterns.trim(())
            await driver.spares.background.wait()
            await asyncio.to_thread(wait_until, lambda: not containers(container_dir), "the pattern stays")

    asyncio.run(go())


@pytest.mark.parametrize("failing", ["/bin/false", "/no/such/runtime"])
def test_docker_starts_what_its_runtime_does_not(container_dir: Path, failing: str) -> None:
    """After some failures in a row, the runtime is left alone."""

    async def go() -> None:
        async with driving(container_dir) as driver:
            patterns = driver.spares._patterns
            runtime, patterns._runtime = patterns._runtime, (failing,)
            kind = (await asyncio.to_thread(driver.daemon.image, BASH_IMAGE), SPEC.limits)
            for number in range(MAX_FAILURES):
                assert patterns.are_used(kind), number
                sandbox = await driver.start(SPEC)
                assert not sandbox.container.startswith("forkpoint-")
                assert (await run(sandbox, "echo on")).out == "on\n"
            assert not patterns.are_used(kind)
            assert (await run(await driver.start(SPEC), "echo on")).out == "on\n"
            # It may be a matter of the image.
            patterns._runtime = runtime
            other = await driver.start(SPEC.model_copy(update={"limits": Limits(pids=40)}))
            assert other.container.startswith("forkpoint-")

    asyncio.run(go())


def test_docker_starts_all_if_it_cannot_be_followed(container_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unfit(*_: object) -> None:
        raise UnfitError("Docker has programs run at the start of a container")

    monkeypatch.setattr("sandboxes.container.patterns.read_pattern", unfit)

    async def go() -> None:
        async with driving(container_dir) as driver:
            one, two = await asyncio.gather(driver.start(SPEC), driver.start(SPEC))
            assert not any(sandbox.container.startswith("forkpoint-") for sandbox in (one, two))
            assert (await run(one, "echo on")).out == "on\n"
            # The container that was to be the pattern is gone.
            await asyncio.to_thread(wait_until, lambda: len(containers(container_dir)) == 2, "another one is left")

    asyncio.run(go())


def test_an_unusable_image_is_the_specs_fault(container_dir: Path) -> None:
    """Also when several begin at once, and again afterwards."""

    async def go() -> None:
        async with driving(container_dir, "forkpoint-test-missing:1") as driver:
            for _ in range(2):
                boxes = [driver.spares.make("forkpoint-test-missing:1", Limits()) for _ in range(3)]
                assert all(
                    isinstance(error, SpecError) for error in await asyncio.gather(*boxes, return_exceptions=True)
                )
            assert containers(container_dir) == []

    asyncio.run(go())


def test_a_cancelled_start_leaves_nothing(container_dir: Path) -> None:
    async def go() -> None:
        async with driving(container_dir) as driver:
            image = await asyncio.to_thread(driver.daemon.image, BASH_IMAGE)
            await (await driver.start(SPEC)).close()
            for pause_s in (0.0, 0.001, 0.005, 0.01, 0.02, 0.04):
                starting = asyncio.create_task(driver.spares.make(image, SPEC.limits))
                await asyncio.sleep(pause_s)
                starting.cancel()
                result = (await asyncio.gather(starting, return_exceptions=True))[0]
                if isinstance(result, Box):
                    await driver.spares.boxes.throw_away(result)
            # The pattern alone.
            await asyncio.to_thread(wait_until, lambda: len(containers(container_dir)) == 1, "a container is left")
            assert not driver.spares._patterns._users[image, SPEC.limits]
            assert len(list(driver.spares.boxes.folder.iterdir())) == 1

    asyncio.run(go())


def test_its_files_are_for_root_alone(container_dir: Path) -> None:
    """A program with a set-user-id bit that an agent made would give its rights to a user of this machine."""

    async def go() -> None:
        async with driving(container_dir) as driver:
            sandbox = await driver.start(SPEC)
            await run(sandbox, "cp /bin/sh /root/sh; chmod 4755 /root/sh; chmod 755 /root")
            (made,) = driver.spares.boxes.folder.glob("*/container/upper/root/sh")
            assert made.stat().st_mode & 0o4000
            look = [sys.executable, "-c", f"import os; os.setuid(65534); os.stat({str(made)!r})"]
            found = await asyncio.to_thread(subprocess.run, look, capture_output=True, text=True, check=False)
            assert "PermissionError" in found.stderr

    asyncio.run(go())


def groups(name: str) -> list[Path]:
    return groups_at(f"/docker/{name}")


def test_control_groups_end_with_it(container_dir: Path) -> None:
    async def go() -> tuple[str, str]:
        async with driving(container_dir) as driver:
            sandbox, other = await driver.start(SPEC), await driver.start(SPEC)
            assert groups(sandbox.container)
            # Also with processes that outlive their call, and that fork.
            await run(sandbox, "while :; do sleep 0.01; done & sleep 1000 &")
            await sandbox.close()
            await asyncio.to_thread(wait_until, lambda: not groups(sandbox.container), "a control group is left")
            return sandbox.container, other.container

    closed, left = asyncio.run(go())
    wait_until(lambda: not groups(closed) + groups(left), "a control group is left")


PROXY = """
import asyncio, os, pathlib, sys
from sandboxes.container.driver import ContainerDriver
from sandboxes.spec import EnvironmentSpec
async def go():
    driver = ContainerDriver(pathlib.Path(sys.argv[1]), spares=0)
    await driver.open()
    sandbox = await driver.start(EnvironmentSpec(driver="container", image=sys.argv[2]))
    print(sandbox.container, flush=True)
    await asyncio.sleep(100)
asyncio.run(go())
"""


@pytest.mark.parametrize("keeper", [None, signal.SIGKILL])
def test_a_killed_proxy_leaves_no_control_group(container_dir: Path, keeper: signal.Signals | None) -> None:
    """The keeper removes them; if it was killed too, the next start of the proxy does."""
    arguments = [sys.executable, "-c", PROXY, str(container_dir), BASH_IMAGE]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        name = process.stdout.readline().strip()
        assert groups(name)
        (launcher,) = children(process.pid)
        keepers = children(launcher)
        if keeper is not None:
            for pid in keepers:
                os.kill(pid, keeper)
        process.kill()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in (launcher, *keepers)), "a keeper lives")

    async def go() -> None:
        async with driving(container_dir):
            assert not groups(name)

    if keeper is None:
        wait_until(lambda: not groups(name), "a control group is left")
    asyncio.run(go())


def make_deep_image(name: str, folder: Path, *, layers: int) -> None:
    """Make an image of bash with many layers, each with one file."""
    made = subprocess.run(["docker", "create", BASH_IMAGE, "true"], capture_output=True, text=True, check=True)
    subprocess.run(["docker", "export", made.stdout.strip(), "-o", str(folder / "0.tar")], check=True)
    subprocess.run(["docker", "rm", made.stdout.strip()], check=True, capture_output=True)
    for number in range(1, layers):
        with tarfile.open(folder / f"{number}.tar", "w") as tar:
            tar.addfile(tarfile.TarInfo(f"layer-{number}"))
    names = [f"{number}.tar" for number in range(layers)]
    digests = [f"sha256:{hashlib.sha256((folder / file).read_bytes()).hexdigest()}" for file in names]
    config = {"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": digests}, "config": {}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "manifest.json").write_text(json.dumps([{"Config": "config.json", "RepoTags": [name], "Layers": names}]))
    parts = ["manifest.json", "config.json", *names]
    subprocess.run(["tar", "-C", str(folder), "-cf", str(folder / "image"), *parts], check=True)
    subprocess.run(["docker", "load", "-i", str(folder / "image")], check=True, capture_output=True)


def test_images_may_have_as_many_layers_as_docker_takes(container_dir: Path, tmp_path: Path) -> None:
    """The kernel takes 4,096 bytes of options, in which all of them are named."""
    deep = "forkpoint-test-deep:1"
    make_deep_image(deep, tmp_path, layers=125)

    async def go() -> None:
        async with driving(container_dir, deep) as driver:
            sandbox = await driver.start(SPEC)
            assert sandbox.container.startswith("forkpoint-")
            assert (await run(sandbox, "ls -d /layer-* | wc -l; echo a > /layer-7; cat /layer-7")).out == "124\na\n"

    asyncio.run(go())
    subprocess.run(["docker", "rmi", deep], check=True, capture_output=True)
