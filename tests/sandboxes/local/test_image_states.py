"""Sandboxes of images: what is made of an image, and which states lie over it."""

import shutil
from pathlib import Path

import pytest

from sandboxes.effects import Effect
from sandboxes.errors import SpecError, StateGoneError
from sandboxes.local.driver import LocalDriver
from sandboxes.spec import Archive, EnvironmentSpec
from tests.sandboxes.box import driven, file, run
from tests.sandboxes.docker import OnImage
from tests.sandboxes.image_archives import bash_image, busybox_image, configured, saved

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
        ["mkdir /mnt/x; touch -d '2001-02-03' /mnt/x/y; mkfifo p; chmod 4755 a 2>/dev/null; truncate -s 100M sparse"],
        [
            "rm -rf /usr/bin/sed; mkdir /usr/bin/sed; echo 1 > /usr/bin/sed/1",
            "rm -rf /usr/bin/sed; echo 2 > /usr/bin/sed",
        ],
        ["mv /var /was; mkdir /var", "rm -rf /was; ln -s /tmp /srv; echo x > /srv/x"],
        ["echo x > /dev/shm/x; echo y >> /etc/hosts"],
    ],
)
def test_restored_sandbox_has_the_frozen_files(data_dir: Path, commands: list[str]) -> None:
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


def test_set_up_over_an_image_is_built_once(data_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "f").write_text("from the archive\n")
    spec = EnvironmentSpec(
        image=bash_image(),
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

    driven(LocalDriver(data_dir), test)


def test_image_configuration_is_respected(data_dir: Path) -> None:
    config = {
        "User": "1000:1000", "Env": ["GREETING=hello"], "Volumes": {"/data": {}}, "Entrypoint": ["/no/such"],
        "WorkingDir": "/tmp",
    }  # fmt: skip
    spec = EnvironmentSpec(image=configured(bash_image(), config))

    async def test(driver: LocalDriver) -> None:
        sandbox = await driver.start(spec)
        assert (await run(sandbox, "id -u; echo $GREETING; pwd; ls -d /data")).out == "1000\nhello\n/tmp\n/data\n"
        assert (await run(sandbox, "echo x > /tmp/mine")).effect is Effect.FILES
        assert (await file(sandbox, "put", "/tmp/put", b"x"))[0] == 201
        assert (await run(sandbox, "stat -c %u /tmp/put; rm /tmp/put && echo removed")).out == "1000\nremoved\n"
        assert (await file(sandbox, "put", "/etc/passwd", b"x"))[0] == 409
        # What runs as that user is seen as well as what root runs.
        assert (await run(sandbox, "sleep 1000 & echo $!")).effect is Effect.PROCESSES
        assert (await run(sandbox, "cat /tmp/mine")).effect is Effect.NONE

    driven(LocalDriver(data_dir), test)


def test_unusable_images_are_spec_errors(data_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "user").write_bytes(Path(configured(bash_image(), {"User": "nobody-here"})).read_bytes())

    async def test(driver: LocalDriver) -> None:
        for name, says in (("none", "none"), ("empty", "empty"), ("user", "unable to find user nobody-here")):
            with pytest.raises(SpecError, match=says):
                await driver.start(EnvironmentSpec(image=str(tmp_path / name)))

    driven(LocalDriver(data_dir), test)


def test_an_image_that_is_gone_ends_its_states(data_dir: Path, tmp_path: Path) -> None:
    """A changed file is another image: its states would lie over files that they were not made over."""
    path = tmp_path / "image.tar"
    shutil.copy(bash_image(), path)
    spec = EnvironmentSpec(image=str(path))

    async def test(driver: LocalDriver) -> None:
        sandbox = await driver.start(spec)
        await run(sandbox, "echo x > /tmp/x")
        frozen = await sandbox.freeze()
        before = await driver.identity(spec)
        shutil.copy(busybox_image(), path)
        assert await driver.identity(spec) != before
        with pytest.raises(StateGoneError, match="has changed"):
            await driver.restore(spec, frozen)

    driven(LocalDriver(data_dir), test)


def test_an_image_without_any_program_runs_bash(data_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "scratch.tar").write_bytes(saved([b"\0" * 1024], {}))

    async def test(driver: LocalDriver) -> None:
        sandbox = await driver.start(EnvironmentSpec(image=str(tmp_path / "scratch.tar")))
        assert (await run(sandbox, 'f() { echo "$1"; }; f one; pwd; echo /*')).out.startswith("one\n/\n/dev /etc")
        assert (await run(sandbox, "f two")).out == "two\n"

    driven(LocalDriver(data_dir), test)


def test_images_that_nothing_uses_are_removed(data_dir: Path, tmp_path: Path) -> None:
    # A directory of its own: tests on other bases leave roots in the shared one.
    folder = data_dir / "unused-images"
    folder.mkdir()
    path = tmp_path / "image.tar"
    path.write_bytes(saved([b"\0" * 1024], {"Env": ["A=1"]}))
    spec = EnvironmentSpec(image=str(path))

    async def test(driver: LocalDriver) -> None:
        sandbox = await driver.start(spec)
        image = sandbox.parts[-1].replace(":", "-")
        # An image that was looked up since the last collection stays.
        for _ in range(2):
            await driver.collect([])
        assert (folder / "images" / image).is_dir()
        await sandbox.close()
        for root in driver.roots.used():
            assert root.images or not root.layers
        shutil.rmtree(folder / "roots")
        (folder / "roots").mkdir()
        await driver.collect([])
        assert not (folder / "images" / image).exists()
        again = await driver.start(spec)
        assert (await run(again, "echo $A")).out == "1\n"

    driven(LocalDriver(folder), test)
