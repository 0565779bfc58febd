"""kill -9 in the middle of a preprocess: nothing half-made is left, and the next instance makes it whole."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from sandboxes.video.driver import VideoDriver
from tests.machine import alive, process, wait_until
from tests.sandboxes.videos import ask, driven, entries, make, parts, prepared, spec_of

HELD = """
import asyncio, os, signal, sys
from pathlib import Path
from sandboxes.video.driver import VideoDriver
from tests.sandboxes.videos import ask, spec_of, until

async def go():
    driver = VideoDriver(Path(sys.argv[1]))
    await driver.open()
    sandbox = await driver.start(spec_of(Path(sys.argv[2])))
    await ask(sandbox, "load_video", name="clip.mp4")
    before = set(driver.worker_pool.workers)
    making = asyncio.ensure_future(ask(sandbox, "preprocess"))
    await until(lambda: driver.worker_pool.workers - before)
    worker = (driver.worker_pool.workers - before).pop().pid
    os.kill(worker, signal.SIGSTOP)
    print(worker, flush=True)
    await making

asyncio.run(go())
"""


def test_killed_proxy_leaves_no_incomplete_part(tmp_path: Path) -> None:
    clip, data = make(tmp_path / "clip.mp4"), tmp_path / "data"
    command = [sys.executable, "-c", HELD, str(data), str(clip)]
    repository = Path(__file__).parents[3]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=repository) as proxy:
        assert proxy.stdout is not None
        # The log is checked there, too.
        worker = process(next(int(line) for line in proxy.stdout if line.strip().isdigit()))
        assert worker is not None
        assert entries(data / "work") != []
        proxy.send_signal(signal.SIGKILL)
    # Stopped before it had asked to die with its parent, it looks whether that lives when it goes on.
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker[0], signal.SIGCONT)
    wait_until(lambda: not alive({worker}), "its worker lives")

    async def test(driver: VideoDriver) -> None:
        assert parts(driver, "m-") == set()
        assert len(parts(driver, "v-")) == 1
        assert entries(driver.store.folder / "work") == []
        sandbox = await prepared(driver, spec_of(clip))
        assert len((await ask(sandbox, "detect_shots")).json["shots"]) == 4

    driven(data, test)
