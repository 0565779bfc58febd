"""The container driver beyond the contract: what a state has, what a copy holds, and what is made of an image."""

import asyncio
import os
import subprocess
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest

from sandboxes.local.driver import LocalDriver
from sandboxes.container.portable_copies import part_of
from sandboxes.effects import Effect
from sandboxes.errors import SpecError, StateGoneError
from sandboxes.spec import Archive, EnvironmentSpec
from tests.sandboxes.box import file, run
from tests.sandboxes.docker import (
    BASH_IMAGE,
    OnImage,
    derive,
    driven,
)

SPEC = EnvironmentSpec()
LISTING = (
    "(cd / && find . -xdev -path ./proc -prune -o -printf '%p %y %m %u %g %l %T@ %n %s\\n' | grep -v ' d ' | sort;"
    " find . -xdev -type d -printf '%p %m %u %g\\n' | sort; find root opt tmp -type f -size -9 -exec cat {} +)"
)
"""Everything that a state has of files, but what counts as none: directories' times, sizes and link counts."""


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
def test_restored_container_has_the_frozen_files(data_dir: Path, commands: list[str]) -> None:
    """A restored container has the files of the frozen one."""

    async def test(driver: LocalDriver) -> None:
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

    driven(OnImage(data_dir), test)


def test_state_costs_what_it_added(data_dir: Path) -> None:
    async def test(driver: LocalDriver) -> None:
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

    driven(OnImage(data_dir), test)


@pytest.mark.parametrize(
    ("large", "named"),
    [
        (":", r"/f' was [0-9a-f]{32} with the clock time \d+ ns and is .*; 0 other paths differ"),
        ("mkdir m; for i in {1..6000}; do : >m/$i; done; head -c 70000000 /dev/zero > big", "too many files"),
    ],
)
def test_a_damaged_copy_is_never_served(data_dir: Path, large: str, named: str) -> None:
    """States of any size are restored with their digest; a copy that was changed on disk is refused, with its path."""

    async def test(driver: LocalDriver) -> None:
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

    driven(OnImage(data_dir), test)


def test_a_copy_that_is_being_deleted_is_gone(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restore that begins while a collection deletes finds the state missing, and lays no part of it anywhere."""

    async def test(driver: LocalDriver) -> None:
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

    driven(OnImage(data_dir), test)


def _bytes_below(folder: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))


def test_freezing_twice_without_a_change_between_is_free(data_dir: Path) -> None:
    async def test(driver: LocalDriver) -> None:
        sandbox = await driver.start(SPEC)
        await run(sandbox, "echo a > a")
        first = await sandbox.freeze()
        await run(sandbox, "cat a")
        assert await sandbox.freeze() is first
        await run(sandbox, "x=1")
        assert (await sandbox.freeze()).payload["sessions"] != first.payload["sessions"]

    driven(OnImage(data_dir), test)


def test_root_state_is_one_image_layer_built_once(data_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "f").write_text("from the archive\n")
    spec = EnvironmentSpec(
        driver="container",
        image=BASH_IMAGE,
        archives=(Archive(source=str(tmp_path / "given"), target="/work"),),
        setup=("date +%N > /work/once", "cat /work/f > copy", "mkdir -p /dev/shm/d"),
        workdir="/work",
    )

    async def test(driver: LocalDriver) -> None:
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

    driven(LocalDriver(data_dir), test)


def test_image_configuration_is_respected(data_dir: Path) -> None:
    name = "forkpoint-test-user:1"
    derive(name, ["USER 1000:1000", "ENV GREETING=hello", "VOLUME /data", 'ENTRYPOINT ["/no/such"]'])

    async def test(driver: LocalDriver) -> None:
        sandbox = await driver.start(EnvironmentSpec(image=name, workdir="/tmp"))
        assert (await run(sandbox, "id -u; echo $GREETING; pwd")).out == "1000\nhello\n/tmp\n"
        assert (await run(sandbox, "echo x > /tmp/mine")).effect is Effect.FILES
        assert (await file(sandbox, "put", "/tmp/put", b"x"))[0] == 201
        assert (await run(sandbox, "stat -c %u /tmp/put; rm /tmp/put && echo removed")).out == "1000\nremoved\n"
        assert (await file(sandbox, "put", "/etc/passwd", b"x"))[0] == 409

    driven(LocalDriver(data_dir), test)


def test_unusable_image_is_a_spec_error(data_dir: Path) -> None:
    _derive_empty()

    async def test(driver: LocalDriver) -> None:
        for image, says in (("no/such:image", "docker pull"), ("forkpoint-test-empty:1", "no /bin/sh")):
            with pytest.raises(SpecError, match=says):
                await driver.start(EnvironmentSpec(image=image))
        with pytest.raises(SpecError, match="needs an image"):
            await driver.identity(EnvironmentSpec(driver="container"))

    driven(LocalDriver(data_dir), test)
    with pytest.raises(ValueError, match="has no images"):
        EnvironmentSpec(driver="local", image="x")


def _derive_empty() -> None:
    empty = subprocess.run(["tar", "-c", "-T", "/dev/null"], capture_output=True, check=True).stdout
    subprocess.run(["docker", "import", "-", "forkpoint-test-empty:1"], input=empty, capture_output=True, check=True)
