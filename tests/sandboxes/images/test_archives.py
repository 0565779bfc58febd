"""Images in files: what their layers give together, and archives that lie or try to leave their directory."""

import functools
import gzip
import io
import itertools
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sandboxes.images import root_tar
from sandboxes.images.archives import ARCHITECTURE, MAX_JSON_BYTES, ImageArchive
from sandboxes.images.config import ImageConfig, ImageError
from tests.sandboxes.images.image_files import (
    Member,
    blob,
    configuration,
    docker_files,
    folder,
    laid_out,
    layer,
    link,
    oci_files,
    oci_manifest,
    packed,
    sha256,
    tree,
)
from tests.sandboxes.images.test_root_tar import ESCAPES, written


def unpacked(path: Path, target: Path) -> Path:
    target.mkdir()
    with ImageArchive(path) as archive:
        archive.unpack(target)
    return target


def names(root: Path) -> dict[str, str]:
    return {str(path.relative_to(root)): "" if path.is_dir() else path.read_text() for path in root.rglob("*")}


LAYERS = (
    layer(folder("etc"), Member("etc/old", "1"), Member("etc/kept", "1"), folder("var/cache"), Member("var/cache/a")),
    layer(Member("etc/.wh.old"), Member("etc/new", "2"), Member("var/cache/b", "2"), Member("var/cache/.wh..wh..opq")),
)
MERGED = {"etc": "", "etc/kept": "1", "etc/new": "2", "var": "", "var/cache": "", "var/cache/b": "2"}


@pytest.mark.parametrize("kind", ["docker save", "OCI archive", "OCI directory"])
def test_every_kind_gives_the_same_image(tmp_path: Path, kind: str) -> None:
    files = docker_files(LAYERS) if kind == "docker save" else oci_files(LAYERS)
    path = tmp_path / "image"
    with ImageArchive((laid_out if kind == "OCI directory" else packed)(path, files)) as archive:
        assert archive.id == f"sha256:{sha256(configuration(LAYERS))}"
        assert archive.config == ImageConfig(environment={"A": "1"}, workdir="/srv")
    assert names(unpacked(path, tmp_path / "root")) == MERGED


def test_attributes_and_times_are_those_of_the_image(tmp_path: Path) -> None:
    """A directory that a later layer only changes keeps its time, and one that no layer describes has a fixed one."""
    if os.geteuid():
        pytest.skip("owners and capabilities need root")
    capability = "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"
    headers = {"SCHILY.xattr.security.capability": capability, "SCHILY.xattr.user.note": "x",
               "SCHILY.xattr.user.overlay.opaque": "y", "SCHILY.xattr.trusted.overlay.opaque": "y"}  # fmt: skip
    first = layer(folder("d", 0o1777, 5), Member("implied/f", "1", uid=7, mode=0o4755, headers=headers))
    layers = (first, layer(Member("d/new", "2")))
    root = unpacked(packed(tmp_path / "image.tar", docker_files(layers)), tmp_path / "root")
    status = (root / "implied/f").stat()
    assert (status.st_uid, status.st_mode & 0o7777, status.st_mtime) == (7, 0o4755, 1_700_000_000)
    assert os.getxattr(root / "implied/f", "security.capability") == capability.encode()
    assert os.listxattr(root / "implied/f") == ["security.capability", "user.note"]
    assert ((root / "d").stat().st_mode & 0o7777, (root / "d").stat().st_mtime) == (0o1777, 5)
    assert (root / "implied").stat().st_mtime == root.stat().st_mtime == 0


def test_directory_takes_the_place_of_a_link(tmp_path: Path) -> None:
    """A later member is below the link while no layer brings a directory in its place, as Docker has it."""
    layers = (
        layer(folder("usr/lib"), link("lib", "usr/lib"), link("bin", "usr/lib")),
        layer(Member("lib/through", "2"), folder("bin"), Member("bin/own", "2")),
    )
    root = unpacked(packed(tmp_path / "image.tar", docker_files(layers)), tmp_path / "root")
    assert (root / "lib").is_symlink()
    assert (root / "usr/lib/through").read_text() == "2"
    assert not (root / "bin").is_symlink()
    assert names(root / "usr/lib") == {"through": "2"}


def test_sparse_file_keeps_its_holes(tmp_path: Path) -> None:
    """GNU tar writes only the data of a sparse file."""
    if shutil.which("tar") is None:
        pytest.skip("there is no GNU tar")
    (tmp_path / "tree").mkdir()
    with (tmp_path / "tree/f").open("wb") as file:
        file.seek(50 << 20)
        file.write(b"end")
        file.truncate(60 << 20)
    for form in ("gnu", "posix"):
        root = tmp_path / form
        root.mkdir()
        words = ["tar", "--create", "--sparse", f"--format={form}", "--directory", str(tmp_path / "tree"), "--file"]
        subprocess.run([*words, str(tmp_path / f"{form}.tar"), "."], check=True)
        root_tar.unpack(tmp_path / f"{form}.tar", root)
        assert (root / "f").read_bytes() == (tmp_path / "tree/f").read_bytes()
        assert (root / "f").stat().st_blocks < 1000


# -- layers against a model --------------------------------------------------------------------------------------------

_NAMES = st.sampled_from(["a", "b", "c"])
_PATHS = st.lists(_NAMES, min_size=1, max_size=3).map("/".join)
_MEMBERS = st.one_of(
    st.builds(Member, _PATHS, st.sampled_from(["1", "2"])),
    st.builds(folder, _PATHS),
    st.builds(lambda path: Member("/".join([*path.split("/")[:-1], f".wh.{path.split('/')[-1]}"])), _PATHS),
    st.builds(lambda path: Member(f"{path}/.wh..wh..opq"), _PATHS),
)

Model = dict[str, str | None]
"""Files by path, with their content; None for a directory."""


def below(model: Model, path: str) -> list[str]:
    return [name for name in model if name.startswith(f"{path}/")]


def removed(model: Model, path: str) -> None:
    for name in [path, *below(model, path)]:
        model.pop(name, None)


def hidden(model: Model, members: Sequence[Member]) -> Model:
    """Return what the whiteouts of a layer leave of a tree."""
    model = dict(model)
    for member in members:
        above, _, name = member.name.rpartition("/")
        if name == ".wh..wh..opq":
            for path in below(model, above):
                model.pop(path)
        elif name.startswith(".wh."):
            removed(model, f"{above}/{name[4:]}".lstrip("/"))
    return model


def laid_over(model: Model, members: Sequence[Member]) -> Model:
    """Return what a layer makes of a tree, by the OCI image specification: first what it hides, then what it brings."""
    model = hidden(model, members)
    for member in members:
        if ".wh." in member.name:
            continue
        folders = member.name.split("/")[: None if member.kind == tarfile.DIRTYPE else -1]
        for path in itertools.accumulate(folders, "{}/{}".format):
            if model.get(path, "") is not None:
                removed(model, path)
                model[path] = None
        if member.kind != tarfile.DIRTYPE:
            removed(model, member.name)
            model[member.name] = member.text
    return model


@settings(max_examples=300)
@given(st.lists(st.lists(_MEMBERS, max_size=6), min_size=1, max_size=4))
@example([[Member("a/b", "1")], [Member("a/c", "2"), Member(".wh.a")]])
@example([[Member("a/b", "1")], [Member("a"), Member("a/.wh..wh..opq")], [folder("a/b")]])
def test_layers_give_what_the_model_gives(layers: list[list[Member]]) -> None:
    model = functools.reduce(laid_over, layers, Model())
    with tempfile.TemporaryDirectory() as place:
        path = packed(Path(place, "image.tar"), docker_files([layer(*members) for members in layers]))
        root = unpacked(path, Path(place, "root"))
        seen = {str(path.relative_to(root)): None if path.is_dir() else path.read_text() for path in root.rglob("*")}
    assert seen == model


# -- attacks -----------------------------------------------------------------------------------------------------------


def canary(tmp_path: Path) -> tuple[Path, Callable[[], bool]]:
    outside = tmp_path / "outside"
    (outside / "folder").mkdir(parents=True)
    (outside / "canary").write_text("canary")
    (outside / "canary").chmod(0o600)
    before = tree(outside)
    return outside, lambda: tree(outside) == before


def attempt(path: Path, target: Path) -> bool:
    """Unpack an archive; return whether it was accepted."""
    try:
        unpacked(path, target)
    except (ImageError, OSError):
        return False
    return True


@pytest.mark.parametrize("split", [False, True], ids=["one layer", "a layer for each member"])
@pytest.mark.parametrize("name", ESCAPES)
def test_no_layer_writes_outside_of_the_target(tmp_path: Path, name: str, *, split: bool) -> None:
    outside, is_untouched = canary(tmp_path)
    parts = [[member] for member in ESCAPES[name]] if split else [ESCAPES[name]]
    layers = [written(tmp_path / "layer", part, outside).read_bytes() for part in parts]
    attempt(packed(tmp_path / "image.tar", docker_files(layers)), tmp_path / "root")
    assert is_untouched()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["image.tar", "layer", "outside", "root"]


@pytest.mark.parametrize(
    ("hides", "is_accepted"),
    [(".wh..", False), (".wh...", False), (".wh.", False), ("l/.wh.canary", True), ("l/.wh..wh..opq", True),
     ("../outside/.wh.canary", False), ("l/folder/../.wh.canary", False), (".wh..wh.plnk", True),
     ("missing/.wh.canary", True), ("f/.wh..wh..opq", True)],
)  # fmt: skip
def test_whiteout_removes_nothing_outside(tmp_path: Path, hides: str, *, is_accepted: bool) -> None:
    outside, is_untouched = canary(tmp_path)
    layers = [layer(link("l", str(outside)), Member("f", "kept")), layer(Member(hides))]
    path = packed(tmp_path / "image.tar", docker_files(layers))
    assert attempt(path, tmp_path / "root") == is_accepted
    assert is_untouched()
    assert not is_accepted or (tmp_path / "root/f").read_text() == "kept"


def test_device_nodes_are_left_out(tmp_path: Path) -> None:
    members = [Member("dev/sda", kind=tarfile.BLKTYPE), Member("dev/null", kind=tarfile.CHRTYPE), Member("f", "1")]
    root = unpacked(packed(tmp_path / "image.tar", docker_files([layer(*members)])), tmp_path / "root")
    assert names(root) == {"f": "1"}


Files = dict[str, bytes]


def _config_of(layers: Sequence[bytes], **changes: Any) -> Callable[[], Files]:
    return lambda: docker_files(layers, configuration(layers, **changes))


def _manifest(**changes: Any) -> Callable[[], Files]:
    def files() -> Files:
        made = docker_files(LAYERS)
        made["manifest.json"] = json.dumps([json.loads(made["manifest.json"])[0] | changes]).encode()
        return made

    return files


def _with(name: str, content: bytes, form: Callable[[Sequence[bytes]], Files] = docker_files) -> Callable[[], Files]:
    return lambda: form(LAYERS) | {name: content}


def _other_blob() -> Files:
    files = oci_files(LAYERS)
    return {name: content + b" " if content.startswith(b'{"schema') and "blobs" in name else content
            for name, content in files.items()}  # fmt: skip


def _index(*platforms: dict[str, str] | None) -> Callable[[], Files]:
    def files() -> Files:
        made: Files = {}
        entries = []
        for number, platform in enumerate(platforms):
            more: dict[str, Any] = {} if platform is None else {"platform": platform}
            entries.append(oci_manifest(made, [layer(Member("f", str(number)))], **more))
        made["index.json"] = json.dumps({"manifests": entries}).encode()
        return made

    return files


def _endless_index() -> Files:
    files: Files = {}
    entry = oci_manifest(files, LAYERS)
    for _ in range(10):
        entry = blob(files, json.dumps({"manifests": [entry]}).encode())
    return files | {"index.json": json.dumps({"manifests": [entry]}).encode()}


OURS = {"os": "linux", "architecture": ARCHITECTURE}
OTHER = {"os": "linux", "architecture": "riscv64"}
LIES: dict[str, tuple[Callable[[], Files], str]] = {
    "another layer": (_with("1/layer.tar", LAYERS[0]), "is not the one"),
    "a layer in place of the first": (_with("0/layer.tar", layer(Member("f"))), "is not the one"),
    "bytes after a layer": (_with("1/layer.tar", LAYERS[1] + bytes(512)), "is not the one"),
    "a cut layer": (_with("1/layer.tar", LAYERS[1][:700]), "is not the one"),
    "an empty layer": (_with("1/layer.tar", b""), "empty"),
    "a cut compressed layer": (_with("1/layer.tar", gzip.compress(LAYERS[1])[:-20]), "end-of-stream|ended"),
    "a layer of zstd": (_with("1/layer.tar", b"\x28\xb5\x2f\xfd1234"), "zstd|Zstd"),
    "a manifest with another content": (_other_blob, "another content"),
    "no layers": (_manifest(Layers=[]), "0 layers"),
    "fewer layers": (_manifest(Layers=["0/layer.tar"]), "1 layers"),
    "a missing layer": (_manifest(Layers=["0/layer.tar", "nowhere"]), "lacks 'nowhere'"),
    "layers that are no list": (_manifest(Layers={"0": 1}), "in place of a list"),
    "a layer that is no name": (_manifest(Layers=[1, 2]), "in place of the name"),
    "two images": (_with("manifest.json", b"[{},{}]"), "2 images"),
    "a manifest that is no list": (_with("manifest.json", b"{}"), "in place of a list"),
    "a manifest that is no JSON": (_with("manifest.json", b"\xff\xfe{"), "."),
    "a manifest of many brackets": (_with("manifest.json", b"[" * 200_000), "recursion|Recursion"),
    "a manifest of megabytes": (_with("manifest.json", b" " * (MAX_JSON_BYTES + 1)), "larger than"),
    "no diff_ids": (_config_of(LAYERS, rootfs={}), "in place of a list"),
    "diff_ids of another kind": (_config_of(LAYERS, rootfs={"diff_ids": ["sha512:00", 1]}), "no digest"),
    "another architecture": (_config_of(LAYERS, architecture="riscv64"), "riscv64"),
    "another system": (_config_of(LAYERS, os="windows"), "windows"),
    "a wrong configuration": (_config_of(LAYERS, config={"Env": 1}), "wrong `Env`"),
    "no image": (lambda: {"f": b""}, "holds no image"),
    "images for other machines": (_index(OTHER, {"os": "unknown", "architecture": "unknown"}), "0 images"),
    "two images for this machine": (_index(OURS, OURS), "2 images"),
    "an index without end": (_endless_index, "too many levels"),
    "a digest that leads out": (
        _with("index.json", b'{"manifests": [{"digest": "sha256:../../etc/passwd"}]}', oci_files),
        "no digest",
    ),
}


@pytest.mark.parametrize("is_folder", [False, True], ids=["tar", "directory"])
@pytest.mark.parametrize("name", LIES)
def test_lying_archive_is_refused(tmp_path: Path, name: str, *, is_folder: bool) -> None:
    files, says = LIES[name]
    path = (laid_out if is_folder else packed)(tmp_path / "image", files())
    with pytest.raises(ImageError, match=says):
        unpacked(path, tmp_path / "root")


def test_this_machines_image_is_taken(tmp_path: Path) -> None:
    """An index of several platforms, as registries have it, also within an index, and with an attestation."""
    files = _index(OTHER, OURS, {"os": "unknown", "architecture": "unknown"})()
    outer = blob(files, files["index.json"])
    files["index.json"] = json.dumps({"manifests": [outer, outer]}).encode()
    assert names(unpacked(packed(tmp_path / "image.tar", files), tmp_path / "root")) == {"f": "1"}


def test_link_in_a_directory_leads_nowhere(tmp_path: Path) -> None:
    """A link of the directory's could lead to a file that only the proxy may read."""
    for name in ("index.json", "manifest.json"):
        place = laid_out(tmp_path / name, {"f": b""})
        (tmp_path / "secret").write_text("[]")
        (place / name).symlink_to(tmp_path / "secret")
        with pytest.raises(ImageError, match="holds no image"):
            ImageArchive(place)
    os.mkfifo(tmp_path / "index.json/oci")
    (tmp_path / "index.json/index.json").unlink()
    os.mkfifo(tmp_path / "index.json/index.json")
    with pytest.raises(ImageError, match="holds no image"):
        ImageArchive(tmp_path / "index.json")


def test_links_of_older_archives_are_followed(tmp_path: Path) -> None:
    """Docker before version 25 saved a layer that an image has twice as a link."""
    files = docker_files([LAYERS[0], LAYERS[0]])
    for target, accepted in (("../0/layer.tar", True), ("../1/layer.tar", False), ("../../../etc/passwd", False)):
        path = tmp_path / "image.tar"
        with tarfile.open(packed(path, {name: files[name] for name in files if not name.startswith("1/")}), "a") as tar:
            info = tarfile.TarInfo("1/layer.tar")
            info.type, info.linkname = tarfile.SYMTYPE, target
            tar.addfile(info)
        assert attempt(path, tmp_path / target.replace("/", "_")) == accepted


@pytest.mark.parametrize("damage", ["compressed", "header of gigabytes", "negative size", "many files", "no archive"])
def test_damaged_archive_is_refused(tmp_path: Path, damage: str) -> None:
    path = packed(tmp_path / "image.tar", docker_files(LAYERS))
    if damage == "compressed":
        path.write_bytes(gzip.compress(path.read_bytes()))
    elif damage == "no archive":
        path.write_bytes(b"no archive" * 1000)
    elif damage == "many files":
        path.write_bytes(tarfile.TarInfo("f").tobuf() * 10_001)
    else:
        head = tarfile.TarInfo("././@LongLink")
        head.type, head.size = tarfile.GNUTYPE_LONGNAME, 4 << 30
        negative = tarfile.TarInfo("f")
        negative.size = -1024
        path.write_bytes((head if damage.startswith("header") else negative).tobuf(tarfile.GNU_FORMAT) + bytes(4096))
    with pytest.raises((ImageError, OSError)):
        ImageArchive(path)


def test_layer_larger_than_the_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros after the end of a tar compress to nothing, and would be read for hours."""
    bomb = gzip.compress(LAYERS[0] + bytes(64 << 20))
    free = os.statvfs(tmp_path)
    monkeypatch.setattr(root_tar, "_SPARE_BYTES", (32 << 20) - free.f_bavail * free.f_frsize)
    (tmp_path / "root").mkdir()
    with (
        root_tar.RootWriter(tmp_path / "root", attributes=False) as writer,
        pytest.raises(OSError, match="no room"),
    ):
        writer.add(io.BytesIO(bomb))


def test_full_disk_is_the_machines_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(root_tar, "RESERVE_BYTES", 1 << 62)
    with pytest.raises(OSError, match="nearly full"):
        unpacked(packed(tmp_path / "image.tar", docker_files(LAYERS)), tmp_path / "root")


def test_too_many_members_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit holds for all layers together."""
    monkeypatch.setattr(root_tar, "MAX_ENTRIES", 8)
    with pytest.raises(ImageError, match="more than 8 members"):
        unpacked(packed(tmp_path / "image.tar", docker_files(LAYERS)), tmp_path / "root")
