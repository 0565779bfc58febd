"""Whatever bytes a client or an agent sends, a decoder gives a value or an error that has a status, and no defect."""

import contextlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.compat.e2b import connect_rpc
from proxy.compat.e2b.connect_rpc import ConnectError
from proxy.dialects import multipart
from proxy.http.access import Access, read_tokens
from proxy.http.address import address_of
from proxy.http.browser_guard import refuse_foreign
from proxy.refusals import RefusalError
from sandboxes.ipc.codec import decode_bytes
from sandboxes.ipc.frames import MalformedFrameError

FORM = "multipart/form-data; boundary=b"


def form_of(data: bytes) -> None:
    multipart.parts(data, FORM)
    multipart.parts(b'--b\r\nContent-Disposition: form-data; name="f"\r\n' + data + b"\r\n--b--\r\n", FORM)


DECODERS: dict[str, Callable[[bytes], object]] = {
    "connect": connect_rpc.messages,
    "connect with a header": lambda data: connect_rpc.messages(b"\0" + len(data).to_bytes(4, "big") + data),
    "multipart": form_of,
    "multipart's type": lambda data: multipart.parts(b"--b--", "multipart/form-data; " + data.decode("latin-1")),
    "address": lambda data: address_of(b"/t/" + data, [(b"x-forkpoint-task", data), (b"x-forkpoint-rollout", data)]),
    "address by headers": lambda data: address_of(b"/e/x", [(b"x-forkpoint-task", data), (b"authorization", data)]),
    "host": lambda data: refuse_foreign("GET", [(b"host", data)], tool=False),
    "origin": lambda data: refuse_foreign("GET", [(b"host", b"h"), (b"origin", data)], tool=False),
    "token": lambda data: Access(read_tokens("t" * 20, None)).holds_token("Basic " + data.decode("latin-1")),
    "message of a sandbox": decode_bytes,
}


@pytest.mark.parametrize("name", list(DECODERS))
@given(data=st.binary(max_size=200) | st.text(max_size=60).map(str.encode))
def test_any_bytes_give_a_value_or_our_error(name: str, data: bytes) -> None:
    with contextlib.suppress(RefusalError, ConnectError, MalformedFrameError):
        DECODERS[name](data)
