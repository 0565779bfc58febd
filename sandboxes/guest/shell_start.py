"""How a shell starts: a bash that the anchor starts on its kit or on pipes of its own, or that a checkpoint had."""

import os
from collections.abc import Callable, Mapping
from typing import Any

from sandboxes.guest.anchors.anchor import Anchor
from sandboxes.guest.anchors.shell_kit import TEXTS, ShellKit, new_pipes, new_text, write_texts
from sandboxes.guest.anchors.starter import AnchorLostError
from sandboxes.guest.anchors.template import ShellTemplate
from sandboxes.guest.bash import session as session_texts
from sandboxes.guest.shell import Shell
from sandboxes.linux.descriptors import close_all
from sandboxes.shell_text import ShellSession


def start(
    anchor: Anchor, name: str, session: ShellSession | None, script: bytes, environment: dict[str, str],
    *, template: bool,
) -> Shell:  # fmt: skip
    """Start a bash that sources a script to become a session. It is ready when its first dump has come."""
    # As a template it is started on the anchor's kit only.

    # Anonymous pipes have no name in the file system. The agent can still reach them through /proc, so the form of
    # a dump is checked (`parse_dump`).
    kit = anchor.kit
    if kit is not None and not kit.lent:
        return begin(anchor, kit, name, session, script, environment, template=template)()
    return _start_on_own(anchor, name, session, script, environment)


def begin(
    anchor: Anchor, kit: ShellKit, name: str, session: ShellSession | None, script: bytes,
    environment: dict[str, str], *, template: bool,
) -> Callable[[], Shell]:  # fmt: skip
    """Have the anchor start a bash on its kit, and return a function that waits for it; see `start`."""
    # The kit must not be lent, and the anchor may be asked for nothing else meanwhile.
    ours = kit.lend(_whole(anchor, script))
    template = template and anchor.forks

    def started() -> Shell:
        try:
            pid = anchor.started()
            found = ShellTemplate(pid, kit, session) if template and ShellTemplate.is_one(kit) else None
            shell = Shell(name, session, pid, ours)
        except AnchorLostError:
            close_all(ours.values())
            raise
        shell.kit, shell.template = kit, found
        return shell

    try:
        anchor.request_shell(environment, template=template)
    except AnchorLostError:
        close_all(ours.values())
        raise
    return started


def _whole(anchor: Anchor, script: bytes) -> bytes:
    # A fork hides our descriptors before it is a shell.
    return script if anchor.forks else f"{session_texts.HIDE}\n".encode() + script


def _start_on_own(
    anchor: Anchor, name: str, session: ShellSession | None, script: bytes, environment: dict[str, str]
) -> Shell:
    ours, theirs = new_pipes()
    theirs |= {number: new_text() for number in TEXTS}
    write_texts(theirs, _whole(anchor, script))
    # Commands inherit this stdin. One that reads it meets its end at once, and does not wait for input that never
    # comes.
    theirs[0] = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    try:
        pid = anchor.start_on(environment, theirs)
        # Each call rewrites the command's text, so it stays open here.
        ours[session_texts.COMMAND_FD] = os.dup(theirs[session_texts.COMMAND_FD])
        return Shell(name, session, pid, ours)
    except AnchorLostError:
        close_all(ours.values())
        raise
    finally:
        close_all(theirs.values())


def adopt(remembered: Mapping[str, Any], ends: Mapping[int, int]) -> Shell:
    """Take over a shell that was restored, with our ends of its new pipes, by what `Shell.remember` returned."""
    # The command's text is anonymous memory of the shell. Opened through /proc it is the same memory.
    command = os.open(f"/proc/{remembered['pid']}/fd/{session_texts.COMMAND_FD}", os.O_RDWR | os.O_CLOEXEC)
    ours = {**ends, session_texts.COMMAND_FD: command}
    shell = Shell(remembered["name"], remembered["session"], remembered["pid"], ours)
    shell.baseline, shell.jobs = remembered["baseline"], tuple(remembered["jobs"])
    shell.runs, shell.knowledge = remembered["runs"], bytes.fromhex(remembered.get("knowledge", ""))
    shell.born = remembered.get("born", [])
    return shell
