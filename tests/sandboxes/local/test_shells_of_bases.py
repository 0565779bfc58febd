"""In sandboxes of which bases shells are forks, and what a hostile base cannot do."""

import asyncio
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from sandboxes.linux import spawn
from sandboxes.local.driver import LocalDriver
from sandboxes.shell_files import copies
from sandboxes.shell_files.copies import NoShellFilesError
from sandboxes.spec import EnvironmentSpec
from tests.machine import require_sandboxes
from tests.sandboxes.box import local_driver, needs_forks, needs_root, opened, run
from tests.sandboxes.guest.forking_anchor import FORK
from tests.sandboxes.local.test_states import small_base


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A root file system with this machine's bash, whose libraries are in a cache."""
    root = small_base(tmp_path / "root")
    (root / "etc").mkdir()
    folders = sorted({f"/{path.parent.relative_to(root)}" for path in root.rglob("*.so*")})
    (root / "etc" / "ld.so.conf").write_text("".join(f"{folder}\n" for folder in folders))
    subprocess.run(["/sbin/ldconfig", "-r", root], check=True)
    return root


def changed(base: Path, root: Path, name: str) -> EnvironmentSpec:
    """Return a spec of a copy of a base, in which one of its files has a byte more."""
    shutil.copytree(base, root, symlinks=True)
    [path] = root.rglob(name)
    path.write_bytes(path.read_bytes() + b"x")
    return EnvironmentSpec(base=str(root))


@needs_root
@needs_forks
def test_only_the_bash_of_this_machine_is_forked(data_dir: Path, base: Path, tmp_path: Path) -> None:
    """Its code, and that of its libraries, runs in the process that starts shells.

    There other code could go on after the layers were sealed, and change a state that others are restored from. A spare
    may have been made for another base, and a restored sandbox is like a new one.
    """
    require_sandboxes()
    shown = f"[[ /proc/$$/exe -ef {FORK} ]] && echo fork; [[ /proc/$$/exe -ef /bin/bash ]] && echo own"
    # Nothing of another base may be seen, or answers would depend on what the spare was made for.
    shown += (
        "; (shopt -s nullglob; names=(/dev/.shell/*); echo ${#names[@]}; (( ${#names[@]} )) && cat /dev/.shell/digest)"
    )
    host, same = EnvironmentSpec(), EnvironmentSpec(base=str(base))
    others = [changed(base, tmp_path / name, name) for name in ("bash", "libtinfo.so*", "libc.so*", "ld-linux*")]

    digests: set[str] = set()

    async def go() -> None:
        async with opened(local_driver(data_dir, checkpoints=False)) as driver:
            for spec in (host, *others, same, *others, host):
                sandbox = await driver.start(spec)
                await run(sandbox, "echo x >/tmp/f")
                restored = await driver.restore(spec, await sandbox.freeze())
                for each in (sandbox, restored):
                    answer = await run(each, shown)
                    assert re.fullmatch(r"own\n0\n" if spec in others else r"fork\n7\n[0-9a-f]{32}", answer.out)
        async with opened(LocalDriver(data_dir, trust_bases=True)) as driver:
            for spec in (*others, same, host):
                answer = await run(await driver.start(spec), shown)
                assert re.fullmatch(r"fork\n7\n[0-9a-f]{32}", answer.out)
                digests.add(answer.out)
        # The host's is that of its equal.
        assert len(digests) == len(others) + 1

    asyncio.run(go())


def hostile(base: Path, what: str, outside: Path) -> None:
    bash = base / spawn.BASH[1:]
    match what:
        case "a pipe":
            bash.unlink()
            os.mkfifo(bash)
        case "a link to the outside":
            bash.unlink()
            bash.symlink_to(f"{'../' * 40}{outside}")
        case "a huge file":
            os.truncate(bash, 1 << 40)
        case "no bash":
            bash.write_bytes(b"#!/bin/cat\n")
        case "a huge cache":
            os.truncate(base / "etc" / "ld.so.cache", 1 << 40)
        case "preloads":
            (base / "etc" / "ld.so.preload").write_text("/tmp/x.so\n")
        case "a library that is a link to the outside":
            for library in base.rglob("libc.so*"):
                library.unlink()
                library.symlink_to(f"{'../' * 40}{outside}")


@pytest.mark.parametrize(
    "what",
    [
        "a pipe", "a link to the outside", "a huge file", "no bash", "a huge cache", "preloads",
        "a library that is a link to the outside",
    ],
)  # fmt: skip
def test_no_copies_are_made_of_a_hostile_base(base: Path, tmp_path: Path, what: str) -> None:
    """What it names is looked up in the base, and no file outside of it is read."""
    outside = tmp_path / "outside"
    outside.write_bytes(Path(spawn.BASH).read_bytes())
    hostile(base, what, outside)
    library = tmp_path / "library"
    library.write_bytes(b"")
    with pytest.raises(NoShellFilesError):
        copies.make(tmp_path / "made", library, str(base))
    assert not (tmp_path / "made" / "files" / "digest").exists()
