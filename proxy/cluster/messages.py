"""What members ask each other and answer, as bytes (pure)."""

from typing import get_args

from sandboxes.ipc.codec import IpcMessage, decode_bytes


class ConfirmQuestion(IpcMessage, op="confirm"):
    """An owner asks an ingress whether an agent still waits for a call."""

    boot: int  # The start of the ingress that has sent the call.
    number: int


class TakeQuestion(IpcMessage, op="take"):
    """A member asks another one to take a task over."""

    task: str
    view: int  # The view that it is to be taken over from; 0 for a task that had no owner.


class DrainQuestion(IpcMessage, op="drain"):
    """A member asks another one to hand over all of its tasks."""


class HandQuestion(IpcMessage, op="hand"):
    """A member asks the owner of a task to hand it over."""

    task: str
    target: int  # Number of the member that is to take it over.


class DrainAnswer(IpcMessage, op="drained"):
    """What became of a drain, or of one task that was to be handed over."""

    handed: int  # How many tasks other members have taken over.
    kept: int  # How many tasks no member has taken over.


class LoadQuestion(IpcMessage, op="load"):
    """A member asks for the load of another one."""


class LoadAnswer(IpcMessage, op="loaded"):
    """The load of a member; see `proxy.cluster.balance`."""

    is_leaving: bool  # Whether it takes no task over, because it was drained or stops.
    tasks: dict[str, int]  # The load of each task that it owns, by name.


class ElsewhereAnswer(IpcMessage, op="elsewhere"):
    """The task has another view, or another owner, than the asker knows."""

    view: int  # The view that the peer knows; 0 if it only knows that it does not own the task.


class ConfirmAnswer(IpcMessage, op="confirmed"):
    """Whether an agent still waits for the call."""

    waits: bool


Message = (
    ConfirmQuestion | TakeQuestion | DrainQuestion | HandQuestion | LoadQuestion
    | ElsewhereAnswer | ConfirmAnswer | DrainAnswer | LoadAnswer
)  # fmt: skip
_MESSAGES: tuple[type[Message], ...] = get_args(Message)


def unpack(data: bytes) -> Message:
    """Return the message that bytes hold. Raises MalformedFrameError: they hold none."""
    return decode_bytes(data, *_MESSAGES)
