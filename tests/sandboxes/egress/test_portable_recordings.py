"""Recordings that travel: an import adds what the egress proxy could have recorded, for its environment alone."""

import asyncio
import hashlib
import json
import struct
import tempfile
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandboxes.egress.portable_recordings import PortableRecordings
from sandboxes.egress.recordings import Recordings
from sandboxes.portability import NotPortableError

NAME = "ab" * 32
HEADERS = (("etag", '"é"'), ("x-a", "1"))


async def uncounted() -> None:
    """Count nothing: no egress proxy runs."""


def record(folder: Path, key: str, body: bytes, status: int = 200) -> None:
    recordings = Recordings(folder)
    draft = recordings.draft()
    draft.write(body)
    recordings.keep(key, draft, status, HEADERS)
    draft.close()


def forged(body: bytes, head: object, length: int | None = None) -> bytes:
    """Return a file with the right digest, as an attacker writes it."""
    text = json.dumps(head).encode()
    data = body + text + struct.pack("!Q", len(text) if length is None else length)
    return data + hashlib.blake2b(data, digest_size=32).digest()


def contents(folder: Path, scope: str) -> dict[str, tuple[int, bytes]]:
    found = {}
    for path in sorted(folder.glob(f"{scope}-*")):
        response = Recordings(folder).load(path.name)
        assert response is not None
        with response.body:
            assert response.headers == HEADERS
            found[path.name] = response.status, response.body.read(response.length)
    return found


KEYS = st.dictionaries(st.sampled_from([f"{digit}{NAME[1:]}" for digit in "0123"]), st.binary(max_size=40))


@settings(max_examples=40)
@given(here=KEYS, others=KEYS, there=KEYS)
def test_recordings_of_one_environment_travel_and_replace_none(
    here: dict[str, bytes], others: dict[str, bytes], there: dict[str, bytes]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, target, scratch = Path(folder, "here"), Path(folder, "there"), Path(folder, "unit")
        for where, scope, recorded in ((source, "a", here), (source, "b", others), (target, "a", there)):
            for name, body in recorded.items():
                record(where, f"{scope}-{name}", body, 404)
        Recordings(source), Recordings(target)
        doubts = list[bool]()
        doubt = partial(doubts.append, True)
        packed, taking = (PortableRecordings(where, "a", uncounted, doubt) for where in (source, target))
        assert packed.names() == sorted(here)
        for name in packed.names():
            scratch.write_bytes(b"".join(packed.pack(name)))
            taking.take(name, scratch)
            scratch.unlink()
        asyncio.run(taking.settle())
        assert contents(target, "a") == {f"a-{name}": (404, body) for name, body in (here | there).items()}
        assert contents(target, "b") == {}
        # Another recording of the same request: states of the other machine do not come from the one that is here.
        assert len(doubts) == sum(there[name] != here[name] for name in here.keys() & there.keys())


GOOD = {"status": 200, "headers": [["etag", "x"]]}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        forged(b"body", GOOD)[:-1] + b"x",
        forged(b"body", GOOD, length=1 << 40),
        forged(b"body", GOOD, length=1 << 63),
        forged(b"body", []),
        forged(b"body", "{"),
        forged(b"body", {"status": 200}),
        forged(b"body", {**GOOD, "status": "200"}),
        forged(b"body", {**GOOD, "status": True}),
        forged(b"body", {**GOOD, "status": 503}),
        forged(b"body", {**GOOD, "status": 101}),
        forged(b"body", {**GOOD, "headers": [["a", "b\r\nset-cookie: c"]]}),
        forged(b"body", {**GOOD, "headers": [["a b", "c"]]}),
        forged(b"body", {**GOOD, "headers": [["transfer-encoding", "chunked"]]}),
        forged(b"body", {**GOOD, "headers": [["Content-Length", "9"]]}),
        forged(b"body", {**GOOD, "headers": [["a", 1]]}),
        forged(b"body", {**GOOD, "headers": [["a"]]}),
        forged(b"body", {**GOOD, "headers": [["a", "b"]] * 201}),
        forged(b"body", {**GOOD, "headers": {"a": "b"}}),
    ],
)
def test_what_no_egress_proxy_wrote_is_refused(tmp_path: Path, data: bytes) -> None:
    recordings = PortableRecordings(tmp_path / "egress", "a", uncounted, lambda: None)
    (tmp_path / "unit").write_bytes(data)
    with pytest.raises(NotPortableError):
        recordings.take(NAME, tmp_path / "unit")
    assert recordings.names() == []


@pytest.mark.parametrize("name", ["", "..", "../../x", NAME[1:], NAME.upper(), f"{NAME}\n", f"/{NAME}"])
def test_names_lead_nowhere_else(tmp_path: Path, name: str) -> None:
    (tmp_path / "unit").write_bytes(forged(b"body", GOOD))
    recordings = PortableRecordings(tmp_path / "egress", "a", uncounted, lambda: None)
    recordings.take(NAME, tmp_path / "unit")
    with pytest.raises(NotPortableError):
        recordings.take(name, tmp_path / "unit")
    assert recordings.names() == [NAME]
