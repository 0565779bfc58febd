"""The host as a base: its fingerprint is taken once, and again after something that counts has changed."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from sandboxes.host.source_watch import Watched
from sandboxes.local.host_base import fingerprint


@pytest.fixture
def host(tmp_path: Path) -> Path:
    for name in ("var/lib/dpkg", "usr/bin", "usr/local/share/x", "opt/tool/bin", "etc/apt"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("var/lib/dpkg/status", "etc/passwd", "etc/apt/sources", "etc/resolv.conf", "usr/bin/tool"):
        (tmp_path / name).write_text("text\n")
    return tmp_path


def install(host: Path) -> None:
    """Replace the list of packages, as dpkg does: with a new file of the old name."""
    (host / "var/lib/dpkg/status-new").write_text("more packages\n")
    (host / "var/lib/dpkg/status-new").rename(host / "var/lib/dpkg/status")


CHANGES: dict[str, Callable[[Path], object]] = {
    "packages": install,
    "a program": lambda host: (host / "usr/bin/new").touch(),
    "without packages": lambda host: (host / "usr/local/share/x/new").touch(),
    "in opt": lambda host: (host / "opt/tool/bin/new").mkdir(),
    "a setting": lambda host: (host / "etc/passwd").write_text("other\n"),
    "a setting below": lambda host: (host / "etc/apt/sources").write_text("other\n"),
    "modes": lambda host: (host / "etc/passwd").chmod(0o600),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_the_host_are_noticed(host: Path, change: str) -> None:
    watched = Watched(partial(fingerprint, root=host))
    before = watched.value()
    assert watched.known() == before
    CHANGES[change](host)
    assert watched.known() is None
    assert watched.value() != before
    assert watched.known() == watched.value()


def test_what_the_machine_rewrites_is_no_change(host: Path) -> None:
    """A DHCP client writes `resolv.conf`: the host is looked at once more, and is the same base."""
    watched = Watched(partial(fingerprint, root=host))
    before = watched.value()
    (host / "etc/resolv.conf").write_text("nameserver 192.0.2.1\n")
    (host / "usr/bin/tool").write_text("a write that no fingerprint shows\n")
    assert watched.value() == before
