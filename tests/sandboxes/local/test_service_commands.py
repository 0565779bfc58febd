"""A call in a side service becomes a call of the main container, with the service's root, variables and user."""

import shlex

from sandboxes.calls import ToolCall
from sandboxes.images.config import ImageConfig
from sandboxes.local.service_commands import call_in_service, frame_of
from sandboxes.server_spec import Service

CONFIG = ImageConfig({"KIND": "image", "OWN": "1"}, "app", "/srv")


def test_process_gets_what_surrounds_the_service() -> None:
    frame = frame_of("db", Service(image="any", environment={"KIND": "spec"}), CONFIG)
    call = ToolCall("process", "run", {"argv": ["echo", "a b"], "env": {"X": "'"}, "service": "db", "tty": True})
    inner = call_in_service(call, frame)
    assert inner.arguments.keys() == {"argv", "env", "cwd", "user", "tty"}
    words = shlex.split(inner.arguments["argv"][2].partition("exec ")[2])
    assert words[:2] == ["env", "-i"]
    assert {"KIND=spec", "OWN=1", "X='", "TERM=xterm", "HOSTNAME=db"} <= set(words)
    assert words[words.index("$c") :] == [
        "$c", "--userspec=app", "/.services/db", "/bin/sh", "-c", 'cd -- "$0" && exec "$@"', "/srv", "echo", "a b",
    ]  # fmt: skip


def test_request_replaces_directory_and_user() -> None:
    frame = frame_of("db", Service(image="any"), CONFIG)
    call = ToolCall("process", "run", {"argv": ["id"], "cwd": "/", "user": "root", "service": "db"})
    text = call_in_service(call, frame).arguments["argv"][2]
    assert text.endswith(("'$c' /.services/db id", '"$c" /.services/db id'))


def test_archive_gets_the_root_directory() -> None:
    frame = frame_of("db", Service(image="any"), ImageConfig())
    call = ToolCall("archive", "pack", {"path": "/x", "service": "db"}, b"")
    assert call_in_service(call, frame).arguments == {"path": "/x", "root": "/.services/db"}


def test_shell_command_stays_one_word_in_a_subshell() -> None:
    """Nothing of the command is read by the main container's shell, which goes on afterwards."""
    frame = frame_of("db", Service(image="any", user="app"), ImageConfig())
    arguments = {"command": "echo ')'; $(id)", "session": "main", "timeout_s": 5.0, "service": "db", "user": "root"}
    inner = call_in_service(ToolCall("shell", "exec", arguments), frame)
    assert inner.arguments.keys() == {"command", "session", "timeout_s"}
    text = inner.arguments["command"]
    assert text.startswith("(")
    assert text.endswith(") </dev/null")
    assert shlex.split(text[1 : -len(") </dev/null")])[-4:] == ["/.services/db", "/bin/sh", "-c", arguments["command"]]
    assert "--userspec" not in text
