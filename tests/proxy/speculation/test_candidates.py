"""Candidates are the likely calls that the tree does not know, where rollouts would make them."""

from proxy.speculation.candidates import Candidate, ranked, walk
from proxy.tree.keys import CallKey
from proxy.tree.next_calls import CallKind, History, LikelyCall, PastCall
from proxy.tree.tree import Node, Record, Tree
from sandboxes.effects import Effect
from sandboxes.spec import EnvironmentSpec

A, B, C = CallKey(b"a"), CallKey(b"b"), CallKey(b"c")


def past(record: Record) -> PastCall:
    return PastCall(record.key, CallKind(record.key.decode(), not record.observation), record.seconds)


def recorded(key: CallKey, source: Node, target: Node) -> None:
    effect = Effect.NONE if source is target else Effect.FILES
    source.records[key] = Record(1, key, source, target, effect, 1.0, 0.0)


def found(node: Node, likely: dict[tuple[CallKey, ...], list[LikelyCall]]) -> dict[tuple[int, CallKey], float]:
    def after(history: History) -> list[LikelyCall]:
        return likely.get(tuple(call.key for call in history), [])

    tree = Tree(1, node, EnvironmentSpec())
    return {candidate.place: candidate.chance for candidate in walk(tree, node, (), after, past)}


def test_an_unknown_likely_call_is_a_candidate() -> None:
    assert found(Node(1), {(): [LikelyCall(A, 0.5, 1.0), LikelyCall(B, 0.01, 1.0)]}) == {(1, A): 0.5}


def test_known_calls_lead_on() -> None:
    root, changed = Node(1), Node(2)
    recorded(A, root, changed)
    recorded(B, changed, changed)
    likely = {
        (): [LikelyCall(A, 0.8, 1.0)],
        (A,): [LikelyCall(B, 0.5, 1.0)],
        (A, B): [LikelyCall(C, 0.9, 1.0)],
    }
    assert found(root, likely) == {(2, C): 0.8 * 0.5 * 0.9}


def test_a_known_call_to_a_lost_state_ends_there() -> None:
    root, lost = Node(1), Node(2, diverged="gone")
    recorded(A, root, lost)
    assert found(root, {(): [LikelyCall(A, 0.8, 1.0)], (A,): [LikelyCall(B, 0.9, 1.0)]}) == {}


def test_a_loop_of_known_calls_ends() -> None:
    root = Node(1)
    recorded(A, root, root)
    loop = {(A,) * times: [LikelyCall(A, 1.0, 1.0)] for times in range(9)}
    assert found(root, loop) == {}


def test_calls_are_ranked_by_the_seconds_they_save() -> None:
    node, other = Node(1), Node(2)
    tree = Tree(1, node, EnvironmentSpec())
    order = ranked(
        [
            Candidate(tree, node, A, 0.5, 1.0),
            Candidate(tree, other, A, 0.4, 2.0),
            Candidate(tree, node, A, 0.5, 1.0),
            Candidate(tree, node, B, 1.0, 0.01),
        ]
    )
    assert [(candidate.place, candidate.chance) for candidate in order] == [((2, A), 0.4), ((1, A), 0.75)]
