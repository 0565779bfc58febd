"""One rollout of an agent that uses E2B's own SDK: argv says how it parts; the URLs are in E2B's own variables.

Prints how many answers are shared, then all, as the agent sees them: what times, pids and luck are in them is left in.
"""

# mypy: disable-error-code="import-not-found"

import io
import json
import sys
from collections.abc import Callable
from typing import Any

from e2b import Sandbox

LOOP = "drawn=$RANDOM$RANDOM; while read -r line </work/ask; do echo $line $drawn >/work/told; done"
"""A server with a memory, over FIFOs."""


def told(ask: Callable[[], Any]) -> Any:
    """Return what the SDK answers, or what it raises."""
    try:
        answer = ask()
    except Exception as error:  # noqa: BLE001 - it is an answer too
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
    """Return what a process says first, up to the end of its line."""
    said = ""
    for out, _err, _pty in handle:
        said += out or ""
        if said.endswith("\n"):
            break
    return said


def main(part: str) -> list[Any]:
    box = Sandbox.create(metadata={"part": part}, envs={"TEAM": "blue"})
    run, files = box.commands.run, box.files
    heard: list[str] = []
    answers = [
        told(lambda: run("mkdir /work; mkfifo /work/ask /work/told; cd /work; echo shared >notes")),
        told(lambda: run("echo $RANDOM$RANDOM | tee /work/drawn")),
        told(lambda: run("pwd; cat notes; echo $TEAM $MORE; whoami", cwd="/work", envs={"MORE": "more"}, user="root")),
        told(lambda: run("echo out; echo err >&2; exit 7")),
        told(lambda: run("for i in 1 2 3; do echo $i; sleep 0.05; done", on_stdout=heard.append)),
        told(lambda: "".join(heard)),
        told(lambda: run("cat", cwd="/no/such")),
        told(lambda: run("head -c 300000 /dev/zero | tr '\\0' x").stdout == "x" * 300000),
        told(lambda: files.write("/work/a.txt", "a text")),
        told(lambda: files.write("/work/b.bin", b"\x00\r\n--\xff")),
        told(lambda: files.write_files([{"path": "/work/c", "data": "1"}, {"path": "/work/d/e", "data": "2"}])),
        told(lambda: files.write("/work/f", io.BytesIO(b"streamed"))),
        told(lambda: files.read("/work/a.txt")),
        told(lambda: list(files.read("/work/b.bin", format="bytes"))),
        told(lambda: files.read("/work/none")),
        told(lambda: files.list("/work", depth=2)),
        told(lambda: [files.exists("/work/a.txt"), files.exists("/work/none")]),
        told(lambda: [files.make_dir("/work/new"), files.make_dir("/work/new")]),
        told(lambda: files.rename("/work/c", "/work/new/c")),
        told(lambda: files.get_info("/work/new/c")),
        told(lambda: files.remove("/work/d")),
        told(lambda: files.list("/work/none")),
    ]
    server = run(LOOP, background=True, timeout=0)
    answers += [
        told(lambda: run("echo first >/work/ask; cat /work/told")),
        told(lambda: [process.cmd for process in box.commands.list()]),
        told(lambda: box.commands.kill(999)),
    ]
    reader = run("while read -r line; do echo got $line; done", background=True, stdin=True, timeout=0)
    box.commands.send_stdin(reader.pid, "one\n")
    answers.append(told(lambda: first_line(reader)))
    answers.append(told(lambda: box.commands.kill(reader.pid)))
    answers.append(told(reader.wait))
    shared = len(answers)
    answers += [
        told(lambda: run(f"echo {part} >/work/part; cat /work/part /work/drawn")),
        told(lambda: run(f"echo {part} >/work/ask; cat /work/told")),
        told(lambda: files.read("/work/part")),
        told(lambda: box.commands.connect(server.pid).pid == server.pid),
        told(server.kill),
        told(lambda: run("timeout 1 cat /work/told")),
        told(box.commands.list),
        told(lambda: run("sleep 5; echo no", timeout=1)),
        told(lambda: run("cat /work/new/c; ls /work")),
        told(lambda: run("echo late; sleep 0.4; echo later", background=True).wait()),
    ]
    told(box.kill)
    answers.append(told(box.is_running))
    return [shared, answers]


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
