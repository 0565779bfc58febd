"""What speculation has learnt from the steps of rollouts: their histories, their calls, and the statistics of both.

Everything is in memory, bounded, and dropped with its task. After a restart it is learnt again.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from proxy.http.lru_cache import LruCache
from proxy.storage.errors import StoreError
from proxy.storage.records import RecordStore
from proxy.tree.keys import CallKey, call_key
from proxy.tree.next_calls import CallKind, History, LikelyCall, NextCalls, PastCall
from proxy.tree.rollout import Rollout
from proxy.tree.tree import Record
from sandboxes.calls import ToolCall

_MAX_CALLS = 16384
"""Different calls that are remembered, 300 bytes each. A forgotten one is read from the store again."""
_MAX_ROLLOUTS = 16384
"""Rollouts whose last calls are remembered."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """A call of the store: its key, the name of its kind, and whether it may be executed ahead."""

    key: CallKey
    name: str
    runnable: bool


class Learned:
    """Learns from steps, and predicts the next ones."""

    def __init__(self, records: RecordStore, namespace: Callable[[str], str]) -> None:
        """Begin with nothing.

        Args:
            records: Where recorded calls are read.
            namespace: Returns what separates a task from those that other tokens see.
        """
        self._records, self._namespace = records, namespace
        self._next = NextCalls()
        # By the number of the rollout, with its task: a rollout that has ended must not stay in memory for this.
        self._histories: OrderedDict[int, tuple[str, History]] = OrderedDict()
        # By the number of the call's blob; and by key the blob of one such call.
        self._seen: LruCache[int, _Seen] = LruCache(_MAX_CALLS)
        self._blobs: LruCache[CallKey, int] = LruCache(_MAX_CALLS)

    def step(self, rollout: Rollout, record: Record) -> None:
        """Learn from a step that a rollout has taken. 10 µs; 50 µs for a call that was never seen."""
        call = self.past(record)
        history = self.history(rollout)
        if call is None:
            return
        self._next.note(self._namespace(rollout.task), rollout.task, history, call)
        self._histories[rollout.id] = rollout.task, (*history[-1:], call)
        self._histories.move_to_end(rollout.id)
        while len(self._histories) > _MAX_ROLLOUTS:
            self._histories.popitem(last=False)

    def history(self, rollout: Rollout) -> History:
        """Return the last calls of a rollout."""
        return self._histories.get(rollout.id, ("", ()))[1]

    def likely(self, task: str, history: History, least: float) -> list[LikelyCall]:
        """Return the calls that may follow a history in a task and may be executed ahead, the likeliest first."""
        likely = self._next.likely(self._namespace(task), task, history, least=least)
        return [call for call in likely if call.key in self._blobs]

    def past(self, record: Record) -> PastCall | None:
        """Return a record as a call of a history; None if its call cannot be read."""
        try:
            seen = self._seen.get(record.call) if not record.upload else None
            if seen is None:
                seen = self._read(record)
        except (StoreError, ValueError, KeyError):
            return None
        return PastCall(seen.key, CallKind(seen.name, not record.observation), record.seconds)

    def call(self, key: CallKey) -> ToolCall | None:
        """Return a call by its key, as some rollout has made it; None if it can no longer be read."""
        blob = self._blobs.get(key)
        if blob is None:
            return None
        try:
            call = self._records.call_without_upload(blob)
            # The blob may have been deleted since, and its number given to another one.
            if call_key(call) == key:
                return call
        except (StoreError, ValueError, KeyError):
            pass
        del self._blobs[key]
        return None

    def forget(self, task: str) -> None:
        """Drop what was learnt from a task's rollouts."""
        self._next.forget(task)
        for number in [number for number, (owner, _) in self._histories.items() if owner == task]:
            del self._histories[number]

    def _read(self, record: Record) -> _Seen:
        call = self._records.call(record)
        key = call_key(call)
        seen = _Seen(key, _name(call), runnable=call.endpoint == "shell" and call.tool == "exec" and not call.body)
        if not record.upload:
            self._seen[record.call] = seen
            # The recorded call may be one that a replay runs in place of another.
            if seen.runnable and (record.private or record.key == key or record.source.state is None):
                self._blobs[key] = record.call
        return seen


def _name(call: ToolCall) -> str:
    """Return the name of a call's kind: endpoint, tool and, for a shell command, the program that it begins with."""
    command = call.arguments.get("command")
    program = command.split(maxsplit=1)[0] if isinstance(command, str) and command.strip() else ""
    return f"{call.endpoint}/{call.tool} {program[:64]}".rstrip()
