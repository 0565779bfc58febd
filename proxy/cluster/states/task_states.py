"""What a member knows of the kept states of one task that it owns."""

import asyncio
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from proxy.cluster.lines import Kept
from proxy.cluster.owned import Owned
from proxy.cluster.states.manifests import ChunkRef, StateManifest, folder_of
from proxy.transfer.state_records import UnitRef

StoredUnit = tuple[UnitRef, tuple[ChunkRef, ...]]


@dataclass(eq=False)
class TaskStates:
    """The kept states of a task, for as long as this member owns it."""

    owned: Owned  # The task. Its `kept` has the lines of the log.
    # Held while objects are written or deleted, so that nothing is deleted which a new state relies on.
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    # What the store has: units by their names here, chunks by digest, and the objects of each state by node.
    units: dict[str, StoredUnit] = field(default_factory=dict)
    chunks: dict[str, ChunkRef] = field(default_factory=dict)
    names: dict[int, frozenset[str]] = field(default_factory=dict)
    here: set[int] = field(default_factory=set)  # Nodes whose snapshot this member had since it owns the task.
    has_garbage: bool = True  # Whether the store may have objects that no kept state needs.
    # When an object was first seen that no kept state needs, by name, on the loop's clock.
    unreachable_since: dict[str, float] = field(default_factory=dict)
    # For each tree whose recordings of hosts were fetched: the names of those that the store has.
    recordings: dict[int, set[str]] = field(default_factory=dict)
    recording: asyncio.Lock = field(default_factory=asyncio.Lock)  # Held while recordings are written or fetched.

    def __post_init__(self) -> None:
        self.folder = folder_of(self.owned.task)

    @property
    def kept(self) -> dict[int, Kept]:
        """The states that the store has, by node."""
        return self.owned.kept

    def path(self, name: str) -> str:
        """Return the name of an object in the store."""
        return f"{self.folder}/{name}"

    def note_manifest(self, line: Kept, manifest: StateManifest) -> None:
        """Note what objects a state needs."""
        self.names[line.node] = manifest.names | {line.name}

    def note_chunks(self, chunks: Iterable[ChunkRef]) -> None:
        """Note that the store has chunks, as this member has written or read them."""
        self.chunks.update((chunk.name.partition("/")[2], chunk) for chunk in chunks)

    def forget_objects(self, names: Collection[str]) -> None:
        """Rely no more on objects, because they are damaged or about to be deleted."""
        gone = frozenset(names)
        self.chunks = {digest: chunk for digest, chunk in self.chunks.items() if chunk.name not in gone}
        self.units = {
            unit: stored for unit, stored in self.units.items() if not any(chunk.name in gone for chunk in stored[1])
        }


StatesOf = Callable[[int], TaskStates | None]
"""Returns the states of the task that a tree belongs to; None if this member does not own the task."""
