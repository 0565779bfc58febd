"""What programs say of their loader and libraries, and what the loader's cache says, whatever a base has put there."""

import re
import struct
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.linux.spawn import BASH
from sandboxes.local.loading import MalformedError, library_path, read_program

X86_64 = 62
ENTRY = (0x0303, 0, 0)
"""An entry for x86-64: its kind, its version, and the processors that it is for."""


def cache_of(*entries: tuple[str, str, tuple[int, int, int]]) -> bytes:
    """Return a cache with these names, paths and kinds; see `struct cache_file_new` of glibc."""
    at, strings, packed = 48 + 24 * len(entries), b"", b""
    for name, path, (kind, version, processors) in entries:
        key = at + len(strings)
        strings += name.encode() + b"\0"
        packed += struct.pack("<iIIIQ", kind, key, at + len(strings), version, processors)
        strings += path.encode() + b"\0"
    return b"glibc-ld.so.cache1.1" + struct.pack("<II20x", len(entries), len(strings)) + packed + strings


def test_library_is_where_the_cache_says() -> None:
    other = ("libc.so.6", "/lib32/libc.so.6", (0x0003, 0, 0))
    cache = cache_of(("libm.so.6", "/lib/libm.so.6", ENTRY), other, ("libc.so.6", "/lib/libc.so.6", ENTRY))
    assert library_path(cache, "libc.so.6", X86_64) == "/lib/libc.so.6"


@pytest.mark.parametrize(
    "entries",
    [
        [],
        [("libm.so.6", "/lib/libm.so.6", ENTRY)],
        [("libc.so.6", "/a", ENTRY), ("libc.so.6", "/b", ENTRY)],
        [("libc.so.6", "/a", (0x0303, 0, 1 << 62))],
        [("libc.so.6", "/a", (0x0A03, 0, 0))],
    ],
    ids=["empty", "another library", "two places", "some processors", "another machine"],
)
def test_a_cache_without_one_place_is_refused(entries: list[tuple[str, str, tuple[int, int, int]]]) -> None:
    with pytest.raises(MalformedError, match="not one place for libc"):
        library_path(cache_of(*entries), "libc.so.6", X86_64)


def test_a_cache_of_another_form_is_refused() -> None:
    with pytest.raises(MalformedError, match="unknown form"):
        library_path(b"ld.so-1.7.0\0" + bytes(100), "libc.so.6", X86_64)


def test_this_machine_s_bash_loads_what_its_loader_lists() -> None:
    try:
        bash, cache = Path(BASH).read_bytes(), Path("/etc/ld.so.cache").read_bytes()
        listed = subprocess.check_output([read_program(bash).loader, "--list", BASH], text=True, env={})
    except (OSError, subprocess.CalledProcessError, MalformedError) as error:
        pytest.skip(f"this machine's bash is loaded in another way: {error}")
    program = read_program(bash)
    found = {name: library_path(cache, name, program.machine) for name in program.needed}
    assert found.items() <= dict(re.findall(r"(\S+) => (/\S+) \(0x", listed)).items()
    assert found


def changed(content: bytes, edits: list[tuple[int, int]], size: int) -> bytes:
    """Return a file with some bytes set, and cut off."""
    edited = bytearray(content)
    for at, value in edits:
        edited[at % len(edited)] = value
    return bytes(edited[: size % (len(edited) + 1)] if size % 3 else edited)


EDITS = st.lists(st.tuples(st.one_of(st.integers(0, 1200), st.integers(0, 1 << 21)), st.integers(0, 255)), max_size=20)


@given(EDITS, st.integers(0, 1 << 21))
def test_any_program_is_read_or_refused(edits: list[tuple[int, int]], size: int) -> None:
    """Most of what says how a program is loaded is in its first kilobyte."""
    content = changed(Path(BASH).read_bytes(), edits, size)
    try:
        program = read_program(content)
        longest = program.with_loader(content, "/l")
    except MalformedError:
        return
    assert len(longest) == len(content)


@given(EDITS, st.integers(0, 1 << 21), st.sampled_from(["libc.so.6", "", "\0", "x"]))
def test_any_cache_is_read_or_refused(edits: list[tuple[int, int]], size: int, name: str) -> None:
    cache = cache_of(("libm.so.6", "/lib/libm.so.6", ENTRY), ("libc.so.6", "/lib/libc.so.6", ENTRY))
    try:
        assert isinstance(library_path(changed(cache, edits, size), name, X86_64), str)
    except MalformedError:
        return


@given(st.binary(max_size=300))
def test_no_bytes_raise_another_error(content: bytes) -> None:
    for read in (lambda: read_program(b"\x7fELF\x02\x01" + content), lambda: library_path(content, "x", X86_64)):
        try:
            read()
        except MalformedError:
            continue


def test_reading_what_a_base_holds_has_a_bound() -> None:
    """A name without an end, of which each of many entries is a part."""
    entries = b"".join(struct.pack("<iIIIQ", 0x0303, 48 + at, 48, 0, 0) for at in range(1 << 15))
    cache = b"glibc-ld.so.cache1.1" + struct.pack("<II20x", 1 << 15, 0) + entries + b"x" * (8 << 20)
    with pytest.raises(MalformedError):
        library_path(cache, "libc.so.6", X86_64)
    with pytest.raises(MalformedError, match="entries"):
        library_path(cache[:20] + struct.pack("<I", 1 << 31) + cache[24:], "libc.so.6", X86_64)
