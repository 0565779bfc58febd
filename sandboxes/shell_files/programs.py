"""What is loaded together with a program: its loader, and the libraries that it needs (pure).

The programs and the cache are a base's, so data of a stranger: `MalformedError` is raised or something returned,
whatever they hold. Only 64-bit programs of this machine's byte order are read (elf(5)).
"""

import struct
from dataclasses import dataclass

_BEGIN = b"\x7fELF\x02\x01"
_HEADER = struct.Struct("<18xH12xQ14xHH6x")
"""Of an ELF header (Elf64_Ehdr): the machine, where the program headers begin, the size of one, and their number."""
_PROGRAM_HEADER = struct.Struct("<I4xQQ8xQ16x")
"""Of a program header (Elf64_Phdr): its type, where in the file it begins, its address, and its size in the file."""
_LOAD, _DYNAMIC, _INTERPRETER = 1, 2, 3
_TAG = struct.Struct("<qQ")
_END, _NEEDED, _STRINGS, _RPATH, _RUNPATH = 0, 1, 5, 15, 29
"""Tags of the dynamic section."""
_MAX_HEADERS, _MAX_TAGS, _MAX_ENTRIES, _MAX_TEXT_BYTES = 64, 1024, 50_000, 4096
"""How much is read: program headers, tags, entries of a cache, and bytes of a name. bash has 14 and 32, a cache some
thousand. Reading takes 0.1 s at the most, in which other threads wait for the interpreter."""

_CACHE_BEGIN = b"glibc-ld.so.cache1.1"
_CACHE_HEADER = struct.Struct("<20xI24x")
"""Of the header of /etc/ld.so.cache (`struct cache_file_new` in glibc's dl-cache.h): the number of entries."""
_CACHE_ENTRY = struct.Struct("<iIIIQ")
"""An entry: its kind, where its name and its path are, a version, and the processors that it is for (0: for all)."""
_CACHE_KINDS = {62: 0x0303, 183: 0x0A03}
"""The kind of a library's entry by the machine of its ELF header: x86-64 and AArch64."""


class MalformedError(ValueError):
    """A file is not of the form that is known here. The text says how."""


@dataclass(frozen=True, slots=True)
class Program:
    """A program or a library."""

    machine: int  # The number of its kind of processor.
    loader: str  # The path of its loader; empty for a library.
    loader_at: tuple[int, int]  # Where in the file that path begins, and how many bytes it may have, with its NUL.
    needed: tuple[str, ...]  # The names of the libraries that it needs.

    def with_loader(self, content: bytes, loader: str) -> bytes:
        """Return a program's file with another loader, whose path must not be longer."""
        at, room = self.loader_at
        if len(loader) >= room:
            raise MalformedError("it names no loader, or one whose path is too short")
        return content[:at] + loader.encode().ljust(room, b"\0") + content[at + room :]


def read_program(content: bytes) -> Program:
    """Return what a program's file says; MalformedError also if it names directories of libraries itself."""
    if not content.startswith(_BEGIN) or len(content) < _HEADER.size:
        raise MalformedError("it is no 64-bit program of this byte order")
    machine, first, size, count = _HEADER.unpack_from(content)
    if count > _MAX_HEADERS:
        raise MalformedError(f"it has {count} program headers")
    headers = [_PROGRAM_HEADER.unpack(_part(content, first + i * size, _PROGRAM_HEADER.size)) for i in range(count)]
    loader, loader_at, needed = "", (0, 0), tuple[str, ...]()
    for kind, begin, _, length in headers:
        if kind == _INTERPRETER:
            loader, loader_at = _text(_part(content, begin, length), 0), (begin, length)
        elif kind == _DYNAMIC:
            places = [(address, begin, length) for kind, begin, address, length in headers if kind == _LOAD]
            needed = _needed(content, _part(content, begin, length), places)
    return Program(machine, loader, loader_at, needed)


def _needed(content: bytes, dynamic: bytes, places: list[tuple[int, int, int]]) -> tuple[str, ...]:
    """Return the libraries that a dynamic section names; `places` are address, offset and length of what is loaded."""
    names, strings = list[int](), -1
    if len(dynamic) > _MAX_TAGS * _TAG.size:
        raise MalformedError("it has too many tags")
    for tag, value in _TAG.iter_unpack(dynamic[: len(dynamic) // _TAG.size * _TAG.size]):
        if tag == _END:
            break
        if tag in (_RPATH, _RUNPATH):
            raise MalformedError("it names directories of libraries")
        if tag == _NEEDED:
            names.append(value)
        elif tag == _STRINGS:
            strings = next((value - at + begin for at, begin, size in places if at <= value < at + size), -1)
    if names and strings < 0:
        raise MalformedError("it has no names of libraries")
    return tuple(_text(content, strings + name) for name in names)


def library_path(cache: bytes, name: str, machine: int) -> str:
    """Return where a loader finds a library by /etc/ld.so.cache, or raise MalformedError."""
    if not cache.startswith(_CACHE_BEGIN) or len(cache) < _CACHE_HEADER.size:
        raise MalformedError("the loader's cache has an unknown form")
    (count,) = _CACHE_HEADER.unpack_from(cache)
    if count > _MAX_ENTRIES:
        raise MalformedError(f"the loader's cache has {count} entries")
    entries = _part(cache, _CACHE_HEADER.size, count * _CACHE_ENTRY.size)
    found = [
        (path, processors)
        for kind, key, path, _, processors in _CACHE_ENTRY.iter_unpack(entries)
        if kind == _CACHE_KINDS.get(machine) and _text(cache, key) == name
    ]
    if len(found) != 1 or found[0][1]:
        raise MalformedError(f"the loader's cache has not one place for {name}")
    return _text(cache, found[0][0])


def _part(content: bytes, begin: int, length: int) -> bytes:
    if begin + length > len(content):
        raise MalformedError("it is cut off")
    return content[begin : begin + length]


def _text(content: bytes, begin: int) -> str:
    end = content.find(b"\0", begin, begin + _MAX_TEXT_BYTES)
    if not 0 <= begin < len(content) or end < 0:
        raise MalformedError("a name in it does not end")
    return content[begin:end].decode(errors="surrogateescape")
