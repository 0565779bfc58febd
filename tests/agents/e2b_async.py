"""One rollout of an agent that uses E2B's SDK for asyncio; see e2b_client.py."""

# mypy: disable-error-code="import-not-found"

import asyncio
import json
import os
import sys
from collections.abc import Awaitable
from typing import Any

from e2b import AsyncSandbox, PtySize
from e2b_client import outcome


async def awaited_outcome(call: Awaitable[Any]) -> Any:
    """Return what an awaited SDK call returns or raises, as JSON."""
    try:
        answer = await call
    except Exception as error:  # noqa: BLE001 - an exception is an outcome too
        raised = error

        def again() -> Any:
            raise raised

        return outcome(again)
    return outcome(lambda: answer)


async def receive_until(queue: "asyncio.Queue[Any]", last: Any) -> list[Any]:
    """Return the items of a queue up to the last one."""
    received = []
    while last not in received:
        received.append(await queue.get())
    return received


async def watch_outcomes(sandbox: Any) -> list[Any]:
    events: asyncio.Queue[Any] = asyncio.Queue()
    ended: list[Any] = []
    handle = await sandbox.files.watch_dir(
        "/work", on_event=lambda event: events.put_nowait([event.type.value, event.name]), on_exit=ended.append
    )
    await sandbox.files.write("/work/new", "1")
    answers = [await receive_until(events, ["write", "new"])]
    await sandbox.commands.run("rm /work/new")
    answers.append(await receive_until(events, ["remove", "new"]))
    await handle.stop()
    return [*answers, ended]


async def terminal_outcomes(sandbox: Any) -> list[Any]:
    output: list[bytes] = []
    handle = await sandbox.pty.create(PtySize(24, 80), on_data=output.append, timeout=0)
    await sandbox.pty.send_stdin(handle.pid, b"echo $((40+2))$((40+2)); exit 5\n")
    return [await awaited_outcome(handle.wait()), b"4242\r\n" in b"".join(output)]


async def main(part: str) -> list[Any]:
    sandbox = await AsyncSandbox.create(timeout=3600, envs={"TEAM": "blue"})
    run, files = sandbox.commands.run, sandbox.files
    answers = [
        await awaited_outcome(run("mkdir /work; echo $TEAM $RANDOM$RANDOM | tee /work/drawn")),
        await awaited_outcome(run("cat /work/drawn; exit 7")),
        await awaited_outcome(
            files.write_files([{"path": "/work/a", "data": "1"}, {"path": "/work/b/c", "data": b"2"}])
        ),
        await awaited_outcome(files.list("/work", depth=2)),
        await awaited_outcome(files.read("/work/none")),
        await awaited_outcome(files.exists("/work/b/c")),
        b"".join([piece async for piece in await files.read("/work/b/c", format="stream")]).decode(),
    ]
    lines: asyncio.Queue[Any] = asyncio.Queue()
    server = await run(
        "while read -r line; do echo got $line; done",
        background=True, stdin=True, timeout=0, on_stdout=lines.put_nowait,
    )  # fmt: skip
    await sandbox.commands.send_stdin(server.pid, "one\n")
    await receive_until(lines, "got one\n")
    answers += [await awaited_outcome(server.kill()), await awaited_outcome(server.wait())]
    shared = len(answers)
    counted = await asyncio.gather(*(awaited_outcome(run(f"echo {n}")) for n in range(4)))
    answers += [
        await awaited_outcome(run(f"echo {part} >/work/part; cat /work/part /work/drawn")),
        sorted(result["stdout"] for result in counted),
        await watch_outcomes(sandbox),
        await terminal_outcomes(sandbox),
        await awaited_outcome(run("sleep 5", timeout=0.5)),
        await awaited_outcome(sandbox.kill()),
        await awaited_outcome(sandbox.is_running()),
        await awaited_outcome(run("echo late")),
    ]
    return [shared, answers]


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1]))), flush=True)
    # The SDK's own threads may abort while the interpreter goes down.
    os._exit(0)
