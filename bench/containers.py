"""The time from a diverging call to a sandbox of an image in its state: `python -m bench.containers`.

Compares a restore and the call with Docker's own steps: `docker commit` of the source, `docker run` of that image,
`docker exec` of the call. Files only, warm caches, states of several sizes; both take turns. Starts a Docker daemon of
its own. (ext4 without a journal creates files slowly for a minute after many were removed, as this benchmark does.)
"""

import asyncio
import tempfile
import time
from argparse import ArgumentParser
from pathlib import Path
from typing import TYPE_CHECKING

import docker

from bench.machine import console, median, table
from bench.sandboxes import Timings, execute, timed
from sandboxes.linux.files import remove_tree
from sandboxes.local.driver import LocalDriver
from sandboxes.spec import EnvironmentSpec
from tests.dockerd import dockerd
from tests.sandboxes.image_archives import bash_image

if TYPE_CHECKING:
    from docker.models.containers import Container

NAME = "test:1"
"""What the archive calls its image."""
MAKE = (
    "python3 -c 'import os\n"
    'for n in range({first}, {last}):\n os.makedirs(f"/srv/{{n // 500}}", exist_ok=True)\n'
    ' open(f"/srv/{{n // 500}}/{{n}}", "w").write(str(n) * 100)\''
)
AT_ONCE = 5_000
"""Files that one call makes, so that it stays below its time limit."""
FREEZE, RESTORE, RUN = "forkpoint: freeze", "forkpoint: restore and the call", "forkpoint: a call"
COMMIT, START, EXEC, ALL = "docker commit", "docker run", "docker exec", "docker: all three"


async def compare(folder: Path, client: docker.DockerClient, files: int, count: int) -> Timings:
    """Return `count` times of each step of both, in milliseconds."""
    timings: Timings = {}
    spec = EnvironmentSpec(image=bash_image())
    driver = LocalDriver(folder)
    container = _sleeper(client, NAME)
    await driver.open()
    try:
        source = await driver.start(spec)
        for first in range(0, files, AT_ONCE):
            command = MAKE.format(first=first, last=min(first + AT_ONCE, files))
            await execute(source, command)
            assert container.exec_run(["bash", "-c", command]).exit_code == 0
        for number in range(count):
            note, call = f"echo {number} > /tmp/last", f"test $(cat /tmp/last) = {number} && test -e /srv/0/0"
            await execute(source, note)
            with timed(timings, FREEZE):
                frozen = await source.freeze()
            with timed(timings, RESTORE):
                sandbox = await driver.restore(spec, frozen)
                await execute(sandbox, call)
            with timed(timings, RUN):
                await execute(sandbox, "true")
            await sandbox.close()
            await asyncio.to_thread(fork, client, container, note, call, timings)
    finally:
        await driver.aclose()
        container.remove(force=True)
    return timings


def fork(client: docker.DockerClient, source: "Container", note: str, call: str, timings: Timings) -> None:
    """Make the call in a copy of a container."""
    source.exec_run(["bash", "-c", note])
    with timed(timings, ALL):
        with timed(timings, COMMIT):
            made = source.commit()
        with timed(timings, START):
            copy = _sleeper(client, str(made.id))
        with timed(timings, EXEC):
            answer = copy.exec_run(["bash", "-c", call])
    assert answer.exit_code == 0
    copy.remove(force=True)
    for _ in range(100):
        try:
            client.images.remove(str(made.id))
        except docker.errors.APIError:
            # Docker is still removing its container.
            time.sleep(0.05)
        else:
            return


def _sleeper(client: docker.DockerClient, image: str) -> "Container":
    return client.containers.run(image, ["sleep", "10000"], detach=True, network_mode="none", auto_remove=True)


def main() -> None:
    """Measure both and print medians and their ratio."""
    parser = ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("-n", type=int, default=12, help="number of measurements for each state")
    parser.add_argument("--files", default="100,2500,10000,50000", help="files in the states")
    given = parser.parse_args()
    with dockerd() as daemon:
        client = docker.DockerClient(base_url=daemon.host, timeout=600)
        daemon.ask("load", "--input", bash_image())
        for files in map(int, given.files.split(",")):
            folder = Path(tempfile.mkdtemp(prefix="forkpoint-bench-", dir="/var/tmp"))
            try:
                timings = asyncio.run(compare(folder, client, files, given.n))
            finally:
                remove_tree(folder)
            shown = table(f"A state of {files:,} files: medians of {given.n}", "step", "ms")
            for step, times in timings.items():
                shown.add_row(step, f"{median(times):.1f}")
            shown.add_row("ratio", f"{median(timings[ALL]) / median(timings[RESTORE]):.0f}")
            console.print(shown)
        client.close()


if __name__ == "__main__":
    main()
