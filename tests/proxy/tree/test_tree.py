"""The tree against a model that is simple enough to trust: a walk over a dictionary of states."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.tree.keys import CallKey
from proxy.tree.tree import Node, Record, Tree, children, doubtful, path
from sandboxes.calls import Execution, ToolCall, ToolResult
from sandboxes.effects import Effect, StateDigest
from sandboxes.spec import EnvironmentSpec

WORDS = ("read", "set 0", "set 1", "set 2", "bump", "process")
trajectories = st.lists(st.lists(st.sampled_from(WORDS), max_size=8), max_size=6)


def digest(state: tuple[int, ...]) -> StateDigest | None:
    """Return the digest of a state: the value set, how often it was bumped, and whether a process runs (no digest)."""
    if state[2]:
        return None
    name = repr(state).encode().ljust(32)
    return StateDigest(name, name)


def run(state: tuple[int, ...], command: str) -> tuple[int, ...]:
    value, bumps, live = state
    match command.split():
        case ["set", to]:
            return int(to), bumps, live
        case ["bump"]:
            return value, bumps + 1, live
        case ["process"]:
            return value, bumps, live + 1
    return state


class Grower:
    """Grows a tree as `Stepper` does, and remembers the true state of each node."""

    def __init__(self, merge: str = "on") -> None:
        root = Node(1, state=digest((0, 0, 0)))
        self.tree = Tree(1, root, EnvironmentSpec(merge=merge))  # type: ignore[arg-type]
        self.truth: dict[Node, tuple[int, ...]] = {root: (0, 0, 0)}
        self.ids = iter(range(2, 10_000))

    def walk(self, trajectory: list[str], private: int | None = None) -> Node:
        here = self.tree.root
        for turn, command in enumerate(trajectory):
            key = CallKey(command.encode() if private is None else f"{command}/{private}/{turn}".encode())
            record = here.records.get(key) or self.record(here, key, command, private=private is not None)
            here = record.target
            assert self.truth[here] == self.truth[record.source] or record.effect
        return here

    def record(self, here: Node, key: CallKey, command: str, *, private: bool) -> Record:
        state = run(self.truth[here], command)
        effect = Effect.NONE if state == self.truth[here] else Effect.FILES
        destination = self.tree.destination(here, effect, digest(state), private=private)
        target = destination.known
        if target is None:
            target = Node(next(self.ids), state=destination.state)
            self.tree.add_node(target, private=private)
            self.truth[target] = state
        assert self.truth[target] == state
        record = Record(next(self.ids), key, here, target, effect, 1.0, 0.0, private=private)
        self.tree.add_record(record)
        self.tree.check()
        return record


@given(trajectories)
def test_every_trajectory_ends_at_its_own_state(rollouts: list[list[str]]) -> None:
    grower = Grower()
    for trajectory in rollouts:
        state: tuple[int, ...] = (0, 0, 0)
        for command in trajectory:
            state = run(state, command)
        assert grower.truth[grower.walk(trajectory)] == state


@given(trajectories)
def test_each_digest_is_one_node(rollouts: list[list[str]]) -> None:
    grower = Grower()
    for trajectory in rollouts:
        grower.walk(trajectory)
    states = [grower.truth[node] for node in grower.tree.nodes.values() if node.state is not None]
    assert len(states) == len(set(states))


@given(trajectories)
def test_without_merging_nodes_are_prefixes(rollouts: list[list[str]]) -> None:
    grower = Grower("off")
    prefixes: set[tuple[str, ...]] = {()}
    for trajectory in rollouts:
        grower.walk(trajectory)
        state: tuple[int, ...] = (0, 0, 0)
        prefix: tuple[str, ...] = ()
        for command in trajectory:
            if run(state, command) != state:
                prefix = (*prefix, command)
                prefixes.add(prefix)
            state = run(state, command)
    assert len(grower.tree.nodes) == len(prefixes)


@given(trajectories)
def test_observations_make_no_nodes(rollouts: list[list[str]]) -> None:
    grower = Grower()
    for trajectory in rollouts:
        end = grower.walk(trajectory)
        assert not any(step.observation for step in path(end))


@given(trajectories, st.integers(0, 5))
def test_private_nodes_are_never_merged_into(rollouts: list[list[str]], seed: int) -> None:
    grower = Grower()
    private: set[Node] = set()
    for number, trajectory in enumerate(rollouts):
        before = set(grower.tree.nodes.values())
        if number % 2 == seed % 2:
            grower.walk(trajectory, private=number)
            private |= set(grower.tree.nodes.values()) - before
        else:
            end = grower.walk(trajectory)
            assert end not in private
            assert not private & {step.source for step in path(end)}


@given(trajectories, st.data())
def test_forgetting_removes_only_descendants(rollouts: list[list[str]], data: st.DataObject) -> None:
    grower = Grower()
    for trajectory in rollouts:
        grower.walk(trajectory)
    others = [node for node in grower.tree.nodes.values() if node is not grower.tree.root]
    if not others:
        return
    lost = data.draw(st.sampled_from(sorted(others, key=lambda n: n.id)))
    before = set(grower.tree.nodes.values())
    gone, records = grower.tree.forget(lost)
    grower.tree.check()
    assert lost in gone
    assert set(grower.tree.nodes.values()) == before - set(gone)
    assert all(record.target in gone or record.source in gone for record in records)
    for trajectory in rollouts:
        grower.walk(trajectory)


@given(trajectories, st.data())
def test_no_walk_enters_nodes_set_aside(rollouts: list[list[str]], data: st.DataObject) -> None:
    grower = Grower()
    for trajectory in rollouts:
        grower.walk(trajectory)
    origins = sorted((n.origin for n in grower.tree.nodes.values() if n.origin is not None), key=lambda r: r.id)
    if not origins:
        return
    lost = grower.tree.set_aside(data.draw(st.sampled_from(origins)), "a test")
    grower.tree.check()
    for trajectory in rollouts:
        assert not grower.walk(trajectory).diverged
    assert all(node.id in grower.tree.nodes and node.diverged for node in lost)


def test_walks_yield_parents_first_within_the_depth() -> None:
    grower = Grower()
    grower.walk(["bump", "bump", "bump"])
    assert [below for _, below in grower.tree.walk()] == [0, 1, 2, 3]
    assert [below for _, below in grower.tree.walk(depth=1)] == [0, 1]
    assert children(grower.tree.root)[0].origin is not None


def is_doubtful(body: bytes, effect: Effect = Effect.PROCESSES, **more: Any) -> bool:
    call = ToolCall("api", "POST /x", {"method": "POST", "target": "/x", "headers": []})
    return doubtful(call, Execution(ToolResult(200, "text/plain", body), effect, 0.1, **more))


def test_unrepeatable_answers_are_doubtful() -> None:
    for body in (b'{"id": 0.123456}', b"at 12:30:59", b"pid 1234567890", b"a1b2c3d4e5f6", b"2026-11-21T10:00:00Z"):
        assert is_doubtful(body)
    for body in (b'{"value": 42}', b"done", b"", b"0.5 of 100", b"line 12345"):
        assert not is_doubtful(body)


@pytest.mark.parametrize("arguments", [{"target": "/x"}, {"server": "memory", "method": "tools/call", "params": {}}])
def test_server_calls_are_doubtful_beside_restless_processes(arguments: Any) -> None:
    call, result = ToolCall("api", "x", arguments), ToolResult(200, "text/plain", b"ok")
    for restless in (False, True):
        assert doubtful(call, Execution(result, Effect.PROCESSES, 0.1, witness=b"w", restless=restless)) is restless


def test_changes_without_a_digest_are_doubtful() -> None:
    assert is_doubtful(b"", Effect.PROCESSES | Effect.FILES)
    assert not is_doubtful(b"0.123456", Effect.NONE)
    assert not is_doubtful(b"0.123456", Effect.FILES, state=StateDigest(b"e" * 32, b"c" * 32))
    for effect in (Effect.DATABASE, Effect.NONE):
        state = StateDigest(b"e" * 32, b"c" * 32)
        assert is_doubtful(b"", effect, state=state, volatile=True) == bool(effect)
    command = ToolCall("shell", "exec", {"command": "x &"})
    assert doubtful(command, Execution(ToolResult(200, "text/plain", b""), Effect.PROCESSES, 0.1))


@pytest.mark.parametrize(("members", "merges"), [({}, True), ({"harness": {}}, False), ({"merge": "off"}, False)])
def test_equal_states_of_harnesses_stay_apart(members: dict[str, Any], merges: bool) -> None:
    """A rollout is entered again at a turn of its own path, which the state alone does not tell."""
    root = Node(1, state=digest((0, 0, 0)))
    tree = Tree(1, root, EnvironmentSpec.model_validate(members))
    node = Node(2, state=digest((1, 0, 0)))
    tree.add_node(node)
    destination = tree.destination(root, Effect.FILES, digest((1, 0, 0)))
    assert (destination.known is node) is merges
