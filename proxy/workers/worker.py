"""One worker: what the server of a process needs of the other processes behind the same port."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from proxy.settings import Settings
from proxy.shares import Share
from proxy.storage.data_dir import directory_of
from proxy.workers.routing import Routes
from proxy.workers.siblings import Siblings

OF_WORKERS = frozenset({"/metrics", "/readyz"})
"""Paths of what the workers of one machine answer together when they are members of a cluster."""


@dataclass(slots=True)
class Worker:
    """This process among the workers of a proxy."""

    share: Share  # The tasks of this worker.
    siblings: Siblings
    is_serving: Callable[[], None]  # Called when this worker answers requests.

    @classmethod
    def among(cls, settings: Settings, number: int, is_serving: Callable[[], None]) -> Self:
        """Return a worker of the proxy that the settings describe; nothing is connected yet."""
        share = Share(number, settings.workers)
        directories = [directory_of(settings.data, each) for each in range(settings.workers)]
        paths = None if settings.cluster is None else OF_WORKERS
        return cls(share, Siblings(Routes(share), directories, paths), is_serving)
