"""The greeting: nobody without the secret can say what a member says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.cluster.link.greeting import HELLO_BYTES, GreetingError, Hello, proof


@given(st.binary(min_size=HELLO_BYTES, max_size=HELLO_BYTES))
def test_foreign_bytes_are_refused(data: bytes) -> None:
    """The only error is the one that closes the connection."""
    with pytest.raises(GreetingError):
        Hello.unpack(data)


def test_another_version_is_refused() -> None:
    packed = bytearray(Hello(1, 2, b"o" * 32).pack())
    packed[5] += 1
    with pytest.raises(GreetingError, match="speaks version"):
        Hello.unpack(bytes(packed))


def test_each_connection_has_its_own_proofs() -> None:
    """They depend on the secret, the cluster, both greetings and the side."""
    opener, acceptor = Hello(1, 2, b"o" * 32), Hello(4, 5, b"a" * 32)
    assert Hello.unpack(opener.pack()) == opener
    seen = {
        proof(secret, cluster, one, other, of_opener=side)
        for secret in (b"secret", b"other")
        for cluster in ("cluster", "second")
        for one in (opener, opener._replace(nonce=b"x" * 32))
        for other in (acceptor, acceptor._replace(nonce=b"x" * 32))
        for side in (True, False)
    }
    assert len(seen) == 32
