"""A manifest says what a state consists of, and nothing that its reader would regret."""

from collections.abc import Callable
from typing import Any

import orjson
import pytest

from proxy.cluster.states.manifests import (
    CHUNK_BYTES,
    ChunkRef,
    ManifestError,
    StateManifest,
    decode,
    folder_of,
    is_name,
    name_of,
)
from proxy.transfer.state_records import StateLine, UnitRef

CHUNK = ChunkRef(name=f"3/{'a' * 64}", size_bytes=10)
MANIFEST = StateManifest(
    state=StateLine(
        node=7, driver="local", kind="files", payload={}, exact=None, content=None, cost_s=1.0,
        units=(UnitRef(name="layer", sha256="b" * 64, size_bytes=10),),
    ),
    chunks=((CHUNK,),),
)  # fmt: skip


def test_manifest_comes_back() -> None:
    """What is encoded is decoded, under the name of its digest."""
    data = MANIFEST.packed()
    assert decode(name_of(3, data), data, 7) == MANIFEST
    assert (MANIFEST.size_bytes, MANIFEST.names) == (10, frozenset({CHUNK.name}))
    assert is_name(name_of(3, data))
    assert folder_of("a") != folder_of("../a")


def change(path: tuple[str | int, ...], value: object) -> Callable[[Any], None]:
    def apply(manifest: Any) -> None:
        for step in path[:-1]:
            manifest = manifest[step]
        manifest[path[-1]] = value

    return apply


@pytest.mark.parametrize(
    "forge",
    [
        change(("chunks", 0, 0, "name"), f"../3/{'a' * 64}"),
        change(("chunks", 0, 0, "name"), f"3/{'A' * 64}"),
        change(("chunks", 0, 0, "name"), f"3/{'a' * 64}\n"),
        change(("chunks", 0, 0, "size_bytes"), 11),
        change(("chunks", 0, 0, "size_bytes"), -1),
        change(("chunks", 0, 0, "size_bytes"), CHUNK_BYTES + 1),
        change(("chunks", 0), []),
        change(("chunks",), []),
        change(("state", "units", 0, "sha256"), "b"),
        change(("state", "units", 0, "name"), "n" * 1000),
        change(("state", "node"), 8),
        change(("state", "cost_s"), "nan"),
        change(("more",), 1),
    ],
)
def test_forged_manifest_is_refused(forge: Callable[[Any], None]) -> None:
    """A name that leads elsewhere, a size that does not fit, another node, or a member too many."""
    value = orjson.loads(MANIFEST.packed())
    forge(value)
    data = orjson.dumps(value)
    with pytest.raises(ManifestError):
        decode(name_of(3, data), data, 7)


def test_damaged_manifest_is_refused() -> None:
    """The digest is the name."""
    data = MANIFEST.packed()
    with pytest.raises(ManifestError, match="not what was written"):
        decode(name_of(3, data), data + b" ", 7)
