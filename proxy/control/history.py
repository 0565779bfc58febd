"""The activity of the last day, minute by minute. It outlives a restart of the proxy."""

from collections import deque
from dataclasses import astuple

import orjson

from proxy.control.activity import Second, timeline
from proxy.storage.errors import DamagedError
from proxy.storage.store import Store

DAY = 24 * 60
"""Minutes that are kept."""
_MINUTE = 60
_SAVED_EVERY = 5
"""Minutes between two writes, of 100 kB at most: what a kill loses."""
_MARK = "activity"


class History:
    """The minutes of the last day, in memory and in the store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._pending: list[Second] = []
        self._known: deque[Second] | None = None

    @property
    def minutes(self) -> deque[Second]:
        """The last day, oldest minute first. The first use reads the store."""
        if self._known is None:
            try:
                text = self._store.database.mark(_MARK)
            except DamagedError:
                text = None
            self._known = deque(_read(text), maxlen=DAY)
        return self._known

    def add(self, second: Second) -> None:
        """Add a second; each full minute is kept, and written now and then."""
        self._pending.append(second)
        if len(self._pending) < _MINUTE:
            return
        self.minutes.extend(timeline(self._pending, span_s=_MINUTE, step_s=_MINUTE))
        self._pending.clear()
        if len(self.minutes) % _SAVED_EVERY == 0 or len(self.minutes) == DAY:
            self.save()

    def save(self) -> None:
        """Write the minutes to the store; nothing if there are none."""
        if not self._known:
            return
        rows = [astuple(minute) for minute in self.minutes]
        self._store.database.put_mark(_MARK, orjson.dumps(rows).decode(), durable=False)


def _read(text: str | None) -> list[Second]:
    """Return written minutes; none if they are of another version or damaged: they are figures of the past."""
    try:
        return [Second(*row) for row in orjson.loads(text or "[]")]
    except (ValueError, TypeError):
        return []
