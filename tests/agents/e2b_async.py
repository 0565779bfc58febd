"""One rollout of an agent that uses E2B's own SDK for asyncio: argv says how it parts.

Prints how many answers are shared, then all, as the agent sees them.
"""

# mypy: disable-error-code="import-not-found"

import asyncio
import json
import os
import sys
from collections.abc import Awaitable
from typing import Any

from e2b import AsyncSandbox, PtySize
from e2b_client import told


async def answered(asking: Awaitable[Any]) -> Any:
    """Return what the SDK answers, or what it raises."""
    try:
        answer = await asking
    except Exception as error:  # noqa: BLE001 - it is an answer too
        raised = error

        def again() -> Any:
            raise raised

        return told(again)
    return told(lambda: answer)


async def heard(queue: "asyncio.Queue[Any]", last: Any) -> list[Any]:
    """Return what comes, up to last."""
    found = []
    while last not in found:
        found.append(await queue.get())
    return found


async def watched(box: Any) -> list[Any]:
    events: asyncio.Queue[Any] = asyncio.Queue()
    ended: list[Any] = []
    handle = await box.files.watch_dir(
        "/work", on_event=lambda event: events.put_nowait([event.type.value, event.name]), on_exit=ended.append
    )
    await box.files.write("/work/new", "1")
    answers = [await heard(events, ["write", "new"])]
    await box.commands.run("rm /work/new")
    answers.append(await heard(events, ["remove", "new"]))
    await handle.stop()
    return [*answers, ended]


async def terminal(box: Any) -> list[Any]:
    said: list[bytes] = []
    handle = await box.pty.create(PtySize(24, 80), on_data=said.append, timeout=0)
    await box.pty.send_stdin(handle.pid, b"echo $((40+2))$((40+2)); exit 5\n")
    return [await answered(handle.wait()), b"4242\r\n" in b"".join(said)]


async def main(part: str) -> list[Any]:
    box = await AsyncSandbox.create(timeout=3600, envs={"TEAM": "blue"})
    run, files = box.commands.run, box.files
    answers = [
        await answered(run("mkdir /work; echo $TEAM $RANDOM$RANDOM | tee /work/drawn")),
        await answered(run("cat /work/drawn; exit 7")),
        await answered(files.write_files([{"path": "/work/a", "data": "1"}, {"path": "/work/b/c", "data": b"2"}])),
        await answered(files.list("/work", depth=2)),
        await answered(files.read("/work/none")),
        await answered(files.exists("/work/b/c")),
        b"".join([piece async for piece in await files.read("/work/b/c", format="stream")]).decode(),
    ]
    lines: asyncio.Queue[Any] = asyncio.Queue()
    server = await run(
        "while read -r line; do echo got $line; done",
        background=True, stdin=True, timeout=0, on_stdout=lines.put_nowait,
    )  # fmt: skip
    await box.commands.send_stdin(server.pid, "one\n")
    await heard(lines, "got one\n")
    answers += [await answered(server.kill()), await answered(server.wait())]
    shared = len(answers)
    answers += [
        await answered(run(f"echo {part} >/work/part; cat /work/part /work/drawn")),
        sorted([done["stdout"] for done in await asyncio.gather(*(answered(run(f"echo {n}")) for n in range(4)))]),
        await watched(box), await terminal(box), await answered(run("sleep 5", timeout=0.5)),
        await answered(box.kill()), await answered(box.is_running()), await answered(run("echo late")),
    ]  # fmt: skip
    return [shared, answers]


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1]))), flush=True)
    # The SDK's own threads may abort while the interpreter goes down.
    os._exit(0)
