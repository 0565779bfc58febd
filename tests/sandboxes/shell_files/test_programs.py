"""What programs say of their loader and libraries, and what the loader's cache says, whatever a base has put there."""

import os
import re
import shutil
import struct
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandboxes.linux.spawn import BASH
from sandboxes.shell_files.programs import MalformedError, library_path, read_program

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


MAGIC = b"\x7fELF\x02\x01"
LOADER = "/dev/.shell/loader"
NUMBERS = st.one_of(st.integers(0, 2**16 - 1), st.integers(2**63 - 2**8, 2**64 - 1))


def elf(first: int, size: int, count: int, *headers: bytes, text: bytes = b"") -> bytes:
    """Return a program: its header, program headers and text follow each other, and the header may say otherwise."""
    begin = struct.pack("<6s26xQ14xHHH4x", MAGIC, first, size, count, 0)
    return begin[:64] + b"".join(headers) + text


def header(kind: int, begin: int, length: int) -> bytes:
    """Return a program header of a part that is loaded at the address at which it is in the file."""
    return struct.pack("<I4xQQ8xQ16x", kind, begin, begin, length)


SHORT, PLACES = st.integers(0, 2**16 - 1), st.one_of(st.integers(0, 400), NUMBERS)
HEADERS = st.lists(st.builds(header, st.sampled_from([0, 1, 2, 3, 3, 3, 2**32 - 1]), PLACES, PLACES), max_size=4)
TEXTS = st.one_of(st.binary(max_size=300), st.just(4 * b"/lib64/ld-linux-x86-64.so.2\0"))
PROGRAMS = st.one_of(
    st.binary(max_size=200),
    st.binary(max_size=200).map(MAGIC.__add__),
    st.builds(lambda headers, text: elf(64, 56, len(headers), *headers, text=text), HEADERS, TEXTS),
    st.builds(
        lambda place, size, count, headers, text: elf(place, size, count, *headers, text=text),
        PLACES, SHORT, SHORT, HEADERS, TEXTS,
    ),
)  # fmt: skip


@settings(max_examples=500)
@given(PROGRAMS)
def test_program_of_any_form_has_a_loader_or_is_refused(program: bytes) -> None:
    """What comes back has another path in the place of the loader's, and is otherwise the same program."""
    try:
        read = read_program(program)
        changed = read.with_loader(program, LOADER)
    except MalformedError:
        return
    path = os.fsencode(read.loader)
    assert len(changed) == len(program)
    places = [at for at in range(len(program)) if changed.startswith(LOADER.encode() + b"\0", at)]
    assert any(program.startswith(path, at) and program[:at] == changed[:at] for at in places)


def test_loader_is_replaced_in_a_program_that_still_runs(tmp_path: Path) -> None:
    """Only the bytes of the path change, and the program finds the new loader."""
    bash = Path(BASH).read_bytes()
    program = read_program(bash)
    with TemporaryDirectory(prefix="f", dir="/tmp") as folder:
        copy = Path(folder) / "l"
        edited = program.with_loader(bash, str(copy))
        assert [before for before, after in zip(bash, edited, strict=True) if before != after]
        assert edited.replace(os.fsencode(copy).ljust(len(program.loader), b"\0"), os.fsencode(program.loader)) == bash
        path = tmp_path / "bash"
        path.write_bytes(edited)
        path.chmod(0o755)
        with pytest.raises(FileNotFoundError):
            subprocess.run([path, "-c", ":"], check=False)
        shutil.copy(program.loader, copy)
        assert subprocess.check_output([path, "-c", "echo on"]) == b"on\n"


@pytest.mark.parametrize("loader", ["/", "/other/other", "/other/other2"])
def test_loader_s_path_needs_room_for_its_end(loader: str) -> None:
    """A header says where the path is, and how long with its NUL."""
    program = elf(64, 56, 1, header(3, 120, 13), text=b"/long/loader\0")
    read = read_program(program)
    assert read.loader == "/long/loader"
    if len(loader) < 13:
        assert read.with_loader(program, loader) == program[:120] + loader.encode().ljust(13, b"\0")
    else:
        with pytest.raises(MalformedError, match="too short"):
            read.with_loader(program, loader)


@pytest.mark.parametrize(
    "program",
    [b"", b"#!/bin/sh\n", b"\x7fELF\x01\x01" + bytes(100), b"\x7fELF\x02\x02" + bytes(100), MAGIC, elf(64, 56, 0)],
    ids=["nothing", "a script", "32 bits", "another byte order", "no whole header", "a static program"],
)
def test_other_programs_are_refused(program: bytes) -> None:
    with pytest.raises(MalformedError):
        read_program(program).with_loader(program, LOADER)
