"""How a proxy's settings and its data directory are divided between workers."""

import socket
from pathlib import Path

from proxy.settings import Settings
from proxy.storage.data_dir import STORE, directory_of, workers_of, write_workers
from proxy.storage.errors import StoreError

_DIVIDED = (
    "max_sandboxes", "snapshot_bytes", "checkpoint_bytes", "warm_sandboxes", "answer_memory_bytes",
    "tree_memory_records", "max_requests", "max_connections", "store_bytes_per_s",
    "postgres_spares",
)  # fmt: skip
"""The settings that limit something of the whole machine."""


def settings_of(settings: Settings, number: int) -> Settings:
    """Return the settings of a worker: its own directory, and its part of what limits the whole machine."""
    count = settings.workers
    least = {"max_requests": 1, "max_connections": 16, "max_sandboxes": 1, "store_bytes_per_s": 1 << 20}
    update: dict[str, object] = {
        # Rounded up: a spare less than requested in all would be none for some.
        name: max(-(-limit // count), least.get(name, 0))
        for name in _DIVIDED
        if (limit := getattr(settings, name)) is not None
    }
    update["data"] = directory_of(settings.data, number)
    if settings.checkpoint_dir is not None:
        update["checkpoint_dir"] = directory_of(settings.checkpoint_dir, number)
    if settings.cluster is None:
        update["quotas"] = {pattern: -(-calls // count) for pattern, calls in settings.quotas.items()}
    else:
        update["node"] = f"{settings.node or socket.gethostname()}-{number}"
    host, _, port = settings.link.rpartition(":") if ":" in settings.link else ("", "", "")
    if port.isdigit() and port != "0":
        update["link"] = f"{host}:{int(port) + number}"
    return settings.model_copy(update=update)


def claim(data: Path, count: int) -> None:
    """Check that a data directory belongs to this number of workers; an empty one does from now on."""
    known = workers_of(data)
    if known is not None and known != count:
        again = "without --workers" if known == 1 else f"with --workers {known}"
        raise StoreError(
            f"{data} is divided between {known} workers, and tasks cannot change their worker. Start {again}, or use "
            "another --data and bring the tasks there (forkpoint backup, forkpoint restore --workers)."
        )
    if known is None and count > 1:
        if (data / STORE).exists():
            raise StoreError(
                f"{data} belongs to a proxy without workers. Start without --workers, or use another --data and bring "
                "the tasks there (forkpoint backup, forkpoint restore --workers)."
            )
        write_workers(data, count)
