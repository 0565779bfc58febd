"""The bytes of a link: they come in any pieces, and nobody without the secret can add or change one."""

import contextlib
from itertools import starmap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.cluster.link import frames
from proxy.cluster.link.frames import Frame, FrameKind, FrameReader, FrameWriter, Hello, LinkError, LinkKeys

KEY = b"k" * 32
FRAMES = st.lists(
    st.builds(Frame, st.sampled_from(FrameKind), st.integers(0, 2**32 - 1), st.binary(max_size=40)), max_size=6
)


@given(FRAMES, st.lists(st.integers(1, 30)))
def test_frames_come_in_any_pieces(sent: list[Frame], sizes: list[int]) -> None:
    """TCP keeps the order of bytes and not their pieces."""
    writer, reader = FrameWriter(KEY), FrameReader(KEY)
    data = b"".join(starmap(writer.write, sent))
    received: list[Frame] = []
    for size in sizes:
        received += reader.feed(data[:size])
        data = data[size:]
    assert received + list(reader.feed(data)) == sent


@given(FRAMES.filter(bool), st.data())
def test_a_changed_byte_ends_the_link(sent: list[Frame], data: st.DataObject) -> None:
    """No frame from the changed one on is taken."""
    writer = FrameWriter(KEY)
    whole = list(starmap(writer.write, sent))
    number = data.draw(st.integers(0, len(whole) - 1))
    bad = bytearray(whole[number])
    # The length may become one that is waited for, so it is not changed here.
    at = data.draw(st.integers(4, len(bad) - 1))
    bad[at] ^= data.draw(st.integers(1, 255))
    whole[number] = bytes(bad)
    received: list[Frame] = []
    with pytest.raises(LinkError):
        received.extend(FrameReader(KEY).feed(b"".join(whole)))
    assert received == sent[:number]


@pytest.mark.parametrize("order", [(1, 0), (0, 0), (1,)])
def test_frames_cannot_be_moved(order: tuple[int, ...]) -> None:
    """A repeated, dropped or earlier frame has a tag, and it is that of another number."""
    writer = FrameWriter(KEY)
    sent = [writer.write(FrameKind.ASK, stream, b"x") for stream in range(2)]
    with pytest.raises(LinkError, match="not the next one"):
        list(FrameReader(KEY).feed(b"".join(sent[index] for index in order)))


def test_a_huge_frame_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its length alone ends the link."""
    data = FrameWriter(KEY).write(FrameKind.ASK, 1, b"x" * 100)
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 99)
    with pytest.raises(LinkError, match="a frame of 100 bytes"):
        list(FrameReader(KEY).feed(data[:9]))


@given(st.binary(max_size=400))
def test_foreign_bytes_are_refused(data: bytes) -> None:
    """Whatever comes, the only error is the one that closes the link."""
    reader = FrameReader(KEY)
    with contextlib.suppress(LinkError):
        assert not list(reader.feed(data))
    if len(data) >= frames.HELLO_BYTES:
        with pytest.raises(LinkError):
            Hello.unpack(data[: frames.HELLO_BYTES])


def test_each_link_has_its_own_keys() -> None:
    """They depend on the secret, the cluster, both greetings and the direction."""
    opener, acceptor = Hello(1, 2, 3, b"o" * 32), Hello(4, 5, 0, b"a" * 32)
    base = LinkKeys.derive(b"secret", "cluster", opener, acceptor)
    others = [
        LinkKeys.derive(b"other", "cluster", opener, acceptor),
        LinkKeys.derive(b"secret", "second", opener, acceptor),
        LinkKeys.derive(b"secret", "cluster", opener._replace(nonce=b"x" * 32), acceptor),
        LinkKeys.derive(b"secret", "cluster", opener, acceptor._replace(nonce=b"x" * 32)),
    ]
    values = [
        value
        for keys in (base, *others)
        for value in (keys.opener_proof, keys.acceptor_proof, keys.to_acceptor, keys.to_opener)
    ]
    assert len(set(values)) == len(values)
    assert Hello.unpack(opener.pack()) == opener
    assert "secret" not in repr(base)
