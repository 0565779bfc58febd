"""Attacks on every kind of sandbox, and a table of what was contained: `python -m bench.attacks`.

It runs the lists of `tests.sandboxes.attack_list` and of this module in `local` sandboxes as root, as an ordinary user
(`--user`), on an image, on SQLite and PostgreSQL, on hostile video files, and on tarballs. The
canaries are files of its own. It exits with 1 if something escaped, or read what belongs to somebody else. What is
contained but reaches code of the kernel that it should not, or disturbs a neighbour, counts as "got through".
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from bench.attacks_on_data import CANARY, Outcome, attack_postgres, attack_sqlite, attack_tarballs, attack_video
from bench.machine import console, table
from sandboxes.driver import Driver
from sandboxes.errors import NotFreezableError, SandboxError
from sandboxes.linux.files import remove_tree
from sandboxes.spec import EnvironmentSpec, Limits
from tests.sandboxes import attack_list
from tests.sandboxes.box import file, is_stopped, local_driver, opened, run
from tests.sandboxes.checkpoint_attacks import REFUSED
from tests.sandboxes.docker import OnImage

LIMITS = Limits(memory_mb=256, pids=64, disk_mb=64, timeout_s=60)
SPEC = EnvironmentSpec(limits=LIMITS)


class Ground(NamedTuple):
    """Where machine sandboxes are attacked.

    Attributes:
        name: The column of the table.
        driver: Makes the driver below a directory.
        differs: Attacks whose command ends with 0 there without harm, with the reason.
    """

    name: str
    driver: Callable[[Path], Driver]
    differs: dict[str, str]


# -- machine sandboxes -----------------------------------------------------------------------------------------------


async def attack_machine(ground: Ground, folder: Path, *, holders: bool = True) -> list[Outcome]:
    """Run all lists in one kind of sandbox; without `holders`, nothing that the whole machine notices."""
    canary = folder / "canary"
    canary.write_text(CANARY)
    found: list[Outcome] = []
    async with opened(ground.driver(folder / "data")) as driver:
        found += await _commands(ground, driver)
        found += await _probes(ground, driver)
        found += await _links(driver, canary)
        found += await _checkpoints(driver, canary)
        for name, command in attack_list.SHAPES.items():
            found.append(Outcome("trees of files", name, await _survives(driver, command)))
        found += await hold_shared(driver) if holders else []
        for name, command in attack_list.FILLERS.items():
            stopped = await is_stopped(await driver.start(SPEC), command)
            found.append(Outcome("what is shared", f"the disk, by {name}", stopped))
    found.append(Outcome("what is shared", "the canary is whole", canary.read_text() == CANARY, "escape"))
    # What the sandboxes left must not keep the next driver from starting.
    restarted = False
    with suppress(SandboxError, OSError):
        async with opened(ground.driver(folder / "data")) as driver:
            restarted = (await run(await driver.start(SPEC), "echo on")).out == "on\n"
    return [*found, Outcome("trees of files", "a restart after all of them", restarted)]


async def _commands(ground: Ground, driver: Driver) -> list[Outcome]:
    results = []
    sandbox = await driver.start(SPEC)
    for name, command in attack_list.COMMANDS.items():
        if name in ground.differs:
            continue
        if not sandbox.alive:
            sandbox = await driver.start(SPEC)
        contained = True
        with suppress(SandboxError):
            contained = (await run(sandbox, f"{{ {command}\n}} >/dev/null 2>&1", timeout_s=20)).code != 0
        results.append(Outcome("escapes and privileges", name, contained))
    await sandbox.close()
    return results


async def _probes(ground: Ground, driver: Driver) -> list[Outcome]:
    results = []
    for area, probe in attack_list.PROBES.items():
        sandbox = await driver.start(SPEC)
        await file(sandbox, "put", "/root/probe.py", probe.script.encode())
        answer = await run(sandbox, "python3 /root/probe.py; echo done", timeout_s=30)
        through = answer.out.splitlines()
        assert through[-1:] == ["done"], answer.err
        names = [name for name in probe.names if name not in ground.differs]
        results += [Outcome(area, name, name not in through) for name in names]
        await sandbox.close()
    return results


async def _links(driver: Driver, canary: Path) -> list[Outcome]:
    """Files are put and fetched through links that the agent has made; none may lead out of the sandbox."""
    results = []
    ways = {
        "a link": "ln -sfn / /root/l",
        "a link of /proc to pid 1": "ln -sfn /proc/1/root /root/l",
        "a link of /proc to itself": "ln -sfn /proc/self/root /root/l",
        "a chain of links": "ln -sfn / /root/k; ln -sfn k/../root/k /root/l",
        "dots": "ln -sfn ../../../../../../../.. /root/l",
        "descriptors": "ln -sfn /proc/self/fd/3 /root/l",
    }
    for name, command in ways.items():
        sandbox = await driver.start(SPEC)
        await run(sandbox, command)
        path = f"/root/l{canary}"
        _, body = await file(sandbox, "get", path, limit_bytes=1 << 20)
        results.append(Outcome("files", f"get through {name}", CANARY.encode() not in body, "read"))
        await file(sandbox, "put", path, b"overwritten")
        await file(sandbox, "delete", path)
        whole = await asyncio.to_thread(_is_whole, canary)
        results.append(Outcome("files", f"put and delete through {name}", whole, "escape"))
        await sandbox.close()
    return results


async def _checkpoints(driver: Driver, canary: Path) -> list[Outcome]:
    """A process holds a name, and the agent leads that name elsewhere; CRIU must not follow it."""
    results = []
    out = f"/proc/1/fd/4{'/..' * 12}{canary.parent}"
    for name, (begin, swap) in REFUSED.items():
        sandbox = await driver.start(SPEC)
        await run(sandbox, begin)
        await run(sandbox, swap.format(out=out) or "true")
        led = []
        with suppress(SandboxError, NotFreezableError):
            restored = await driver.restore(SPEC, await sandbox.freeze())
            led.append("it was restored")
            await restored.close()
        contained = not led and await asyncio.to_thread(_is_whole, canary) and not (canary.parent / "planted").exists()
        results.append(Outcome("checkpoints", name, contained, "escape"))
        await sandbox.close()
    return results


def _is_whole(canary: Path) -> bool:
    """Return whether a canary is as it was, and make it so."""
    whole = canary.exists() and canary.read_text() == CANARY
    canary.write_text(CANARY)
    return whole


async def _survives(driver: Driver, command: str) -> bool:
    """Return whether a sandbox and its driver are sound after a command made a tree of files."""
    sandbox = await driver.start(SPEC)
    await run(sandbox, command, timeout_s=40)
    sound = (await run(sandbox, "echo on")).out == "on\n"
    with suppress(SandboxError, NotFreezableError):
        frozen = await sandbox.freeze()
        restored = await driver.restore(SPEC, frozen)
        sound = sound and (await run(restored, "echo on")).out == "on\n"
        await restored.close()
    await sandbox.close()
    return sound and (await run(await driver.start(SPEC), "echo on")).out == "on\n"


async def hold_shared(driver: Driver) -> list[Outcome]:
    """Let sandboxes hold all that they can get of what each of the machine's programs needs."""
    return [
        Outcome("what is shared", name, await _leaves_neighbours(driver, command))
        for name, command in attack_list.HOLDERS.items()
    ]


async def _leaves_neighbours(driver: Driver, command: str) -> bool:
    """Return whether another sandbox works while one holds all that it can get."""
    sandbox, neighbour = await driver.start(SPEC), await driver.start(SPEC)
    works = False
    with suppress(SandboxError):
        await file(neighbour, "put", "/root/n.py", attack_list.NEIGHBOUR.encode())
        with suppress(SandboxError):
            await run(sandbox, command, timeout_s=20)
        works = (await run(neighbour, "python3 /root/n.py")).out == "works\n"
    for each in (sandbox, neighbour):
        await each.close()
    return works


# -- the table -------------------------------------------------------------------------------------------------------

UNPRIVILEGED = {
    "more terminals than its share": "the count is of the machine's own limit in a user namespace",
}


def grounds() -> Iterator[tuple[str, Callable[[Path], Awaitable[list[Outcome]]]]]:
    """Yield what can be attacked on this machine, as this user."""
    local = Ground("local", local_driver, {} if os.geteuid() == 0 else UNPRIVILEGED)
    yield f"local, {'root' if os.geteuid() == 0 else 'user'}", lambda folder: attack_machine(local, folder)
    if os.geteuid() != 0:
        return
    from tests.sandboxes.postgres_cluster import _missing as postgres_missing  # noqa: PLC0415

    yield "image", lambda folder: attack_machine(Ground("image", OnImage, {}), folder)
    yield "sqlite", attack_sqlite
    if why := postgres_missing():
        console.print(f"postgres: left out, {why}", markup=False)
    else:
        yield "postgres", attack_postgres
    yield "video", attack_video

    async def tarballs(folder: Path) -> list[Outcome]:
        return attack_tarballs(folder)

    yield "bases", tarballs


@contextmanager
def directory() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="forkpoint-attacks-", dir="/var/tmp"))
    try:
        yield folder
    finally:
        remove_tree(folder)


def as_user(uid: int) -> dict[str, list[Outcome]]:
    """Run the attacks of an ordinary user in a process of that user."""
    paths = os.pathsep.join([str(Path.cwd()), *sys.path])
    with directory() as folder:
        os.chown(folder, uid, uid)
        # This interpreter may lie where that user does not reach it; the system's has the same modules then.
        for interpreter in (sys.executable, "/usr/bin/python3"):
            with suppress(PermissionError):
                done = subprocess.run(
                    [interpreter, "-m", "bench.attacks", "--json", "--only", "local"], check=False,
                    stdout=subprocess.PIPE, user=uid, group=uid, extra_groups=[], umask=0o022,
                    env={**os.environ, "HOME": str(folder), "TMPDIR": str(folder), "PYTHONPATH": paths},
                )  # fmt: skip
                if done.returncode == 0:
                    return {name: [Outcome(*row) for row in rows] for name, rows in json.loads(done.stdout).items()}
    console.print("local, user: left out, because the program does not run as that user")
    return {}


def report(found: dict[str, list[Outcome]]) -> bool:
    """Print the table; return whether nothing escaped and nothing of others was read."""
    shown = table("Attacks", "", "tried", "contained", "got through", "escapes", "reads")
    for ground, outcomes in found.items():
        for area in dict.fromkeys(outcome.area for outcome in outcomes):
            rows = [outcome for outcome in outcomes if outcome.area == area]
            through = [outcome for outcome in rows if not outcome.contained]
            harms = [sum(outcome.harm == harm for outcome in through) for harm in ("escape", "read")]
            cells = (len(rows), len(rows) - len(through), len(through), *harms)
            shown.add_row(f"{ground}: {area}", *map(str, cells))
    console.print(shown)
    all_through = [
        (ground, outcome) for ground, outcomes in found.items() for outcome in outcomes if not outcome.contained
    ]
    for ground, outcome in all_through:
        console.print(f"got through: {ground}: {outcome.area}: {outcome.name} ({outcome.harm})", markup=False)
    tried = sum(map(len, found.values()))
    harmful = sum(outcome.harm != "surface" for _, outcome in all_through)
    console.print(f"{tried} attacks tried, {tried - len(all_through)} contained, {harmful} escapes or reads of others")
    return harmful == 0


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="attack only what begins with this name, such as local or postgres")
    parser.add_argument("--user", type=int, default=65534, help="the uid of the ordinary user; 0 leaves it out")
    parser.add_argument("--json", action="store_true", help="print the outcomes as JSON")
    options = parser.parse_args()
    found: dict[str, list[Outcome]] = {}
    for name, attack in grounds():
        if options.only is None or name.startswith(options.only):
            with ExitStack() as stack:
                found[name] = asyncio.run(_run(attack, stack.enter_context(directory())))
    if os.geteuid() == 0 and options.user and (options.only is None or "local, user".startswith(options.only)):
        found |= as_user(options.user)
    if options.json:
        print(json.dumps(found))
        sys.exit(0)
    sys.exit(0 if report(found) else 1)


async def _run(attack: Callable[[Path], Awaitable[list[Outcome]]], folder: Path) -> list[Outcome]:
    return await attack(folder)


if __name__ == "__main__":
    main()
