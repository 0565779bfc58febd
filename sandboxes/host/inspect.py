"""From a supervisor's description of a state to what people are shown of it (pure)."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from sandboxes.errors import SandboxError
from sandboxes.guest.bash.restore import split_functions
from sandboxes.inspection import GONE, FileEntry, SessionView, StateView
from sandboxes.ipc.codec import Envelope
from sandboxes.ipc.messages import CallDone, Described, FileOutcome
from sandboxes.shell_text import ShellSession

_VARIABLE = re.compile(r"(?:declare -\S+ )?([A-Za-z_][A-Za-z0-9_]*)")
"""The name in a variable's line, as bash declares it or as a POSIX shell assigns it."""


def state_look(state: Described) -> StateView:
    """Return a state as it is shown, with absolute paths."""
    # The supervisor's paths are relative to the sandbox's root.
    files = None if state.delta is None else {f"/{path}": what for path, (what, _) in state.delta.items()}
    sessions = {name: _session(session) for name, session in state.sessions.items()}
    return StateView(files, sessions, None if state.pristine is None else _session(state.pristine))


def _session(session: ShellSession) -> SessionView:
    # Dumps come from a shell that the agent controls, so lines that are no variables are skipped.
    variables = {match[1]: line for line in session["variables"] if (match := _VARIABLE.match(line)) is not None}
    return SessionView(
        _text(session["cwd"]),
        {name: _text(line) for name, line in variables.items()},
        {text.split(" ", 1)[0]: _text(text.rstrip()) for text in split_functions(session.get("functions", ""))},
    )


def _text(latin: str) -> str:
    """Return a session's text as people read it: a dump keeps bytes as latin-1."""
    # Bytes that are no UTF-8 are replaced here only; the snapshot keeps them.
    return latin.encode("latin-1", "replace").decode(errors="replace")


def entries_of(done: Envelope[CallDone], paths: Sequence[str]) -> Mapping[str, FileEntry]:
    """Return what is at each of the paths that were looked at."""
    outcome = done.message.outcome
    if not isinstance(outcome, FileOutcome) or outcome.status != 200:
        raise SandboxError("the files could not be looked at: it ran out of time or memory. Ask again.")
    entries: dict[str, dict[str, Any]] = json.loads(done.body)
    return {path: _entry(entries.get(path)) for path in paths}


def _entry(facts: dict[str, Any] | None) -> FileEntry:
    if facts is None:
        return GONE
    # JSON has no bytes: contents travel as latin-1, one character for each byte.
    content = facts.pop("content", None)
    return FileEntry(**facts, content=None if content is None else content.encode("latin-1"))
