"""The time from a diverging call to a sandbox on an image in its state: `python -m bench.containers IMAGE`.

Compares the restore of a sandbox on an image, and a call in it, with Docker's own steps through the same client:
`docker commit` of the source, `docker run` of that image, `docker exec` of the call. Files only, warm caches, on an
otherwise idle machine. (ext4 without a journal creates files slowly for a minute after many were removed, as this
benchmark does. Many files then cost eight times as much as elsewhere.)
"""

import asyncio
import tempfile
import time
from argparse import ArgumentParser
from pathlib import Path

import docker
from docker.models.containers import Container

from bench.machine import console, median, table
from bench.sandboxes import Timings, execute, timed
from sandboxes.linux.files import remove_tree
from sandboxes.local.driver import LocalDriver
from sandboxes.spec import EnvironmentSpec
from snapshots.criu.checkpoints import CriuCheckpointer

STATES = {
    "3 files": "for i in 1 2 3; do echo $i > /tmp/$i; done",
    "1,000 files, 10 MB": (
        "mkdir /tmp/d; head -c 10240 /dev/urandom > /tmp/x; for i in $(seq 1000); do cp /tmp/x /tmp/d/$i; done"
    ),
}
FREEZE, RESTORE, RUN = "freeze", "restore and the call", "a call"
COMMIT, START, EXEC, ALL = "docker commit", "docker run", "docker exec", "all three"


async def ours(folder: Path, image: str, state: str, count: int) -> Timings:
    """Return `count` times of each step, in milliseconds."""
    timings: Timings = {}
    spec = EnvironmentSpec(driver="local", image=image)
    driver = LocalDriver(folder, CriuCheckpointer(folder))
    await driver.open()
    try:
        source = await driver.start(spec)
        await execute(source, state)
        for number in range(count):
            await execute(source, f"echo {number} > /tmp/last")
            with timed(timings, FREEZE):
                frozen = await source.freeze()
            with timed(timings, RESTORE):
                sandbox = await driver.restore(spec, frozen)
                await execute(sandbox, f"test $(cat /tmp/last) = {number}")
            with timed(timings, RUN):
                await execute(sandbox, "true")
            await sandbox.close()
    finally:
        await driver.aclose()
    return timings


def theirs(image: str, state: str, count: int) -> Timings:
    """Return `count` times of each of Docker's own steps, in milliseconds."""
    timings: Timings = {}
    client = docker.from_env()
    source = _sleeper(client, image)
    try:
        source.exec_run(["bash", "-c", state])
        for number in range(count):
            source.exec_run(["bash", "-c", f"echo {number} > /tmp/last"])
            with timed(timings, ALL):
                with timed(timings, COMMIT):
                    made = source.commit()
                with timed(timings, START):
                    fork = _sleeper(client, str(made.id))
                with timed(timings, EXEC):
                    answer = fork.exec_run(["bash", "-c", f"test $(cat /tmp/last) = {number}"])
            assert answer.exit_code == 0
            fork.remove(force=True)
            _forget(client, str(made.id))
    finally:
        source.remove(force=True)
        client.close()
    return timings


def _sleeper(client: docker.DockerClient, image: str) -> Container:
    return client.containers.run(image, ["sleep", "1000"], detach=True, network_mode="none", auto_remove=True)


def _forget(client: docker.DockerClient, image: str) -> None:
    for _ in range(100):
        try:
            client.images.remove(image)
        except docker.errors.APIError:
            # Docker is still removing its container.
            time.sleep(0.05)
        else:
            return


def main() -> None:
    """Measure both and print medians and their ratio."""
    parser = ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("image", help="an image with bash, coreutils and sleep, such as debian:12")
    parser.add_argument("-n", type=int, default=12, help="number of measurements for each state")
    given = parser.parse_args()
    for name, state in STATES.items():
        folder = Path(tempfile.mkdtemp(prefix="forkpoint-bench-", dir="/var/tmp"))
        try:
            mine = asyncio.run(ours(folder, given.image, state, given.n))
        finally:
            remove_tree(folder)
        docker_s = theirs(given.image, state, given.n)
        rows = [(f"forkpoint: {step}", f"{median(times):.1f}") for step, times in mine.items()]
        rows += [(f"docker: {step}", f"{median(times):.1f}") for step, times in docker_s.items()]
        rows.append(("ratio", f"{median(docker_s[ALL]) / median(mine[RESTORE]):.0f}"))
        shown = table(f"{name}: medians of {given.n}", "step", "ms")
        for row in rows:
            shown.add_row(*row)
        console.print(shown)


if __name__ == "__main__":
    main()
