"""Multipart forms: parts come out byte for byte, malformed forms are refused, and headers have limits."""

from email import message_from_bytes
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.dialects.body_forms import body_form
from proxy.dialects.multipart import MAX_HEADER_BYTES, MAX_PART_HEADERS, MAX_PARTS, MalformedFormError, files, parts

TOKENS = st.text("abcdefghijklmnopqrstuvwxyz0123456789-", min_size=1, max_size=12)
VALUES = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs", "Zs", "Cc"]), max_size=8)
FILENAMES = st.none() | st.text(st.characters(exclude_characters="\r\n\0", exclude_categories=["Cs"]), min_size=1)
PARTS = st.tuples(TOKENS, FILENAMES, st.dictionaries(TOKENS.map("x-{}".format), VALUES, max_size=3), st.binary())
FIELD = b'Content-Disposition: form-data; name="a"'


def quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def written(boundary: str, given: list[tuple[str, str | None, dict[str, str], bytes]]) -> tuple[bytes, str]:
    """Return a form as a client writes it, and its content type."""
    body = b""
    for name, filename, headers, data in given:
        disposition = f'form-data; name="{name}"' + ("" if filename is None else f'; filename="{quoted(filename)}"')
        lines = [f"Content-Disposition: {disposition}", *(f"{name}: {value}" for name, value in headers.items())]
        body += f"--{boundary}\r\n".encode() + "\r\n".join([*lines, "", ""]).encode() + data + b"\r\n"
    return body + f"--{boundary}--\r\n".encode(), f'multipart/form-data; boundary="{boundary}"'


@given(st.lists(PARTS, min_size=1, max_size=4))
def test_parts_come_out_as_written(given: list[tuple[str, str | None, dict[str, str], bytes]]) -> None:
    read = parts(*written("a-boundary-no-part-holds", given))
    assert [(part.name, part.filename, dict(part.headers[1:]), part.data) for part in read] == given


@given(st.lists(PARTS, min_size=1, max_size=2), st.lists(PARTS, min_size=1, max_size=2))
def test_forms_are_equal_where_parts_are(
    form: list[tuple[str, str | None, dict[str, str], bytes]],
    other: list[tuple[str, str | None, dict[str, str], bytes]],
) -> None:
    """The boundary is chosen by the client for each request, so it must not reach the key; everything else must."""
    assert body_form(*written("boundary-a", form)) == body_form(*written("boundary-b", form))
    assert (body_form(*written("boundary-a", form)) == body_form(*written("boundary-a", other))) == (form == other)


@pytest.mark.parametrize(
    ("header", "other"),
    [
        (b"Content-Type: text/plain", b"Content-Type: text/csv"),
        (b"Content-Type: text/plain", b"Content-Type: text/plain; charset=latin-1"),
        (b"X-A: 1", b"X-A: 2"),
        (b"Content-Transfer-Encoding: 8bit", b"Content-Transfer-Encoding: base64"),
    ],
)
def test_part_headers_are_in_the_form(header: bytes, other: bytes) -> None:
    """A tool server sees each part's headers, so the same bytes as text/plain and as text/csv are two calls."""
    forms = [
        body_form(b"--b\r\n" + FIELD + b"\r\n" + line + b"\r\n\r\n1\r\n--b--", "multipart/form-data; boundary=b")
        for line in (header, other)
    ]
    assert "parts" in forms[0]
    assert forms[0] != forms[1]


def test_order_and_case_of_headers_are_irrelevant() -> None:
    """The order and the case of a part's headers do not change the key."""
    forms = [
        body_form(b"--b\r\n" + head + b"\r\n\r\n1\r\n--b--", "multipart/form-data; boundary=b")
        for head in (FIELD + b"\r\nX-A: 1", b"x-a: 1\r\n" + FIELD)
    ]
    assert forms[0] == forms[1]


@given(st.data())
def test_truncated_form_is_refused(data: st.DataObject) -> None:
    body, content_type = written("b", data.draw(st.lists(PARTS, min_size=1, max_size=2)))
    with pytest.raises(MalformedFormError) as refusal:
        parts(body[: data.draw(st.integers(0, len(body) - len(b"--\r\n") - 1))], content_type)
    assert refusal.value.status == 400


@given(
    st.binary(),
    st.sampled_from(["multipart/form-data; boundary=b", "multipart/form-data", "multipart/form-data; boundary="]),
)
def test_arbitrary_bytes_never_crash_the_parser(body: bytes, content_type: str) -> None:
    assert body_form(b"--b\r\n" + body, content_type) is not None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--b--"[:-1],
        b"--b\r\n" + FIELD + b"\r\n\r\nno end",
        b"--b\r\n" + FIELD + b"\n\n1\r\n--b--",
        b"--b\r\nno colon\r\n\r\n1\r\n--b--",
        b'--b\r\nContent-Disposition: form-data; name="\xff"\r\n\r\n1\r\n--b--',
        b"--b\r\nX-A: 1\r\n\r\n1\r\n--b--",
        b"--b\r\n" + FIELD + b"\r\nContent-Length: 2\r\n\r\n1\r\n--b--",
        b"--bb\r\n" + FIELD + b"\r\n\r\n1\r\n--bb--",
        b"--b\r\n" + FIELD + b"\r\n\r\n--b\r\n--b--",
        b"--b\r\n" + FIELD + b"\r\n\r\n1\n--b\r\n--b--",
    ],
)
def test_malformed_form_is_refused(body: bytes) -> None:
    with pytest.raises(MalformedFormError) as refusal:
        parts(body, "multipart/form-data; boundary=b")
    assert refusal.value.status == 400


@pytest.mark.parametrize(
    "body",
    [
        b"--b\r\n" + FIELD + b"\r\nX-A: " + b"1" * MAX_HEADER_BYTES + b"\r\n\r\n1\r\n--b--",
        b"--b\r\n" + FIELD + b"\r\nX-A: 1" * MAX_PART_HEADERS + b"\r\n\r\n1\r\n--b--",
        b"--b\r\n" + (FIELD + b"\r\n\r\n1\r\n--b\r\n") * MAX_PARTS,
    ],
    ids=["header size", "headers of a part", "parts"],
)
def test_form_beyond_a_limit_is_too_large(body: bytes) -> None:
    with pytest.raises(MalformedFormError) as refusal:
        parts(body, "multipart/form-data; boundary=b")
    assert refusal.value.status == 413


def test_files_are_the_parts_with_a_filename() -> None:
    form = written("b", [("a", None, {}, b"1"), ("file", 'C:\\x "y"', {}, b"2")])
    assert [(file.filename, file.data) for file in files(*form)] == [('C:\\x "y"', b"2")]


HOSTILE_PARAMETERS = (
    'name="a"', "name=a", 'NAME="a"', 'name="b"', 'name="a\\"; filename=\\"x"', 'filename="x"', 'filename="../../x"',
    'filename="/x"', 'filename="C:\\\\x"', "filename*=utf-8''x", "filename*=utf-8''%2e%2e%2fx", 'filename="x%00"',
    'filename="x\\x"', 'filename=""', 'filename="é"',
)  # fmt: skip
HOSTILE_HEADERS = (
    "Content-Type: text/plain", "content-type:text/plain", "Content-Type: text/html", "X-A: 1", "X-A: 1 ", "X-A:\t1",
    "x-a: 2", "Content-Transfer-Encoding: base64", 'Content-Disposition: form-data; name="b"',
)  # fmt: skip
HOSTILE_PARTS = st.tuples(
    st.lists(st.sampled_from(HOSTILE_PARAMETERS), max_size=3),
    st.lists(st.sampled_from(HOSTILE_HEADERS), max_size=2),
    st.sampled_from(["", "1", "--b", "\r\n", "--b--\r\n"]),
)
BOUNDARIES = st.sampled_from(["b", "bb", "b-", "--b"])
HostileForm = tuple[str, list[tuple[list[str], list[str], str]]]
HOSTILE_FORMS = st.tuples(BOUNDARIES, st.lists(HOSTILE_PARTS, min_size=1, max_size=2))


def hostile(form: HostileForm) -> tuple[bytes, str]:
    """Return a form as a hostile client writes it, and its content type."""
    boundary, chosen = form
    body = ""
    for parameters, headers, data in chosen:
        disposition = "; ".join(["Content-Disposition: form-data", *parameters])
        body += "\r\n".join([f"--{boundary}", disposition, *headers, "", data, ""])
    return f"{body}--{boundary}--\r\n".encode(), f"multipart/form-data; boundary={boundary}"


def as_servers_read(body: bytes, content_type: str) -> list[tuple[list[tuple[str, str]], Any]]:
    """Return a form's parts as another parser reads them: their headers by lower-case names, and their content."""
    message = message_from_bytes(f"Content-Type: {content_type}\r\n\r\n".encode() + body)
    found: Any = message.get_payload()
    return [
        (sorted((name.lower(), str(value).strip()) for name, value in part.items()), part.get_payload())
        for part in found
    ]


@given(HOSTILE_FORMS, HOSTILE_FORMS)
def test_equal_keys_are_equal_for_servers(one: HostileForm, other: HostileForm) -> None:
    """Two forms with one key are the same form for Python's own parser, whatever names and boundaries they have."""
    try:
        keys = [body_form(*hostile(form)) for form in (one, other)]
    except MalformedFormError:
        return
    if keys[0] == keys[1] and "parts" in keys[0]:
        assert as_servers_read(*hostile(one)) == as_servers_read(*hostile(other))
