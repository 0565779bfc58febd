"""Build hook: in the wheel, the rooms of the repository lie below the `forkpoint` package.

The repository keeps `proxy/`, `sandboxes/` and `snapshots/` at its top level. Installed under these names they would
collide with other packages (PyPI's `proxy.py` installs a top-level `proxy`, for example). So this hook copies them to
`forkpoint/proxy/` and so on, and rewrites every import of them. An editable installation needs no copy: there the
repository itself is on the path.

The hook also compiles `vfork.c` and `anchor.c` in `sandboxes/linux`. The wheel then is for this machine's architecture,
and for the glibc that they need.
Where no compiler works it is for every machine, and Forkpoint does without them, more slowly.

Where MkDocs is installed, the hook also builds the documentation site, which the proxy then serves below `/manual/`.
"""

import ast
import importlib.util
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOMS = ("proxy", "sandboxes", "snapshots")
PACKAGE = "forkpoint"
NATIVE = Path("sandboxes", "linux")
HELPER, LIBRARY = NATIVE / "vfork.c", NATIVE / "libvfork.so"
ANCHOR_SOURCE, ANCHOR = NATIVE / "anchor.c", NATIVE / "libanchor.so"
COMPILED = {HELPER: LIBRARY, ANCHOR_SOURCE: ANCHOR}
"""The C files, and what they are compiled into."""
COMPILED_NAMES = {target.name for target in COMPILED.values()}
_WITHOUT_LIBC = (
    "-O2", "-nostdlib", "-ffreestanding", "-fno-stack-protector", "-fno-asynchronous-unwind-tables",
    # CRIU tells programs from each other by their build ID.
    "-Wl,--build-id=sha1", "-s",
)  # fmt: skip
_SHARED = ("-O2", "-shared", "-fPIC")
FLAGS = {
    LIBRARY: _SHARED,
    ANCHOR: (*_WITHOUT_LIBC, "-shared", "-fPIC", "-fvisibility=hidden"),
}
"""The compiler's arguments, by what it makes."""
OLDEST_GLIBC = (2, 17)
"""The oldest glibc that a wheel names: that of CentOS 7, and the first one on aarch64."""
_GLIBC = re.compile(rb"GLIBC_(\d+)\.(\d+)[.\d]*\0")
"""The name of a version in a library that needs symbols of it (`readelf -V`)."""
_OTHER_LIBC = b"libc.musl"
SITE = Path("proxy", "ui", "manual")
Edit = tuple[int, int, str]
"""Begin and end of the bytes to replace, and the new text."""

_ROOM = "|".join(ROOMS)
_MODULE_NAME = re.compile(rf"^([rbfuRBFU]*['\"])((?:{_ROOM})(?:\.[\w{{}}]+)+(?::\w+)?['\"])$")
"""A string literal that is nothing but the name of a module, or of a name in one: `"sandboxes.video.worker_engine"`."""
_PROGRAM = re.compile(rf"\b(from|import) ({_ROOM})\b(?=[. ])")
"""An import inside a string: the program text of a child process."""


class RoomsHook(BuildHookInterface):  # type: ignore[misc]
    """Copies the rooms into the wheel. Hatchling finds it by this module's name."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the rewritten rooms and the compiled helper to the wheel.

        Args:
            version: "standard" for a wheel, "editable" for a development installation.
            build_data: Hatchling's; `force_include` maps files to their places in the wheel.
        """
        if version != "standard":
            for source, target in COMPILED.items():
                compile_helper(Path(self.root) / source, Path(self.root) / target)
            return
        self._copy = Path(mkdtemp(prefix="forkpoint-wheel-"))
        for room in ROOMS:
            copy_room(Path(self.root) / room, self._copy / room)
            compiled = [
                compile_helper(Path(self.root) / source, self._copy / target)
                for source, target in COMPILED.items()
                if room == source.parts[0]
            ]
            if any(compiled):
                build_data["pure_python"] = False
                # The library is loaded by ctypes, so one build serves every version of Python.
                build_data["tag"] = f"py3-none-{platform_of(self._copy / target for target in COMPILED.values())}"
            build_data["force_include"][str(self._copy / room)] = f"{PACKAGE}/{room}"
        if not add_site(Path(self.root), self._copy / SITE):
            self.app.display_warning("The wheel has no manual: install the dependency group `docs`, and build again.")
        copy_room(Path(self.root) / PACKAGE, self._copy / PACKAGE)
        for path in sorted((self._copy / PACKAGE).rglob("*")):
            if path.is_file():
                build_data["force_include"][str(path)] = str(path.relative_to(self._copy))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        """Delete the copy."""
        if version == "standard":
            shutil.rmtree(self._copy)


def compile_helper(source: Path, target: Path) -> bool:
    """Compile a C file with `$CC` or `cc`; return whether a compiler could do it.

    Args:
        source: The file.
        target: What is made; its name tells how.
    """
    target.unlink(missing_ok=True)
    command = [*shlex.split(os.environ.get("CC", "cc")), *FLAGS[NATIVE / target.name], "-o", str(target), str(source)]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0  # noqa: S603
    except OSError:
        return False


def platform_of(libraries: Iterable[Path]) -> str:
    """Return the platform of a wheel with some libraries; a missing one needs nothing.

    With glibc it is `manylinux_2_N`, for the oldest glibc that has all that they need (PEP 600).
    """
    contents = [library.read_bytes() for library in libraries if library.exists()]
    platform = re.sub("[-.]", "_", sysconfig.get_platform())
    if not platform.startswith("linux_") or any(_OTHER_LIBC in content for content in contents):
        return platform
    needed = {(int(match[1]), int(match[2])) for content in contents for match in _GLIBC.finditer(content)}
    major, minor = max(needed | {OLDEST_GLIBC})
    return f"many{platform.replace('_', f'_{major}_{minor}_', 1)}"


def add_site(root: Path, target: Path) -> bool:
    """Build the documentation site into a folder.

    The site that FORKPOINT_SITE names is copied instead. Where MkDocs or its sources are missing, it is the one that
    `./run docs` has built. Return whether there is one.

    Raises:
        subprocess.CalledProcessError: The pages have an error, such as a dead link.
    """
    needed = ("material", "fastapi")
    built = Path(os.environ.get("FORKPOINT_SITE", root / SITE))
    buildable = (root / "docs" / "site").is_dir() and all(importlib.util.find_spec(name) for name in needed)
    if "FORKPOINT_SITE" in os.environ or not buildable:
        if built.is_dir():
            shutil.copytree(built, target)
        return target.is_dir()
    subprocess.run([sys.executable, "-m", "docs.site.build", str(target)], cwd=root, check=True)  # noqa: S603
    return True


def copy_room(source: Path, target: Path) -> None:
    """Copy a room with all its files; Python modules are rewritten."""
    for path in sorted(source.rglob("*")):
        # A compiled file in the checkout is of an editable installation, perhaps of older source.
        if not path.is_file() or "__pycache__" in path.parts or path.name in COMPILED_NAMES:
            continue
        if path.is_relative_to(source.parent / SITE):
            continue
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix in (".py", ".pyi"):
            copy.write_text(rewritten(path.read_text(), str(path)))
        else:
            shutil.copyfile(path, copy)


def rewritten(text: str, name: str) -> str:
    """Return the text of a module with every import of a room moved below the package.

    Args:
        text: The module's source.
        name: Its path, for the error message.

    Raises:
        ValueError: The module says `import room.module`, which binds the room's name and cannot be moved.
    """
    # The parser and the tokenizer count columns differently (bytes, characters): all edits are made in bytes.
    data = text.encode()
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    edits = [*_import_edits(text, data, starts, name), *_string_edits(text, starts)]
    for begin, end, new in sorted(edits, reverse=True):
        data = data[:begin] + new.encode() + data[end:]
    return data.decode()


def _import_edits(text: str, data: bytes, starts: list[int], name: str) -> Iterator[Edit]:
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Import | ast.ImportFrom) or node.end_lineno is None or node.end_col_offset is None:
            continue
        begin, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        if isinstance(node, ast.ImportFrom):
            if node.level == 0 and _is_room(node.module or ""):
                yield begin, end, data[begin:end].decode().replace("from ", f"from {PACKAGE}.", 1)
        elif any(_is_room(alias.name) for alias in node.names):
            alias, *others = node.names
            if "." in alias.name or others:
                raise ValueError(f"{name}:{node.lineno}: write `from package import module`, so that it can be moved")
            renamed = f" as {alias.asname}" if alias.asname else ""
            yield begin, end, f"from {PACKAGE} import {alias.name}{renamed}"


def _string_edits(text: str, starts: list[int]) -> Iterator[Edit]:
    lines = text.splitlines(keepends=True)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.STRING:
            moved = _PROGRAM.sub(rf"\1 {PACKAGE}.\2", _MODULE_NAME.sub(rf"\1{PACKAGE}.\2", token.string))
            if moved != token.string:
                row, column = token.start
                begin = starts[row - 1] + len(lines[row - 1][:column].encode())
                yield begin, begin + len(token.string.encode()), moved


def _is_room(module: str) -> bool:
    return module.partition(".")[0] in ROOMS
