"""Trees that were imported: written as drafts, a piece at a time, and then given to a task."""

from collections.abc import Iterable

from proxy.storage.drafts import Draft
from proxy.storage.store import Store
from proxy.transfer.format import Part
from proxy.transfer.schema import BundleLine, NodeLine


def write_draft(store: Store, draft: Draft, items: Iterable[Part | BundleLine]) -> None:
    """Write blobs, nodes and records of a checked bundle in one transaction.

    Args:
        store: The store.
        draft: The tree that they belong to.
        items: In the order of the file: what a line names was written before, or is among the items before it.
    """
    with store.database.transaction() as execute:
        for item in items:
            if isinstance(item, Part):
                packed = item.kind == "zblob"
                store.blobs.insert_stored(execute, item.digest, packed=packed, data=item.stored)
            elif isinstance(item, NodeLine):
                exact, content = (None if text is None else bytes.fromhex(text) for text in (item.exact, item.content))
                store.drafts.add_node(execute, draft, item.node, exact, content, pinned=item.pinned)
            else:
                call, upload, answer = (
                    0 if digest is None else store.blobs.number_of(bytes.fromhex(digest))
                    for digest in (item.call, item.upload, item.answer)
                )
                store.drafts.add_record(
                    execute, draft, (item.source, item.target), bytes.fromhex(item.key), (call, upload, answer),
                    effect=item.effect, seconds=item.seconds, recorded_at=item.recorded_at,
                    reproducible=item.reproducible,
                )  # fmt: skip
