"""Messages between a driver and its egress proxy; the driver asks, and gets its answers in order."""

from sandboxes.calls import EgressExchange
from sandboxes.ipc.codec import IpcMessage, IpcRequest
from sandboxes.ipc.messages import Done


# The listening socket accompanies it: made in the sandbox's network namespace, to which it belongs for ever.
class OpenOutlet(IpcRequest[Done], op="open_outlet", descriptors=(1, 1)):
    """Serve the connections of a sandbox."""

    sandbox: str
    hosts: list[str]  # The hosts that its spec names.
    scope: str  # Names the environment whose recordings are meant.


class ExchangesTaken(IpcMessage, op="exchanges_taken"):
    """What the programs of a sandbox requested since the last time."""

    exchanges: list[EgressExchange]  # The latest requests.
    lost: int  # How many more there were before them.
    live: bool  # Whether something came in that was not recorded before.


class TakeExchanges(IpcRequest[ExchangesTaken], op="take_exchanges"):
    """Say what the programs of a sandbox requested since the last time."""

    sandbox: str


class RecountRecordings(IpcRequest[Done], op="recount_recordings"):
    """Count the recordings again: the driver has put others beside them."""


class CloseOutlet(IpcRequest[Done], op="close_outlet"):
    """End the connections of a sandbox, and accept no more of them."""

    sandbox: str
