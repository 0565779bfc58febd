"""The container driver beyond the contract: what is observed, what a copy holds, what is left behind."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path

import pytest

from sandboxes.container.daemon import INSTANCE, Daemon
from sandboxes.container.driver import ContainerDriver
from sandboxes.container.orphans import kill_orphans
from sandboxes.container.portable_copies import part_of
from sandboxes.container.sandbox import ContainerSandbox
from sandboxes.driver import Sandbox
from sandboxes.effects import Effect
from sandboxes.errors import SandboxError, SpecError, StateGoneError
from sandboxes.spec import Archive, EnvironmentSpec, Limits
from tests.machine import children, wait_until
from tests.sandboxes.box import file, opened, run
from tests.sandboxes.docker import BASH_IMAGE, BUSYBOX_IMAGE, SH_IMAGE, OnImage, containers, derive, first_processes

SPEC = EnvironmentSpec()
LISTING = (
    "(cd / && find . -xdev -path ./proc -prune -o -printf '%p %y %m %u %g %l %T@ %n %s\\n' | grep -v ' d ' | sort;"
    " find . -xdev -type d -printf '%p %m %u %g\\n' | sort; find root opt tmp -type f -size -9 -exec cat {} +)"
)
"""Everything that a state has of files, but what counts as none: directories' times, sizes and link counts."""


def driven(driver: ContainerDriver, test: Callable[[ContainerDriver], Awaitable[None]]) -> None:
    async def go() -> None:
        async with opened(driver):
            await test(driver)

    asyncio.run(go())


@pytest.mark.parametrize(
    "commands",
    [
        ["echo a > a; mkdir -p d/e; echo b > d/e/f; chmod 640 a; chown 7:8 d", "mv d g; ln -s g h"],
        ["rm -rf /opt /home; mkdir /opt; echo new > /opt/x; chmod 700 /opt", "rm /etc/passwd; echo mine > /etc/passwd"],
        ["echo a > a; ln a b; mkdir d; ln a d/c", "echo more >> b"],
        ["mkdir /mnt/x; touch -d '2001-02-03' /mnt/x/y; mkfifo p; chmod 4755 a 2>/dev/null; truncate -s 100M sparse"],
        [
            "rm -rf /usr/bin/sed; mkdir /usr/bin/sed; echo 1 > /usr/bin/sed/1",
            "rm -rf /usr/bin/sed; echo 2 > /usr/bin/sed",
        ],
        ["mv /var /was; mkdir /var", "rm -rf /was; ln -s /tmp /srv; echo x > /srv/x"],
        ["echo x > /dev/shm/x; echo y >> /etc/hosts"],
    ],
)
def test_restored_container_has_the_frozen_files(container_dir: Path, commands: list[str]) -> None:
    """A restored container has the files of the frozen one."""

    async def test(driver: ContainerDriver) -> None:
        sandbox = await driver.start(SPEC)
        for command in commands:
            await run(sandbox, command)
            frozen = await sandbox.freeze()
            restored = await driver.restore(SPEC, frozen)
            live, back = await run(sandbox, LISTING), await run(restored, LISTING)
            assert back.out == live.out
            assert back.state == live.state == frozen.state
            # And so has one restored from a freeze of that.
            await run(restored, "touch /tmp/again")
            again = await driver.restore(SPEC, await restored.freeze())
            assert (await run(again, "rm /tmp/again; " + LISTING)).out.replace("/tmp/again", "") == back.out
            await restored.close()
            await again.close()

    driven(OnImage(container_dir, spares=0), test)


def test_state_costs_what_it_added(container_dir: Path) -> None:
    async def test(driver: ContainerDriver) -> None:
        sandbox = await driver.start(SPEC)
        await run(sandbox, "head -c 4000000 /dev/urandom > big; echo a > small")
        first = await sandbox.freeze()
        second = None
        for number in range(12):
            await run(sandbox, f"echo {number} > small")
            second = await sandbox.freeze()
            assert second.size_bytes < 100_000
        assert second is not None
        assert first.size_bytes > 4_000_000
        # However long the history: each is one directory over the image, and needs no other.
        assert [len(state.parts) for state in (first, second)] == [2, 2]
        assert first.parts[1] == second.parts[1] == part_of(first.payload["image"])
        await sandbox.close()
        assert await driver.collect(second.parts) < 4_500_000
        assert driver.states.all() == set(second.parts[:1])
        restored = await driver.restore(SPEC, second)
        assert (await run(restored, "wc -c < big; cat small")).out.split() == ["4000000", "11"]
        with pytest.raises(StateGoneError):
            await driver.restore(SPEC, first)
        await restored.close()
        assert await driver.collect([]) == 0
        assert _bytes_below(driver.states.folder) < 10_000

    driven(OnImage(container_dir, spares=0), test)


@pytest.mark.parametrize(
    ("large", "named"),
    [
        (":", r"/f' was [0-9a-f]{32} with the clock time \d+ ns and is .*; 0 other paths differ"),
        ("mkdir m; for i in {1..6000}; do : >m/$i; done; head -c 70000000 /dev/zero > big", "too many files"),
    ],
)
def test_a_damaged_copy_is_never_served(container_dir: Path, large: str, named: str) -> None:
    """States of any size are restored with their digest; a copy that was changed on disk is refused, with its path."""

    async def test(driver: ContainerDriver) -> None:
        sandbox = await driver.start(SPEC)
        answer = await run(sandbox, f"echo alpha > f; {large}")
        assert answer.state is not None
        frozen = await sandbox.freeze()
        restored = await driver.restore(SPEC, frozen)
        assert (await run(restored, "cat f")).state == answer.state
        (damaged,) = set((driver.states.folder / frozen.parts[0]).glob("diff/**/f"))
        status = damaged.stat()
        damaged.write_text("alphb\n")
        os.utime(damaged, ns=(status.st_atime_ns, status.st_mtime_ns))
        with pytest.raises(StateGoneError, match=named):
            await driver.restore(SPEC, frozen)

    driven(OnImage(container_dir, spares=0), test)


def test_a_copy_that_is_being_deleted_is_gone(container_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restore that begins while a collection deletes finds the state missing, and lays no part of it anywhere."""

    async def test(driver: ContainerDriver) -> None:
        sandbox = await driver.start(SPEC)
        await run(sandbox, "echo alpha > f")
        frozen = await sandbox.freeze()
        await sandbox.close()
        deletes, goes_on, drop = threading.Event(), threading.Event(), driver.states.drop

        def drop_later(names: Iterable[str]) -> None:
            deletes.set()
            assert goes_on.wait(30)
            drop(names)

        monkeypatch.setattr(driver.states, "drop", drop_later)
        collecting = asyncio.create_task(driver.collect([]))
        await asyncio.to_thread(deletes.wait, 30)
        try:
            with pytest.raises(StateGoneError, match="is gone"):
                await driver.restore(SPEC, frozen)
        finally:
            goes_on.set()
            await collecting

    driven(OnImage(container_dir, spares=0), test)


def _bytes_below(folder: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))


def test_freezing_twice_without_a_change_between_is_free(container_dir: Path) -> None:
    async def test(driver: ContainerDriver) -> None:
        sandbox = await driver.start(SPEC)
        await run(sandbox, "echo a > a")
        first = await sandbox.freeze()
        await run(sandbox, "cat a")
        assert await sandbox.freeze() is first
        await run(sandbox, "x=1")
        assert (await sandbox.freeze()).payload["sessions"] != first.payload["sessions"]

    driven(OnImage(container_dir, spares=0), test)


def test_what_the_live_bash_holds_comes_back(container_dir: Path) -> None:
    async def test(driver: ContainerDriver) -> None:
        sandbox = await driver.start(SPEC)
        for command in (
            "f() { echo \"f $1\"; }; a=(1 '2 3'); declare -A m=([k]='v w'); alias hi='echo hi'; set -u; umask 027",
            "trap 'echo bye' USR1; shopt -s extglob; readonly R=r; export E='multi\nline'; pushd /tmp >/dev/null",
            "set -- p q",
            "ulimit -Sn 300",
        ):
            assert (await run(sandbox, command)).effect is Effect.SESSION
        restored = await driver.restore(SPEC, await sandbox.freeze())
        commands = "f x; echo ${a[1]} ${m[k]} $R $E $-; hi; trap; dirs; echo $@ ; umask; ulimit -n; shopt extglob; cd -"
        live, back = await run(sandbox, commands), await run(restored, commands)
        assert back.outcome == live.outcome
        assert "f x\n2 3 v w r multi line" in back.out
        assert "\n300\n" in back.out

    driven(OnImage(container_dir, spares=0), test)


@pytest.mark.parametrize(
    ("image", "said"), [(BASH_IMAGE, "line 1: "), (SH_IMAGE, ": 1: "), (BUSYBOX_IMAGE, "line 1: ")]
)
def test_invalid_command_keeps_options_and_traps(container_dir: Path, image: str, said: str) -> None:
    """A command with a syntax error leaves options and traps as they were."""

    async def test(driver: ContainerDriver) -> None:
        sandbox = await driver.start(SPEC)
        await run(sandbox, "set -u; trap 'echo one' USR1; trap 'echo two' USR2")
        assert (await run(sandbox, "if true")).effect is Effect.NONE
        assert (await run(sandbox, "kill -USR1 $$; kill -USR2 $$; true")).out == "one\ntwo\n"
        result = await run(sandbox, "echo ${never}; echo on")
        assert (result.out, result.effect) == ("", Effect.NONE)
        assert said in result.err

    driven(OnImage(container_dir, image, spares=0), test)


@pytest.mark.parametrize("image", [SH_IMAGE, BUSYBOX_IMAGE])
def test_posix_session_is_restored_without_functions(container_dir: Path, image: str) -> None:
    async def test(driver: ContainerDriver) -> None:
        sandbox = await driver.start(SPEC)
        assert (await run(sandbox, "x='a  b'; export y=\"it's\"; alias hi='echo hi'")).effect is Effect.SESSION
        assert (
            await run(sandbox, "umask 027; cd /tmp; set -u; set -- p 'q r'; trap 'echo bye' USR1")
        ).effect is Effect.SESSION
        # A function cannot be printed: it is gone after the call, live or restored, so it is no effect either.
        assert (await run(sandbox, "f() { echo f; }; f")).outcome == ("f\n", "", 0, Effect.NONE)
        restored = await driver.restore(SPEC, await sandbox.freeze())
        commands = (
            'echo "$x" $y $-; hi; trap; umask; pwd; for i in "$@"; do echo "$i"; done; env | grep ^y; command -v f'
        )
        live, back = await run(sandbox, commands), await run(restored, commands)
        assert back.outcome == live.outcome
        assert back.out.startswith("a  b it's ")
        assert "\nhi\n" in back.out
        assert back.out.endswith("0027\n/tmp\np\nq r\ny=it's\n") or back.out.endswith("027\n/tmp\np\nq r\ny=it's\n")
        assert (await run(sandbox, "if")).code == 2
        assert (await run(sandbox, "echo $$ >/dev/null; echo ${unset}; echo on")).code != 0
        assert (await run(sandbox, "exec 3</etc/passwd")).effect is not Effect.NONE

    driven(OnImage(container_dir, image, spares=0), test)


def test_root_state_is_one_image_layer_built_once(container_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "f").write_text("from the archive\n")
    spec = EnvironmentSpec(
        driver="container",
        image=BASH_IMAGE,
        archives=(Archive(source=str(tmp_path / "given"), target="/work"),),
        setup=("date +%N > /work/once", "cat /work/f > copy", "mkdir -p /dev/shm/d"),
        workdir="/work",
    )

    async def test(driver: ContainerDriver) -> None:
        one, two = await driver.start(spec), await driver.start(spec)
        commands = "pwd; cat f copy once; stat -c %Y *; ls /dev/shm"
        first, second = await run(one, commands), await run(two, commands)
        assert first.outcome == second.outcome
        assert first.out.startswith("/work\nfrom the archive\nfrom the archive\n")
        assert (first.effect, first.state) == (Effect.NONE, second.state)
        written = await run(one, "echo x > x")
        frozen = await one.freeze()
        assert frozen.size_bytes < 50_000
        assert (await run(await driver.restore(spec, frozen), "cat x once")).out == "x\n" + (
            await run(one, "cat once")
        ).out
        assert written.effect is Effect.FILES

    driven(ContainerDriver(container_dir, spares=0), test)


def test_image_configuration_is_respected(container_dir: Path) -> None:
    name = "forkpoint-test-user:1"
    derive(name, ["USER 1000:1000", "ENV GREETING=hello", "VOLUME /data", 'ENTRYPOINT ["/no/such"]'])

    async def test(driver: ContainerDriver) -> None:
        sandbox = await driver.start(EnvironmentSpec(driver="container", image=name, workdir="/tmp"))
        assert (await run(sandbox, "id -u; echo $GREETING; pwd")).out == "1000\nhello\n/tmp\n"
        assert (await run(sandbox, "echo x > /tmp/mine")).effect is Effect.FILES
        assert (await file(sandbox, "put", "/tmp/put", b"x"))[0] == 201
        assert (await run(sandbox, "stat -c %u /tmp/put; rm /tmp/put && echo removed")).out == "1000\nremoved\n"
        assert (await file(sandbox, "put", "/etc/passwd", b"x"))[0] == 409

    driven(ContainerDriver(container_dir, spares=0), test)


def test_unusable_image_is_a_spec_error(container_dir: Path) -> None:
    _derive_empty()

    async def test(driver: ContainerDriver) -> None:
        for image, says in (("no/such:image", "docker pull"), ("forkpoint-test-empty:1", "no /bin/sh")):
            with pytest.raises(SpecError, match=says):
                await driver.start(EnvironmentSpec(driver="container", image=image))
        with pytest.raises(SpecError, match="needs an image"):
            await driver.identity(EnvironmentSpec(driver="container"))

    driven(ContainerDriver(container_dir, spares=0), test)
    with pytest.raises(ValueError, match="has no images"):
        EnvironmentSpec(driver="local", image="x")


def _derive_empty() -> None:
    empty = subprocess.run(["tar", "-c", "-T", "/dev/null"], capture_output=True, check=True).stdout
    subprocess.run(["docker", "import", "-", "forkpoint-test-empty:1"], input=empty, capture_output=True, check=True)


def test_spare_is_used_once(container_dir: Path) -> None:
    async def test(driver: ContainerDriver) -> None:
        sandbox = await driver.start(SPEC)
        await run(sandbox, "echo a > a; x=1")
        frozen = await sandbox.freeze()
        await driver.spares.background.wait()
        waiting = [box.container for boxes in driver.spares._spares.values() for box in boxes]
        one, two = await driver.restore(SPEC, frozen), await driver.restore(SPEC, frozen)
        assert [one.container, two.container] == waiting[:2]
        await run(one, "echo b > a")
        assert (await run(two, "cat a; echo $x")).out == "a\n1\n"
        other = await driver.start(SPEC.model_copy(update={"limits": Limits(pids=40)}))
        assert (await run(other, "cat a")).code == 1

    driven(OnImage(container_dir, spares=2), test)


@pytest.mark.parametrize("docker_starts", [False, True])
def test_container_killed_from_outside_is_an_error(container_dir: Path, docker_starts: bool) -> None:
    """A container that is killed from outside is an error for its rollout."""

    async def test(driver: ContainerDriver) -> None:
        sandbox = await driver.start(SPEC)
        assert isinstance(sandbox, ContainerSandbox)
        call = asyncio.create_task(run(sandbox, "sleep 30; echo no"))
        await run(await driver.start(SPEC), "true")
        os.kill(first_processes(container_dir)[sandbox.container], signal.SIGKILL)
        with pytest.raises(SandboxError, match="died"):
            await call
        assert not sandbox.alive

    driven(OnImage(container_dir, spares=0, docker_starts=docker_starts), test)


def test_cancelled_call_kills_the_sandbox(container_dir: Path) -> None:
    async def test(driver: ContainerDriver) -> None:
        sandbox = await driver.start(SPEC)
        await run(sandbox, "x=1")
        answer = await run(sandbox, "y=2; echo part; sleep 1000 & sleep 1000", timeout_s=3.0)
        assert (answer.out, answer.code, answer.timed_out, answer.effect) == ("part\n", 124, True, Effect.NONE)
        assert (await run(sandbox, "echo $x $y; ps -e | grep -c sleep")).out == "1\n0\n"
        call = asyncio.create_task(run(sandbox, "sleep 30"))
        await asyncio.sleep(0.2)
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call
        assert not sandbox.alive

    driven(OnImage(container_dir, spares=0), test)


PROXY = """
import asyncio, sys, pathlib
from sandboxes.container.driver import ContainerDriver
from sandboxes.spec import EnvironmentSpec
async def go():
    driver = ContainerDriver(pathlib.Path(sys.argv[1]), spares=1)
    await driver.open()
    await driver.start(EnvironmentSpec(driver="container", image=sys.argv[2]))
    await driver.spares.background.wait()
    print("ready", flush=True)
    await asyncio.sleep(100)
asyncio.run(go())
"""


@pytest.fixture
def killed(container_dir: Path) -> Callable[..., None]:
    """Starts an instance in a process of its own, with a sandbox and a spare, and kills it."""

    def kill(*, keepers: int | None = None) -> None:
        """keepers: a signal that they get first, SIGCONT follows."""
        process = subprocess.Popen(
            [sys.executable, "-c", PROXY, str(container_dir), BASH_IMAGE], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        # A sandbox, a spare, and their pattern.
        assert len(containers(container_dir)) == 3
        results = [pid for doorman in children(process.pid) for pid in children(doorman)]
        assert len(results) == 3
        if keepers is not None:
            for pid in results:
                os.kill(pid, keepers)
        doormen = children(process.pid)
        process.kill()
        process.wait()
        process.stdout.close()
        wait_until(lambda: not any(Path(f"/proc/{doorman}").exists() for doorman in doormen), "the doorman lives")
        if keepers == signal.SIGSTOP:
            for pid in results:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    return kill


def test_orphaned_keeper_kills_its_container(container_dir: Path, killed: Callable[..., None]) -> None:
    killed(keepers=signal.SIGSTOP)
    wait_until(lambda: not containers(container_dir), "containers outlive their keepers", within_s=90)


def test_unsaved_root_image_is_removed_at_start(container_dir: Path) -> None:
    async def ran(driver: ContainerDriver) -> set[str]:
        sandbox = await driver.start(EnvironmentSpec(setup=("echo 1 > /root/a",)))
        assert (await run(sandbox, "cat /root/a")).out == "1\n"
        return {
            image
            for image, labels in driver.daemon.images()
            if labels.get(INSTANCE) == driver.spares.boxes.labels[INSTANCE]
        }

    async def unnoted(driver: ContainerDriver) -> None:
        before = await ran(driver)
        assert before <= {root.image for root in driver.roots.all()}
        for note in (container_dir / "roots").iterdir():
            note.unlink()

    async def again(driver: ContainerDriver) -> None:
        assert await ran(driver) == {root.image for root in driver.roots.all()}

    driven(OnImage(container_dir, spares=0), unnoted)
    driven(OnImage(container_dir, spares=0), again)


def test_orphaned_container_is_killed(container_dir: Path) -> None:
    async def test(driver: ContainerDriver) -> None:
        living, forgotten = await driver.start(SPEC), await driver.start(SPEC)
        # As after a kill of the daemon: it runs on, and nobody knows its name.
        driver.spares.boxes.names.discard(forgotten.id)
        assert len(kill_orphans(driver.spares.boxes.folder, driver.spares.boxes.names)) == 1
        with pytest.raises(SandboxError, match="died"):
            await run(forgotten, "echo on")
        assert (await run(living, "echo on")).out == "on\n"

    driven(OnImage(container_dir, spares=0), test)


def test_unreported_container_is_removed_by_the_sweep(container_dir: Path) -> None:
    async def test(driver: ContainerDriver) -> None:
        sandbox = await driver.start(SPEC)
        labels = {**driver.spares.boxes.labels, "forkpoint.sandbox": "lost"}
        options = [word for name, value in labels.items() for word in ("--label", f"{name}={value}")]
        create = ["docker", "create", *options, BASH_IMAGE, "true"]
        await asyncio.to_thread(subprocess.run, create, capture_output=True, check=True)
        assert len(containers(container_dir)) == 3
        await asyncio.to_thread(driver._sweep)
        assert len(containers(container_dir)) == 2
        assert (await run(sandbox, "echo on")).out == "on\n"

    driven(OnImage(container_dir, spares=0), test)


def test_killed_instance_leaves_no_container(container_dir: Path, killed: Callable[..., None]) -> None:
    killed()
    wait_until(lambda: not containers(container_dir), "a container outlives its instance", within_s=90)


def test_killed_instance_is_swept_by_any_instance(
    container_dir: Path, data_dir: Path, killed: Callable[..., None]
) -> None:
    async def nothing(_driver: ContainerDriver) -> None:
        # Docker lists one for a moment longer than it has it.
        await asyncio.to_thread(wait_until, lambda: containers(container_dir) == [], "a container is left")

    killed(keepers=signal.SIGKILL)
    driven(OnImage(container_dir), nothing)
    killed(keepers=signal.SIGKILL)
    driven(OnImage(data_dir / "another"), nothing)


def test_second_instance_is_refused(container_dir: Path, data_dir: Path) -> None:
    async def test(driver: ContainerDriver) -> None:
        sandbox = await driver.start(SPEC)
        with pytest.raises(SandboxError, match="in use"):
            await OnImage(container_dir).open()
        async with opened(OnImage(data_dir / "another", spares=0)):
            assert (await run(sandbox, "echo on")).out == "on\n"

    driven(OnImage(container_dir, spares=0), test)


@pytest.fixture
def silent() -> Iterator[str]:
    """A daemon that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def full() -> Iterator[str]:
    """A daemon whose disk is full."""
    body = b'{"message": "write /var/lib/docker/x: no space left on device"}'
    answer = (
        b"HTTP/1.1 500 Error\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
        % len(body)
    )

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                end, _ = server.accept()
                with end:
                    end.recv(65536)
                    end.sendall(answer + body)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    ("kind", "says"),
    [("down", "no Docker daemon responds"), ("silent", "gave no response within"), ("full", "disk is full")],
)
def test_daemon_failures_are_named(
    kind: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr("sandboxes.container.daemon.TIMEOUT_S", 1.0 if kind == "silent" else 30.0)
    monkeypatch.setattr("sandboxes.container.daemon.PAUSES_S", (0.01,))
    where = f"unix://{tmp_path}/none.sock" if kind == "down" else request.getfixturevalue(kind)
    monkeypatch.setenv("DOCKER_HOST", where)
    daemon = Daemon()
    with pytest.raises(SandboxError, match=says):
        daemon.check()
    daemon.close()
    driver = ContainerDriver(tmp_path / "data")
    with pytest.raises(SandboxError, match=says):
        asyncio.run(driver.open())
    # And nothing is held that would hinder a later try.
    with pytest.raises(SandboxError, match=says):
        asyncio.run(ContainerDriver(tmp_path / "data").open())


@pytest.mark.parametrize("image", [BASH_IMAGE, SH_IMAGE, BUSYBOX_IMAGE])
def test_a_session_stays_in_its_directory(container_dir: Path, image: str) -> None:
    """The directory is moved, removed or behind a changed link: a shell of any kind stays in it, as plain shells do."""

    async def test(sandbox: Sandbox) -> None:
        for before, after, out in (
            ("mkdir /tmp/a; cd /tmp/a; echo > in", "mv ../a ../b", "in\n/tmp/a\n"),
            ("mkdir /tmp/c; cd /tmp/c", "rmdir /tmp/c; mkdir /tmp/c; echo > /tmp/c/other", "/tmp/c\n"),
            ("mkdir -p /tmp/d/in /tmp/e; ln -s d /tmp/l; cd /tmp/l", "ln -sfn e /tmp/l", "in\n/tmp/l\n"),
        ):
            await run(sandbox, before)
            assert (await run(sandbox, after)).state is None
            assert (await run(sandbox, "ls; pwd")).outcome == (out, "", 0, Effect.NONE)
            assert (await run(sandbox, "cd /tmp")).state is not None
        await run(sandbox, "mkdir /tmp/g; cd /tmp/g; rmdir /tmp/g")
        await run(sandbox, "exit 3")
        assert (await run(sandbox, "rm -rf * ./* 2>/dev/null; ls -d /etc")).out == "/etc\n"

    async def go() -> None:
        async with opened(OnImage(container_dir, image)) as driver:
            await test(await driver.start(EnvironmentSpec()))

    asyncio.run(go())
