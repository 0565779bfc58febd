"""The facts of files: they differ once a file is another one, whatever it looks like."""

import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from sandboxes.shell_files import facts as shell_facts
from tests.machine import wait_until


def facts_of(*paths: Path) -> bytes:
    return shell_facts.facts_of([os.fsencode(path) for path in paths])


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(bytes(path.stat().st_size))
    other.replace(path)


def touch(path: Path) -> None:
    path.touch()


def write(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"X")


def change_mode(path: Path) -> None:
    path.chmod(0o700)


@pytest.mark.parametrize("change", [replace, touch, write, change_mode])
def test_changed_file_has_other_facts(change: Callable[[Path], None], tmp_path: Path) -> None:
    """It has its old size and its old time of content again, which a command can set."""
    path = tmp_path / "file"
    path.write_bytes(b"text")
    before, facts = path.stat(), facts_of(path)
    assert shell_facts.as_now(facts) == facts

    def changed() -> bool:
        change(path)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        # Kernels before 6.13 have one time for all changes of some milliseconds.
        return path.stat().st_ctime_ns != before.st_ctime_ns

    wait_until(changed)
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert shell_facts.as_now(facts) != facts


def test_facts_are_what_the_library_reads(tmp_path: Path) -> None:
    """`preloaded.c` compares the numbers with the kernel's `stat`, in which a time may be before 1970."""
    path, missing = tmp_path / "file", tmp_path / "missing"
    path.write_bytes(b"text")
    os.utime(path, ns=(0, -1))
    changed = path.stat().st_ctime_ns
    fields = (os.fsencode(path), 4, -1, 999_999_999, changed // 10**9, changed % 10**9)
    assert facts_of(path, missing) == struct.pack("=128s5q", *fields) + struct.pack(
        "=128s5q", os.fsencode(missing), -1, 0, 0, 0, 0
    )


@pytest.mark.parametrize("later", [True, False], ids=["appears", "disappears"])
def test_file_that_comes_or_goes_has_other_facts(later: bool, tmp_path: Path) -> None:
    path = tmp_path / "file"
    if not later:
        path.touch()
    facts = facts_of(path)
    if later:
        path.touch()
    else:
        path.unlink()
    assert shell_facts.as_now(facts) not in (facts, b"")


def test_link_has_the_facts_of_what_it_leads_to(tmp_path: Path) -> None:
    """Distributions have links in the paths of bash and its libraries, and a command may change one."""
    one, other, link = (tmp_path / name for name in ("one", "other", "link"))
    one.write_bytes(b"1")
    other.write_bytes(b"22")
    link.symlink_to(one)
    facts = facts_of(link)
    assert facts[shell_facts.PATH_BYTES :] == facts_of(one)[shell_facts.PATH_BYTES :]
    link.unlink()
    link.symlink_to(other)
    assert shell_facts.as_now(facts) != facts


def test_path_needs_room_for_its_end() -> None:
    """A path that is cut off would be another file's."""
    longest = b"/" * (shell_facts.PATH_BYTES - 1)
    assert shell_facts.facts_of([longest]).startswith(longest + b"\0")
    with pytest.raises(ValueError, match="127 bytes"):
        shell_facts.facts_of([longest + b"/"])


def test_file_that_cannot_be_looked_at_has_no_facts(tmp_path: Path) -> None:
    """What is below a file, and what links to itself, is no missing file."""
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path / "file" / "below", tmp_path / "loop"):
        facts = struct.pack("=128s5q", os.fsencode(path), -1, 0, 0, 0, 0)
        assert shell_facts.as_now(facts) == b""
        with pytest.raises(OSError, match=r"Not a directory|symbolic links"):
            facts_of(path)
