"""How a connection between two members begins: both prove that they have the cluster's secret (pure).

The member that opens the connection sends a `Hello` with a nonce. The other one answers with its own `Hello`, and with
a proof over both. The opener checks it and sends its own proof. Both proofs are HMACs with the secret, and each names
its side, so neither can be sent back to its maker. Then the connection is HTTP.

Nothing is encrypted: the network between members must be one that may see what agents send.
"""

import hmac
import struct
from hashlib import sha256
from typing import NamedTuple

VERSION = 10
"""Version of the greeting and of the headers that members add. Members of another version refuse each other."""
NONCE_BYTES = 32
"""Size of a nonce: no proof of another connection is of use."""
_HELLO = struct.Struct("!4sHQQ?")
_MAGIC = b"FKPT"
HELLO_BYTES = _HELLO.size + NONCE_BYTES
PROOF_BYTES = sha256().digest_size


class GreetingError(RuntimeError):
    """The bytes of a peer are not those of a member of this cluster."""


class Hello(NamedTuple):
    """What a member says of itself when a connection begins."""

    member: int
    boot: int
    nonce: bytes
    # Whether an agent's bytes come on the connection. Then only its first request is one that the member passes on.
    is_tunnel: bool = False

    def pack(self) -> bytes:
        """Return the greeting as bytes."""
        return _HELLO.pack(_MAGIC, VERSION, self.member, self.boot, self.is_tunnel) + self.nonce

    @classmethod
    def unpack(cls, data: bytes) -> "Hello":
        """Read a greeting of `HELLO_BYTES`. Raises GreetingError: it is no greeting, or one of another version."""
        magic, version, member, boot, is_tunnel = _HELLO.unpack_from(data)
        if magic != _MAGIC:
            raise GreetingError("the peer is not a member of a Forkpoint cluster")
        if version != VERSION:
            raise GreetingError(f"the peer speaks version {version}, and this member {VERSION}")
        return cls(member, boot, data[_HELLO.size :], is_tunnel)

    def require(self, member: int, boot: int) -> None:
        """Check that it comes from the start of a member that is meant. Raises GreetingError."""
        if (self.member, self.boot) != (member, boot):
            raise GreetingError("another member answers")


def proof(secret: bytes, cluster: str, opener: Hello, acceptor: Hello, *, of_opener: bool) -> bytes:
    """Return the proof of one side; cluster is the cluster's name, so clusters with one secret stay apart."""
    side = b"opener proof\0" if of_opener else b"acceptor proof\0"
    return hmac.new(secret, side + opener.pack() + acceptor.pack() + cluster.encode(), sha256).digest()


def require_proof(
    received: bytes, secret: bytes, cluster: str, opener: Hello, acceptor: Hello, *, of_opener: bool
) -> None:
    """Check the proof of one side; see `proof`. Raises GreetingError."""
    if not hmac.compare_digest(received, proof(secret, cluster, opener, acceptor, of_opener=of_opener)):
        raise GreetingError("a peer does not have the cluster's secret")
