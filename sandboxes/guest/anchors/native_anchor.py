"""A program of ours as the anchor: one of its own, or a bash with our library."""

import functools
import os
import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Self

from sandboxes.guest.anchors.anchor import Anchor
from sandboxes.guest.anchors.shell_kit import OPENED, ShellKit, sign
from sandboxes.guest.bash import session as session_texts
from sandboxes.linux import processes, spawn
from sandboxes.shell_files import facts as shell_facts

_EXPORTABLE = re.compile(r"(?!(?:BASHOPTS|BASH_VERSINFO|EUID|PPID|SHELLOPTS|UID)$)[A-Za-z_][A-Za-z0-9_]*")
"""The names that bash can export: identifiers, but not those of its variables that are read-only."""


class NativeAnchor(Anchor):
    """The program `linux/anchor.c` as the anchor.

    Attributes:
        digest: The digest of the program.
    """

    hidden = True
    digest = ""

    @classmethod
    def start(cls, program: str = spawn.ANCHOR) -> Self:
        """Start an anchor. 0.2 ms.

        Args:
            program: Its path in the sandbox.

        Raises:
            OSError: No process can be started.
        """
        # An anchor that is started beside the agent's processes could be entered before it hides.
        alone = not processes.list_processes()
        anchor = cls._start(program, ["anchor"])
        anchor.stays, anchor.digest = alone, spawn.anchor_digest()
        return anchor

    @classmethod
    def start_with_bash(cls, files: str = spawn.SHELL_FILES) -> Self | None:
        """Start a bash with `linux/preloaded.c` as the anchor. A millisecond of CPU, most of it the anchor's own.

        Args:
            files: The path in the sandbox of what `shell_files.copies` has made.

        Returns:
            None if shells cannot be forks: without such files, if the sandbox's bash is another one, and beside
            processes of the agent. What the loader of programs reads could change while it does.

        Raises:
            OSError: No process can be started.
        """
        if not os.access(f"{files}/bash", os.X_OK) or not _is_known_bash(files) or processes.list_processes():
            return None
        variables = [f"LD_LIBRARY_PATH={files}", f"LD_PRELOAD={files}/preloaded.so"]
        anchor = cls._start(f"{files}/bash", _shell_arguments(session_texts.START), variables)
        anchor.stays = anchor.forks = True
        anchor.digest = _contents(f"{files}/digest").decode()
        return anchor

    def remember(self) -> dict[str, Any]:
        """Return what a checkpoint has to keep; a disk format. The program's digest is in it."""
        return {**super().remember(), "program": self.digest}

    def _request_on_kit(self, kit: ShellKit, environment: Mapping[str, str], *, template: bool) -> bytes:  # noqa: ARG002
        """Return the request for a shell on the kit. It is the same for each shell with these variables."""
        return _packed_start(tuple(environment.items()), tuple(OPENED.items()), session_texts.START, template=template)

    def _request(self, environment: Mapping[str, str], paths: Mapping[int, str], program: str) -> bytes:
        return _packed_start(tuple(environment.items()), tuple(paths.items()), program)

    def take_note_of(self, pid: int) -> None:
        """Have the anchor keep the exit code of a shell that a template has forked, and that has not begun yet.

        Raises:
            AnchorLostError: The anchor is gone.
        """
        self.send(_packed([f"n{pid}"]))

    def _request_to_close(self) -> bytes:
        return _packed(["c"])

    def _request_for_status(self, pid: int) -> bytes:
        return _packed([f"w{pid}"])


def _is_known_bash(files: str) -> bool:
    """Return whether the sandbox's bash, and all that loading it involves, is what the files were copied from."""
    facts = _contents(f"{files}/facts")
    return bool(facts) and facts == shell_facts.as_now(facts)


def _contents(path: str) -> bytes:
    """Return what is in a file; nothing if it was removed."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            return file.read()
    except FileNotFoundError:
        return b""


@functools.lru_cache(maxsize=4)
def _packed_start(
    environment: tuple[tuple[str, str], ...],
    paths: tuple[tuple[int, str], ...],
    program: str,
    *,
    template: bool = False,
) -> bytes:
    """Return the request for a bash. It is kept, because each call starts a shell on the same kit."""
    files = [f"{sign(number)}{number:02}{path}" for number, path in paths]
    arguments = [f"a{word}" for word in _shell_arguments(program)]
    # As if a bash had exported them: another one would take options and functions from the rest.
    variables = [f"e{name}={value}" for name, value in environment if _EXPORTABLE.fullmatch(name)]
    return _packed([*files, *arguments, *variables, *(["t"] if template else [])])


def _shell_arguments(program: str) -> list[str]:
    return ["bash", "--noprofile", "--norc", "-c", program, "bash"]


def _packed(texts: Sequence[str]) -> bytes:
    body = b"".join(os.fsencode(text) + b"\0" for text in texts)
    return struct.pack("=II", len(body), len(texts)) + body
