"""Tarballs of root file systems that try to write outside of their directory, or to use up the machine."""

import contextlib
import io
import os
import tarfile
from pathlib import Path

import pytest

from sandboxes.images import root_tar
from sandboxes.images.config import ImageError

Member = tuple[str, bytes, str]
"""The name of a member, its type, and its content or where it leads."""

ESCAPES: dict[str, list[Member]] = {
    "a name with dots": [("../evil", tarfile.REGTYPE, "evil")],
    "an absolute name": [("{outside}/evil", tarfile.REGTYPE, "evil")],
    "a link, then a file below it": [("l", tarfile.SYMTYPE, "{outside}"), ("l/evil", tarfile.REGTYPE, "evil")],
    "a relative link, then a file below it": [
        ("l", tarfile.SYMTYPE, "../outside"),
        ("l/evil", tarfile.REGTYPE, "evil"),
    ],
    "a link, then a file of its name": [
        ("f", tarfile.SYMTYPE, "{outside}/canary"),
        ("f", tarfile.REGTYPE, "evil"),
    ],
    "a link, then a directory of its name": [("d", tarfile.SYMTYPE, "{outside}"), ("d", tarfile.DIRTYPE, "")],
    "a hard link to a file of the host": [("h", tarfile.LNKTYPE, "{outside}/canary")],
    "a hard link with dots": [("h", tarfile.LNKTYPE, "../outside/canary")],
    "a hard link through a link": [("l", tarfile.SYMTYPE, "{outside}"), ("h", tarfile.LNKTYPE, "l/canary")],
    "a hard link to a link, written through": [
        ("l", tarfile.SYMTYPE, "{outside}/canary"),
        ("h", tarfile.LNKTYPE, "l"),
        ("h", tarfile.REGTYPE, "evil"),
    ],
    "a path that is too long to be resolved (CVE-2025-4517)": [
        *[("/".join(["d" * 247] * level), tarfile.DIRTYPE, "") for level in range(1, 17)],
        *[(f"{'/'.join(['d' * 247] * level)}/{chr(97 + level)}", tarfile.SYMTYPE, "d" * 247) for level in range(16)],
        ("abcdefghijklmnop/" + "l" * 254, tarfile.SYMTYPE, "../" * 16),
        ("escape", tarfile.SYMTYPE, "abcdefghijklmnop/" + "l" * 254 + "/../../../outside"),
        ("escape/evil", tarfile.REGTYPE, "evil"),
    ],
    "a magic link of proc": [("p", tarfile.SYMTYPE, "/proc/self/root{outside}"), ("p/evil", tarfile.REGTYPE, "evil")],
}


def written(path: Path, members: list[Member], outside: Path) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, kind, text in members:
            info = tarfile.TarInfo(name.replace("{outside}", str(outside)))
            info.type, info.mode = kind, 0o4755
            leads = text.replace("{outside}", str(outside))
            if kind == tarfile.REGTYPE:
                info.size = len(text)
                archive.addfile(info, io.BytesIO(text.encode()))
            else:
                info.linkname = leads
                archive.addfile(info)
    return path


@pytest.mark.parametrize("name", ESCAPES)
def test_nothing_is_written_outside_of_the_target(tmp_path: Path, name: str) -> None:
    outside, target = tmp_path / "outside", tmp_path / "target"
    outside.mkdir()
    target.mkdir()
    (outside / "canary").write_text("canary")
    (outside / "canary").chmod(0o600)
    before = {path: (path.lstat().st_mode, path.lstat().st_nlink) for path in outside.rglob("*")}
    with contextlib.suppress(ImageError, OSError):
        root_tar.unpack(written(tmp_path / "evil.tar", ESCAPES[name], outside), target)
    assert {path: (path.lstat().st_mode, path.lstat().st_nlink) for path in outside.rglob("*")} == before
    assert (outside / "canary").read_text() == "canary"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["evil.tar", "outside", "target"]


def test_root_file_system_is_unpacked_whole(tmp_path: Path) -> None:
    """Modes, links through links, hard links and FIFOs are as in the archive; device nodes are left out."""
    target = tmp_path / "target"
    target.mkdir()
    members: list[Member] = [
        ("usr/lib", tarfile.DIRTYPE, ""),
        ("lib", tarfile.SYMTYPE, "usr/lib"),
        ("./lib/libc.so", tarfile.REGTYPE, "elf"),
        ("/etc/alias", tarfile.SYMTYPE, "/usr/lib/libc.so"),
        ("twin", tarfile.LNKTYPE, "lib/libc.so"),
        ("pipe", tarfile.FIFOTYPE, ""),
        ("dev/sda", tarfile.BLKTYPE, ""),
    ]
    root_tar.unpack(written(tmp_path / "root.tar", members, tmp_path), target)
    assert (target / "usr/lib/libc.so").read_text() == "elf"
    assert (target / "usr/lib/libc.so").stat().st_mode & 0o7777 == 0o4755
    assert (target / "twin").stat().st_nlink == 2
    assert (target / "etc/alias").readlink() == Path("/usr/lib/libc.so")
    assert (target / "pipe").is_fifo()
    assert not (target / "dev").exists()


@pytest.mark.parametrize("damage", ["cut", "header of gigabytes", "chain of headers", "no archive"])
def test_damaged_tarball_is_refused(tmp_path: Path, damage: str) -> None:
    path, target = tmp_path / "evil.tar.gz", tmp_path / "target"
    target.mkdir()
    if damage == "cut":
        with tarfile.open(path, "w:gz") as archive:
            info = tarfile.TarInfo("f")
            info.size = 1 << 20
            archive.addfile(info, io.BytesIO(os.urandom(1 << 20)))
        path.write_bytes(path.read_bytes()[:500_000])
    elif damage == "no archive":
        path.write_bytes(b"no archive" * 100)
    else:
        plain = tarfile.TarInfo("f").tobuf()
        head = tarfile.TarInfo("././@LongLink")
        head.type, head.size = tarfile.GNUTYPE_LONGNAME, (4 << 30 if damage.startswith("header") else 512)
        repeated = 1 if damage.startswith("header") else 5_000
        path.write_bytes(plain + (head.tobuf(tarfile.GNU_FORMAT) + b"n" * 511 + b"\0") * repeated)
    with pytest.raises((ImageError, OSError)):
        root_tar.unpack(path, target)
