"""The cost of a checkpoint of live processes: `python -m bench.checkpoints`. Needs root, CRIU and an idle machine.

Measures a shell with a Python HTTP server, and a Python process with touched memory: checkpoint (the sandbox
continues), restore into a new sandbox, restore until the server answers, and many concurrent restores of one
checkpoint.
"""

import asyncio
import tempfile
from argparse import ArgumentParser
from pathlib import Path

from bench.machine import console, median, table
from bench.sandboxes import Timings, execute, timed
from sandboxes.linux.files import remove_tree
from sandboxes.local.driver import LocalDriver
from sandboxes.spec import EnvironmentSpec, Limits
from snapshots.criu.checkpoints import CriuCheckpointer

SPEC = EnvironmentSpec(limits=Limits(memory_mb=1024))
SERVER = "echo hi > page; python3 -m http.server -b 127.0.0.1 8000 >log 2>&1 &"
ANSWERS = "until exec 3<>/dev/tcp/127.0.0.1/8000; do sleep .01; done 2>/dev/null; "
ANSWERS += "printf 'GET /page HTTP/1.0\\r\\n\\r\\n' >&3; grep -q hi <&3; exec 3<&-"
TOUCHED = 'python3 -c \'import time; x = bytearray(b"x") * ({mb} << 20); open("ready", "w"); time.sleep(1000)\' & '
TOUCHED += "until test -e ready; do sleep .01; done"


async def measure(driver: LocalDriver, begin: str, answers: str, count: int, clones: int) -> tuple[Timings, int]:
    """Return the times in milliseconds, and the size of a checkpoint in bytes."""
    timings: Timings = {}
    sandbox = await driver.start(SPEC)
    await execute(sandbox, begin)
    await execute(sandbox, answers)
    frozen = await sandbox.freeze()
    for _ in range(count):
        with timed(timings, "checkpoint"):
            frozen = await sandbox.freeze()
        await asyncio.sleep(0.05)
        with timed(timings, "restore and answer"):
            with timed(timings, "restore"):
                other = await driver.restore(SPEC, frozen)
            await execute(other, answers)
        await other.close()
        await asyncio.sleep(0.05)
    with timed(timings, f"{clones} clones at once, all answer"):
        others = await asyncio.gather(*(driver.restore(SPEC, frozen) for _ in range(clones)))
        await asyncio.gather(*(execute(other, answers) for other in others))
    await asyncio.gather(*(other.close() for other in (*others, sandbox)))
    return timings, frozen.size_bytes


async def run(folder: Path, images: Path | None, count: int, megabytes: int) -> None:
    driver = LocalDriver(folder, CriuCheckpointer(folder, images_dir=images))
    await driver.open()
    try:
        subjects = {
            "shell": ("sleep 1000 &", "kill -0 %1"),
            "shell + HTTP server": (SERVER, ANSWERS),
            f"shell + {megabytes} MB touched": (TOUCHED.format(mb=megabytes), "kill -0 %1"),
        }
        for name, (begin, answers) in subjects.items():
            timings, size = await measure(driver, begin, answers, count, 16 if "MB" not in name else 4)
            shown = table(
                f"{name}: {size / 1e6:.1f} MB, images {'on a tmpfs' if images else 'on disk'}",
                "",
                "median ms",
                "max ms",
            )
            for what, times in timings.items():
                shown.add_row(what, f"{median(times):.1f}", f"{max(times):.1f}")
            console.print(shown)
    finally:
        await driver.aclose()


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=15)
    parser.add_argument("--megabytes", type=int, default=200)
    options = parser.parse_args()
    places = ("/var/tmp", "/dev/shm")  # noqa: S108
    folders = [Path(tempfile.mkdtemp(prefix="forkpoint-bench-", dir=place)) for place in places]
    try:
        for images in (None, folders[1]):
            asyncio.run(run(folders[0], images, options.count, options.megabytes))
    finally:
        for folder in folders:
            remove_tree(folder)


if __name__ == "__main__":
    main()
