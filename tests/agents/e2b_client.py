"""One rollout of an agent that uses E2B's Python SDK.

The first argument makes the rollout diverge; E2B's environment variables have the URLs. Prints the number of answers in
the shared prefix, then all answers with the times, pids and random numbers that the agent sees.
"""

# mypy: disable-error-code="import-not-found"

import io
import json
import sys
from collections.abc import Callable
from typing import Any

from e2b import Sandbox

LOOP = "drawn=$RANDOM$RANDOM; while read -r line </work/requests; do echo $line $drawn >/work/replies; done"
"""A stateful server over two FIFOs."""


def outcome(call: Callable[[], Any]) -> Any:
    """Return what an SDK call returns or raises, as JSON."""
    try:
        answer = call()
    except Exception as error:  # noqa: BLE001 - an exception is an outcome too
        kept = {name: getattr(error, name) for name in ("stdout", "stderr", "exit_code") if hasattr(error, name)}
        return {"raised": type(error).__name__, **(kept or {"message": str(error)})}
    if hasattr(answer, "stdout"):
        return {name: getattr(answer, name) for name in ("stdout", "stderr", "exit_code")}
    if isinstance(answer, list):
        return [getattr(entry, "name", str(entry)) for entry in answer]
    if hasattr(answer, "path"):
        return {name: str(getattr(answer, name, "")) for name in ("name", "path")}
    return answer.decode() if isinstance(answer, bytes | bytearray) else answer


def first_line(handle: Any) -> str:
    """Return the first line of a process's output."""
    line = ""
    for stdout, _err, _pty in handle:
        line += stdout or ""
        if line.endswith("\n"):
            break
    return line


def main(part: str) -> list[Any]:
    sandbox = Sandbox.create(metadata={"part": part}, envs={"TEAM": "blue"})
    run, files = sandbox.commands.run, sandbox.files
    streamed: list[str] = []
    answers = [
        outcome(lambda: run("mkdir /work; mkfifo /work/requests /work/replies; cd /work; echo shared >notes")),
        outcome(lambda: run("echo $RANDOM$RANDOM | tee /work/drawn")),
        outcome(
            lambda: run("pwd; cat notes; echo $TEAM $MORE; whoami", cwd="/work", envs={"MORE": "more"}, user="root")
        ),
        outcome(lambda: run("echo out; echo err >&2; exit 7")),
        outcome(lambda: run("for i in 1 2 3; do echo $i; sleep 0.05; done", on_stdout=streamed.append)),
        outcome(lambda: "".join(streamed)),
        outcome(lambda: run("cat", cwd="/no/such")),
        outcome(lambda: run("head -c 300000 /dev/zero | tr '\\0' x").stdout == "x" * 300000),
        outcome(lambda: files.write("/work/a.txt", "a text")),
        outcome(lambda: files.write("/work/b.bin", b"\x00\r\n--\xff")),
        outcome(lambda: files.write_files([{"path": "/work/c", "data": "1"}, {"path": "/work/d/e", "data": "2"}])),
        outcome(lambda: files.write("/work/f", io.BytesIO(b"streamed"))),
        outcome(lambda: files.read("/work/a.txt")),
        outcome(lambda: list(files.read("/work/b.bin", format="bytes"))),
        outcome(lambda: files.read("/work/none")),
        outcome(lambda: files.list("/work", depth=2)),
        outcome(lambda: [files.exists("/work/a.txt"), files.exists("/work/none")]),
        outcome(lambda: [files.make_dir("/work/new"), files.make_dir("/work/new")]),
        outcome(lambda: files.rename("/work/c", "/work/new/c")),
        outcome(lambda: files.get_info("/work/new/c")),
        outcome(lambda: files.remove("/work/d")),
        outcome(lambda: files.list("/work/none")),
    ]
    server = run(LOOP, background=True, timeout=0)
    answers += [
        outcome(lambda: run("echo first >/work/requests; cat /work/replies")),
        outcome(lambda: [process.cmd for process in sandbox.commands.list()]),
        outcome(lambda: sandbox.commands.kill(999)),
    ]
    reader = run("while read -r line; do echo got $line; done", background=True, stdin=True, timeout=0)
    sandbox.commands.send_stdin(reader.pid, "one\n")
    answers.append(outcome(lambda: first_line(reader)))
    answers.append(outcome(lambda: sandbox.commands.kill(reader.pid)))
    answers.append(outcome(reader.wait))
    shared = len(answers)
    answers += [
        outcome(lambda: run(f"echo {part} >/work/part; cat /work/part /work/drawn")),
        outcome(lambda: run(f"echo {part} >/work/requests; cat /work/replies")),
        outcome(lambda: files.read("/work/part")),
        outcome(lambda: sandbox.commands.connect(server.pid).pid == server.pid),
        outcome(server.kill),
        outcome(lambda: run("timeout 1 cat /work/replies")),
        outcome(sandbox.commands.list),
        outcome(lambda: run("sleep 5; echo no", timeout=1)),
        outcome(lambda: run("cat /work/new/c; ls /work")),
        outcome(lambda: run("echo late; sleep 0.4; echo later", background=True).wait()),
    ]
    outcome(sandbox.kill)
    answers.append(outcome(sandbox.is_running))
    return [shared, answers]


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
