"""Attacks that every driver of machine sandboxes must withstand. Each is really tried."""

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, ClassVar, Protocol

import pytest

from sandboxes.driver import Sandbox
from tests.sandboxes import archive_attacks, attack_list
from tests.sandboxes.box import SMALL, file, is_stopped, run
from tests.sandboxes.processes import archive


class Inside(Protocol):
    """Runs a test on a fresh sandbox with a spec."""

    def __call__(self, test: Callable[[Sandbox], Awaitable[None]], **spec: Any) -> None: ...


class SecurityContract:
    """The attacks; a driver's test class provides `inside` and the commands that it refuses."""

    refused: ClassVar[dict[str, str]]
    """Shell commands that must fail, by what they attack."""

    unreachable: ClassVar[tuple[str, ...]]
    """Network addresses that must not be reached, as bash's /dev/tcp names them."""

    needs_root: ClassVar[bool]
    """Whether the driver limits processes and memory, and hides files, only for a proxy with root."""

    max_processes: ClassVar[int]
    """Limits the processes, `ps` and its pipe included, that may be left after a fork bomb."""

    @pytest.fixture
    def inside(self) -> Inside:
        """Return what runs a test on a fresh sandbox."""
        raise NotImplementedError

    def _require_root(self) -> None:
        if self.needs_root and os.geteuid() != 0:
            pytest.skip("checks control groups and mounts, which need root")

    def test_attacks_are_refused(self, inside: Inside) -> None:
        self._require_root()

        async def test(sandbox: Sandbox) -> None:
            succeeded = [name for name, attack in self.refused.items() if (await run(sandbox, attack)).code == 0]
            assert succeeded == []

        inside(test)

    def test_files_and_archives_stay_inside(self, inside: Inside, tmp_path: Path) -> None:
        """The front of a file API has no attack of its own: each path is resolved in the sandbox, as the agent."""
        canary = tmp_path / "canary"
        canary.write_text("secret of the host")
        before = canary.stat()

        async def test(sandbox: Sandbox) -> None:
            await run(sandbox, f"ln -s / /tmp/out; mkdir -p {tmp_path}")
            for number, (name, packed) in enumerate(archive_attacks.archives(canary)):
                # Each gets a directory of its own, so that no attack meets what another one left.
                await run(sandbox, f"mkdir /tmp/{number}")
                await archive(sandbox, "extract", f"/tmp/{number}", packed)
                assert canary.read_text() == "secret of the host", name
            # Those behind links were carried out, on the file that has this name in the sandbox.
            assert (await run(sandbox, f"cat {canary}")).out == "hostile"
            for path in archive_attacks.paths(canary):
                for answer in (
                    await archive(sandbox, "pack", path), await file(sandbox, "get", path),
                    await file(sandbox, "put", path, b"hostile"), await file(sandbox, "delete", path),
                ):  # fmt: skip
                    assert b"secret of the host" not in answer[1], path
            for device in ("/tmp/*/device", "/root/device"):
                assert (await run(sandbox, f"head -c 1 {device}")).code != 0

        inside(test)
        after = canary.stat()
        assert (after.st_ino, after.st_mtime_ns, after.st_nlink) == (before.st_ino, before.st_mtime_ns, 1)
        assert [path.name for path in tmp_path.iterdir()] == ["canary"]

    def test_network_has_only_the_loopback(self, inside: Inside) -> None:
        async def test(sandbox: Sandbox) -> None:
            assert (await run(sandbox, "tail -n +3 /proc/net/dev | cut -d: -f1")).out.strip() == "lo"
            for address in self.unreachable:
                assert (await run(sandbox, f"exec 5<>/dev/tcp/{address}")).code != 0

        inside(test)

    def test_host_processes_are_out_of_reach(self, inside: Inside) -> None:
        """A sandbox may kill what is its own; its next call then gets a fresh shell with the same session."""

        async def test(sandbox: Sandbox) -> None:
            kills = f"kill -9 {os.getpid()}; ls /proc | grep -c '^[0-9]'; kill -9 1; kill -TERM 1; echo on"
            lines = (await run(sandbox, kills)).out.splitlines()
            assert lines[-1] == "on"
            assert int(lines[0]) < 10
            assert (await run(sandbox, "x=kept")).code == 0
            assert (await run(sandbox, "kill -9 -1; echo no")).out in {"", "no\n"}
            assert (await run(sandbox, "echo alive $x")).out == "alive kept\n"
            assert sandbox.alive

        inside(test)

    def test_fork_bomb_stays_within_its_limit(self, inside: Inside) -> None:
        self._require_root()

        async def test(sandbox: Sandbox) -> None:
            assert (await run(sandbox, "bomb() { bomb | bomb & }; bomb; sleep 30")).code == 137
            assert int((await run(sandbox, "ps -e | wc -l")).out) <= self.max_processes

        inside(test, limits=SMALL)

    def test_memory_bomb_is_killed(self, inside: Inside) -> None:
        """The command is killed, or the shell itself; the sandbox survives both."""
        self._require_root()

        async def test(sandbox: Sandbox) -> None:
            bomb = await run(sandbox, "python3 -c 'x = bytearray(1 << 30); print(len(x))'")
            assert (bomb.code, bomb.out) == (137, "")
            bomb = await run(sandbox, "x=$(head -c 1000000000 /dev/zero | tr '\\0' x); echo no", timeout_s=15)
            assert bomb.out == ""
            assert (await run(sandbox, "echo alive")).out == "alive\n"

        inside(test, limits=SMALL)

    @pytest.mark.parametrize("way", attack_list.FILLERS)
    def test_disk_is_filled_in_no_other_way(self, inside: Inside, way: str) -> None:
        async def test(sandbox: Sandbox) -> None:
            assert await is_stopped(sandbox, attack_list.FILLERS[way])

        inside(test, limits=SMALL)

    def test_disk_filler_is_stopped(self, inside: Inside) -> None:
        async def test(sandbox: Sandbox) -> None:
            big = await run(sandbox, "head -c 100M /dev/zero > /tmp/big; stat -c %s /tmp/big")
            # Either limit may be met first: that of a file, or that of all files.
            assert big.code == 137 or int(big.out) <= 24 << 20
            many = "rm /tmp/big; for i in $(seq 50); do head -c 8M /dev/zero > /tmp/f$i; sleep 0.02; done"
            stopped = await run(sandbox, many)
            assert stopped.code == 137
            assert "killed: the sandbox may hold 24 MB" in stopped.err
            assert (await run(sandbox, "rm -f /tmp/f*; echo room")).out == "room\n"
            assert (await run(sandbox, "head -c 1M /dev/zero > /tmp/f; echo written")).out == "written\n"

        inside(test, limits=SMALL)
