"""Lists in pages: `{"items": […], "total": n, "next": cursor}`. Pure."""

import re
from collections.abc import Sequence
from typing import Annotated, Generic, TypeVar

from fastapi import Query
from pydantic import BaseModel

from proxy.refusals import RefusalError

T = TypeVar("T")
_CURSOR = re.compile(r"after-([0-9]{1,12})")

CursorQuery = Annotated[
    str | None, Query(max_length=100, description="`next` of the page before, unchanged. Default: the first page.")
]


class Page(BaseModel, Generic[T]):
    """A page of a list.

    Attributes:
        items: The items, in the order of the list.
        total: Number of items of the whole list.
        next: The cursor of the next page; null on the last page.
    """

    items: list[T]
    total: int
    next: str | None

    @classmethod
    def at(cls, offset: int, items: Sequence[T], total: int) -> "Page[T]":
        """Return the page that begins with the item after `offset` others."""
        end = offset + len(items)
        return cls(items=list(items), total=total, next=f"after-{end}" if items and end < total else None)


def offset_of(cursor: str | None) -> int:
    """Return how many items come before the page of a cursor.

    Raises:
        RefusalError: 422, no page has this cursor.
    """
    if cursor is None:
        return 0
    match = _CURSOR.fullmatch(cursor)
    if match is None:
        raise RefusalError(422, "cursor", "the cursor is not the `next` of a page. Begin without one.")
    return int(match[1])
