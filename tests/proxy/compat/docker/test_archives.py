"""Docker: keys of archives, and the description of a path."""

import base64
import gzip
import io
import json
import stat
import tarfile

from hypothesis import given
from hypothesis import strategies as st

from proxy.compat.docker import archives
from sandboxes.calls import ToolCall

CONTENT = st.binary(max_size=40)


def archive(files: dict[str, bytes], *, mtime: int = 0, mode: int = 0o644, uid: int = 0) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as writer:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mtime, member.mode, member.uid = len(content), mtime, mode, uid
            writer.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def key(body: bytes, path: str = "/tmp") -> bytes:
    return archives.extract_key(ToolCall("archive", "extract", {"path": path}, body))


@given(st.dictionaries(st.text("abc", min_size=1, max_size=4), CONTENT, min_size=1, max_size=4))
def test_archive_key_consists_of_members(files: dict[str, bytes]) -> None:
    """Order, times and compression of an archive are not in its key; names, modes, owners and contents are."""
    same = key(archive(files))
    assert key(archive(dict(reversed(files.items())), mtime=99)) == same
    assert key(gzip.compress(archive(files))) == same
    assert key(archive(files, mode=0o755)) != same
    assert key(archive(files, uid=5)) != same
    assert key(archive({name: content + b"!" for name, content in files.items()})) != same
    assert key(archive(files), "/other") != same
    # A truncated archive does not have the key of a shorter one.
    assert key(archive({"first": b"1", **files})[: 512 * 2 + 100]) != key(archive({"first": b"1"}))


def test_order_of_members_with_one_path_is_in_the_key() -> None:
    """The last one stays, however its path is written."""
    assert key(archive({"a": b"1", "./a": b"2"})) != key(archive({"./a": b"2", "a": b"1"}))


def test_path_description_has_gos_forms() -> None:
    """Modes and times of a path are sent as Go writes them."""
    fields = {"name": "d", "size": 5, "mode": stat.S_IFDIR | 0o1777, "mtime_ns": 1_500_000_000_250_000_000, "link": ""}
    assert json.loads(base64.b64decode(archives.path_stat(fields))) == {
        "name": "d", "size": 5, "mode": (1 << 31) | (1 << 20) | 0o777, "mtime": "2017-07-14T02:40:00.25Z",
        "linkTarget": "",
    }  # fmt: skip
