"""What specs name is checked again when it is used, and the host's own system shows no file of the proxy's own."""

import asyncio
import os
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandboxes.errors import ForbiddenSourceError, SpecError
from sandboxes.local.driver import LocalDriver
from sandboxes.sources import SourceRules
from sandboxes.spec import Archive, Database, EnvironmentSpec
from tests.sandboxes.box import needs_root, opened, run


def driver_of(data_dir: Path, folder: Path) -> LocalDriver:
    """Return a driver of a proxy whose secrets are below `folder`, and whose tenants may name `folder/shared`."""
    return LocalDriver(data_dir, None, SourceRules((folder / "secret",), (str(folder / "shared"),)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("secret", "shared", "other"):
        (tmp_path / name / "d").mkdir(parents=True)
        (tmp_path / name / "d" / "f").write_text(name)
        sqlite3.connect(tmp_path / name / "t.db").execute("CREATE TABLE t (x)").connection.close()
    return tmp_path


@pytest.mark.parametrize("kind", ["archive of a directory", "archive", "database"])
def test_swapped_links_are_not_followed(data_dir: Path, folder: Path, kind: str) -> None:
    """A tenant names its own path, and replaces it by a link once the spec is accepted."""
    named = folder / "shared" / ("d" if "directory" in kind else "t.db")
    if kind == "archive":
        named = folder / "shared" / "a.tar"
        for name in ("shared", "other", "secret"):
            subprocess.run(["tar", "-C", folder / name, "-cf", folder / name / "a.tar", "d"], check=True)
    spec = EnvironmentSpec(archives=(Archive(source=str(named), target="/root"),), confined=True)
    if kind == "database":
        spec = EnvironmentSpec(databases={"t": Database(source=str(named), path="/root/t.db")}, confined=True)

    async def go() -> None:
        async with opened(driver_of(data_dir, folder)) as driver:
            assert (await run(await driver.start(spec), "ls /root")).code == 0
            for victim in ("other", "secret"):
                named.rename(folder / "shared" / f"away-{victim}")
                named.symlink_to(folder / victim / named.name)
                with pytest.raises(ForbiddenSourceError):
                    await driver.identity(spec)
                with pytest.raises(ForbiddenSourceError):
                    await driver.start(spec)
                named.unlink()
                (folder / "shared" / f"away-{victim}").rename(named)
            # The operator's own specs may have links, but not to the proxy's own files.
            named.rename(folder / "shared" / "away")
            named.symlink_to(folder / "other" / named.name)
            assert (await run(await driver.start(spec.model_copy(update={"confined": False})), "true")).code == 0

    asyncio.run(go())


@needs_root
def test_swapped_base_is_not_mounted(data_dir: Path, folder: Path) -> None:
    """A base is used in place, so it is looked at whenever a sandbox is made, and mounted without following links."""
    base = folder / "shared" / "base"
    for target in (base, folder / "other" / "base"):
        (target / "bin").mkdir(parents=True)
        for program in ("bash", "cat"):
            shutil.copy(f"/bin/{program}", target / "bin")
        # The dynamic linker and the libraries, at the paths that the programs have them at.
        needed = subprocess.run(["ldd", "/bin/bash", "/bin/cat"], check=True, capture_output=True, text=True).stdout
        for line in needed.split():
            if line.startswith("/") and not line.endswith(":"):
                (target / line.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(line, target / line.lstrip("/"))
        (target / "name").write_text(target.parent.name)
    spec = EnvironmentSpec(base=str(base), confined=True)

    async def go() -> None:
        async with opened(driver_of(data_dir, folder)) as driver:
            assert isinstance(driver, LocalDriver)
            await driver.identity(spec)
            assert (await run(await driver.start(spec), "cat /name")).out == "shared"
            known = driver.bases.base(spec)
            base.rename(folder / "shared" / "away")
            base.symlink_to(folder / "other" / "base")
            with pytest.raises(ForbiddenSourceError):
                await driver.start(spec)
            # The launcher does not rely on that check, which is over before it mounts.
            driver.bases.base = lambda *_, **__: known  # type: ignore[method-assign]
            with pytest.raises(Exception, match=r"Not a directory|link"):
                await driver.start(spec)

    asyncio.run(go())


@pytest.fixture
def visible() -> Iterator[Path]:
    """A directory of the host that sandboxes on its own system see; not one whose times are in the fingerprint."""
    folder = Path(f"/usr/share/doc/forkpoint-front-{os.getpid()}")
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@needs_root
def test_host_base_hides_the_proxy_s_own_files(data_dir: Path, visible: Path) -> None:
    """Data and tokens that lie where everybody reads are invisible; their neighbours are not."""
    for name in ("data/store", "tokens", "neighbour"):
        (visible / name).parent.mkdir(exist_ok=True)
        (visible / name).write_text("text")
    rules = SourceRules((visible / "data", visible / "tokens", visible / "not-there"))

    async def go() -> None:
        async with opened(LocalDriver(data_dir, None, rules)) as driver:
            sandbox = await driver.start(EnvironmentSpec())
            assert (await run(sandbox, f"ls -A {visible}")).out == "neighbour\n"
            assert (await run(sandbox, f"cat {visible}/data/store {visible}/tokens; true")).out == ""

    asyncio.run(go())


def test_missing_sources_are_errors_of_the_spec(data_dir: Path, folder: Path) -> None:
    async def go() -> None:
        async with opened(driver_of(data_dir, folder)) as driver:
            for name in ("nowhere", "d/f/below"):
                for confined in (True, False):
                    archives = (Archive(source=str(folder / "shared" / name)),)
                    with pytest.raises(SpecError, match="cannot be read"):
                        await driver.identity(EnvironmentSpec(archives=archives, confined=confined))

    asyncio.run(go())
