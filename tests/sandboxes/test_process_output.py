"""A process's output as frames: written, read in pieces, compared, truncated."""

import contextlib
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from sandboxes.process_output import (
    END,
    OUT,
    Frames,
    Incoming,
    KeptOutput,
    OutputError,
    by_stream,
    ending,
    frame,
    frames,
    output,
)

CONTENT = st.binary(max_size=40)
PIECES = st.lists(st.tuples(st.sampled_from([1, 2]), CONTENT.filter(bool)), max_size=8)


@given(PIECES, st.integers(1, 7))
def test_frames_round_trip_in_any_pieces(pieces: list[tuple[int, bytes]], size: int) -> None:
    """Output is read back from frames, whole or in pieces of any size; neighbours of one stream are one frame."""
    kept = Frames()
    for kind, data in pieces:
        kept.add(kind, data)
    body = kept.end(3)
    for kind in (1, 2):
        assert output(body, kind) == b"".join(data for piece_kind, data in pieces if piece_kind == kind)
    kinds = [kind for kind, _ in frames(body)]
    assert all(first != second for first, second in pairwise(kinds))
    assert (kinds[-1], ending(body).exit_code, ending(body).truncated) == (END, 3, False)
    sent = b"".join(frame(kind, data) for kind, data in pieces)
    incoming = Incoming()
    received = [piece for start in range(0, len(sent), size) for piece in incoming.feed(sent[start : start + size])]
    assert received == pieces


@given(PIECES)
def test_order_between_streams_is_ignored(pieces: list[tuple[int, bytes]]) -> None:
    """How stdout and stderr are interleaved depends on timing, so results are compared by stream."""
    mixed, ordered = Frames(), Frames()
    for kind, data in pieces:
        mixed.add(kind, data)
    for kind, data in sorted(pieces, key=lambda piece: piece[0]):
        ordered.add(kind, data)
    assert by_stream(mixed.end(0)) == by_stream(ordered.end(0))


def test_truncated_output_is_marked() -> None:
    """Output beyond the limit is dropped, and the result says so."""
    kept = Frames(max_bytes=4)
    kept.add(1, b"abc")
    kept.add(2, b"def")
    body = kept.end(0)
    assert (output(body, 1), output(body, 2), ending(body).truncated, kept.whole) == (b"abc", b"d", True, False)


@given(st.binary(max_size=60) | st.builds(lambda data, cut: frame(OUT, data)[:cut], CONTENT, st.integers(0, 40)))
def test_any_bytes_are_output_or_an_error(body: bytes) -> None:
    """Cut frames and foreign bytes are errors of ours, and nothing of a frame is left out without a word."""
    for read in (lambda: output(body, OUT), lambda: ending(body), lambda: by_stream(body), lambda: list(frames(body))):
        try:
            read()
        except OutputError:
            continue


@given(st.binary(max_size=40))
def test_any_ending_is_read_or_an_error(data: bytes) -> None:
    for text in (data, b"[" * 100_000, b"{}", b'"x"', b"null"):
        with contextlib.suppress(OutputError):
            ending(frame(END, text))


TEXTS = st.lists(st.sampled_from(["a", "\0", "é", "€", "𝄞", "\U0010ffff"]), max_size=12).map(
    lambda words: "".join(words).encode()
)
BYTES = st.lists(
    st.sampled_from([b"a", b"\x80", b"\xc3", b"\xe2\x82", b"\xed\xa0", b"\xf0\x9d\x84", b"\xff"]), max_size=12
)


def kept_of(data: bytes, max_bytes: int, size: int) -> KeptOutput:
    """Return what is kept of data that comes in pieces of a size."""
    kept = KeptOutput()
    for start in range(0, len(data), size):
        kept.add(data[start : start + size], max_bytes)
    return kept


@given(st.one_of(TEXTS, BYTES.map(b"".join)), st.integers(0, 40), st.integers(1, 9))
def test_pieces_do_not_matter_to_what_is_kept(data: bytes, max_bytes: int, size: int) -> None:
    """The same bytes are kept, and the same number is told of the others."""
    kept, at_once = kept_of(data, max_bytes, size), kept_of(data, max_bytes, 99)
    assert data.startswith(kept.data)
    assert kept.dropped == len(data) - len(kept.data)
    assert (kept.end, kept.take()) == (at_once.end, at_once.take())


@given(TEXTS, st.integers(0, 40))
def test_a_cut_leaves_whole_characters(data: bytes, max_bytes: int) -> None:
    """It is the longest beginning within the limit that is text."""
    kept = kept_of(data, max_bytes, 5)
    longest = max(end for end in range(min(max_bytes, len(data)) + 1) if _is_text(data[:end]))
    assert bytes(kept.data) == data[:longest]


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@given(BYTES.map(b"".join), st.integers(0, 40))
def test_a_cut_of_what_is_no_text_lacks_three_bytes_at_most(data: bytes, max_bytes: int) -> None:
    kept = kept_of(data, max_bytes, 5)
    assert min(max_bytes, len(data)) - 3 <= len(kept.data) <= max_bytes
    assert kept.dropped or bytes(kept.data) == data


@given(st.one_of(TEXTS, BYTES.map(b"".join)), st.integers(0, 40), st.integers(1, 9))
def test_both_ends_of_an_output_are_kept(data: bytes, max_bytes: int, size: int) -> None:
    """In whichever pieces it comes, and each end in whole characters; the line between them tells the rest."""
    kept = KeptOutput()
    for start in range(0, len(data), size):
        kept.add(data[start : start + size], max_bytes, max_bytes // 2)
    head = bytes(kept.data)
    taken = kept.take()
    if len(data) <= max_bytes:
        assert taken == data
        return
    tail = taken.removeprefix(head).partition(b" more bytes left out]\n")[2]
    assert taken == head + b"\n[forkpoint: %d more bytes left out]\n" % (len(data) - len(head) - len(tail)) + tail
    assert (data.startswith(head), data.endswith(tail)) == (True, True)
    assert max_bytes - 6 <= len(head) + len(tail) <= max_bytes
    if _is_text(data):
        assert _is_text(taken)


def test_an_output_that_fits_is_kept_as_it_is() -> None:
    """Also if it ends within a character: the process has written it so."""
    kept = kept_of(b"a\xe2\x82", 3, 1)
    assert kept.take() == b"a\xe2\x82"
    kept.add(b"next", 3)
    assert kept.take() == b"nex\n[forkpoint: 1 more bytes left out]\n"


def test_the_end_of_a_cut_output_is_known() -> None:
    """It may have a mark of ours."""
    kept = kept_of(b"x" * 5000 + b"the mark", 4998, 3)
    assert kept.end.endswith(b"xxthe mark")
    assert len(kept.end) == 1024
