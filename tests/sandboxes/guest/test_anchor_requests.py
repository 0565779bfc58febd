"""The anchor answers each request or ends by itself, whatever the request says."""

import os
import re
import select
import struct
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandboxes.guest.bash import session as session_texts
from tests.sandboxes.guest import forking_anchor

PATIENCE_S = 20.0
MAX_BYTES, MAX_TEXTS = 1 << 28, 1 << 20
UNKNOWN = b"w0\0"
"""A request for the exit code of a process that nobody has started."""
# Whatever bash is started with, it ends at once and changes nothing: it gets no other words than these.
PARTS = [
    b"\0",
    b"<",
    b">",
    b"a",
    b"e",
    b"w",
    b"c",
    b"d",
    b"u",
    b"t",
    b" ",
    b"00",
    b"01",
    b"09",
    b"63",
    b"/dev/null",
    b"/nowhere",
]
PARTS += [b"-c", b"exit 3", b":", b"PATH", b"=", b"\xff", b"1", b"99999999999"]
SHELL = b"abash\0a--noprofile\0a--norc\0a-c\0a%b\0abash\0" % session_texts.START.encode()
"""The arguments of a session's shell. It has no text to run."""
NO_USERS = [
    b"",
    b" ",
    b"1",
    b"1 ",
    b"x",
    b"1 x",
    b"1 2x",
    b"1 2 ",
    b"1  2",
    b" 1 2",
    b"1 2 3 x",
    b"-1 2",
    b"1 -2",
    b"1\t2",
]
NO_USERS += [b"%d 2" % (2**32 - 1), b"1 %d" % (2**32 - 1), b"1 2 %d" % (2**32 - 1), b"%d 2" % 2**32, b"%d 2" % 2**64]
NO_USERS += [b"1 2" + 1025 * b" 3"]
"""What is no user: no number, a number too few, the one that means "no change", and a group too many."""
BODIES = st.lists(st.sampled_from(PARTS), min_size=1, max_size=40).map(b"".join)
SENSIBLE = st.tuples(
    st.sampled_from(
        [b"", b"<0000/dev/null\0", b"<0000/dev/null\0>0001/dev/null\0>0002/dev/null\0", b"<1063/nowhere\0"]
    ),
    st.sampled_from([b"", b"", b"u1 2\0", b"u1 2" + 1024 * b" 3" + b"\0", *(b"u%b\0" % text for text in NO_USERS)]),
    st.sampled_from([SHELL, b"abash\0", b"abash\0a-c\0aexit 3\0", b"abash\0a-c\0a:\0" + 500 * b"ax\0"]),
    st.sampled_from([b"", b"ePATH=/bin\0", b"eLD_BIND_NOW=\0", 500 * b"ex=\0"]),
).map(b"".join)
COUNTS = st.one_of(st.integers(1, 9), st.sampled_from([1000, MAX_TEXTS]))
ORDERS = st.lists(st.tuples(st.one_of(BODIES, SENSIBLE), st.one_of(st.none(), COUNTS)), max_size=6)
"""Bodies, each with the number of texts that it claims to have; None for the number that it has."""
ENDS = st.sampled_from(
    [
        (0, 1), (1, 0), (MAX_BYTES + 1, 1), (1, MAX_TEXTS + 1), (2**32 - 1, 2**32 - 1),
        (MAX_BYTES, MAX_TEXTS), (4, 1), None,
    ]
)  # fmt: skip
"""The head of a last request, which is refused or never comes whole; None for no such request."""


def line_of(replies: int) -> bytes:
    """Return the next answer; empty if the anchor has closed its end."""
    line = b""
    while not line.endswith(b"\n"):
        assert select.select([replies], [], [], PATIENCE_S)[0], f"no answer after {line!r}"
        part = os.read(replies, 1)
        if not part:
            return line
        line += part
    return line


@pytest.mark.parametrize("text", NO_USERS, ids=[text[:10].decode() for text in NO_USERS])
def test_with_a_malformed_user_nothing_starts(shell_folder: Path, text: bytes) -> None:
    """It would be root's process."""
    anchor = forking_anchor.start(shell_folder)
    for user, answers in ((text, rb"0\n"), (b"1 2", rb"[1-9][0-9]*\n")):
        body = b"u%b\0abash\0a-c\0a:\0" % user
        anchor.send(struct.pack("=II", len(body), 4) + body)
        assert re.fullmatch(answers, line_of(anchor.ends[1]))
    anchor.close()


@settings(max_examples=150)
@given(orders=ORDERS, end=ENDS)
def test_each_request_is_answered_or_ends_the_anchor(
    shell_folder: Path, orders: list[tuple[bytes, int | None]], end: tuple[int, int] | None
) -> None:
    with tempfile.TemporaryDirectory() as empty:
        # A bash that takes a word for the name of a script finds none.
        anchor = forking_anchor.start(shell_folder, empty)
        requests, replies = anchor.ends
        try:
            for body, claimed in [*orders, (UNKNOWN, None)]:
                count = max(1, body.count(b"\0")) if claimed is None else claimed
                os.write(requests, struct.pack("=II", len(body), count) + body)
                answer = line_of(replies)
                assert re.fullmatch(rb"[0-9]{1,10}\n", answer), (body, claimed, answer)
            assert answer == b"256\n"
            if end is not None:
                os.write(requests, struct.pack("=II", *end) + b"w")
            else:
                os.write(requests, b"\1\0\0")
            # The pipe ends in the middle of a request, if the head was not refused before.
            null = os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(null, requests, inheritable=False)
            os.close(null)
            assert line_of(replies) == b""
            ended = os.waitid(os.P_PID, anchor.pid, os.WEXITED | os.WNOWAIT)
            assert ended is not None
            assert (ended.si_code, ended.si_status) == (os.CLD_EXITED, 1)
        finally:
            anchor.close()
