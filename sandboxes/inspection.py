"""Inspection: how people look at the state of a sandbox, beside running calls. A driver need not offer it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO, Literal, Protocol, runtime_checkable

from sandboxes.driver import FrozenState
from sandboxes.spec import EnvironmentSpec

FileKind = Literal["file", "directory", "symlink", "other", "gone"]


@dataclass(frozen=True, slots=True)
class SessionView:
    """A shell session."""

    cwd: str
    variables: Mapping[str, str] = field(default_factory=dict)
    functions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StateView:
    """How a state differs from its task's root state."""

    # A fingerprint, which equal entries share, for each path that differs; None if too many differ.
    files: Mapping[str, str] | None
    sessions: Mapping[str, SessionView]  # The sessions that calls have changed.
    fresh: SessionView | None = None


@dataclass(frozen=True, slots=True)
class FileEntry:
    """What a path leads to."""

    kind: FileKind  # The kind of the entry; `gone` if there is none.
    mode: int = 0  # The permission bits.
    uid: int = 0
    gid: int = 0
    size_bytes: int = 0
    target: str | None = None  # Where a symbolic link points; None for other kinds.
    content: bytes | None = None  # The content of a regular file; None if it was not read.


GONE = FileEntry("gone")
"""The entry of a path that leads nowhere."""


@dataclass(frozen=True, slots=True)
class FrozenPath:
    """What a path of a frozen state leads to."""

    entry: FileEntry  # The entry itself. No link is followed: neither one at the path, nor one on the way.
    file: BinaryIO | None = None  # The content of a regular file, for the caller to close; None for other kinds.
    # What is in a directory, by name; empty for other kinds.
    entries: Mapping[str, FileEntry] = field(default_factory=dict)
    truncated: bool = False  # Whether the directory has more entries.
    base: bool = True  # Whether files of the base below the state's layers were looked at too.


@runtime_checkable
class ReadableStates(Protocol):
    """A driver that reads files of frozen states without a sandbox."""

    async def open_frozen(self, spec: EnvironmentSpec, frozen: FrozenState, path: str) -> FrozenPath:
        """Return what a path of a state leads to.

        The path is below the root, without empty parts, `.` and `..`; empty for the root. Bytes that are no UTF-8 are
        surrogates (PEP 383). Raises StateGoneError if the data of the state is missing or damaged.
        """
        ...


@runtime_checkable
class Terminal(Protocol):
    """A terminal with a shell in a sandbox. The shell continues from the sandbox's main session."""

    async def read(self) -> bytes:
        """Return the next output, or nothing once the shell has ended."""
        ...

    async def write(self, data: bytes) -> None:
        """Pass on what a person typed."""
        ...

    def resize(self, columns: int, rows: int) -> None:
        """Change the size of the window."""
        ...

    def close(self) -> None:
        """Close the terminal, which hangs up the shell. Idempotent."""
        ...


@runtime_checkable
class InspectableSandbox(Protocol):
    """A sandbox whose files and sessions can be inspected."""

    async def inspect(self) -> StateView:
        """Return how the state differs from the root state."""
        ...

    async def entries(self, paths: Sequence[str], *, content_bytes: int) -> Mapping[str, FileEntry]:
        """Return what absolute paths lead to, with the content of files up to `content_bytes`."""
        ...


@runtime_checkable
class TerminalSandbox(Protocol):
    """A sandbox in which terminals can be opened."""

    async def open_terminal(self, columns: int, rows: int) -> Terminal:
        """Start a shell on a terminal. Its effects are not detected, so the sandbox must run no calls afterwards."""
        ...
