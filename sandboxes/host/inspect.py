"""From what pid 1 or a keeper tells of a state to what is shown of it (pure)."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from sandboxes.errors import SandboxError
from sandboxes.inspection import GONE, FileEntry, SessionView, StateView
from sandboxes.ipc.frames import Message
from sandboxes.session_types import ShellSession

_VARIABLE = re.compile(r"(?:declare -\S+ )?([A-Za-z_][A-Za-z0-9_]*)")
"""As bash declares it, or as a POSIX shell assigns it."""
_FUNCTION = re.compile(r"^(\S+) \(\) *$", re.MULTILINE)


def state_look(told: Message) -> StateView:
    """Return the answer to `describe`. Paths are absolute."""
    delta = told.fields["delta"]
    files = None if delta is None else {f"/{path}": str(what) for path, (what, _) in delta.items()}
    fresh = told.fields["pristine"]
    sessions = {name: _session(session) for name, session in told.fields["sessions"].items()}
    return StateView(files, sessions, None if fresh is None else _session(fresh))


def _session(session: ShellSession) -> SessionView:
    variables = {match[1]: line for line in session["variables"] if (match := _VARIABLE.match(line)) is not None}
    return SessionView(
        _text(session["cwd"]),
        {name: _text(line) for name, line in variables.items()},
        {name: _text(body) for name, body in _functions(session.get("functions", "")).items()},
    )


def _functions(text: str) -> dict[str, str]:
    """Split what `declare -f` prints; bash indents what stands in a function, so only names begin a line."""
    heads = list(_FUNCTION.finditer(text))
    ends = [head.start() for head in heads[1:]] + [len(text)]
    return {head[1]: text[head.start() : end].rstrip() for head, end in zip(heads, ends, strict=False)}


def _text(latin: str) -> str:
    """Return a session's text as it is meant: bytes that a dump reads as latin-1."""
    return latin.encode("latin-1", "replace").decode(errors="replace")


def entries_of(told: Message, paths: Sequence[str]) -> Mapping[str, FileEntry]:
    """Return the answer to `entries`.

    Raises:
        SandboxError: it ran out of time or memory.
    """
    if told.fields.get("status") != 200:
        raise SandboxError("the files could not be looked at: it ran out of time or memory. Ask again.")
    found: dict[str, dict[str, Any]] = json.loads(told.body)
    return {path: _entry(found.get(path)) for path in paths}


def _entry(told: dict[str, Any] | None) -> FileEntry:
    if told is None:
        return GONE
    content = told.pop("content", None)
    return FileEntry(**told, content=None if content is None else content.encode("latin-1"))
