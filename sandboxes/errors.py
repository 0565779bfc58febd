"""The errors that every driver may raise."""


class SandboxError(RuntimeError):
    """The sandbox or the machine failed, and not the tool. The call gets an error response and is never recorded."""


class ServerError(SandboxError):
    """A tool server failed: it crashed, was silent, or broke its protocol."""

    def __init__(self, text: str, *, silent: bool = False, status: int = 0) -> None:
        super().__init__(text)
        # `silent`: the server sent nothing for too long.
        # `status`: the status that a server elsewhere sent itself (429, or 500 and above); 0 if it sent none.
        self.silent, self.status = silent, status


class StateGoneError(SandboxError):
    """The data of a frozen state is missing or damaged, so no later attempt can restore it."""


class SpecError(ValueError):
    """The environment spec cannot be built: a base does not exist, or a set-up command fails."""


class RootLostError(SpecError):
    """A task's set-up ran again and gave another root state, whose answers would be mixed with the recorded ones."""

    def __init__(self) -> None:
        super().__init__(
            "the task's root state was lost, and its set-up, run again, gave another one than its tree was recorded "
            "on. Delete the task, or make its set-up reproducible (fixed dates, no random names)."
        )


class ForbiddenSourceError(SpecError):
    """The spec names a path, URL or variable that specs, or specs of this client, must not reach."""


class NotFreezableError(RuntimeError):
    """This state cannot be frozen, for example because processes are running. Its path is replayed instead."""


class NotFreezableNowError(NotFreezableError):
    """The machine failed while a state was frozen, for example by a full disk. The sandbox goes on."""
