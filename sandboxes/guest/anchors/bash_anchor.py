"""The sandbox's bash as the anchor."""

import contextlib
import os
from collections.abc import Mapping
from typing import Any, Self

from sandboxes.guest.anchors.anchor import Anchor
from sandboxes.guest.anchors.shell_kit import EXPORTS, OPENED, PLACES, ShellKit, sign
from sandboxes.guest.bash import session as session_texts
from sandboxes.guest.users import User
from sandboxes.linux.descriptors import unread_bytes
from sandboxes.linux.spawn import BASH
from sandboxes.shell_text import quote


def _bash(program: str) -> str:
    return f"exec -a bash {BASH} --noprofile --norc -c {program} bash"


_CLOSE_KIT = " ".join(f"{place}<&-" for place in PLACES.values())
_OPEN_KIT = " ".join(f"{number}{sign(number)}{path}" for number, path in OPENED.items() if number)
_START_ON_KIT = (
    f"( . /proc/self/fd/{PLACES[EXPORTS]}; exec 0</dev/null {_OPEN_KIT}; echo $BASHPID >&4; "
    f"{_bash(quote(session_texts.START))} 3<&- 4>&- {_CLOSE_KIT} ) &"
)
_BASH_LOOP = (
    f"LC_ALL=C; set -m; export -n PWD OLDPWD SHLVL; kit() {{ {_START_ON_KIT} }}; "
    'read -r -u 3 key; while read -r -u 3 proof line; do [[ $proof == "$key" ]] || exit; eval "$line"; jobs -n; done'
)
"""What bash runs as the anchor. `set -m` gives each shell a process group of its own, so that `kill 0` in one reaches
no other. `jobs -n` forgets jobs that have ended. The exported variables are removed from the environment of all
processes to come. The function `kit` starts a shell on the kit. Bash reads a pipe byte by byte, so the line that calls
it is short, and the variables that the shell is born with are in a text. `LC_ALL`, which is not exported, keeps bash
from loading the locale of each variable that it exports to a new process: that process loads its locale itself."""


class BashAnchor(Anchor):
    """The sandbox's bash as the anchor."""

    hidden = False
    key = ""  # What each line begins with; empty for an anchor of an earlier version, which knows none.
    # The processes that it has started; None if they are not known, because a checkpoint brought it back.
    children: set[int] | None = None

    @classmethod
    def start(cls) -> Self:
        """Start an anchor."""
        anchor = cls._start(BASH, ["anchor", "--noprofile", "--norc", "-c", _BASH_LOOP])
        anchor.key, anchor.children = os.urandom(8).hex(), set()
        # If bash is gone, no process reads it, and the first request fails.
        with contextlib.suppress(BrokenPipeError):
            os.write(anchor.ends[0], anchor.key.encode() + b"\n")
        return anchor

    @classmethod
    def adopt(cls, remembered: Mapping[str, Any], ends: tuple[int, int]) -> Self:
        """Return our end of an anchor that was restored; see `adopted_anchor`."""
        anchor = cls(remembered["pid"], ends)
        anchor.key = remembered.get("key", "")
        return anchor

    def remember(self) -> dict[str, Any]:
        """Return what a checkpoint has to keep; a disk format. The key is in it."""
        return {**super().remember(), "key": self.key}

    def started(self) -> int:
        """Return the pid of the bash that was asked for last; see `Anchor`."""
        pid = super().started()
        if self.children is not None:
            self.children.add(pid)
        return pid

    def wait(self, pid: int) -> int | None:
        """Return the exit status of a process; see `Anchor`. Bash itself tells 127 of one that is not its child."""
        if self.children is not None and pid not in self.children:
            return None
        return super().wait(pid)

    @property
    def has_unread(self) -> bool:
        """Whether one of the pipes has something in it. Between calls only a command can have written it."""
        return any(map(unread_bytes, self.ends))

    def _line(self, text: str) -> bytes:
        return f"{self.key} {text}\n".lstrip(" ").encode("latin-1")

    def _request_on_kit(self, kit: ShellKit, environment: Mapping[str, str], *, template: bool) -> bytes:  # noqa: ARG002
        kit.write_exports(_exports(environment).encode("latin-1"))
        return self._line("kit")

    def _request(
        self,
        environment: Mapping[str, str],
        paths: Mapping[int, str],
        program: str,
        user: User | None,  # noqa: ARG002 - it is root: a bash cannot change the user
        folder: str,  # noqa: ARG002 - which root can enter itself
    ) -> bytes:
        redirections = " ".join(f"{number}{sign(number)}{path}" for number, path in paths.items())
        return self._line(
            f"( {_exports(environment)}exec {redirections}; echo $BASHPID >&4; "
            f"exec 3<&- 4>&- {_CLOSE_KIT}; {_bash(_quoted_line(program))} ) &"
        )

    def _request_to_close(self) -> bytes:
        return self._line(f"exec {_CLOSE_KIT}; echo 0 >&4")

    def _request_for_status(self, pid: int) -> bytes:
        return self._line(f"wait {pid}; echo $? >&4")


def _exports(environment: Mapping[str, str]) -> str:
    return "".join(f"export {name}={_quoted_line(value)}; " for name, value in environment.items())


def _quoted_line(text: str) -> str:
    """Return a text quoted for bash on one line, because the anchor reads line by line."""
    return quote(text.encode(errors="surrogateescape").decode("latin-1")).replace("\n", "'$'\\n''")
