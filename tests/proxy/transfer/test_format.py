"""A bundle is a tar, and any damage to it is detected."""

import io
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.transfer.format import BundleError, Writer, digest_of, read
from tests.proxy.transfer.rig import verdict


def test_any_tar_program_can_list_a_bundle(bundle: bytes, tmp_path: Path) -> None:
    """An undamaged bundle is imported, and Python's tarfile lists its members."""
    assert verdict(bundle, tmp_path) == ""
    with tarfile.open(fileobj=io.BytesIO(bundle)) as listed:
        kinds = [name.partition("/")[0] for name in listed.getnames()]
    assert (kinds[0], kinds[-1]) == ("manifest", "seal")
    assert {"zblob", "blob", "batch"} <= set(kinds)


@given(st.data())
def test_a_flipped_bit_is_detected_and_located(bundle: bytes, data: st.DataObject) -> None:
    """Any single flipped bit makes the import fail, with an error that names the part."""
    at, bit = data.draw(st.integers(0, len(bundle) - 1)), data.draw(st.integers(0, 7))
    damaged = bytearray(bundle)
    damaged[at] ^= 1 << bit
    with pytest.raises(BundleError) as refused:
        list(read(io.BytesIO(bytes(damaged))))
    assert any(word in str(refused.value) for word in ("part ", "its seal"))


@given(st.data())
def test_a_truncated_or_extended_file_is_refused(bundle: bytes, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(bundle) - 1))
    for wrong in (bundle[:cut], bundle + b"\0", bundle + bundle):
        with pytest.raises(BundleError):
            list(read(io.BytesIO(wrong)))


@given(st.binary(max_size=2000))
def test_bytes_that_are_no_bundle_are_refused(data: bytes) -> None:
    with pytest.raises(BundleError):
        list(read(io.BytesIO(data)))


def test_a_decompression_bomb_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small compressed part that unpacks to more than the limit is refused."""
    import zlib  # noqa: PLC0415

    monkeypatch.setattr("proxy.transfer.format.MAX_PART_BYTES", 1 << 16)
    writer = Writer()
    data = bytes(1 << 20)
    made = writer.json("manifest", {}) + writer.part("zblob", zlib.compress(data), digest_of(data)) + writer.seal()
    with pytest.raises(BundleError, match="larger than"):
        list(read(io.BytesIO(made)))
