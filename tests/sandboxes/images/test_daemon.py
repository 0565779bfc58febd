"""Images of a Docker daemon's: both ways to their files, what keeps them, and images that it is given."""

import contextlib
import io
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sandboxes.errors import SandboxError, SpecError
from sandboxes.images import build
from sandboxes.images import daemon as module
from sandboxes.images.daemon import ImageDaemon
from sandboxes.images.store import ImageStore
from sandboxes.linux import syscalls as kernel
from sandboxes.linux.descriptors import Opened
from tests.sandboxes.docker import derive, require_docker
from tests.sandboxes.images.image_files import Member, configuration, docker_files, folder, layer, link, packed, tree
from tests.sandboxes.images.test_build import CONFIG, grown

NAME, BUILT = "forkpoint-test-layers:1", "forkpoint-test-built:1"
LAYERS = (
    layer(folder("etc"), Member("etc/old", "1"), Member("etc/kept", "1"), folder("var"), folder("var/cache")),
    layer(
        folder("etc"), Member("etc/.wh.old"), Member("etc/new", "2", mode=0o4755), folder("srv"), link("l", "etc/new")
    ),
)


def docker(*words: str) -> str:
    return subprocess.run(["docker", *words], capture_output=True, check=True, text=True).stdout.strip()


@pytest.fixture
def images(tmp_path: Path) -> Iterator[ImageStore]:
    require_docker()
    images = ImageStore(tmp_path / "images")
    images.open()
    yield images
    images.collect(set())
    images.collect(set())
    assert images.daemon.pins(socket.gethostname()) == []
    images.close()
    for name in (NAME, BUILT):
        subprocess.run(["docker", "rmi", "--force", name], capture_output=True, check=False)


def load(tmp_path: Path, *layers: bytes) -> str:
    """Give an image to the daemon; return its id."""
    docker("load", "--input", str(packed(tmp_path / "image.tar", docker_files(layers))))
    docker("tag", "image:1", NAME)
    docker("rmi", "image:1")
    return docker("image", "inspect", "--format", "{{.Id}}", NAME)


def mounted(lowers: tuple[str, ...], empty: Path) -> dict[str, tuple[Any, ...]]:
    """Return what a sandbox sees of lower layers."""
    empty.mkdir()
    with Opened(kernel.overlay([*lowers, str(empty)], None, None)) as overlay:
        seen = tree(Path(f"/proc/self/fd/{overlay}/."))
    # An overlay numbers files in its own way.
    return {path: facts[:5] for path, facts in seen.items()}


def test_both_ways_show_the_same_files(tmp_path: Path, images: ImageStore) -> None:
    """Docker's directories in place, without a copy, and the image as it is saved and unpacked."""
    made = load(tmp_path, *LAYERS)
    in_place = images.resolve(NAME)
    assert in_place.id == made
    assert len(in_place.lowers) == 3
    assert all("overlay2" in lower for lower in in_place.lowers[1:])
    copies = ImageStore(tmp_path / "copies", in_place=False)
    copies.open()
    copied = copies.resolve(NAME)
    assert (copied.id, copied.config) == (made, in_place.config)
    assert copied.lowers == (f"{tmp_path}/copies/{made.replace(':', '-')}",)
    assert mounted(in_place.lowers, tmp_path / "e") == mounted(copied.lowers, tmp_path / "e2")
    assert copies.resolve(str(tmp_path / "image.tar")) == copied
    copies.close()


def test_layers_stay_while_an_image_is_in_use(tmp_path: Path, images: ImageStore) -> None:
    """A container that is never started keeps them, when others remove the image; then a collection removes both."""
    load(tmp_path, *LAYERS)
    image = images.resolve(NAME)
    docker("rmi", "--force", NAME)
    images.collect({image.id})
    images.collect({image.id})
    assert all(Path(lower).is_dir() for lower in image.lowers)
    with pytest.raises(SpecError, match="Docker has no image"):
        images.resolve(NAME)
    images.collect(set())
    assert not Path(image.lowers[1]).exists()


def test_image_whose_layers_are_gone_is_copied(
    tmp_path: Path, images: ImageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(tmp_path, *LAYERS)
    found = images.daemon.image(NAME)
    gone = replace(found, layers=("/nowhere",))
    monkeypatch.setattr(images.daemon, "image", lambda _: gone)
    assert images.resolve(NAME).lowers == (f"{tmp_path}/images/{found.id.replace(':', '-')}",)


def test_image_that_was_built_here_is_copied(images: ImageStore) -> None:
    """Its files have times of nanoseconds, which an image in a file has not. Nothing keeps it from being removed."""
    derive(BUILT, ["ENV A=1"])
    image = images.resolve(BUILT)
    assert len(image.lowers) == 1
    assert Path(image.lowers[0], "usr/bin/bash").is_file()
    assert image.config.environment["A"] == "1"
    assert images.daemon.pins(socket.gethostname()) == []


def test_tree_becomes_an_image_of_the_daemons(tmp_path: Path, images: ImageStore) -> None:
    """With its configuration word for word, and the same files."""
    root = grown(tmp_path / "tree")
    made = build.load(images.daemon, root, CONFIG, BUILT, tmp_path)
    assert images.daemon.image(BUILT).id == made
    assert BUILT in images.daemon.tags()
    image = ImageStore(tmp_path / "copies", in_place=False)
    image.open()
    resolved = image.resolve(BUILT)
    image.close()
    assert resolved.config == CONFIG
    assert tree(Path(resolved.lowers[0])) == tree(root)


def test_pins_of_lost_folders_are_removed(tmp_path: Path, images: ImageStore) -> None:
    """A data directory that somebody deletes leaves its pins; the next collection of another one removes them."""
    load(tmp_path, *LAYERS)
    other = ImageStore(tmp_path / "other")
    other.open()
    other.resolve(NAME)
    images.resolve(NAME)
    images.collect(set())
    assert len(images.daemon.pins(socket.gethostname())) == 2
    other.close()
    subprocess.run(["rm", "-r", tmp_path / "other"], check=True)
    images.collect(set())
    assert images.daemon.pins(socket.gethostname()) == []


def test_missing_image_is_the_specs_error(images: ImageStore) -> None:
    for name in ("forkpoint-test-missing:1", "sha256:" + "0" * 64, "UPPER:case"):
        with pytest.raises((SpecError, SandboxError), match=r"Docker has no image|Docker refused"):
            images.resolve(name)


def test_image_for_another_machine_is_refused(tmp_path: Path, images: ImageStore) -> None:
    """Docker has it, and starts it where an emulator runs its programs."""
    docker(
        "load",
        "--input",
        str(packed(tmp_path / "image.tar", docker_files(LAYERS, configuration(LAYERS, architecture="riscv64")))),
    )
    docker("tag", "image:1", NAME)
    docker("rmi", "image:1")
    with pytest.raises(SpecError, match="riscv64"):
        images.resolve(NAME)


def test_archive_that_docker_refuses_is_named(images: ImageStore) -> None:
    with pytest.raises(SandboxError, match="Docker refused"):
        images.daemon.load(iter([b"no archive" * 1000]))


@pytest.fixture
def silent() -> Iterator[str]:
    """A daemon that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def full() -> Iterator[str]:
    """A daemon whose disk is full."""
    body = b'{"message": "write /var/lib/docker/x: no space left on device"}'
    head = b"HTTP/1.1 500 Error\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                end, _ = server.accept()
                with end:
                    end.recv(65536)
                    end.sendall(head % len(body) + body)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    ("kind", "says"),
    [("down", "no Docker daemon responds"), ("silent", "gave no response within"), ("full", "disk is full")],
)
def test_daemon_failures_are_named(
    kind: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(module, "TIMEOUT_S", 1.0 if kind == "silent" else 30.0)
    monkeypatch.setattr(module, "PAUSES_S", (0.01,))
    where = f"unix://{tmp_path}/none.sock" if kind == "down" else request.getfixturevalue(kind)
    monkeypatch.setenv("DOCKER_HOST", where)
    daemon = ImageDaemon()
    images = ImageStore(tmp_path / "images")
    images.open()
    for request_ in (daemon.check, daemon.tags, lambda: daemon.save("a", io.BytesIO()), lambda: images.resolve("a")):
        with pytest.raises(SandboxError, match=says):
            request_()
    daemon.close()
    images.close()
    assert [path.name for path in (tmp_path / "images").iterdir()] == ["root"]
