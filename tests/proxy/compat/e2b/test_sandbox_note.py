"""What is stored about an E2B sandbox."""

import json
from dataclasses import replace

from proxy.compat.e2b.sandbox_note import DEFAULT_TIMEOUT_S, SandboxNote


def test_note_round_trips() -> None:
    """A stored note is read back unchanged."""
    note = replace(
        SandboxNote.new(7.0), template="n3", metadata={"a": "b"}, envs={"A": "1"}, paused=True, mortal=True,
        pauses=True, resumes=True, timeout_s=60.0, snapshots=[{"snapshotID": "n3", "names": ["s"]}],
    )  # fmt: skip
    assert SandboxNote.decode(note.encode(), 99.0) == note


def test_stored_names_are_stable() -> None:
    """The names of stored members do not follow renames in the code: data directories outlive versions."""
    assert json.loads(SandboxNote.new(7.0).encode()) == {
        "template": "base", "metadata": {}, "envs": {}, "started": 7.0, "ends": 7.0 + DEFAULT_TIMEOUT_S,
        "paused": False, "snapshots": [], "mortal": False, "pauses": False, "resumes": False,
        "seconds": DEFAULT_TIMEOUT_S,
    }  # fmt: skip


def test_older_note_has_defaults() -> None:
    """A note of a version that knew fewer members is readable."""
    assert SandboxNote.decode('{"paused": true}', 7.0) == replace(SandboxNote.new(7.0), paused=True)


def test_only_mortal_running_sandbox_is_over() -> None:
    """The timeout of a paused sandbox, or of one that E2B's API did not create, does not pass."""
    note = replace(SandboxNote.new(0.0), mortal=True)
    assert note.is_over(DEFAULT_TIMEOUT_S)
    assert not note.is_over(DEFAULT_TIMEOUT_S - 1)
    assert not replace(note, paused=True).is_over(DEFAULT_TIMEOUT_S)
    assert not replace(note, mortal=False).is_over(DEFAULT_TIMEOUT_S)
