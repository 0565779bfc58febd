"""A mapping with a budget: it forgets its oldest entries."""

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class LruCache(OrderedDict[K, V]):
    """A mapping that forgets the least recently used entries beyond a budget, the sum of their costs.

    Reads by `get` are as fast as a dict's and do not count as a use; `move_to_end` after a read makes it one. One entry
    is kept whatever it costs. By default each entry costs 1.
    """

    def __init__(self, budget: int, cost: Callable[[V], int] = lambda _: 1) -> None:
        super().__init__()
        self._budget, self._cost = budget, cost
        self.used = 0

    def __setitem__(self, key: K, value: V) -> None:
        if key in self:
            del self[key]
        super().__setitem__(key, value)
        self.used += self._cost(value)
        while self.used > self._budget and len(self) > 1:
            del self[next(iter(self))]

    def __delitem__(self, key: K) -> None:
        self.used -= self._cost(self[key])
        super().__delitem__(key)
