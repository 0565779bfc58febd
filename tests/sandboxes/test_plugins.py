"""Drivers and dialects are found through entry points."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandboxes.plugins import DIALECTS, DRIVERS, ENDPOINTS, DriverContext, PluginError, installed, load, make_driver

OURS = {"http", "local", "postgres", "sqlite", "video"}


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a directory on the path that a test fills with distributions; nothing of them is remembered."""
    monkeypatch.syspath_prepend(str(tmp_path))
    installed.cache_clear()
    load.cache_clear()
    yield tmp_path
    installed.cache_clear()
    load.cache_clear()
    sys.modules.pop("third_party", None)


def distribution(folder: Path, name: str, entries: str) -> None:
    """Lay out what pip leaves of an installed distribution."""
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(entries)


def context(folder: Path) -> DriverContext:
    return DriverContext(folder)


def test_our_own_parts_are_entry_points_too() -> None:
    assert installed(DRIVERS).keys() >= OURS
    assert {"shell", "sql", "mcp", "video"} <= installed(DIALECTS).keys()


@pytest.mark.parametrize("name", ["local", "sqlite", "http"])
def test_driver_is_made_but_not_opened(name: str, tmp_path: Path) -> None:
    assert make_driver(name, context(tmp_path / name)).name == name
    assert not (tmp_path / name).exists()


def test_driver_of_another_package_is_found(packages: Path) -> None:
    distribution(packages, "third", f"[{DRIVERS}]\nthird = third_party:driver\n")
    (packages / "third_party.py").write_text("def driver(context):\n    return context.directory.name\n")
    assert str(make_driver("third", context(packages / "data"))) == "data"


def test_missing_driver_names_the_installed_ones() -> None:
    with pytest.raises(PluginError, match="'nothing' is not installed; installed are: client, http, local"):
        make_driver("nothing", context(Path("/nowhere")))


def test_two_packages_with_one_name_are_refused(packages: Path) -> None:
    distribution(packages, "rival", f"[{DRIVERS}]\nlocal = third_party:driver\n")
    with pytest.raises(PluginError, match=r"'local' is defined twice, by forkpoint and rival\. Uninstall one\."):
        installed(DRIVERS)


@pytest.mark.parametrize(
    "text", ["import no_such_module\n", "x = 1\n", "def driver(context):\n    import no_such_module\n"]
)
def test_broken_driver_is_named(packages: Path, text: str) -> None:
    distribution(packages, "broken", f"[{DRIVERS}]\nbroken = third_party:driver\n")
    (packages / "third_party.py").write_text(text)
    with pytest.raises(PluginError, match="'broken'"):
        make_driver("broken", context(packages / "data"))


def test_whole_apis_are_entry_points_too() -> None:
    assert {"docker", "e2b"} <= installed(ENDPOINTS).keys()
