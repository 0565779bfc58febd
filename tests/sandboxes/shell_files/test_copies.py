"""The copies of a machine's bash: what they are, and when there are none."""

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
from sandboxes.shell_files.copies import NoShellFilesError


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A root that has this machine's bash, and what loading it involves. Its directories are absolute links."""
    root = tmp_path / "machine"
    listed = subprocess.check_output(["ldd", spawn.BASH], text=True)
    for path in (spawn.BASH, "/etc/ld.so.cache", *re.findall(r"(/\S+) \(0x", listed)):
        place = root / "usr" / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place)
    for folder in (root / "usr").iterdir():
        (root / folder.name).symlink_to(f"/usr/{folder.name}")
    return root


def test_copies_are_of_the_machine_and_whole(machine: Path, anchor_helper: Path, tmp_path: Path) -> None:
    """Each user may read and execute them, whatever the umask is."""
    folder = tmp_path / "made"
    with (machine / "usr/bin/bash").open("ab") as bash:
        bash.write(b"of the machine")
    before = os.umask(0o077)
    try:
        made = copies.make(folder, anchor_helper, str(machine))
    finally:
        os.umask(before)
    files = folder / "files"
    names = {path.name for path in files.iterdir()}
    assert names > {"bash", "loader", "libanchor.so", "digest", "libc.so.6"}
    assert {path.stat().st_mode & 0o777 for path in (files, folder / "empty", *files.iterdir())} == {0o755}
    assert list((folder / "empty").iterdir()) == []
    assert (made.folder, made.digest) == (str(folder), (files / "digest").read_text())
    assert (files / "bash").read_bytes().endswith(b"of the machine")
    assert (files / "libanchor.so").read_bytes() == anchor_helper.read_bytes()


def test_copied_bash_loads_copies_alone(shell_folder: Path) -> None:
    """Its program names the copy of the loader, and that loader reads no list of libraries to preload."""
    bash, loader = ((shell_folder / "files" / name).read_bytes() for name in ("bash", "loader"))
    assert b"/dev/.shell/loader\0" in bash
    assert b"/etc/ld.so.preload" not in loader


def test_digest_differs_with_each_copy(machine: Path, anchor_helper: Path, tmp_path: Path) -> None:
    """A checkpoint has pages of all of them, so it may go on only with the same ones."""

    def digest(library: Path = anchor_helper) -> str:
        return copies.make(tmp_path / "made", library, str(machine)).digest

    first = digest()
    assert digest() == first
    other = tmp_path / "other.so"
    other.write_bytes(anchor_helper.read_bytes() + b"\0")
    seen = {first, digest(other)}
    changed = [path for path in (machine / "usr").rglob("*") if path.is_file() and path.name != "ld.so.cache"]
    for path in changed:
        with path.open("ab") as file:
            file.write(b"\0")
        seen.add(digest())
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
    "libraries to preload": lambda usr: (usr / "etc/ld.so.preload").touch(),
    "an endless link to preload": lambda usr: _link(usr / "etc/ld.so.preload", "/etc/ld.so.preload"),
}
"""What makes a machine unfit, by name: a function of its directory /usr."""


@pytest.mark.parametrize("name", UNFIT)
def test_of_an_unfit_machine_there_are_no_copies(machine: Path, anchor_helper: Path, tmp_path: Path, name: str) -> None:
    """What was there before does not stay."""
    copies.make(tmp_path / "made", anchor_helper, str(machine))
    UNFIT[name](machine / "usr")
    with pytest.raises(NoShellFilesError):
        copies.make(tmp_path / "made", anchor_helper, str(machine))
    assert not (tmp_path / "made/files/digest").exists()


def test_without_the_compiled_library_there_are_no_copies(machine: Path, anchor_helper: Path, tmp_path: Path) -> None:
    copies.make(tmp_path / "made", anchor_helper, str(machine))
    with pytest.raises(NoShellFilesError, match="/nowhere"):
        copies.make(tmp_path / "made", Path("/nowhere/libanchor.so"), str(machine))
    assert not (tmp_path / "made/files/digest").exists()


def test_a_proxy_starts_without_copies_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of an earlier start do not stay: this machine's bash may be another one by now."""

    def no_copies(_folder: Path) -> None:
        raise NoShellFilesError("no compiler")

    (tmp_path / "files").mkdir()
    monkeypatch.setattr(copies, "make", no_copies)
    assert copies.made_or_none(tmp_path) is None
    assert "each shell is executed" in caplog.text
    assert "no compiler" in caplog.text
    assert not tmp_path.exists()


def test_folder_that_cannot_be_made_is_no_other_error(machine: Path, anchor_helper: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NoShellFilesError, match="Not a directory"):
        copies.make(tmp_path / "file" / "made", anchor_helper, str(machine))


def test_full_disk_is_no_other_error(machine: Path, tmp_path: Path, anchor_helper: Path) -> None:
    """Sandboxes start without the copies then."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The kernel sends SIGXFSZ, which Python ignores, and the write fails as on a full disk (setrlimit(2)).
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(NoShellFilesError, match="File too large"):
            copies.make(tmp_path / "made", anchor_helper, str(machine))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "made/files/digest").exists()


def test_copies_do_not_tell_when_they_were_made(machine: Path, anchor_helper: Path, tmp_path: Path) -> None:
    copies.make(tmp_path / "made", anchor_helper, str(machine))
    files = tmp_path / "made" / "files"
    assert {path.stat().st_mtime for path in (files, *files.iterdir())} == {0}
