"""Calls that leave nothing behind but files: their steps are taken by a library in C, at a fraction of the CPU time."""

# Theory of operation.
#
# After most calls nothing survives, the session is as before, and the shell is replaced by one like it. The supervisor
# finds that out in Python, with some hundred system calls and a millisecond of CPU time. `linux/ordinary.c` makes the
# same system calls. It compares what it sees with what was seen once:
#
# 1. A call goes the regular way, and leaves its session as it was and nothing behind. Then `learn` keeps the two dumps
#    of its shell byte by byte, and what the library sees now of that shell, of pid 1, of the anchor and of the kit.
#    Afterwards the regular looks are taken once more. So what the library saw is what the regular way takes for
#    untouched.
# 2. The next call of this session is run by the library. If its dumps are the same byte by byte, and what is seen
#    afterwards is the same too, it has left nothing behind but files. If anything differs, the library returns at
#    once with what it has read so far, and the call goes on in the regular way (`supervisor`).
# 3. The library ends the shell, and has the anchor start the next one on the same kit. The `LocalShell` stays, because
#    its descriptors are those of the kit; only its process is another one.
#
# So the library decides nothing. A difference that it sees in error costs time and is no wrong answer. It is compiled
# when the package is built. Where no compiler works, every call goes the regular way.

import contextlib
import ctypes
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from sandboxes.guest.anchors.anchor import Anchor
from sandboxes.guest.anchors.native_anchor import NativeAnchor
from sandboxes.guest.anchors.shell_kit import EXPORTS, LOOP, PIPES, TEXTS, ShellKit
from sandboxes.guest.anchors.starter import AnchorLostError
from sandboxes.guest.anchors.template import ShellTemplate
from sandboxes.guest.bash import session as session_texts
from sandboxes.guest.bash.restore import orders
from sandboxes.guest.driver_link import DriverLink
from sandboxes.guest.local_shell import LocalShell
from sandboxes.guest.local_shells import LocalShells
from sandboxes.linux import spawn
from sandboxes.shell_text import ShellSession

LIBRARY = f"{os.path.dirname(spawn.__file__)}/libordinary.so"  # noqa: PTH120 - pathlib is not loaded in pid 1
"""The library. `hatch_build.py` compiles it."""
WITHIN_S = 0.05
"""How long a command may run in the library. Then the supervisor waits for it, which also watches disk and time. It
looks at the disk every 0.05 s at the most; doubled, a command may write twice as much before its limit is looked at."""
_MAX_VAIN = 8
"""After so many calls in a row that differ from what was learnt, nothing is learnt any more: it takes 0.3 ms."""
_FACTS, _OUTPUT, _DUMP = 1 << 14, 1 << 14, 1 << 15
"""Sizes of buffers in `ordinary.c`."""
_ORDINARY, _NOT_BEGUN, _BEGUN = range(3)
_SHELL, _ANCHOR, _KIT, _TEMPLATE = range(4)
_WAITING, _READY, _USELESS = range(3)
"""What is known of a template."""


class _Bytes(ctypes.Structure):
    _fields_ = (("data", ctypes.c_char_p), ("size", ctypes.c_long))


class _Shell(ctypes.Structure):
    """`struct shell` of `ordinary.c`."""

    _fields_ = (
        *((name, ctypes.c_int) for name in (
            "link", "anchor", "requests", "replies", "pid", "death", "out", "err", "dump", "go", "command",
            "template", "template_death", "template_requests", "template_replies", "template_state", "forked",
            "last_fork", "has_dumped",
        )),
        ("pipes", ctypes.c_int * 4), ("texts", ctypes.c_int * 4),
        *((name, _Bytes) for name in (
            "first_dump", "last_dump", "descriptors", "facts", "anchor_facts", "template_facts", "kit_facts", "script",
            "loop", "request",
        )),
        ("folder", ctypes.c_char_p), ("began_s", ctypes.c_double),
        *((name, ctypes.c_int) for name in ("status", "out_size", "err_size", "dump_size")),
        ("out_data", ctypes.c_char * _OUTPUT), ("err_data", ctypes.c_char * _OUTPUT),
        ("dump_data", ctypes.c_char * _DUMP),
    )  # fmt: skip


def library(path: str = LIBRARY) -> Any:
    """Return the library; None if it is missing or of another machine."""
    try:
        # PyDLL: pid 1 has one thread, so nothing waits for the interpreter's lock.
        return ctypes.PyDLL(path, use_errno=True)
    except OSError:
        return None


# In the launcher, once: in a sandbox the path leads to nothing.
_library = library()


@dataclass(frozen=True)
class _Known:
    """What was learnt: of which session, and for which anchor and kit it holds.

    Attributes:
        name: The session's name.
        session: The session; None for one that is as new.
        baseline: The session as its shell's first dump shows it.
        settings: What its template passes on to its forks; empty if the shell has none.
    """

    name: str
    session: ShellSession | None
    baseline: ShellSession
    settings: list[str]
    anchor: Anchor
    kit: ShellKit


@dataclass(frozen=True)
class Ran:
    """A command that was given to its shell.

    Attributes:
        began_at: When it began, by `time.perf_counter`.
        status: Its exit status, if it is known that nothing survives it; None if the regular way has to go on.
        stdout: What has come on its standard output.
        stderr: What has come on its standard error.
    """

    began_at: float
    status: int | None
    stdout: bytes = b""
    stderr: bytes = b""


class OrdinaryCalls:
    """Runs the calls of a sandbox that are like the last ones."""

    def __init__(self, link: DriverLink, shells: LocalShells) -> None:
        """Nothing is learnt yet.

        Args:
            link: The socket to the proxy, which may hang up during a call.
            shells: The sandbox's shells.
        """
        self._library, self._shells, self._link = _library, shells, link
        self._known: _Known | None = None
        self._shell = _Shell()
        self._first_dump, self._kept = b"", list[bytes]()
        self._vain = 0

    # -- before a call -----------------------------------------------------------------------------------------------

    def fresh_shell(self, name: str) -> LocalShell | None:
        """Return the shell of a session if it is like the one from which was learnt, and has begun nothing."""
        shell = self._current()
        if shell is None or shell.name != name or shell.runs or shell.forked:
            return None
        return shell if shell.template is not None or shell.baseline is None else None

    def run(self, shell: LocalShell, command: bytes) -> Ran | None:
        """Run a command in the shell that `fresh_shell` has returned; None if it was not begun.

        Nothing survives from before.

        Raises:
            OSError: The command cannot be given to the shell.
        """
        known, state = self._known, self._shell
        assert known is not None
        go, text = orders(shell.session, command)
        ending = self._library.forkpoint_run(
            ctypes.byref(state), go, len(go), text, ctypes.c_long(len(text)), int(WITHIN_S * 1000)
        )
        if shell.template is not None and state.template_state == _READY:
            shell.template.is_known_to_be_ready(known.settings)
        elif shell.template is not None and state.template_state == _USELESS:
            shell.drop_template()
        if state.forked:
            shell.was_forked(state.pid, state.death)
        if ending == _ORDINARY:
            self._vain = 0
            shell.begun(known.baseline, self._first_dump, b"")
            return Ran(state.began_s, state.status, self._read("out"), self._read("err"))
        self._vain += 1
        if ending == _NOT_BEGUN and shell.baseline is None:
            shell.feed(self._read("dump"))
        elif ending == _NOT_BEGUN:
            # It has dumped before, but its template could not fork.
            self._known = None
        else:
            shell.begun(known.baseline, self._first_dump, self._read("dump"))
        if shell.has_dumped:
            # It differs, or something survives: what comes now may be learnt.
            self._known = None
        if ending == _NOT_BEGUN:
            return None
        if ending == _BEGUN:
            shell.out.kept += self._read("out")
            shell.err.kept += self._read("err")
            return Ran(state.began_s, None)
        raise OSError(ctypes.get_errno(), "the command cannot be given to its shell")

    @property
    def is_known(self) -> bool:
        """Whether there is a shell for which all holds that was learnt."""
        return self._current() is not None

    def _current(self) -> LocalShell | None:
        """Return the shell for which all holds that was learnt, and take over its descriptors; None if there is none.

        It may have been started in the regular way.
        """
        known, shells = self._known, self._shells
        if known is None or shells.names != {known.name} or not shells.sessions.keys() <= {known.name}:
            return None
        [shell], anchor = shells, shells.anchor
        assert isinstance(shell, LocalShell)
        # `is`, because each change of a session makes a new value.
        same_session = shells.sessions.get(known.name) is known.session is shell.session
        if not same_session or anchor is not known.anchor or not (anchor.kit is known.kit is shell.kit):
            return None
        if (shell.template is not None) != bool(known.settings):
            return None
        self._follow(shell)
        return shell

    def _follow(self, shell: LocalShell) -> None:
        state, template = self._shell, shell.template
        state.template, state.forked, state.has_dumped = 0, shell.forked, shell.baseline is not None
        if template is not None:
            state.template, state.template_death = template.pid, template.death
            state.template_state = _READY if template.ready else _WAITING
            state.template_requests, state.template_replies = template.ends
            state.last_fork = template.last_fork
        state.pid, state.death = shell.pid, shell.death
        state.out, state.err, state.dump = shell.out.fd, shell.err.fd, shell.dump_fd
        state.go, state.command = shell.go_fd, shell.command_fd

    def _read(self, name: str) -> bytes:
        field = getattr(_Shell, f"{name}_data")
        return ctypes.string_at(ctypes.addressof(self._shell) + field.offset, getattr(self._shell, f"{name}_size"))

    # -- after a call ------------------------------------------------------------------------------------------------

    def learn(self, untouched: Callable[[], bool]) -> None:
        """Learn from a call that went the regular way, changed its session in nothing, and left nothing behind.

        Its shell is idle. 0.5 ms.

        Args:
            untouched: Takes the regular looks once more; returns whether they find nothing.
        """
        self._known = None
        shells, anchor = self._shells, self._shells.anchor
        if self._library is None or self._vain >= _MAX_VAIN or len(shells.names) != 1:
            return
        [shell], kit = shells, None if anchor is None else anchor.kit
        if not isinstance(shell, LocalShell) or not isinstance(anchor, NativeAnchor) or not anchor.stays or kit is None:
            return
        baseline, (status, _, rest) = shell.baseline, shell.last_dump.partition(b"\0")
        if shell.kit is not kit or shell.runs != 1 or shell.jobs or baseline is None or not shell.first_dump:
            return
        # The dump of a wary run begins with another field than the status.
        if session_texts.KEPT in baseline or baseline["limits"] or not status.isdigit():
            return
        # A session like a new one is that of `main` when layers have changed.
        if shell.session is None and shell.name != "main":
            return
        self._follow(shell)
        self._describe(shell, anchor, kit, b"\0" + rest, baseline["cwd"].encode("latin-1"))
        # Last: what was seen counts if it is still what the regular way takes for untouched.
        if all(self._kept) and untouched():
            settings = [] if shell.template is None else shell.template.settings
            self._known = _Known(shell.name, shell.session, baseline, settings, anchor, kit)

    def _describe(self, shell: LocalShell, anchor: NativeAnchor, kit: ShellKit, dump: bytes, folder: bytes) -> None:
        """Put all that is known of the shell into the structure."""
        state, (script, environment) = self._shell, self._shells.origin(shell.session)
        state.link, state.anchor, (state.requests, state.replies) = self._link.fileno(), anchor.pid, anchor.ends
        state.pipes[:] = [kit.theirs[number] for number in PIPES]
        state.texts[:] = [kit.theirs[number] for number in (*TEXTS, EXPORTS)]
        texts = {
            "first_dump": shell.first_dump, "last_dump": dump, "descriptors": shell.known_descriptors,
            "facts": self._see(_SHELL), "anchor_facts": self._see(_ANCHOR), "kit_facts": self._see(_KIT),
            "script": script, "loop": LOOP,
            "request": anchor.request_on_kit(kit, environment, template=shell.template is not None),
        }  # fmt: skip
        # The structure has addresses only.
        self._first_dump = shell.first_dump
        if shell.template is not None:
            texts["template_facts"] = self._see(_TEMPLATE)
        self._kept = [*texts.values(), folder]
        for member, text in texts.items():
            setattr(state, member, _Bytes(text, len(text)))
        state.folder = folder

    def _see(self, what: int) -> bytes:
        seen = ctypes.create_string_buffer(_FACTS)
        size = self._library.forkpoint_see(ctypes.byref(self._shell), what, seen)
        return seen.raw[: max(size, 0)]

    def end(self, names: Collection[str] | None = None) -> LocalShell | None:
        """End the shell; return it if `start` can replace it, and None if the regular way has to end all shells.

        Args:
            names: The sessions whose shells are to end; None for all.
        """
        shell = self._current()
        if shell is None or (names is not None and {*names} != {shell.name}):
            return None
        return None if self._library.forkpoint_end(ctypes.byref(self._shell)) else shell

    def start(self, shell: LocalShell) -> bool:
        """Start the next shell in the place of one that has ended; return whether that could be done.

        A template is the next shell itself. Without one, the anchor starts it.
        """
        if shell.template is not None:
            return shell.fold()
        pid, kit = self._library.forkpoint_start(ctypes.byref(self._shell)), shell.kit
        if not pid:
            return False
        assert kit is not None
        with contextlib.suppress(AnchorLostError):
            shell.become(
                pid, self._shell.death, ShellTemplate(pid, kit, shell.session) if ShellTemplate.is_one(kit) else None
            )
            return True
        return False
