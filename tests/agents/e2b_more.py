"""One rollout of an agent that uses what few do of E2B's own SDK: terminals, watched directories, polls, ends of time.

Prints all answers, as the agent sees them.
"""

# mypy: disable-error-code="import-not-found"

import json
from collections.abc import Callable
from typing import Any

from e2b import PtySize, Sandbox
from e2b_client import told


def until(handle: Any, last: bytes) -> bytes:
    """Return what a terminal says, up to last."""
    heard = b""
    for _out, _err, data in handle:
        heard += data or b""
        if last in heard:
            break
    return heard


def polled(ask: Callable[[], bool]) -> bool:
    """Ask until it is so, not for ever."""
    return any(ask() for _ in range(1000))


def terminal(box: Any) -> list[Any]:
    handle = box.pty.create(PtySize(24, 80), cwd="/work", envs={"PS1": "$ "}, timeout=0)
    box.pty.send_stdin(handle.pid, b"stty size; x=$((40+2))\n")
    answers = [b"24 80" in until(handle, b"24 80\r\n"), [process.pid == handle.pid for process in box.commands.list()]]
    box.pty.resize(handle.pid, PtySize(30, 100))
    box.pty.send_stdin(handle.pid, b"stty size; pwd; echo $x$x\n")
    answers.append(b"30 100\r\n/work\r\n" in until(handle, b"4242\r\n"))
    answers.append(told(lambda: box.commands.send_stdin(handle.pid, "x")))
    answers += [told(lambda: box.pty.kill(handle.pid)), told(handle.wait), told(lambda: box.pty.kill(handle.pid))]
    return answers


def watched(box: Any) -> list[Any]:
    files = box.files
    handle = files.watch_dir("/work", recursive=True)
    files.write("/work/new", "1")
    files.rename("/work/new", "/work/other")
    answers = [[(event.type.value, event.name) for event in handle.get_new_events()]]
    box.commands.run("mkdir sub; cp notes sub; rm other", cwd="/work")
    answers.append([event.name for event in handle.get_new_events() if event.type.value in ("create", "remove")])
    answers += [handle.get_new_events(), told(handle.stop), told(lambda: files.watch_dir("/work/notes"))]
    return [*answers, told(lambda: files.watch_dir("/work/none"))]


def beside(box: Any) -> list[Any]:
    run, files = box.commands.run, box.files
    reader = run("sleep 0.4; read a; read b; echo $a-$b >/work/read; exit 3", background=True, stdin=True, timeout=0)
    for _ in range(2):
        box.commands.send_stdin(reader.pid, "same\n")
    reader.disconnect()
    answers = [polled(lambda: files.exists("/work/read")), told(lambda: files.read("/work/read"))]
    answers.append(polled(lambda: not box.commands.list()))
    return [*answers, told(lambda: box.commands.connect(reader.pid)), told(lambda: box.commands.connect(4))]


def main() -> list[Any]:
    box = Sandbox.create(timeout=3600)
    before = box.get_info().end_at
    box.set_timeout(7200)
    box.commands.run("mkdir /work; echo shared >/work/notes")
    answers = [box.get_info().end_at > before, beside(box), terminal(box), watched(box)]
    answers.append(told(lambda: box.commands.run("cat notes", cwd="/work")))
    box.set_timeout(0)
    answers += [told(box.is_running), told(lambda: box.commands.run("echo late")), told(lambda: box.files.read("/x"))]
    answers += [told(lambda: Sandbox.get_info(box.sandbox_id)), told(lambda: Sandbox.connect(box.sandbox_id))]
    return [*answers, told(box.kill)]


if __name__ == "__main__":
    print(json.dumps(main()))
