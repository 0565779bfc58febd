"""Attacks on databases, and on what reads files of agents: videos and tarballs of root file systems.

`python -m bench.attacks` runs them and prints the table.
"""

import json
import random
import sqlite3
import tarfile
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from sandboxes.errors import SandboxError, SpecError
from sandboxes.spec import Limits
from tests.sandboxes.attack_statements import HARMLESS, POSTGRES, SQLITE
from tests.sandboxes.box import opened

CANARY = "what belongs to somebody else"


class Outcome(NamedTuple):
    """One attack that was tried.

    Attributes:
        area: What it attacks.
        name: Its name.
        contained: Whether nothing came of it.
        harm: "escape", "read" of somebody else's data, or "surface": got through, but reached nothing.
    """

    area: str
    name: str
    contained: bool
    harm: str = "surface"


# -- databases -------------------------------------------------------------------------------------------------------


async def attack_database(
    ask: Callable[[str], Awaitable[str | None]], statements: dict[str, str], names: dict[str, str]
) -> list[Outcome]:
    """Send statements. `ask` returns the text of a result, or None for an error or a result without rows."""
    results = []
    for name, statement in statements.items():
        text = await ask(statement.format(**names))
        evil = (Path(names["folder"]) / "evil").exists()
        read = text is not None and CANARY in text
        harm = "escape" if evil else "read" if read else "surface"
        results.append(Outcome("statements", name, not evil and not read and (text is None or name in HARMLESS), harm))
        (Path(names["folder"]) / "evil").unlink(missing_ok=True)
    return results


async def attack_sqlite(folder: Path) -> list[Outcome]:
    """Attack the machine from SQLite's statements."""
    from sandboxes.sqlite.driver import SqliteDriver  # noqa: PLC0415
    from tests.sandboxes.sql_calls import ask  # noqa: PLC0415 - only where databases are attacked
    from tests.sandboxes.sqlite_files import make, spec_of  # noqa: PLC0415

    names = _places(folder)
    connection = sqlite3.connect(names["other"])
    connection.executescript(f"CREATE TABLE secret (t); INSERT INTO secret VALUES ('{CANARY}')")
    connection.close()
    source = make(folder / "shop.db")
    async with opened(SqliteDriver(folder / "data")) as driver:
        sandbox = await driver.start(spec_of(source))

        async def send(sql: str) -> str | None:
            answer = await ask(sandbox, sql, tool="script" if ";" in sql else "query", timeout_s=3.0)
            return None if answer.error or not answer.body.get("rows", True) else json.dumps(answer.body)

        return await attack_database(send, SQLITE, names)


async def attack_postgres(folder: Path) -> list[Outcome]:
    """Attack the server from statements of a rollout's role; another database has the canary."""
    from sandboxes.postgres.driver import PostgresDriver  # noqa: PLC0415
    from tests.sandboxes.postgres_cluster import cluster  # noqa: PLC0415
    from tests.sandboxes.sql_calls import ask  # noqa: PLC0415

    names = _places(folder)
    with cluster() as server:
        server.create("shop")
        server.create("other", f"CREATE TABLE secret AS SELECT '{CANARY}' AS t")
        async with opened(PostgresDriver(folder / "data")) as driver:
            sandbox = await driver.start(server.spec("shop"))

            async def send(sql: str) -> str | None:
                nonlocal sandbox
                try:
                    answer = await ask(sandbox, sql, tool="script" if "; " in sql else "query", timeout_s=3.0)
                except SandboxError:
                    # The server did not stop the statement in time, so the driver gave the sandbox up.
                    await sandbox.close()
                    sandbox = await driver.start(server.spec("shop"))
                    return None
                return None if answer.error or not answer.body.get("rows", True) else json.dumps(answer.body)

            result = await attack_database(send, POSTGRES, names)
            alive = (await ask(sandbox, "SELECT count(*) FROM item")).error is None
            await sandbox.close()
        with server.connect("other") as connection:
            rows = connection.execute("SELECT t FROM secret").fetchall()
            evil = connection.execute("SELECT rolname FROM pg_roles WHERE rolname = 'evil'").fetchall()
        result.append(
            Outcome("statements", "another tenant's database is whole", rows == [(CANARY,)] and not evil, "escape")
        )
    return [*result, Outcome("statements", "the database answers after all of them", alive)]


def _places(folder: Path) -> dict[str, str]:
    (folder / "canary").write_text(CANARY)
    # A database server is another user: what it must not do is tried where it could.
    folder.chmod(0o777)
    (folder / "canary").chmod(0o644)
    return {"canary": str(folder / "canary"), "folder": str(folder), "other": str(folder / "other.db")}


# -- files that are read ---------------------------------------------------------------------------------------------


async def attack_video(folder: Path, *, files: int = 60, seed: int = 1) -> list[Outcome]:
    """Load damaged video files of several containers: each must be read or refused, and the driver goes on."""
    from sandboxes.video.driver import VideoDriver  # noqa: PLC0415 - needs the extra `video`
    from tests.sandboxes.videos import ask, make, spec_of  # noqa: PLC0415

    chance, results = random.Random(seed), []  # noqa: S311
    clips = [make(folder / f"clip{suffix}") for suffix in (".mp4", ".mkv", ".avi")]
    async with opened(VideoDriver(folder / "data")) as driver:
        for number in range(files):
            clip = chance.choice(clips)
            content = bytearray(clip.read_bytes())
            for _ in range(chance.choice((1, 10, 1000))):
                content[chance.randrange(len(content))] = chance.randrange(256)
            if chance.random() < 0.3:
                del content[chance.randrange(len(content)) :]
            source = folder / f"evil{number}{clip.suffix}"
            source.write_bytes(content)
            contained = False
            with suppress(SpecError):
                sandbox = await driver.start(spec_of(source, limits=Limits(memory_mb=512, timeout_s=60)))
                answer = await ask(sandbox, "load_video", name=source.name)
                contained = answer.status in {200, 422}
                await sandbox.close()
            results.append(Outcome("video files", f"damaged {clip.suffix} {number}", contained))
            source.unlink()
        playlist = folder / "list.m3u8"
        playlist.write_text(f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:8,\n{clips[0]}\n#EXT-X-ENDLIST\n")
        answer = await ask(await driver.start(spec_of(playlist)), "load_video", name=playlist.name)
        results.append(Outcome("video files", "a playlist that names another file", answer.status == 422, "read"))
    return results


def attack_tarballs(folder: Path) -> list[Outcome]:
    """Unpack tarballs of root file systems that try to write outside."""
    from sandboxes.images import root_tar  # noqa: PLC0415
    from sandboxes.images.config import ImageError  # noqa: PLC0415
    from tests.sandboxes.images.test_root_tar import ESCAPES, written  # noqa: PLC0415

    results = []
    for number, (name, members) in enumerate(ESCAPES.items()):
        top = folder / str(number)
        outside, target = top / "outside", top / "target"
        for made in (outside, target):
            made.mkdir(parents=True)
        (outside / "canary").write_text(CANARY)
        with suppress(ImageError, OSError, tarfile.TarError):
            root_tar.unpack(written(top / "evil.tar", members, outside), target)
        canary = outside / "canary"
        whole = [path.name for path in outside.iterdir()] == ["canary"] and canary.read_text() == CANARY
        results.append(Outcome("tarballs", name, whole and canary.stat().st_nlink == 1, "escape"))
    return results
