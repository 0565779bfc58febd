"""Errors that every driver may raise."""


class SandboxError(RuntimeError):
    """The sandbox or the machine under it failed, not the tool: answered as an error, never recorded."""


class ServerError(SandboxError):
    """A tool server failed: it crashed, is silent, or what it says is no HTTP.

    status: of one elsewhere, what it answered itself, 429 or 500 and above; else 0.
    """

    def __init__(self, text: str, *, silent: bool = False, status: int = 0) -> None:
        super().__init__(text)
        self.silent, self.status = silent, status


class StateGoneError(SandboxError):
    """What a frozen state holds is gone or damaged: no later attempt will restore it."""


class SpecError(ValueError):
    """The environment spec cannot be built: a base that is not there, a set-up command that fails."""


class NotFreezableError(RuntimeError):
    """This state cannot be frozen now (processes live, descriptors are open): its path is replayed instead."""
