"""The copies of a base's shell: what they are, and when there are none. Hostile bases: `test_shells_of_bases.py`."""

import asyncio
import os
import re
import resource
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from sandboxes.linux import spawn
from sandboxes.shell_files import copies
from sandboxes.shell_files import facts as shell_facts
from sandboxes.shell_files.copies import NoShellFilesError, ShellCopies
from tests.sandboxes.box import needs_forks


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A base that has this machine's bash, and what loading it involves. Its directories are absolute links."""
    root = tmp_path / "base"
    listed = subprocess.check_output(["ldd", spawn.BASH], text=True)
    for path in (spawn.BASH, "/etc/ld.so.cache", *re.findall(r"(/\S+) \(0x", listed)):
        place = root / "usr" / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place)
    for folder in (root / "usr").iterdir():
        (root / folder.name).symlink_to(f"/usr/{folder.name}")
    return root


def test_copies_are_of_the_base_and_whole(base: Path, preloaded_helper: Path, tmp_path: Path) -> None:
    """Each user may read and execute them, whatever the umask is."""
    made = tmp_path / "made"
    with (base / "usr/bin/bash").open("ab") as bash:
        bash.write(b"of the base")
    before = os.umask(0o077)
    try:
        digest = copies.make(made, preloaded_helper, str(base))
    finally:
        os.umask(before)
    files = made / "files"
    names = {path.name for path in files.iterdir()}
    assert names > {"bash", "loader", "preloaded.so", "facts", "digest", "libc.so.6"}
    assert {path.stat().st_mode & 0o777 for path in (files, made / "empty", *files.iterdir())} == {0o755}
    assert list((made / "empty").iterdir()) == []
    assert (files / "digest").read_text() == digest
    assert (files / "bash").read_bytes().endswith(b"of the base")
    assert (files / "preloaded.so").read_bytes() == preloaded_helper.read_bytes()


def test_facts_are_of_all_files_that_loading_involves(base: Path, preloaded_helper: Path, tmp_path: Path) -> None:
    """Each fact is of a file of the base, by the path that this file has in a sandbox."""
    listed = re.findall(r"(/\S+) \(0x", subprocess.check_output(["ldd", spawn.BASH], text=True))
    paths = {spawn.BASH, *listed, "/etc/ld.so.cache", "/etc/ld.so.preload"}
    copies.make(tmp_path / "made", preloaded_helper, str(base))
    facts = (tmp_path / "made/files/facts").read_bytes()
    size = shell_facts.PATH_BYTES + 5 * 8
    found = {facts[at : at + size].split(b"\0")[0].decode(): facts[at : at + size] for at in range(0, len(facts), size)}
    assert found.keys() == paths
    for path, fact in found.items():
        there = base / "usr" / path.lstrip("/")
        assert fact[shell_facts.PATH_BYTES :] == shell_facts.facts_of([os.fsencode(there)])[shell_facts.PATH_BYTES :]


def test_digest_differs_with_each_copy(base: Path, preloaded_helper: Path, tmp_path: Path) -> None:
    """A checkpoint has pages of all of them, so it may go on only with the same ones."""
    digest = copies.make(tmp_path / "made", preloaded_helper, str(base))
    assert copies.make(tmp_path / "made", preloaded_helper, str(base)) == digest
    seen = {digest}
    other = tmp_path / "other.so"
    other.write_bytes(preloaded_helper.read_bytes() + b"\0")
    seen.add(copies.make(tmp_path / "made", other, str(base)))
    changed = [path for path in (base / "usr").rglob("*") if path.is_file() and path.name != "ld.so.cache"]
    for path in changed:
        with path.open("ab") as file:
            file.write(b"\0")
        seen.add(copies.make(tmp_path / "made", preloaded_helper, str(base)))
    assert len(seen) == 2 + len(changed)


def _replace(path: Path, content: bytes) -> None:
    path.unlink()
    path.write_bytes(content)


def _link(path: Path, to: str) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(to)


UNFIT: dict[str, Callable[[Path], object]] = {
    "no bash": lambda usr: (usr / "bin/bash").unlink(),
    "a directory for bash": lambda usr: _link(usr / "bin/bash", "/usr/etc"),
    "a library less": lambda usr: next(usr.rglob("libc.so.6")).unlink(),
    "no cache of the loader": lambda usr: (usr / "etc/ld.so.cache").unlink(),
    "another cache of the loader": lambda usr: _replace(usr / "etc/ld.so.cache", b"glibc-ld.so.cache1.1" + bytes(50)),
    "an endless link to preload": lambda usr: _link(usr / "etc/ld.so.preload", "/etc/ld.so.preload"),
}
"""What makes a base unfit, by name: a function of its directory /usr."""


@pytest.mark.parametrize("name", UNFIT)
def test_of_an_unfit_base_there_are_no_copies(base: Path, preloaded_helper: Path, tmp_path: Path, name: str) -> None:
    """What was there before does not stay."""
    copies.make(tmp_path / "made", preloaded_helper, str(base))
    UNFIT[name](base / "usr")
    with pytest.raises(NoShellFilesError):
        copies.make(tmp_path / "made", preloaded_helper, str(base))
    assert not (tmp_path / "made/files/digest").exists()


def test_without_the_compiled_library_there_are_no_copies(base: Path, preloaded_helper: Path, tmp_path: Path) -> None:
    copies.make(tmp_path / "made", preloaded_helper, str(base))
    with pytest.raises(NoShellFilesError, match="/nowhere"):
        copies.make(tmp_path / "made", Path("/nowhere/preloaded.so"), str(base))
    assert not (tmp_path / "made/files/digest").exists()


def test_folder_that_cannot_be_made_is_no_other_error(base: Path, preloaded_helper: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NoShellFilesError, match="Not a directory"):
        copies.make(tmp_path / "file" / "made", preloaded_helper, str(base))


def test_full_disk_is_no_other_error(base: Path, tmp_path: Path, preloaded_helper: Path) -> None:
    """Sandboxes start without the copies then."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The kernel sends SIGXFSZ, which Python ignores, and the write fails as on a full disk (setrlimit(2)).
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(NoShellFilesError, match="File too large"):
            copies.make(tmp_path / "made", preloaded_helper, str(base))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "made/files/digest").exists()


def test_copies_do_not_tell_when_they_were_made(base: Path, preloaded_helper: Path, tmp_path: Path) -> None:
    copies.make(tmp_path / "made", preloaded_helper, str(base))
    files = tmp_path / "made" / "files"
    assert {path.stat().st_mtime for path in (files, *files.iterdir())} == {0}


@needs_forks
def test_copies_are_kept_once_and_of_this_machine_s_bash_alone(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bases with another bash leave nothing, so they take no room from others."""
    monkeypatch.setattr(copies, "_MAX_COPIES", 2)
    other = tmp_path / "other"
    shutil.copytree(base, other, symlinks=True)
    with (other / "usr/bin/bash").open("ab") as bash:
        bash.write(b"x")

    async def go() -> None:
        made = ShellCopies(tmp_path / "shells")
        for number in range(3):
            assert await made.of(f"other {number}", str(other)) is None
        own = await made.of("host: before", "/")
        assert own is not None
        assert await made.of("host: after a change of other files", "/") is own
        same = await made.of("same", str(base))
        assert same is not None
        assert (same.digest, same.folder == own.folder, made.last) == (own.digest, False, same.folder)
        assert {str(path) for path in (tmp_path / "shells").iterdir()} == {own.folder, same.folder}
        (base / "usr/bin/bash").touch()
        assert await made.of("a third", str(base)) is None
        made.open()
        assert not (tmp_path / "shells").exists()

    asyncio.run(go())
