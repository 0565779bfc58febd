"""Why a compose file cannot be a sandbox."""

from enum import Enum


class Reason(str, Enum):
    """The reasons for which a compose file is refused. Each message names the service and the member."""

    MALFORMED = "malformed"
    """It is no compose file, or it uses parts that are elsewhere (`include`, `extends`)."""
    NO_IMAGE = "no image"
    """Nothing names a service's image, or the image cannot be built here."""
    COMMAND = "command"
    """The main service's command does more than keep it running, or a service has to end before another one starts."""
    HOST_FILES = "files of the host"
    """A service mounts files of the client's machine that cannot be copied."""
    RIGHTS = "rights"
    """A service needs rights over the host, its processes or its network."""
    DEVICES = "devices"
    """A service needs a device, such as a GPU."""
    NETWORK = "network"
    """Services are kept from each other, or share the network of a container outside."""
    VALUE = "value"
    """A member that matters has a variable without a value, or a value that a sandbox cannot have."""
    UNKNOWN = "unknown member"
    """A member whose meaning is not known here."""


class ComposeFileError(ValueError):
    """A compose file says something that a sandbox cannot be; the message says what helps."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
