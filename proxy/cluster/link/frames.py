"""The bytes between two members: how a link proves the secret, and frames whose origin and order are proven (pure).

1. The member that opens the link sends a `Hello` with a nonce. The other one answers with its own `Hello`, and with a
   proof over both. The opener checks it and sends its own proof. Both proofs are HMACs with the cluster's secret, and
   each names its side, so neither can be sent back to its maker.
2. Each direction then has a key of its own, made of the secret and both greetings. Every frame carries a tag over its
   number, its head and its content. A frame that was changed, dropped, repeated or put in by another machine ends the
   link.

Frames are not encrypted: the network between members must be one that may see what agents send.
"""

import hmac
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from hashlib import blake2b, sha256
from typing import NamedTuple

VERSION = 7
"""Version of the bytes. Members of another version refuse the link."""
HTTP = 1
"""The use of a connection that is HTTP after the greeting."""
NONCE_BYTES = 32
"""Size of a nonce: two links never have the same keys."""
MAX_FRAME_BYTES = 80 << 20
"""Most bytes of a frame's content: the largest body of a request (64 MiB by default) and its head."""
_HELLO = struct.Struct("!4sHIQQQ")
_MAGIC = b"FKPT"
_HEAD = struct.Struct("!IIB")
_TAG_BYTES = 16
HELLO_BYTES = _HELLO.size + NONCE_BYTES
"""Size of a greeting."""
PROOF_BYTES = sha256().digest_size
"""Size of a proof."""


class LinkError(RuntimeError):
    """The bytes of a peer are not those of a member of this cluster."""


class FrameKind(IntEnum):
    """What a frame is."""

    ASK = 1
    ANSWER = 2
    FAILED = 3
    PING = 4
    PONG = 5
    DATA = 6
    """The last piece of a message of a channel."""
    PIECE = 7
    """Any other piece."""
    CREDIT = 8
    """How many more bytes of a channel the peer may send."""
    CLOSE = 9
    """A channel ends."""


class Frame(NamedTuple):
    """One frame.

    Attributes:
        kind: What it is.
        stream: Number of the question that it belongs to; 0 for pings.
        content: Its bytes.
    """

    kind: FrameKind
    stream: int
    content: bytes


class Hello(NamedTuple):
    """What a member says of itself when a link begins.

    Attributes:
        member: Number of the member.
        boot: Its start.
        link: Number of the link among those that this start has opened to its peer; 0 in an answer.
        nonce: Random bytes.
        use: What the connection is after the greeting: a link, or `HTTP`.
    """

    member: int
    boot: int
    link: int
    nonce: bytes
    use: int = 0

    def pack(self) -> bytes:
        """Return the greeting as bytes."""
        return _HELLO.pack(_MAGIC, VERSION, self.use, self.member, self.boot, self.link) + self.nonce

    @classmethod
    def unpack(cls, data: bytes) -> "Hello":
        """Read a greeting of `HELLO_BYTES`.

        Raises:
            LinkError: It is no greeting, or one of another version.
        """
        magic, version, use, member, boot, link = _HELLO.unpack_from(data)
        if magic != _MAGIC:
            raise LinkError("the peer is not a member of a Forkpoint cluster")
        if version != VERSION:
            raise LinkError(f"the peer speaks version {version} of the link, and this member {VERSION}")
        return cls(member, boot, link, data[_HELLO.size :], use)


@dataclass(frozen=True, slots=True)
class LinkKeys:
    """What both ends of a link derive from the secret and the two greetings.

    Attributes:
        opener_proof: Shows that the opener has the secret.
        acceptor_proof: Shows that the other end has it.
        to_acceptor: Key of the frames that the opener sends.
        to_opener: Key of the frames that it receives.
    """

    opener_proof: bytes = field(repr=False)
    acceptor_proof: bytes = field(repr=False)
    to_acceptor: bytes = field(repr=False)
    to_opener: bytes = field(repr=False)

    @classmethod
    def derive(cls, secret: bytes, cluster: str, opener: Hello, acceptor: Hello) -> "LinkKeys":
        """Return the keys of one link; cluster is the cluster's name, so clusters with one secret stay apart."""
        # Both nonces are in the transcript, so keys and proofs of another link are of no use here.
        transcript = opener.pack() + acceptor.pack() + cluster.encode()

        def derived(purpose: bytes) -> bytes:
            return hmac.new(secret, purpose + b"\0" + transcript, sha256).digest()

        return cls(derived(b"opener proof"), derived(b"acceptor proof"), derived(b"to acceptor"), derived(b"to opener"))

    def require(self, proof: bytes, acceptor: Hello, expected: tuple[int, int]) -> None:
        """Check that the acceptor has proven the secret, and is the member and the start that the opener expects.

        Raises:
            LinkError: It has not, or it is another one.
        """
        if not hmac.compare_digest(proof, self.acceptor_proof):
            raise LinkError("the peer does not have the cluster's secret")
        if (acceptor.member, acceptor.boot) != expected:
            raise LinkError("another member answers")


class FrameWriter:
    """Encodes the frames of one direction."""

    def __init__(self, key: bytes) -> None:
        self._tags, self._number = _begin_tags(key), 0

    def write(self, kind: FrameKind, stream: int, content: bytes) -> bytes:
        """Return a frame as bytes. 1 us for 300 bytes.

        Raises:
            ValueError: The content has more than `MAX_FRAME_BYTES`.
        """
        if len(content) > MAX_FRAME_BYTES:
            raise ValueError(f"a frame of {len(content)} bytes is too large")
        head = _HEAD.pack(len(content), stream, kind)
        # The number is not sent: both ends count, so a frame that is repeated, dropped or moved has the wrong tag.
        tag = self._tags.copy()
        tag.update(self._number.to_bytes(8) + head)
        tag.update(content)
        self._number += 1
        return head + tag.digest() + content


class FrameReader:
    """Decodes the frames of one direction. It holds at most one frame that is not complete."""

    def __init__(self, key: bytes) -> None:
        self._tags, self._number, self._held = _begin_tags(key), 0, bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that are complete now.

        Raises:
            LinkError: A frame is not what the peer sent next, or too large.
        """
        at = 0
        # One packet mostly holds whole frames, so the common case copies nothing but their contents.
        held: bytes | bytearray = data
        if self._held:
            self._held += data
            held = self._held
        try:
            while len(held) - at >= _HEAD.size:
                size, stream, kind = _HEAD.unpack_from(held, at)
                # Before the content is waited for, so that no peer can make this member hold more.
                if size > MAX_FRAME_BYTES:
                    raise LinkError(f"the peer announces a frame of {size} bytes")
                start = at + _HEAD.size + _TAG_BYTES
                # The rest of the frame is on its way; `finally` keeps what has come.
                if len(held) < start + size:
                    return
                head, content = bytes(held[at : at + _HEAD.size]), bytes(held[start : start + size])
                tag = self._tags.copy()
                tag.update(self._number.to_bytes(8) + head)
                tag.update(content)
                if not hmac.compare_digest(held[at + _HEAD.size : start], tag.digest()):
                    raise LinkError("a frame was changed on its way, or is not the next one")
                self._number += 1
                at = start + size
                # After the tag: only what the peer itself has sent is interpreted.
                known = _KINDS.get(kind)
                if known is None:
                    raise LinkError(f"the peer sends frames of the unknown kind {kind}")
                yield Frame(known, stream, content)
        finally:
            # Also where a frame raised or the caller stopped: what was yielded must not be read again.
            if held is self._held:
                del self._held[:at]
            else:
                self._held += held[at:]


_KINDS = {int(kind): kind for kind in FrameKind}


def _begin_tags(key: bytes) -> blake2b:
    """Return what the tags of one direction begin with. To copy it is cheaper than to begin with the key each time."""
    return blake2b(digest_size=_TAG_BYTES, key=key)
