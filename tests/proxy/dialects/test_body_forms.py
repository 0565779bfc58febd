"""Canonical forms: equal contents have one form in every spelling, and different contents have different forms."""

import gzip
import io
import tarfile
import zipfile
from hashlib import sha256
from typing import Literal

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.dialects.body_forms import body_form, file_form, json_value, query_form

JSON = "application/json"
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**31), 2**31) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.text(max_size=3), values, max_size=4), st.randoms())
def test_equal_json_values_have_one_form(value: dict[str, object], random: object) -> None:
    members = list(value.items())
    random.shuffle(members)  # type: ignore[attr-defined]
    other = orjson.dumps(dict(members), option=orjson.OPT_INDENT_2)
    assert body_form(orjson.dumps(value), JSON) == body_form(other, f"{JSON}; charset=utf-8")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b'{"a": 1}', b'{"a": 1.0}'),
        (b'{"a": 123456789012345678901}', b'{"a": 123456789012345678902}'),
        (b'{"a": 0.12345678901234567890}', b'{"a": 0.12345678901234567891}'),
        (b'{"a": 123456789012345.111}', b'{"a": 123456789012345.112}'),
        (b'{"a": 1e-400}', b'{"a": 1E-401}'),
        (b'{"a": 0e99999999999999999999}', b'{"a": 1e-99999999999999999999}'),
        (b"[1, 2]", b"[2, 1]"),
        (b'{"a": null}', b"{}"),
        (b'{"a": 1e400}', b'{"a": 1e401}'),
        (b'{"a": "\\ud800"}', b'{"a": "\\ud801"}'),
        (b"not json", b"not  json"),
    ],
)
def test_different_json_values_have_different_forms(one: bytes, other: bytes) -> None:
    forms = [orjson.dumps(body_form(body, JSON), option=orjson.OPT_SORT_KEYS) for body in (one, other)]
    assert forms[0] != forms[1]


def test_query_form_sorts_by_name() -> None:
    assert query_form("b=2&a=1") == query_form("a=1&b=2") == query_form("a=%31&b=2")
    assert query_form("a=1&a=2") != query_form("a=2&a=1")
    assert query_form("a=") != query_form("")


@pytest.mark.parametrize(("one", "other"), [("a", "a="), ("q=c++", "q=c%20%20"), ("q=c+", "q=c%2B"), ("a&&b", "a&b")])
def test_queries_that_a_server_can_tell_apart_are_two(one: str, other: str) -> None:
    form = "application/x-www-form-urlencoded"
    assert query_form(one) != query_form(other)
    assert body_form(one.encode(), form) != body_form(other.encode(), form)


@pytest.mark.parametrize("value", ["NaN", "-Infinity", r'"\ud800"', "[" * 3000 + "]" * 3000])
def test_a_body_that_has_no_canonical_form_counts_by_its_bytes(value: str) -> None:
    """Long numbers are read by another parser, which accepts more."""
    body = f'{{"long": 1234567890123456, "value": {value}}}'.encode()
    assert body_form(body, "application/json") == {"sha256": sha256(body).hexdigest()}


def form(boundary: str, *parts: tuple[str, bytes]) -> tuple[bytes, str]:
    """Return a multipart body and its content type."""
    body = b"".join(f"--{boundary}\r\n{head}\r\n\r\n".encode() + data + b"\r\n" for head, data in parts)
    return body + f"--{boundary}--\r\n".encode(), f"multipart/form-data; boundary={boundary}"


FILE = 'Content-Disposition: form-data; name="file"; filename="a.zip"\r\nContent-Type: application/zip'
FIELD = 'Content-Disposition: form-data; name="target"'


def test_multipart_form_ignores_its_boundary() -> None:
    one, other = (body_form(*form(b, (FIELD, b"/x"), (FILE, b"\x00\xff data"))) for b in ("aaa", "bbbbbb"))
    assert one == other
    headers = [["content-disposition", 'form-data; name="target"']]
    assert one["parts"][0] == {"name": "target", "headers": headers, "text": "/x"}
    assert one != body_form(*form("aaa", (FIELD, b"/y"), (FILE, b"\x00\xff data")))
    assert one != body_form(*form("aaa", (FIELD, b"/x"), (FILE, b"\x00\xff datA")))


def test_truncated_form_is_identified_by_its_bytes() -> None:
    body, kind = form("aaa", (FIELD, b"/x"))
    assert "sha256" in body_form(body[:-10], kind)
    assert "sha256" in body_form(body, "multipart/form-data")


def zipped(*members: tuple[str, bytes], year: int = 2000, mode: int = 0o644) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members:
            info = zipfile.ZipInfo(name, (year, 1, 1, 0, 0, 0))
            info.external_attr = mode << 16
            archive.writestr(info, data)
    return file.getvalue()


def tarred(*members: tuple[str, bytes], at: int = 0, mode: Literal["w:", "w:gz"] = "w:") -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(data), at
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def test_archives_are_identified_by_their_contents() -> None:
    a, b = ("a", b"1"), ("b", b"2")
    assert file_form(zipped(a, b)) == file_form(zipped(b, a, year=2020))
    assert file_form(zipped(a, b)) != file_form(zipped(a, ("b", b"3")))
    assert file_form(zipped(a)) != file_form(zipped(a, mode=0o755))
    assert file_form(tarred(a, b)) == file_form(tarred(b, a, at=5)) == file_form(tarred(a, b, mode="w:gz"))
    assert file_form(tarred(a)) != file_form(tarred(("c", b"1")))
    assert file_form(zipped(a)) != file_form(tarred(a))


@pytest.mark.parametrize("before", [("./a", b"1"), ("a/../b", b"1"), ("b/c", b"1")])
def test_order_of_members_counts_where_it_decides_what_is_unpacked(before: tuple[str, bytes]) -> None:
    """Of two members with one path the last stays, and a file may become the directory of another, or not."""
    after = ("b", b"2") if "b" in before[0] else ("a", b"2")
    for packed in (zipped, tarred):
        assert file_form(packed(before, after)) != file_form(packed(after, before))


def test_order_of_hard_links_counts() -> None:
    link = tarfile.TarInfo("a")
    link.type, link.linkname = tarfile.LNKTYPE, "b"
    linked, target = link.tobuf(), tarred(("b", b"1"))
    end = bytes(1024)
    assert file_form(linked + target) != file_form(target[:1024] + linked + end)


def test_broken_archive_is_identified_by_its_bytes() -> None:
    for data in (b"PK\x03\x04 nothing", b"\x1f\x8b nothing", zipped(("a", b"1"))[:-10], b""):
        assert "sha256" in file_form(data)


def test_too_large_archive_is_not_unpacked() -> None:
    bomb = zipped(("zeros", b"\0" * (300 << 20)))
    assert "sha256" in file_form(bomb)


@pytest.mark.parametrize("kind", ["many zeros", "header of gigabytes", "chain of headers", "damaged"])
def test_hostile_archive_takes_no_memory(kind: str) -> None:
    """A body of a few kilobytes that claims or unpacks to gigabytes is identified by its bytes, at once."""
    info = tarfile.TarInfo("f")
    if kind == "many zeros":
        info.size = 8 << 30
        tar = info.tobuf(tarfile.GNU_FORMAT) + bytes(4 << 20)
    else:
        info.name, info.type = "././@LongLink", tarfile.GNUTYPE_LONGNAME
        info.size = 512 if kind == "chain of headers" else 8 << 30
        tar = (info.tobuf(tarfile.GNU_FORMAT) + b"n" * 511 + b"\0") * (5_000 if kind == "chain of headers" else 1)
    body = gzip.compress(tar)
    if kind == "damaged":
        body = body[:-40] + b"\xff" * 40
    assert body_form(body, "application/gzip", archives=True) == {"sha256": sha256(body).hexdigest()}


@pytest.mark.parametrize(("one", "other"), [("q=%e9", "q=%e8"), ("q=%e9", "q=%ef%bf%bd"), ("%ff", "%fe")])
def test_queries_that_are_not_utf_8_are_told_apart(one: str, other: str) -> None:
    assert query_form(one) != query_form(other)
    form = "application/x-www-form-urlencoded"
    assert body_form(one.encode(), form) != body_form(other.encode(), form)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b'{"a":1,"a":2}', b'{"a":2}'),
        (b'{"a":1,"a":2}', b'{"a":3,"a":2}'),
        (b'[{"a" :{"b":1,"\\u0062":2}}]', b'[{"a":{"b":2}}]'),
        (b'{"a":-0}', b'{"a":0}'),
        (b"[-0]", b"[0]"),
    ],
)
def test_json_that_servers_read_differently_is_told_apart(one: bytes, other: bytes) -> None:
    forms = [orjson.dumps(body_form(text, JSON), option=orjson.OPT_SORT_KEYS) for text in (one, other)]
    assert forms[0] != forms[1]


def test_a_colon_in_a_string_is_no_member() -> None:
    assert body_form(rb'{"a":"say \": twice"}', JSON) == {"json": {"a": 'say ": twice'}}


@pytest.mark.parametrize("number", ["1234567890123456", "-0", "1e-400", "123456789012345.5"])
def test_numbers_beside_a_long_one_stay_numbers(number: str) -> None:
    """Rules compare numbers, and a rollout may be named by one."""
    value = json_value(f'{{"a":{number},"n":7,"x":1.50,"s":"1234567890123456"}}'.encode())
    assert value is not None
    assert (value[0]["n"], value[0]["x"]) == (7, 1.5)
