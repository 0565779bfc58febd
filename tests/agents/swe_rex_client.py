"""One rollout of an agent that uses SWE-ReX, with the project's own client: argv is a URL and how the rollout parts.

It works in the directory that the variable WORK names. With a third word, `steady`, nothing is drawn or left running in
the shared part. Prints how many answers are shared, then the JSON of all answers, exceptions among them, as the agent
sees them.
"""

# mypy: disable-error-code="import-not-found"

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from swerex.runtime.abstract import (
    BashAction,
    BashInterruptAction,
    CloseSessionRequest,
    Command,
    CreateBashSessionRequest,
    ReadFileRequest,
    UploadRequest,
    WriteFileRequest,
)
from swerex.runtime.remote import RemoteRuntime

WORK = os.environ["WORK"]


async def outcome(coming: Any) -> Any:
    """Return what an action answers, or the exception that the client raises for it."""
    try:
        answer = await coming
    except Exception as error:  # noqa: BLE001 - it is an answer too
        return {"raised": type(error).__name__, "message": str(error)}
    return answer.model_dump()


def bundle() -> Path:
    """Return a directory to upload; times in it differ from run to run."""
    folder = Path(tempfile.mkdtemp())
    (folder / "bin").mkdir()
    (folder / "bin" / "tool").write_text("#!/bin/sh\necho tool says $1\n")
    (folder / "bin" / "tool").chmod(0o755)
    (folder / "notes.txt").write_text("notes\n")
    # Wherever it was unpacked.
    os.utime(folder / "notes.txt", (1_700_000_000 + os.getpid() % 10_000, 1_700_000_000))
    return folder


async def main(url: str, part: str, *, steady: bool) -> list[Any]:
    # The default of 0.15 s is too short for a machine that is busy with other tests.
    runtime = RemoteRuntime(host=url, auth_token="token", timeout=20)  # noqa: S106

    def bash(command: str, **more: Any) -> Any:
        return outcome(runtime.run_in_session(BashAction(command=command, **{"timeout": 20, **more})))

    drawn = "7" if steady else "random.random()"
    tick = "while [ -d . ]; do date +%s%N > tick; sleep .05; done"
    ticking = "echo none" if steady else f"({tick}) > /dev/null 2>&1 & echo started"
    answers = [
        await outcome(runtime.is_alive()),
        await outcome(runtime.create_session(CreateBashSessionRequest(startup_source=[]))),
        await bash(f"mkdir -p {WORK} && cd {WORK} && pwd"),
        await bash('x=5; greet() { echo "greet $x $1"; }; greet one'),
        await outcome(runtime.write_file(WriteFileRequest(path=f"{WORK}/file", content="written\n"))),
        await outcome(runtime.upload(UploadRequest(source_path=str(bundle()), target_path=f"{WORK}/bundle"))),
        await bash("chmod +x bundle/bin/tool; bundle/bin/tool hello; cat bundle/notes.txt"),
        await bash(f"python3 -c 'import random; print({drawn})' > drawn; cat drawn", check="raise"),
        await bash("python3 -c 'import sys; sys.exit(3)'", check="silent"),
        await bash("false", check="raise", error_msg="as asked"),
        await bash("python3 -q", is_interactive_command=True, expect=[">>> "]),
        await bash("memory = 42", is_interactive_command=True, expect=[">>> "]),
        await bash("print(memory + 1)", is_interactive_command=True, expect=[">>> "]),
        await bash("quit()", is_interactive_quit=True),
        await bash("sleep 60", timeout=0.5),
        await outcome(runtime.run_in_session(BashInterruptAction())),
        await bash(ticking),
        await outcome(runtime.execute(Command(command=["echo", "executed"], check=True))),
        await outcome(runtime.execute(Command(command="exit 4", shell=True))),  # noqa: S604
        await outcome(runtime.read_file(ReadFileRequest(path=f"{WORK}/file"))),
        await outcome(runtime.read_file(ReadFileRequest(path=f"{WORK}/missing"))),
        await outcome(runtime.create_session(CreateBashSessionRequest(session="second"))),
        await outcome(runtime.create_session(CreateBashSessionRequest(session="second"))),
    ]
    shared = len(answers)
    answers += await asyncio.gather(
        outcome(runtime.execute(Command(command=["echo", f"left {part}"]))),
        outcome(runtime.execute(Command(command=["echo", f"right {part}"]))),
    )
    answers += [
        await bash(f"greet {part}; pwd; cat file drawn"),
        await bash(
            'a=$(cat tick); for i in {1..90}; do [ "$(cat tick)" = "$a" ] || break; sleep .1; done; '
            # Whether bash tells of its end before the next prompt is chance.
            '[ "$(cat tick)" != "$a" ] && echo it ticks; kill %1; disown %1'
        ),
        await bash(f"x={part}; echo {part} > own; greet again; cat own"),
        await outcome(runtime.read_file(ReadFileRequest(path=f"{WORK}/own"))),
        await outcome(runtime.run_in_session(BashAction(command="echo in the second", session="second", timeout=20))),
        await outcome(runtime.close_session(CloseSessionRequest(session="second"))),
        await outcome(runtime.close()),
    ]
    return [shared, answers]


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1], sys.argv[2], steady="steady" in sys.argv))))
