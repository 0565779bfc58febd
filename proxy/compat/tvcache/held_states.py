"""Client-held states: which sandbox of a client stands at which node, for other rollouts of the client to fork.

Sandboxes belong to the client: an eviction is a name in a response, and the client that gets it stops the sandbox.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from proxy.tree.tree import Node

MAX_HELD = 50
"""Most sandboxes of one task, as in the authors' server. With fewer, rollouts fork earlier states and repeat more
calls."""
LEASE_S = 600.0
"""How long a client may take to fork a sandbox that it was named. A client that dies never gives its lease back. If a
fork takes longer, its parent may be stopped, and its rollout fails."""


@dataclass(slots=True)
class _HeldSandbox:
    """One sandbox, and the times at which its leases end."""

    sandbox: str
    leases: list[float] = field(default_factory=list)


class HeldStates:
    """The sandboxes of one tree by the number of their node, the least recently used first; its clock is monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._held: OrderedDict[int, _HeldSandbox] = OrderedDict()

    def at(self, node: Node) -> str | None:
        """Return the sandbox at a node; None if there is none."""
        held = self._held.get(node.id)
        return None if held is None or node.detached or node.diverged else held.sandbox

    def lease(self, node: Node) -> str | None:
        """Return the sandbox at a node; None if there is none. It is not evicted until `release`, or for `LEASE_S`."""
        sandbox = self.at(node)
        if sandbox is not None:
            self._held[node.id].leases.append(self._clock() + LEASE_S)
            self._held.move_to_end(node.id)
        return sandbox

    def lease_all(self) -> list[str]:
        """Return all sandboxes, each with a lease."""
        for held in self._held.values():
            held.leases.append(self._clock() + LEASE_S)
        return [held.sandbox for held in self._held.values()]

    def release(self, sandbox: str) -> None:
        """End one lease of a sandbox, the oldest. Unknown names change nothing."""
        for held in self._held.values():
            if held.sandbox == sandbox and held.leases:
                held.leases.pop(0)

    def put(self, node: Node, sandbox: str) -> list[str]:
        """Keep a sandbox at a node; return the sandboxes that the client may stop, which may be this one."""
        if self.at(node) is not None or node.detached:
            return [] if self.at(node) == sandbox else [sandbox]
        self._held[node.id] = _HeldSandbox(sandbox)
        now, stopped = self._clock(), list[str]()
        for number, held in list(self._held.items()):
            if len(self._held) <= MAX_HELD:
                break
            held.leases = [end for end in held.leases if end > now]
            if not held.leases:
                stopped.append(self._held.pop(number).sandbox)
        return stopped

    def drop(self, nodes: Iterable[Node]) -> list[str]:
        """Forget the sandboxes at nodes; return them. The client may stop them."""
        dropped = (self._held.pop(node.id, None) for node in nodes)
        return [held.sandbox for held in dropped if held is not None]
