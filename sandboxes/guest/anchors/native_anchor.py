"""A bash of ours as the anchor, which forks shells (`linux/anchor.c`)."""

import functools
import os
import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Self

from sandboxes.guest.anchors.anchor import Anchor
from sandboxes.guest.anchors.shell_kit import OPENED, ShellKit, sign
from sandboxes.guest.bash import session as session_texts
from sandboxes.guest.users import User
from sandboxes.linux import processes, spawn

_EXPORTABLE = re.compile(r"(?!(?:BASHOPTS|BASH_VERSINFO|EUID|PPID|SHELLOPTS|UID)$)[A-Za-z_][A-Za-z0-9_]*")
"""The names that bash can export: identifiers, but not those of its variables that are read-only."""


class NativeAnchor(Anchor):
    """A bash with `linux/anchor.c` as the anchor; `digest` is that of its files."""

    hidden = forks = True
    digest = ""

    @classmethod
    def start(cls, files: str = spawn.SHELL_FILES) -> Self | None:
        """Start an anchor from what `shell_files.copies` has made; None if there are no such files in the sandbox."""
        if not os.access(f"{files}/bash", os.X_OK):
            return None
        # An anchor that is started beside the agent's processes could be entered before it hides.
        alone = not processes.list_processes()
        variables = [f"LD_LIBRARY_PATH={files}", f"LD_PRELOAD={files}/libanchor.so"]
        anchor = cls._start(f"{files}/bash", ["bash"], variables)
        anchor.stays = alone
        with open(f"{files}/digest") as file:  # noqa: PTH123
            anchor.digest = file.read()
        return anchor

    def remember(self) -> dict[str, Any]:
        """Return what a checkpoint has to keep; a disk format. The program's digest is in it."""
        return {**super().remember(), "program": self.digest}

    def _request_on_kit(self, kit: ShellKit, environment: Mapping[str, str], *, template: bool) -> bytes:  # noqa: ARG002
        return _packed_start(
            tuple(environment.items()), tuple(OPENED.items()), session_texts.START, self.user, template=template
        )

    def _request(
        self, environment: Mapping[str, str], paths: Mapping[int, str], program: str, user: User | None, folder: str
    ) -> bytes:
        variables, files = tuple(environment.items()), tuple(paths.items())
        return _packed_start(variables, files, program, user or self.user, folder)

    def take_note_of(self, pid: int) -> None:
        """Have the anchor keep the exit code of a shell that a template has forked, and that has not begun yet."""
        self.send(_packed([f"n{pid}"]))

    def _request_to_close(self) -> bytes:
        return _packed(["c"])

    def _request_for_status(self, pid: int) -> bytes:
        return _packed([f"w{pid}"])


@functools.lru_cache(maxsize=4)
def _packed_start(
    environment: tuple[tuple[str, str], ...],
    paths: tuple[tuple[int, str], ...],
    program: str,
    user: User,
    folder: str = "",
    *,
    template: bool = False,
) -> bytes:
    files = [f"{sign(number)}{number:04}{path}" for number, path in paths]
    # No path has a zero byte, which would begin another text.
    begins = [f"d{folder}"] if folder and "\0" not in folder else []
    # Root needs no change: in a user namespace the kernel refuses to set groups.
    becomes = [] if user.is_root else [f"u{' '.join(map(str, (user.uid, user.gid, *user.groups)))}"]
    arguments = [f"a{word}" for word in ("bash", "--noprofile", "--norc", "-c", program, "bash")]
    # As if a bash had exported them: another one would take options and functions from the rest.
    variables = [f"e{name}={value}" for name, value in environment if _EXPORTABLE.fullmatch(name)]
    return _packed([*files, *begins, *becomes, *arguments, *variables, *(["t"] if template else [])])


def _packed(texts: Sequence[str]) -> bytes:
    body = b"".join(os.fsencode(text) + b"\0" for text in texts)
    return struct.pack("=II", len(body), len(texts)) + body
