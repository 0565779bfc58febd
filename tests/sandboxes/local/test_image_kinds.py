"""Images of other kinds than Debian: an Alpine-like root with musl and busybox, and a RHEL-like one with RPM."""

from collections.abc import Callable
from pathlib import Path

import pytest

from sandboxes.effects import Effect
from sandboxes.local.driver import LocalDriver
from sandboxes.spec import EnvironmentSpec
from tests.sandboxes.box import driven, file, ran, run
from tests.sandboxes.image_archives import busybox_image, configured, saved
from tests.sandboxes.image_kinds import make_tiny, musl_image, packed, rhel_image

KINDS = pytest.mark.parametrize(
    ("image", "user", "shell"),
    [(musl_image, "guest uid=405(guest) gid=100(users) groups=10(wheel),100(users)", "/bin/ash"),
     (rhel_image, "app uid=1001(app) gid=1001(app) groups=1001(app),10(wheel)", "/bin/bash")],
)  # fmt: skip


@KINDS
def test_session_and_rollouts(data_dir: Path, image: Callable[[], str], user: str, shell: str) -> None:
    """A session keeps functions, variables and its directory; a restored rollout goes on with them and diverges."""
    name = user.split(maxsplit=1)[0]
    spec = EnvironmentSpec(image=image(), env={"MINE": "spec's"})
    steps = (
        ("echo $(whoami) $(id); pwd; echo $HOME $KIND $MINE", f"{user}\n/home/{name}\n/home/{name} {{}} spec's\n"),
        ("f() { echo \"$1 of $(whoami) in $PWD\"; }; A=(1 2); mkdir -p /tmp/w && cd /tmp/w; export E=e", ""),
        (f"f call; echo ${{A[1]}} $(printenv E); grep ^{name}: /etc/passwd | cut -d: -f7",
         f"call of {name} in /tmp/w\n2 e\n{shell}\n"),
    )  # fmt: skip

    async def test(driver: LocalDriver) -> None:
        sandbox = await driver.start(spec)
        kind = "musl" if image is musl_image else "rhel"
        for command, out in steps:
            assert (await run(sandbox, command)).out == out.format(kind)
        frozen = await sandbox.freeze()
        restored = await driver.restore(spec, frozen)
        command = "f again; echo $A $E; facts; echo x > own; ls -l own | cut -c1-10; cat own"
        live, back = await run(sandbox, command), await run(restored, command)
        assert back.outcome == live.outcome
        assert back.state == live.state
        assert live.out.startswith(f"again of {name} in /tmp/w\n1 e\ngetpwuid: {name} {shell}\ngetpwnam: /root -\n")
        assert "getaddrinfo localhost: 0\ngetaddrinfo no-such-host.invalid: 1\n" in live.out
        assert "thread: one\nfork: 7\nposix_spawnp: 0 8\n" in live.out
        assert (live.effect, live.code) == (Effect.FILES, 0)
        # The rollouts part.
        await run(restored, "echo y >> own; cd ..; A=other")
        assert (await run(sandbox, "pwd; cat own; echo $A")).out == "/tmp/w\nx\n1\n"
        assert (await run(restored, "pwd; cat w/own; echo $A")).out == "/tmp\nx\ny\nother\n"

    driven(LocalDriver(data_dir), test)


def test_processes_run_as_in_a_container(data_dir: Path) -> None:
    """A process of its own has the image's sh, its user, the host's name, and the user that a call names."""

    async def test(driver: LocalDriver) -> None:
        sandbox = await driver.start(EnvironmentSpec(image=musl_image(), hostname="here"))
        assert (await ran(sandbox, "sh", "-c", "readlink -f /bin/sh; id -un; echo $HOSTNAME; hostname")).out == (
            b"/bin/busybox\nguest\nhere\nhere\n"
        )
        assert (await ran(sandbox, "id", user="root")).out == b"uid=0(root) gid=0(root) groups=0(root),1(bin)\n"
        assert (await ran(sandbox, "readlink", "/dev/stdin")).out == b"/proc/self/fd/0\n"

    driven(LocalDriver(data_dir), test)


def test_rpm_knows_its_packages(data_dir: Path) -> None:
    """A package that one rollout removes stays in another."""

    async def test(driver: LocalDriver) -> None:
        spec = EnvironmentSpec(image=configured(rhel_image(), {}))
        sandbox = await driver.start(spec)
        assert (await run(sandbox, "rpm -qf /etc/redhat-release")).out == "redhat-release-9.4-1.noarch\n"
        frozen = await sandbox.freeze()
        assert (await run(sandbox, "rpm -e redhat-release; ls /etc/redhat-release; rpm -qa")).out == ""
        restored = await driver.restore(spec, frozen)
        assert (await run(restored, "rpm -qa; cat /etc/redhat-release")).out == (
            "redhat-release-9.4-1.noarch\nRed Hat Enterprise Linux release 9.4 (Plow)\n"
        )

    driven(LocalDriver(data_dir), test)


def test_root_has_the_groups_of_the_image(data_dir: Path) -> None:
    """Without a user, an image's processes have root's groups and home; without /etc/passwd, root's home is /."""
    more = {"etc/passwd": b"root:x:0:0:root:/srv:/bin/sh\n", "etc/group": b"root:x:0:root\nwheel:x:10:root\n"}

    async def test(driver: LocalDriver) -> None:
        spec = EnvironmentSpec(image=configured(busybox_image(), {}, more))
        command = "id; echo $HOME; grep Groups /proc/self/status"
        expected = "uid=0(root) gid=0(root) groups=0(root),10(wheel)\n/srv\nGroups:\t0 10 \n"
        sandbox = await driver.start(spec)
        assert (await run(sandbox, command)).out == expected
        assert (await ran(sandbox, "sh", "-c", command)).out.decode() == expected
        # File operations have no more rights than its processes.
        status, body = await file(sandbox, "get", "/proc/1/maps")
        assert status == 409, body

    driven(LocalDriver(data_dir), test)


def test_process_needs_no_env_in_the_image(data_dir: Path, tmp_path: Path) -> None:
    """`env` sets a process's variables. An image without it, such as one of static programs, runs processes too."""
    (tmp_path / "tiny.tar").write_bytes(saved([packed(make_tiny)], {"Env": ["A=1"]}))

    async def test(driver: LocalDriver) -> None:
        sandbox = await driver.start(EnvironmentSpec(image=str(tmp_path / "tiny.tar"), workdir="/bin"))
        printed = await ran(
            sandbox, "sh", "-c", "echo $A $B $HOME $PWD; exit 3", env={"B": "two words", "not.a.name": "x"}
        )
        assert (printed.out, printed.err) == (b"1 two words / /bin\n", b"")
        names = (await ran(sandbox, "sh", "-c", "export | sort", env={})).out.decode()
        named = [line.split()[1].split("=")[0] for line in names.splitlines()]
        assert named == ["A", "HOME", "HOSTNAME", "PATH", "PWD", "SHLVL"]
        assert (await ran(sandbox, "/facts")).out.startswith(b"getpwuid: - -\n")

    driven(LocalDriver(data_dir), test)
