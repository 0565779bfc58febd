"""A client's sandboxes are offered, leased, evicted and forgotten without leaving one behind."""

from proxy.compat.tvcache.held_states import LEASE_S, MAX_HELD, HeldStates
from proxy.tree.tree import Node


def test_first_sandbox_of_a_node_stays() -> None:
    """A second one is given back to its client."""
    held, node = HeldStates(), Node(1)
    assert held.put(node, "a") == []
    assert held.put(node, "b") == ["b"]
    assert held.at(node) == "a"


def test_leased_sandboxes_are_not_evicted() -> None:
    """The least recently used one without a lease goes; a lease that nobody returned ends by itself."""
    now = [0.0]
    held = HeldStates(lambda: now[0])
    nodes = [Node(number) for number in range(1, MAX_HELD + 4)]
    for node in nodes[:MAX_HELD]:
        held.put(node, f"env{node.id}")
    held.lease(nodes[1])
    held.lease(nodes[0])
    assert held.put(nodes[MAX_HELD], "new") == ["env3"]
    held.release("env2")
    # The lease moved it behind the others, so it is not the next.
    assert held.put(nodes[MAX_HELD + 1], "newer") == ["env4"]
    now[0] = LEASE_S + 1
    for node in nodes[4 : MAX_HELD + 2]:
        held.lease(node)
    assert held.put(nodes[MAX_HELD + 2], "newest") == ["env2"]


def test_forgotten_nodes_offer_nothing() -> None:
    """A sandbox at a node that was forgotten or cannot be rebuilt is in no answer."""
    held, node = HeldStates(), Node(1)
    held.put(node, "a")
    node.diverged = "differs"
    assert (held.at(node), held.lease(node)) == (None, None)
    assert held.drop([node, Node(2)]) == ["a"]
    node.detached = True
    assert held.put(node, "b") == ["b"]


def test_unknown_names_release_nothing() -> None:
    """The library may return a lease twice."""
    held = HeldStates()
    held.release("nobody")
    assert held.lease_all() == []


def test_lease_keeps_a_sandbox_until_it_ends() -> None:
    """While all have leases, the new sandbox itself is given back; afterwards the oldest one goes."""
    now = [0.0]
    held = HeldStates(lambda: now[0])
    for number in range(1, MAX_HELD + 1):
        held.put(Node(number), f"env{number}")
    held.lease_all()
    assert held.put(Node(MAX_HELD + 1), "new") == ["new"]
    now[0] = LEASE_S + 1
    assert held.put(Node(MAX_HELD + 2), "newer") == ["env1"]
