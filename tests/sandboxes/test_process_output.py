"""A process's output as frames: written, read in pieces, compared, truncated."""

import contextlib
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from sandboxes.process_output import END, OUT, Frames, Incoming, OutputError, by_stream, ending, frame, frames, output

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
