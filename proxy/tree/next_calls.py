"""Next calls: which calls a rollout is likely to make next, from what rollouts of its tenant have made (pure).

Theory of operation:

1. Each task has statistics: after which *context* which call came how often. A step is noted under four contexts, from
   the most general to the most specific: none, the kind of the call before (`CallKind`: `pytest` follows an edit,
   whatever was edited), the call before, and the two calls before.
2. `likely` mixes the contexts. A context's own counts weigh the more, the more often it was seen and the fewer
   different calls followed it; the rest of the weight goes to the next more general one (Witten and Bell 1991, method
   C). In each context the rollout's own task stands above the other tasks of its namespace.
3. Statistics belong to one task and are dropped with it. A namespace is never looked at for another one.

What is bounded: contexts of a task, calls of a context, tasks of a namespace that are looked at, calls in all.
"""

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from proxy.tree.keys import CallKey

_MAX_CONTEXTS = 4096
"""Contexts that a task keeps, the latest ones: some thousand calls. Each takes about 1 kB."""
_MAX_FOLLOWING = 32
"""Calls that a context keeps; the least frequent one makes room. More would hardly be likely enough to be run."""
_MAX_OTHER_TASKS = 32
"""Tasks of a namespace that are looked at beside a rollout's own, the latest ones."""
_MAX_TASKS = 4096
"""Tasks with statistics; the one used longest ago makes room."""


@dataclass(frozen=True, slots=True)
class CallKind:
    """What a call has in common with similar ones."""

    name: str  # Endpoint, tool and, for a shell command, its program.
    changed: bool  # Whether the call changed something.


@dataclass(frozen=True, slots=True)
class PastCall:
    """A call that a rollout has made, and how long its tool ran."""

    key: CallKey
    kind: CallKind
    seconds: float


@dataclass(frozen=True, slots=True)
class LikelyCall:
    """A call that a rollout may make next."""

    key: CallKey
    chance: float  # How likely it is, from 0 to 1.
    seconds: float  # How long its tool ran on average.


@dataclass(slots=True)
class _Pace:
    """How often a call was made, and how many seconds its tool ran in all."""

    times: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class _Statistics:
    """The statistics of one task: which calls followed which context, and how long calls took."""

    following: OrderedDict[Hashable, Counter[CallKey]] = field(default_factory=OrderedDict)
    paces: OrderedDict[CallKey, _Pace] = field(default_factory=OrderedDict)

    def note(self, contexts: Iterable[Hashable], call: PastCall) -> None:
        for context in contexts:
            counts = self.following.setdefault(context, Counter())
            self.following.move_to_end(context)
            if call.key not in counts and len(counts) >= _MAX_FOLLOWING:
                del counts[min(counts, key=counts.__getitem__)]
            counts[call.key] += 1
        pace = self.paces.setdefault(call.key, _Pace())
        self.paces.move_to_end(call.key)
        pace.times += 1
        pace.seconds += call.seconds
        while len(self.following) > _MAX_CONTEXTS:
            self.following.popitem(last=False)
        while len(self.paces) > _MAX_CONTEXTS:
            self.paces.popitem(last=False)


History = tuple[PastCall, ...]
"""The last calls of a rollout, the oldest first. Only the last two count."""


class NextCalls:
    """The statistics of all tasks, by namespace."""

    def __init__(self) -> None:
        self._tasks: OrderedDict[tuple[str, str], _Statistics] = OrderedDict()

    def note(self, namespace: str, task: str, history: History, call: PastCall) -> None:
        """Note that a rollout made a call after its history.

        Other namespaces than the task's never learn of the call.
        """
        statistics = self._tasks.setdefault((namespace, task), _Statistics())
        self._tasks.move_to_end((namespace, task))
        statistics.note(_contexts(history), call)
        while len(self._tasks) > _MAX_TASKS:
            self._tasks.popitem(last=False)

    def likely(self, namespace: str, task: str, history: History, *, least: float) -> list[LikelyCall]:
        """Return the calls that a rollout may make after its history, the likeliest first.

        Calls less likely than `least`, from 0 to 1, are left out.
        """
        own = self._tasks.get((namespace, task))
        others = self._others(namespace, task)
        chances: dict[CallKey, float] = {}
        for context in _contexts(history):
            for counts in (_sum(others, context), own.following.get(context) if own else None):
                if counts:
                    chances = _mixed(chances, counts)
        sources = [*([own] if own else []), *others]
        likely = [LikelyCall(key, chance, _mean_s(sources, key)) for key, chance in chances.items() if chance >= least]
        # The key breaks ties, so that equal statistics give equal predictions.
        return sorted(likely, key=lambda call: (-call.chance, call.key))

    def forget(self, task: str) -> None:
        """Drop what was learnt from a task's rollouts, in whichever namespace."""
        for known in [known for known in self._tasks if known[1] == task]:
            del self._tasks[known]

    def _others(self, namespace: str, task: str) -> list[_Statistics]:
        statistics: list[_Statistics] = []
        # The latest first: what agents do changes with the policy that is trained.
        for known in reversed(self._tasks):
            if len(statistics) >= _MAX_OTHER_TASKS:
                break
            if known[0] == namespace and known[1] != task:
                statistics.append(self._tasks[known])
        return statistics


def _contexts(history: History) -> list[Hashable]:
    """Return the contexts of the call after a history, the most general first."""
    contexts: list[Hashable] = [()]
    if history:
        contexts += [history[-1].kind, history[-1].key]
    if len(history) > 1:
        contexts.append((history[-2].key, history[-1].key))
    return contexts


def _sum(others: Iterable[_Statistics], context: Hashable) -> Counter[CallKey]:
    total: Counter[CallKey] = Counter()
    for statistics in others:
        total.update(statistics.following.get(context, {}))
    return total


def _mixed(general: dict[CallKey, float], counts: Counter[CallKey]) -> dict[CallKey, float]:
    """Return the chances in a context: its own counts, and the more general chances for the rest."""
    seen, different = counts.total(), len(counts)
    weight = 1 / (seen + different)
    mixed = {key: different * chance * weight for key, chance in general.items()}
    for key, times in counts.items():
        mixed[key] = mixed.get(key, 0.0) + times * weight
    return mixed


def _mean_s(sources: Iterable[_Statistics], key: CallKey) -> float:
    for statistics in sources:
        pace = statistics.paces.get(key)
        if pace is not None:
            return pace.seconds / pace.times
    return 0.0
