"""Inspection: how people look at the state of a sandbox, beside running calls. A driver need not offer it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO, Literal, Protocol, runtime_checkable

from sandboxes.driver import FrozenState
from sandboxes.spec import EnvironmentSpec

FileKind = Literal["file", "directory", "symlink", "other", "gone"]


@dataclass(frozen=True, slots=True)
class SessionView:
    """A shell session.

    Attributes:
        cwd: The working directory.
        variables: The declarations of variables by name, as the shell prints them.
        functions: The definitions of functions by name, as the shell prints them.
    """

    cwd: str
    variables: Mapping[str, str] = field(default_factory=dict)
    functions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StateView:
    """How a state differs from its task's root state.

    Attributes:
        files: For each path that differs, a fingerprint that equal entries share; None if too many paths differ.
        sessions: The sessions that calls have changed, by name.
        fresh: How every other session looks; None if that is not known.
    """

    files: Mapping[str, str] | None
    sessions: Mapping[str, SessionView]
    fresh: SessionView | None = None


@dataclass(frozen=True, slots=True)
class FileEntry:
    """What a path leads to.

    Attributes:
        kind: The kind of the entry; `gone` if there is none.
        mode: The permission bits.
        uid: The owner's number.
        gid: The group's number.
        size_bytes: The size of a regular file.
        target: Where a symbolic link points; None for other kinds.
        content: The content of a regular file; None if it was not read.
    """

    kind: FileKind
    mode: int = 0
    uid: int = 0
    gid: int = 0
    size_bytes: int = 0
    target: str | None = None
    content: bytes | None = None


GONE = FileEntry("gone")
"""The entry of a path that leads nowhere."""


@dataclass(frozen=True, slots=True)
class FrozenPath:
    """What a path of a frozen state leads to.

    Attributes:
        entry: The entry itself. No link is followed: neither one at the path, nor one on the way.
        file: The content of a regular file, for the caller to close; None for other kinds.
        entries: What is in a directory, by name; empty for other kinds.
        truncated: Whether the directory has more entries.
        base: Whether files of the base below the state's layers were looked at too.
    """

    entry: FileEntry
    file: BinaryIO | None = None
    entries: Mapping[str, FileEntry] = field(default_factory=dict)
    truncated: bool = False
    base: bool = True


@runtime_checkable
class ReadableStates(Protocol):
    """A driver that reads files of frozen states without a sandbox."""

    async def open_frozen(self, spec: EnvironmentSpec, frozen: FrozenState, path: str) -> FrozenPath:
        """Return what a path of a state leads to.

        Args:
            spec: The spec of the sandbox that was frozen.
            frozen: The state.
            path: A path below the root without empty parts, `.` and `..`; empty for the root. Bytes that are no UTF-8
                are surrogates (PEP 383).

        Raises:
            StateGoneError: The data of the state is missing or damaged.
            SandboxError: The machine failed.
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
        """Return how the state differs from the root state.

        Raises:
            SandboxError: The sandbox failed.
        """
        ...

    async def entries(self, paths: Sequence[str], *, content_bytes: int) -> Mapping[str, FileEntry]:
        """Return what paths lead to.

        Args:
            paths: Absolute paths in the sandbox.
            content_bytes: The largest file whose content is returned.

        Raises:
            SandboxError: The sandbox failed.
        """
        ...


@runtime_checkable
class TerminalSandbox(Protocol):
    """A sandbox in which terminals can be opened."""

    async def open_terminal(self, columns: int, rows: int) -> Terminal:
        """Start a shell on a terminal. Its effects are not detected, so the sandbox must run no calls afterwards.

        Args:
            columns: The width of the window in characters.
            rows: The height of the window in characters.

        Raises:
            SandboxError: The sandbox failed, or it has no shell.
        """
        ...
