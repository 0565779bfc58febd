"""Hostile paths and archives over HTTP: what Docker's and E2B's file APIs are sent stays in the sandbox."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest

from tests.agents.e2b_requests import Client
from tests.agents.serving import Proxy
from tests.sandboxes import archive_attacks

if TYPE_CHECKING:
    import httpx

SECRET = "secret of the host"


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Path]:
    """Return a file of the host, which must be as it was afterwards, and alone in its directory."""
    path = tmp_path / "canary"
    path.write_text(SECRET)
    before = path.stat()
    yield path
    after = path.stat()
    assert path.read_text() == SECRET
    assert (after.st_ino, after.st_mtime_ns, after.st_nlink) == (before.st_ino, before.st_mtime_ns, 1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["canary"]


def spellings(canary: Path) -> list[str]:
    """Return paths to the canary as they stand in a URL: plain, encoded once and twice, with NUL and with UTF-8."""
    shown = []
    for number, path in enumerate(archive_attacks.paths(canary)):
        once = quote(path, safe="")
        dots = once.replace(".", "%2e")
        others = [once, dots.replace("%", "%25"), f"{once}%00.txt", f"%00{once}", f"{once}%2F..%2F"]
        shown += [quote(path), dots, others[number % len(others)]]
    return [*shown, "", ".", "..", "%2e%2e%2f" * 20, "%c0%ae%c0%ae/" * 20, "%ff"]


def answered(response: "httpx.Response") -> None:
    """Require an answer that is no failure of the proxy and shows nothing of the host."""
    assert response.status_code < 500, (response.request.url, response.text)
    assert SECRET.encode() not in response.content, response.request.url


def test_dockers_archives_stay_inside(proxy: Proxy, canary: Path) -> None:
    proxy.put("docker-paths", workdir="/root", setup=[f"ln -s / /tmp/out; mkdir -p {canary.parent} /tmp/in"])
    http, base = proxy.client, "/t/docker-paths/r/a/docker"
    made = http.post(f"{base}/containers/create", json={"Image": "debian", "Cmd": ["sleep", "inf"]}).raise_for_status()
    container = f"{base}/containers/{made.json()['Id']}"
    http.post(f"{container}/start").raise_for_status()
    _, packed = next(archive_attacks.archives(canary))
    for path in spellings(canary):
        answered(http.get(f"{container}/archive?path={path}"))
        answered(http.put(f"{container}/archive?path={path}", content=packed))
    for name, packed in archive_attacks.archives(canary):
        answered(http.put(f"{container}/archive?path=/tmp/in", content=packed))
        assert canary.read_text() == SECRET, name


def test_e2bs_files_stay_inside(proxy: Proxy, canary: Path) -> None:
    proxy.put("e2b-paths", workdir="/root", setup=[f"ln -s / /tmp/out; mkdir -p {canary.parent}"])
    client = Client(proxy, "e2b-paths")
    files = f"{client.base}/files"
    for path in spellings(canary):
        answered(client.http.get(f"{files}?path={path}", headers=client.headers))
        upload = {"file": ("f", b"hostile")}
        answered(client.http.post(f"{files}?path={path}", files=upload, headers=client.headers))
    for path in archive_attacks.paths(canary):
        # Without a path in the URL, the names in the form say where the files go.
        answered(client.http.post(files, files={"file": (path, b"hostile")}, headers=client.headers))
        for method in ("ListDir", "Stat", "Remove", "MakeDir"):
            answered(client.call(f"filesystem.Filesystem/{method}", path=path))
        answered(client.call("filesystem.Filesystem/Move", source=path, destination="/tmp/taken"))
        answered(client.call("filesystem.Filesystem/Move", source="/etc/hostname", destination=path))
