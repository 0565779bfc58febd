"""What a sandbox may tell of its state to who looks at it, beside running calls. No driver has to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

FileKind = Literal["file", "directory", "symlink", "other", "gone"]


@dataclass(frozen=True, slots=True)
class SessionLook:
    """A shell session. variables, functions: as the shell declares them, by name."""

    cwd: str
    variables: Mapping[str, str] = field(default_factory=dict)
    functions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StateLook:
    """How a state differs from its task's root state.

    files: of each path that differs a word that equal entries share; None where too much differs to be told.
    sessions: those in which something has happened; fresh: any other, where that is known.
    """

    files: Mapping[str, str] | None
    sessions: Mapping[str, SessionLook]
    fresh: SessionLook | None = None


@dataclass(frozen=True, slots=True)
class FileEntry:
    """What is at a path. target: of a symbolic link. content: of a regular file, None where it was not read."""

    kind: FileKind
    mode: int = 0
    uid: int = 0
    gid: int = 0
    size_bytes: int = 0
    target: str | None = None
    content: bytes | None = None


GONE = FileEntry("gone")


@runtime_checkable
class Terminal(Protocol):
    """A terminal with a shell in a sandbox, which goes on from the sandbox's main session."""

    async def read(self) -> bytes:
        """Return what is to be shown next; empty when the shell has ended."""
        ...

    async def write(self, data: bytes) -> None:
        """Pass on what was typed."""
        ...

    def resize(self, columns: int, rows: int) -> None: ...

    def close(self) -> None:
        """Let go of it; the shell is hung up. Idempotent."""
        ...


@runtime_checkable
class LookingSandbox(Protocol):
    """A sandbox that tells of its files and sessions."""

    async def look(self) -> StateLook:
        """Say how this state differs from the root state.

        Raises:
            SandboxError: the sandbox failed.
        """
        ...

    async def entries(self, paths: Sequence[str], *, content_bytes: int) -> Mapping[str, FileEntry]:
        """Return what is at these paths, with the content of regular files up to content_bytes each.

        Raises:
            SandboxError: the sandbox failed.
        """
        ...


@runtime_checkable
class TerminalSandbox(Protocol):
    """A sandbox in which terminals can be opened."""

    async def open_terminal(self, columns: int, rows: int) -> Terminal:
        """Start a shell on a terminal. What happens in it is observed by nobody: the sandbox is of no other use then.

        Raises:
            SandboxError: the sandbox failed, or has no shell.
        """
        ...
