"""The cost of a sandbox of the local driver, compared with Docker if it is installed: `python -m bench.sandboxes`.

Measures start, freeze (the sandbox continues) and restore, each alone and with the next command, on an otherwise idle
machine.
"""

import asyncio
import json
import shutil
import subprocess
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.machine import console, median, table
from sandboxes.calls import ToolCall
from sandboxes.driver import Sandbox
from sandboxes.local.driver import LocalDriver
from sandboxes.spec import EnvironmentSpec
from snapshots.criu.checkpoints import CriuCheckpointer

Timings = dict[str, list[float]]
START, RESTORE, FREEZE, RUN = "start from nothing", "restore", "freeze", "a command"
ANSWERED, REMOVE = " and answer", "remove"


async def execute(sandbox: Sandbox, command: str) -> None:
    """Run command in sandbox.

    Raises:
        RuntimeError: it failed.
    """
    call = ToolCall("shell", "exec", {"command": command, "timeout_s": 10.0, "session": "main"})
    result = json.loads((await sandbox.execute(call)).result.body)
    if result["exit_code"] != 0:
        raise RuntimeError(f"{command!r} failed in the sandbox: {result}")


@contextmanager
def timed(timings: Timings, what: str) -> Iterator[None]:
    """Append the duration of the block to `timings`, in milliseconds."""
    started = time.perf_counter()
    yield
    timings.setdefault(what, []).append((time.perf_counter() - started) * 1e3)


async def local(folder: Path, count: int) -> Timings:
    """Return `count` times of each step in milliseconds: alone, and with the next command."""
    timings: Timings = {}
    driver, spec = LocalDriver(folder, CriuCheckpointer(folder)), EnvironmentSpec()
    await driver.open()
    try:
        for number in range(count):
            with timed(timings, START + ANSWERED):
                with timed(timings, START):
                    sandbox = await driver.start(spec)
                await execute(sandbox, "true")
            await execute(sandbox, f"echo {number} > /tmp/written; export kept={number}")
            # Directly after the call that wrote, so that making its layer counts.
            with timed(timings, FREEZE + ANSWERED):
                with timed(timings, FREEZE):
                    frozen = await sandbox.freeze()
                await execute(sandbox, "true")
            with timed(timings, RUN):
                await execute(sandbox, "true")
            await sandbox.close()
            with timed(timings, RESTORE + ANSWERED):
                with timed(timings, RESTORE):
                    restored = await driver.restore(spec, frozen)
                await execute(restored, f'test "$(cat /tmp/written)" = {number} && test "$kept" = {number}')
            await restored.close()
    finally:
        await driver.aclose()
    return timings


def docker(image: str, count: int) -> Timings:
    """Return the times of Docker's steps in milliseconds: run, exec, commit, run from the commit. Cleans up.

    Raises:
        subprocess.CalledProcessError: docker refused.
    """
    timings: Timings = {}

    def step(what: str, *words: str) -> str:
        with timed(timings, what):
            run = subprocess.run(["docker", *words], capture_output=True, text=True, check=True)
        return run.stdout.strip()

    for _ in range(count):
        container = committed = restored = ""
        try:
            container = step(START, "run", "-d", "--network", "none", image, "sleep", "600")
            step(RUN, "exec", container, "true")
            committed = step(FREEZE, "commit", container)
            restored = step(RESTORE, "run", "-d", "--network", "none", committed, "sleep", "600")
        finally:
            for name in filter(None, (container, restored)):
                step(REMOVE, "rm", "-f", name)
            if committed:
                step(REMOVE, "rmi", committed)
    return timings


def docker_image(wanted: str | None) -> tuple[str | None, str]:
    """Return a local image, or None and the reason: the benchmark pulls no image."""
    if shutil.which("docker") is None:
        return None, "docker is not installed"
    ask = ["docker", "images", "--format", "{{.Repository}}:{{.Tag}}"]
    result = subprocess.run(ask, capture_output=True, text=True, check=False)
    if result.returncode:
        return None, f"docker does not answer: {result.stderr.strip().splitlines()[-1]}"
    images = [image for image in result.stdout.split() if "<none>" not in image]
    if wanted is not None and wanted not in images:
        return None, f"{wanted} is not among the images here: {', '.join(images) or 'none'}"
    return (wanted or images[0], "") if images else (None, "docker has no image here")


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--docker-count", type=int, default=5)
    parser.add_argument("--image", help="image for Docker; default: the first local image")
    parser.add_argument("--data", type=Path, help="directory of the sandboxes; default: a temporary directory")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.data, prefix="forkpoint-bench-") as folder:
        ours = asyncio.run(local(Path(folder), options.count))
    image, why = docker_image(options.image)
    theirs = docker(image, options.docker_count) if image else {}
    shown = table("Sandboxes: medians in ms", "", "local", "p95", "docker", "ratio")
    for what, values in ours.items():
        beside = median(theirs[what]) if what in theirs else None
        ratio = (f"{beside:.0f}", f"{beside / median(values):.0f}x") if beside else ("-", "-")
        shown.add_row(what, f"{median(values):.2f}", f"{sorted(values)[int(0.95 * (len(values) - 1))]:.2f}", *ratio)
    console.print(shown)
    console.print(f"docker: {image or why}; its freeze is `docker commit` (files alone), ours files and session")


if __name__ == "__main__":
    main()
