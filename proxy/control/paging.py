"""Lists in pages: `{"items": […], "total": n, "next": cursor}`. Pure.

The cursor of the next page is the order (the sort key, then something unique) of the last item of this page. So an item
that is added or removed meanwhile shifts no page, and no item comes twice. Long lists come from an index of the store,
which begins at the cursor; lists that are in memory are sorted.
"""

import binascii
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

import orjson
from fastapi import Depends, Query
from pydantic import BaseModel, Field

from proxy.refusals import RefusalError

T = TypeVar("T")
E = TypeVar("E")
Key = str | int | float
Order = tuple[Key, ...]
"""The place of an item in its list: values of sort keys, and at the end something that no other item has."""
MOST = 1000
"""Most items of a page. A page of rollouts is 0.5 MB; a much larger one would delay every hit."""
_USUAL = 100
"""Items of a page unless the request names another limit."""
_CURSOR_CHARS = 1000
"""Longest cursor: a name of 200 characters in each of two keys takes 600."""
_DESCENDING = "-"


class Page(BaseModel, Generic[T]):
    """A page of a list; `total` counts the whole list, and `next` is the next page's cursor or null."""

    items: list[T]
    total: int
    next: str | None = Field(description="The cursor of the next page; null on the last page.")

    @classmethod
    def whole(cls, items: Sequence[T]) -> "Page[T]":
        """Return a list that always fits in one page."""
        return cls(items=list(items), total=len(items), next=None)


@dataclass(frozen=True, slots=True)
class PagePart(Generic[E]):
    """A part of a list: the entries of one page."""

    entries: list[E]
    total: int  # Of the whole list; None if the entries were not counted.
    next: str | None  # The cursor of the next page; None on the last page.

    def page(self, view: Callable[[E], T]) -> Page[T]:
        """Return the page, with the view of each entry."""
        return Page(items=[view(entry) for entry in self.entries], total=self.total, next=self.next)


@dataclass(frozen=True, slots=True)
class ListQuery:
    """Which page of a list is wanted."""

    key: str
    descending: bool = False  # Whether the greatest come first.
    limit: int = MOST
    after: Order | None = None  # Place of the last item of the page before; None for the first page.

    def sorted_part(self, entries: Iterable[E], order: Callable[[E], Order]) -> PagePart[E]:
        """Return the wanted part of a list in any order. Raises RefusalError (422) for the cursor of another list."""
        rows = sorted(entries, key=order, reverse=self.descending)
        try:
            rest = [row for row in rows if self._follows(order(row))]
        except TypeError as error:
            raise _foreign() from error
        return self.part(rest, len(rows), order)

    def part(self, rows: Sequence[E], total: int, order: Callable[[E], Order]) -> PagePart[E]:
        """Return the part that begins with these rows after the cursor: `limit`, and one more if a page follows."""
        shown = list(rows[: self.limit])
        following = packed_cursor([self._sort, *order(shown[-1])]) if len(rows) > self.limit else None
        return PagePart(shown, total, following)

    def sql(self, *columns: str) -> tuple[str, dict[str, Any]]:
        """Return the end of a page's query, and its values. The last column is unique. Raises RefusalError (422)."""
        direction, sign = ("DESC", "<") if self.descending else ("ASC", ">")
        names = [f"after{number}" for number in range(len(columns))]
        if self.after is not None and len(self.after) != len(columns):
            raise _foreign()
        parameters = ", ".join(f":{name}" for name in names)
        condition = "" if self.after is None else f" AND ({', '.join(columns)}) {sign} ({parameters})"
        order = ", ".join(f"{column} {direction}" for column in columns)
        values = dict(zip(names, self.after or (), strict=False))
        return f"{condition} ORDER BY {order} LIMIT :limit", {**values, "limit": self.limit + 1}

    def _follows(self, place: Order) -> bool:
        if self.after is None:
            return True
        return place < self.after if self.descending else place > self.after

    @property
    def _sort(self) -> str:
        return f"{_DESCENDING if self.descending else ''}{self.key}"

    def at(self, cursor: str) -> "ListQuery":
        """Return the query of the page that a cursor names. Raises RefusalError (422) if this list has no such page."""
        place = unpacked_cursor(cursor)
        if not (isinstance(place, list) and len(place) > 1 and place[0] == self._sort):
            raise _foreign()
        if not all(isinstance(each, Key) and (not isinstance(each, int) or abs(each) < 1 << 63) for each in place):
            raise _foreign()
        return ListQuery(self.key, self.descending, self.limit, tuple(place[1:]))


def packed_cursor(value: list[Any]) -> str:
    """Return the text of a cursor, which needs no quoting in a URL."""
    return urlsafe_b64encode(orjson.dumps(value)).rstrip(b"=").decode()


def unpacked_cursor(cursor: str) -> Any:
    """Return what `packed_cursor` packed; None for a text that it did not write."""
    try:
        return orjson.loads(urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    except (binascii.Error, ValueError):
        return None


def _foreign() -> RefusalError:
    return RefusalError(
        422, "cursor", "the cursor is not the `next` of a page of this list in this order. Begin without one."
    )


def list_query(*keys: str, default: str) -> Any:
    """Return the dependency that reads a list's query; the default key has `-` in front for the greatest first."""
    orders = [sign + key for key in keys for sign in ("", _DESCENDING)]
    description = f"Sort key: {', '.join(f'`{key}`' for key in keys)}. `-` in front puts the greatest first."
    # The description lists the values, so that generated clients know them; an unknown one is refused with a sentence.
    schema: dict[str, Any] = {"enum": orders}

    async def query(
        sort: Annotated[str, Query(max_length=100, description=description, json_schema_extra=schema)] = default,
        limit: Annotated[int, Query(ge=1, le=MOST, description="Maximum number of items in the page.")] = _USUAL,
        cursor: Annotated[
            str | None,
            Query(
                max_length=_CURSOR_CHARS, description="`next` of the page before, unchanged. Default: the first page."
            ),
        ] = None,
    ) -> ListQuery:
        if sort not in orders:
            raise RefusalError(422, "sort", f"this list is not sorted by {sort!r}. Use one of: {', '.join(orders)}.")
        wanted = ListQuery(sort.removeprefix(_DESCENDING), sort.startswith(_DESCENDING), limit)
        return wanted if cursor is None else wanted.at(cursor)

    return Depends(query)
