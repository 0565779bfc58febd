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
    """The parts of the store. A room that needs one part is given that part.

    Attributes:
        database: The file: transactions, queries, maintenance.
        blobs: Bytes of calls and answers.
        records: Nodes and records, one call at a time.
        trees: Whole trees, and which task uses which.
        tasks: Tasks and their specs.
        rollouts: Rollouts and their steps.
        rollout_lists: Long lists of rollouts, in parts.
        notes: What protocols remember of rollouts.
        audits: Findings, counts and masks of audits.
        drafts: Trees that are being imported.
        copies: Rows that travel to the stores of other proxies under their own numbers.
    """

    def __init__(
        self,
        path: Path,
        *,
        sync: Literal["NORMAL", "FULL"] = "NORMAL",
        namespace: Callable[[str], str] = lambda _task: "",
        block: int = 0,
    ) -> None:
        """Open or create the store; see `StoreDatabase` and `TreeStore` for the arguments.

        Raises:
            StoreError: The file cannot be used; it is left unchanged.
        """
        self.database = StoreDatabase(path, sync=sync, block=block)
        self.blobs = BlobStore(self.database)
        self.records = RecordStore(self.database, self.blobs)
        self.trees = TreeStore(self.database, namespace)
        self.tasks = TaskStore(self.database, self.trees)
        self.rollouts = RolloutStore(self.database)
        self.rollout_lists = RolloutLists(self.database)
        self.notes = NoteStore(self.database)
        self.audits = AuditStore(self.database)
        self.drafts = DraftStore(self.database, self.trees)
        self.copies = CopyStore(self.database, self.blobs)

    def close(self) -> None:
        """Close the file."""
        self.database.close()
