"""Attacks on CRIU, which handles what agents have made with all rights. Each driver with checkpoints must hold them.

A process keeps something by its name, and the agent then puts a link where that name led. A checkpointer that looks the
name up again follows the link out of the sandbox. The canary is a file of the host beside the data directory.
"""

import asyncio
import os
import stat
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from sandboxes.driver import FrozenState
from sandboxes.effects import Effect
from sandboxes.errors import NotFreezableError, SandboxError
from sandboxes.linux.files import remove_tree
from sandboxes.spec import EnvironmentSpec
from snapshots.criu.rpc import CriuConversation
from tests.sandboxes.box import opened, run

SPEC = EnvironmentSpec()
SECRET = "the host's secret"
WAIT = "until [ -e ready ] || [ -e d/ready ]; do sleep .02; done; rm -f ready d/ready; "
"""Waits until the process that holds something says that it does; its root directory may be `d`."""


def _shell(holds: str) -> str:
    return f"( {holds}; : > /root/ready; exec sleep 1000 ) & {WAIT}"


def _python(holds: str) -> str:
    return f"cat > hold.py <<'E'\nimport os, socket, time\n{holds}\nopen('/root/ready', 'w'); time.sleep(1000)\nE\npython3 hold.py & {WAIT}"  # noqa: E501


_BOUND = "s = socket.socket(socket.AF_UNIX); s.bind('{}'); s.listen()"
_UNDER_WAY = "a, b = socket.socketpair(); socket.send_fds(a, [b'x'], [os.open('d/e', os.O_RDONLY)])"

REFUSED = {
    "a directory replaced by a link": ("mkdir -p d/e; " + _shell("cd d/e"), "rmdir d/e d; ln -s {out} d"),
    "an open directory replaced by a link": ("mkdir -p d/e; " + _shell("exec 9<d/e"), "rmdir d/e d; ln -s {out} d"),
    "a directory that was removed": ("mkdir -p d/e; " + _shell("cd d/e"), "rmdir d/e d"),
    "a directory whose name another one has": ("mkdir d; " + _shell("cd d"), "rmdir d; mkdir d"),
    "a link that is called deleted": ("mkdir d; " + _shell("cd d"), "rmdir d; ln -s {out} 'd (deleted)'"),
    "a deleted file below a link": (
        "mkdir d; " + _shell("exec 9<>d/planted; chmod 4755 d/planted"),
        "rm d/planted; rmdir d; ln -s {out} d",
    ),
    "a deleted file without its directory": ("mkdir d; " + _shell("exec 9>d/f"), "rm -r d"),
    "a deleted file whose name is a link": (_shell("exec 9>f"), "rm f; ln -s {out}/planted f"),
    "a running program below a link": (
        "mkdir d; cp /bin/sleep d; d/sleep 1000 & until grep -qx sleep /proc/$!/comm; do sleep .02; done",
        "rm -r d; ln -s {out} d",
    ),
    "a mapped file below a link": (
        "mkdir d; " + _python("import ctypes\n"
                              "lib = [line.split()[-1] for line in open('/proc/self/maps') if 'libc.so' in line][0]\n"
                              "open('d/f', 'wb').write(open(lib, 'rb').read()); ctypes.CDLL('/root/d/f')"),
        "rm -r d; ln -s {out} d",
    ),
    "a deleted FIFO below a link": ("mkdir d; mkfifo d/p; " + _shell("exec 9<>d/p"), "rm -r d; ln -s {out} d"),
    "a socket below a link": ("mkdir d; " + _python(_BOUND.format("/root/d/s")), "rm -r d; ln -s {out} d"),
    "a socket bound through a link": ("mkdir d; ln -s d l; " + _python(_BOUND.format("/root/l/s")), ""),
    "a relative socket below a link": (
        "mkdir d; " + _python("os.chdir('d')\n" + _BOUND.format("s") + "\nos.chdir('/')"),
        "rm -r d; ln -s {out} d",
    ),
    "a socket bound below a root that was left": (
        "mkdir d; " + _python("s = socket.socket(socket.AF_UNIX)\nif not os.fork():\n"
                              "    os.chroot('d'); s.bind('/s'); os._exit(0)\nos.wait(); s.listen()"), "",
    ),
    "a socket whose file was moved": (_python(_BOUND.format("/root/s")), "mv s t"),
    "a linked file below a link": ("mkdir d; " + _shell("exec 9>d/f"), "ln d/f kept; rm -r d; ln -s {out} d"),
    "a root directory replaced by a link": ("mkdir d; " + _python("os.chroot('d')").replace("'/root/", "'/"),
                                            "rm -r d; ln -s {out} d"),
    "a memory file with a path as its name": (
        _python("import ctypes; ctypes.CDLL(None).memfd_create(b'../../x', 0)"), "",
    ),
    "a file of another process": (_shell("exec 9</proc/$PPID/status"), ""),
    "memory of a process": (_shell("exec 9</proc/self/mem"), ""),
    "another user's view of a process": (_shell("exec 9</proc/self/environ"), ""),
    "a directory of a process": (_shell("cd /proc/self/task"), ""),
    "a kernel file": (_shell("exec 9</proc/sys/kernel/ns_last_pid"), ""),
    "a name that is too long": (
        "( for i in $(seq 30); do n=$(printf '%0200d' $i); mkdir $n; cd $n; done; : > /root/ready; exec sleep 1000 ) & "
        + WAIT, "",
    ),
    "deleted files in many long places": (
        _python("os.chdir('/root')\nkept = []\nfor number in range(300):\n"
                "    d = '/'.join([f'{number:0200}'] * 6); os.makedirs(d)\n"
                "    kept.append(open(d + '/f', 'w')); os.unlink(d + '/f')"), "",
    ),
    "a descriptor under way": ("mkdir -p d/e; " + _python(_UNDER_WAY), "rmdir d/e d; ln -s {out} d"),
}  # fmt: skip
"""What a process comes to hold, and what the agent does then. Such a state must not be dumped."""

_MEASURED = "a name that is too long"
"""What others write to the disk has the sandbox's files measured, which ends a call that has nested them too deeply."""

KEPT = {
    "a renamed directory": ("mkdir d; echo x > d/f; " + _shell("cd d; exec 9<f"), "mv d e; ln -s {out} d"),
    "a directory that is called deleted": ("mkdir 'd (deleted)'; " + _shell("cd 'd (deleted)'"), ""),
    "a deleted file": (_shell("exec 9>f; rm f; echo 1 >&9"), ""),
    "a memory file": (_python("import ctypes; ctypes.CDLL(None).memfd_create(b'x', 0)"), ""),
    "monitors' files": (_shell("exec 8</proc/stat 9</proc/meminfo"), ""),
    "an own root directory": ("mkdir d; " + _python("os.chroot('d')").replace("'/root/", "'/"), ""),
    "a bound socket": (_python(_BOUND.format("/root/s")), ""),
    "a socket with a winding name": ("mkdir d; " + _python(_BOUND.format("//root/d/../s")), ""),
    "a bound socket without its file": (_python(_BOUND.format("/root/s")), "rm s"),
}
"""The same for what is no attack. Such a state can be kept."""


class CheckpointAttacks:
    """The attacks; a driver's test class provides a driver and says where a copy of the sandbox's files lies."""

    way_out: ClassVar[str]
    """A directory that leads CRIU to the host if CRIU follows a link to it, with `..` at its end."""

    def driver(self) -> Any:
        """Return a new driver with checkpoints."""
        raise NotImplementedError

    def kept_files(self, driver: Any, frozen: FrozenState) -> Path:
        """Return the directory that has what the sandbox had written, as the state keeps it."""
        raise NotImplementedError

    def foreign_processes(self, driver: Any) -> list[int]:
        """Return all processes in the pid namespaces of the driver's sandboxes."""
        raise NotImplementedError

    @pytest.fixture
    def canary(self, data_dir: Path) -> Iterator[Path]:
        """A file of the host beside the data directory, which nothing may read or change."""
        folder = data_dir.parent / f"{data_dir.name}-canary"
        folder.mkdir(mode=0o700)
        (folder / "secret").write_text(SECRET)
        yield folder
        try:
            assert [path.name for path in folder.iterdir()] == ["secret"]
            assert (folder / "secret").read_text() == SECRET
        finally:
            remove_tree(folder)

    def _with(self, test: Callable[[Any], Awaitable[None]]) -> None:
        async def go() -> None:
            async with opened(self.driver()) as driver:
                await test(driver)

        asyncio.run(go())

    @pytest.mark.parametrize(
        "name", [pytest.param(name, marks=[pytest.mark.alone] * (name == _MEASURED)) for name in REFUSED]
    )
    def test_names_that_lead_astray_are_refused(self, canary: Path, name: str) -> None:
        """The state is not dumped, its processes go on, and the host is untouched."""
        begin, swap = REFUSED[name]

        async def test(driver: Any) -> None:
            sandbox = await driver.start(SPEC)
            await run(sandbox, begin)
            await run(sandbox, swap.format(out=f"{self.way_out}{canary}") or "true")
            with pytest.raises(NotFreezableError) as refusal:
                await sandbox.freeze()
            assert "CRIU" not in str(refusal.value), "CRIU has looked something up already"
            assert (await run(sandbox, "kill -0 %1 && echo runs")).out == "runs\n"

        self._with(test)

    @pytest.mark.parametrize("name", KEPT)
    def test_harmless_names_are_kept(self, canary: Path, name: str) -> None:
        begin, swap = KEPT[name]

        async def test(driver: Any) -> None:
            sandbox = await driver.start(SPEC)
            await run(sandbox, begin)
            await run(sandbox, swap.format(out=f"{self.way_out}{canary}") or "true")
            restored = await driver.restore(SPEC, await sandbox.freeze())
            for box in (sandbox, restored):
                assert (await run(box, "kill -0 %1 && echo runs")).out == "runs\n"

        self._with(test)

    @pytest.mark.parametrize(
        ("begin", "more"),
        [(_python(_BOUND.format("/root/d/s")), ""), (_python(_BOUND.format("/root/d/s")), "rm d/s"),
         (_shell("exec 9>d/f"), "rm d/f")],
        ids=["a bound socket", "a bound socket without its file", "a deleted file"],
    )  # fmt: skip
    def test_a_restore_leaves_times(self, begin: str, more: str) -> None:
        """A restore binds sockets again and makes deleted files for a moment; neither shows in any time."""
        look = "find d -printf '%p %y %m %T+\\n' | sort"

        async def test(driver: Any) -> None:
            sandbox = await driver.start(SPEC)
            await run(sandbox, f"mkdir d; {begin}")
            await run(sandbox, more or "true")
            times = (await run(sandbox, look)).out
            frozen = await sandbox.freeze()
            assert (await run(sandbox, look)).out == times
            restored = await driver.restore(SPEC, frozen)
            looked = await run(restored, look)
            assert looked.out == times
            assert Effect.FILES not in looked.effect

        self._with(test)

    @pytest.mark.parametrize("target", ["/root/other", "/proc/1/root/root/other", "out"])
    @pytest.mark.parametrize("held", ["cd d/e", "exec 9>d/e/f", "exec 9<>d/e/p", "exec 9<d/e"])
    def test_restore_follows_no_link(self, canary: Path, target: str, held: str) -> None:
        """Images and files do not belong together here: the kept files have a link that the dump did not see."""

        async def test(driver: Any) -> None:
            sandbox = await driver.start(SPEC)
            await run(sandbox, "mkdir -p d/e other/e; mkfifo d/e/p other/e/p; : > other/e/f")
            await run(sandbox, _shell(held))
            frozen = await sandbox.freeze()
            files = self.kept_files(driver, frozen)
            remove_tree(files / "root/d")
            link = f"{self.way_out}{canary}" if target == "out" else target
            (files / "root/d").symlink_to(link)
            with pytest.raises(SandboxError):
                await driver.restore(SPEC, frozen)

        self._with(test)

    def test_links_are_followed_after_a_restore(self) -> None:
        """No link may be followed while CRIU works; the processes must not notice, at no moment of their lives."""
        watch = "while :; do [ -d l/e ] || echo gone >> seen; done"

        async def test(driver: Any) -> None:
            sandbox = await driver.start(SPEC)
            await run(sandbox, f"mkdir -p d/e; ln -s d l; bash -c '{watch}' & sleep .1")
            frozen = await sandbox.freeze()
            for _ in range(3):
                restored = await driver.restore(SPEC, frozen)
                looked = await run(restored, "ls -d l/e; cat seen; grep -c nosymfollow /proc/self/mountinfo; sleep .1")
                assert looked.out == "l/e\n0\n"

        self._with(test)

    def test_nothing_in_a_sandbox_leads_to_the_host(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A process with all rights in the sandbox, as CRIU has, reaches no host directory through /proc."""
        looks = 0
        led: set[str] = set()
        drivers: list[Any] = []
        receive = CriuConversation._receive

        async def look_and_receive(conversation: CriuConversation) -> bytes:
            nonlocal looks
            message = await receive(conversation)
            result = await asyncio.to_thread(lambda: [look for pid in others() for look in leads_to_host(pid)])
            looks += 1
            led.update(result)
            return message

        def others() -> list[int]:
            return self.foreign_processes(drivers[0])

        monkeypatch.setattr(CriuConversation, "_receive", look_and_receive)

        async def test(driver: Any) -> None:
            drivers.append(driver)
            sandbox = await driver.start(SPEC)
            await run(sandbox, _shell("exec 9>f; cd /tmp"))
            frozen = await sandbox.freeze()
            restored = await driver.restore(SPEC, frozen)
            for box in (sandbox, restored):
                await run(box, "echo 1 > written")
            led.update(look for pid in others() for look in leads_to_host(pid))

        self._with(test)
        # A dump and a restore have about five stages each.
        assert looks > 6
        assert led == set()


def leads_to_host(pid: int) -> list[str]:
    """Return the links of a process in /proc through which a process with all rights could reach the host's files."""
    results = []
    try:
        for link in ("cwd", "root", *(f"fd/{entry.name}" for entry in Path(f"/proc/{pid}/fd").iterdir())):
            path = f"/proc/{pid}/{link}"
            try:
                status, text = Path(path).stat(), str(Path(path).readlink())
                if stat.S_ISDIR(status.st_mode):
                    leads = _has_root_above(path)
                elif stat.S_ISREG(status.st_mode) and not text.startswith("/memfd:"):
                    # The one file of the host that a restore needs. It changes the writing process's pids.
                    known = text == "/proc/sys/kernel/ns_last_pid"
                    leads = not known and _is_foreign(pid, link) and _is_writable(path)
                else:
                    leads = False
            except FileNotFoundError:
                continue
            if leads:
                command = Path(f"/proc/{pid}/cmdline").read_bytes()[:40]
                results.append(f"{link} of {command!r}: {text}")
    except (FileNotFoundError, ProcessLookupError):
        pass
    return results


def _is_foreign(pid: int, link: str) -> bool:
    """Return whether a descriptor belongs to a mount that the sandbox does not have."""
    facts = Path(f"/proc/{pid}/fdinfo/{link.removeprefix('fd/')}").read_text()
    mount = next(line.split()[1] for line in facts.splitlines() if line.startswith("mnt_id:"))
    return mount not in {line.split()[0] for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()}


def _has_root_above(path: str) -> bool:
    """Return whether the host's root is a directory or above it."""
    fd = os.open(path, os.O_PATH | os.O_DIRECTORY)
    while True:
        above = os.open("..", os.O_PATH | os.O_DIRECTORY, dir_fd=fd)
        same = os.path.samestat(os.fstat(fd), os.fstat(above))
        os.close(fd)
        fd = above
        if same:
            try:
                return os.path.samestat(os.fstat(fd), Path("/").stat())
            finally:
                os.close(fd)


def _is_writable(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True
