"""Messages between members come back as they were, and foreign bytes are refused."""

import pytest

from proxy.cluster.messages import (
    ConfirmAnswer,
    ConfirmQuestion,
    DrainAnswer,
    DrainQuestion,
    ElsewhereAnswer,
    HandQuestion,
    LoadAnswer,
    LoadQuestion,
    Message,
    TakeQuestion,
    unpack,
)
from sandboxes.ipc.codec import encode
from sandboxes.ipc.frames import MalformedFrameError
from sandboxes.ipc.messages import Done


@pytest.mark.parametrize(
    "message",
    [
        ConfirmQuestion(1, 4),
        ElsewhereAnswer(0),
        ConfirmAnswer(waits=False),
        TakeQuestion("t", 3),
        DrainQuestion(),
        DrainAnswer(3, 0),
        HandQuestion("t", 2),
        LoadQuestion(),
        LoadAnswer(is_leaving=False, tasks={"t": 3}),
    ],
)
def test_message_comes_back(message: Message) -> None:
    """What is packed is unpacked."""
    assert unpack(encode(message)) == message


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"\x90", encode(ConfirmQuestion(1, 1))[:-1], encode(ConfirmQuestion(1, 1)) + b"\0", encode(Done())],
)
def test_foreign_bytes_are_refused(data: bytes) -> None:
    """What is no message raises."""
    with pytest.raises(MalformedFrameError):
        unpack(data)
