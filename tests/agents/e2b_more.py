"""One rollout of an agent that uses rare features of E2B's Python SDK: terminals, watches, polls, timeouts.

Prints all answers as the agent sees them.
"""

# mypy: disable-error-code="import-not-found"

import json
from collections.abc import Callable
from typing import Any

from e2b import PtySize, Sandbox
from e2b_client import outcome


def read_until(handle: Any, last: bytes) -> bytes:
    """Return the output of a terminal up to a text."""
    output = b""
    for _out, _err, data in handle:
        output += data or b""
        if last in output:
            break
    return output


def polled(is_done: Callable[[], bool]) -> bool:
    """Poll until a condition is true; return False after 1000 polls."""
    return any(is_done() for _ in range(1000))


def terminal_outcomes(sandbox: Any) -> list[Any]:
    handle = sandbox.pty.create(PtySize(24, 80), cwd="/work", envs={"PS1": "$ "}, timeout=0)
    sandbox.pty.send_stdin(handle.pid, b"stty size; x=$((40+2))\n")
    answers = [
        b"24 80" in read_until(handle, b"24 80\r\n"),
        [process.pid == handle.pid for process in sandbox.commands.list()],
    ]
    sandbox.pty.resize(handle.pid, PtySize(30, 100))
    sandbox.pty.send_stdin(handle.pid, b"stty size; pwd; echo $x$x\n")
    answers.append(b"30 100\r\n/work\r\n" in read_until(handle, b"4242\r\n"))
    answers.append(outcome(lambda: sandbox.commands.send_stdin(handle.pid, "x")))
    answers += [
        outcome(lambda: sandbox.pty.kill(handle.pid)),
        outcome(handle.wait),
        outcome(lambda: sandbox.pty.kill(handle.pid)),
    ]
    return answers


def watch_outcomes(sandbox: Any) -> list[Any]:
    files = sandbox.files
    handle = files.watch_dir("/work", recursive=True)
    files.write("/work/new", "1")
    files.rename("/work/new", "/work/other")
    answers = [[(event.type.value, event.name) for event in handle.get_new_events()]]
    sandbox.commands.run("mkdir sub; cp notes sub; rm other", cwd="/work")
    answers.append([event.name for event in handle.get_new_events() if event.type.value in ("create", "remove")])
    answers += [handle.get_new_events(), outcome(handle.stop), outcome(lambda: files.watch_dir("/work/notes"))]
    return [*answers, outcome(lambda: files.watch_dir("/work/none"))]


def background_outcomes(sandbox: Any) -> list[Any]:
    run, files = sandbox.commands.run, sandbox.files
    reader = run("sleep 0.4; read a; read b; echo $a-$b >/work/read; exit 3", background=True, stdin=True, timeout=0)
    for _ in range(2):
        sandbox.commands.send_stdin(reader.pid, "same\n")
    reader.disconnect()
    answers = [polled(lambda: files.exists("/work/read")), outcome(lambda: files.read("/work/read"))]
    answers.append(polled(lambda: not sandbox.commands.list()))
    return [
        *answers,
        outcome(lambda: sandbox.commands.connect(reader.pid)),
        outcome(lambda: sandbox.commands.connect(4)),
    ]


def main() -> list[Any]:
    sandbox = Sandbox.create(timeout=3600)
    before = sandbox.get_info().end_at
    sandbox.set_timeout(7200)
    sandbox.commands.run("mkdir /work; echo shared >/work/notes")
    answers = [
        sandbox.get_info().end_at > before,
        background_outcomes(sandbox),
        terminal_outcomes(sandbox),
        watch_outcomes(sandbox),
    ]
    answers.append(outcome(lambda: sandbox.commands.run("cat notes", cwd="/work")))
    sandbox.set_timeout(0)
    answers += [
        outcome(sandbox.is_running),
        outcome(lambda: sandbox.commands.run("echo late")),
        outcome(lambda: sandbox.files.read("/x")),
    ]
    answers += [
        outcome(lambda: Sandbox.get_info(sandbox.sandbox_id)),
        outcome(lambda: Sandbox.connect(sandbox.sandbox_id)),
    ]
    return [*answers, outcome(sandbox.kill)]


if __name__ == "__main__":
    print(json.dumps(main()))
