"""The durable store, assembled: one part for each kind of row, all over one database."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from proxy.storage.audits import AuditStore
from proxy.storage.blobs import BlobStore
from proxy.storage.copies import CopyStore
from proxy.storage.database import StoreDatabase
from proxy.storage.drafts import DraftStore
from proxy.storage.notes import NoteStore
from proxy.storage.records import RecordStore
from proxy.storage.rollout_lists import RolloutLists
from proxy.storage.rollouts import RolloutStore
from proxy.storage.tasks import TaskStore
from proxy.storage.trees import TreeStore


class Store:
    """The parts of the store. A room that needs one part is given that part."""

    def __init__(
        self,
        path: Path,
        *,
        sync: Literal["NORMAL", "FULL"] = "NORMAL",
        namespace: Callable[[str], str] = lambda _task: "",
        block: int = 0,
    ) -> None:
        """Open or create the store; see `StoreDatabase` and `TreeStore`. Raises StoreError, and leaves it unchanged."""
        self.database = StoreDatabase(path, sync=sync, block=block)
        self.blobs = BlobStore(self.database)  # Bytes of calls and answers.
        self.records = RecordStore(self.database, self.blobs)  # Nodes and records, one call at a time.
        self.trees = TreeStore(self.database, namespace)  # Whole trees, and which task uses which.
        self.tasks = TaskStore(self.database, self.trees)
        self.rollouts = RolloutStore(self.database)
        self.rollout_lists = RolloutLists(self.database)  # Long lists of rollouts, in parts.
        self.notes = NoteStore(self.database)  # What protocols remember of rollouts.
        self.audits = AuditStore(self.database)  # Findings, counts and masks of audits.
        self.drafts = DraftStore(self.database, self.trees)  # Trees that are being imported.
        # Rows that travel to the stores of other proxies under their own numbers.
        self.copies = CopyStore(self.database, self.blobs)

    def close(self) -> None:
        """Close the file."""
        self.database.close()
