"""One worker: what the server of a process needs of the other processes behind the same port."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from proxy.http.asgi import AsgiApp
from proxy.settings import Settings
from proxy.shares import Share
from proxy.storage.data_dir import directory_of
from proxy.workers.routing import Routes
from proxy.workers.siblings import Siblings
from proxy.workers.views import AllWorkers

OF_WORKERS = frozenset({"/metrics", "/readyz"})
"""Paths of what the workers of one machine answer together when they are members of a cluster."""


@dataclass(slots=True)
class Worker:
    """This process among the workers of a proxy."""

    share: Share  # The tasks of this worker.
    siblings: Siblings
    is_serving: Callable[[], None]  # Called when this worker answers requests.
    is_member: bool = False  # Whether each worker is a member of a cluster, which merges all but `OF_WORKERS`.
    views: AllWorkers | None = None  # The views of all workers, from `before` on.

    @classmethod
    def among(cls, settings: Settings, number: int, is_serving: Callable[[], None]) -> Self:
        """Return a worker of the proxy that the settings describe; nothing is connected yet."""
        share = Share(number, settings.workers)
        directories = [directory_of(settings.data, each) for each in range(settings.workers)]
        return cls(share, Siblings(Routes(share), directories), is_serving, settings.cluster is not None)

    def before(self, application: AsgiApp) -> AsgiApp:
        """Return an application that answers requests without a task for all workers, and others by this one."""
        self.views = AllWorkers(application, self.siblings, OF_WORKERS if self.is_member else None)
        return self.views

    def open(self, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        """Take connections of other workers from now on, and say that this worker answers."""
        assert self.views is not None
        self.siblings.open(make_protocol, self.views.respond)
        self.is_serving()
