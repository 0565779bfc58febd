"""What a driver offers whose frozen states may go to another machine. No driver has to."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import BinaryIO, Protocol, runtime_checkable

from sandboxes.driver import FrozenState


class NotPortableError(ValueError):
    """What came from elsewhere is no part or state that `pack` made, and why."""


class Unpacking(Protocol):
    """Parts and states that come in together."""

    def part(self, name: str, data: BinaryIO, sha256: str) -> None:
        """Write a part under a name of this driver's own. Blocking. data: all that `pack` gave, at its beginning.

        Raises:
            Unusable: data is not what `pack` makes of a part, or packed again its digest is another.
            OSError: the machine cannot hold it; nothing of it stays.
        """
        ...

    def state(self, frozen: FrozenState) -> FrozenState:
        """Return frozen in terms of the parts that came in.

        Raises:
            Unusable: it is no state that this driver froze, or one of its parts did not come.
        """
        ...


@runtime_checkable
class Porter(Protocol):
    """Carries frozen states out and in."""

    def carries(self, kind: str) -> bool:
        """Say whether states of this kind are plain data. Images of live processes hang on their machine's kernel."""
        ...

    def pack(self, part: str) -> Iterator[bytes]:
        """Yield a part's bytes, the same ones whenever it is asked. Blocking.

        Raises:
            NotFreezable: something in it cannot travel.
            OSError: it is gone, or cannot be read.
        """
        ...

    def unpacking(self) -> AbstractContextManager[Unpacking]:
        """Return what takes parts in. They are not collected before its end, and then only if nothing keeps them."""
        ...


@runtime_checkable
class PortableDriver(Protocol):
    """A driver with a porter."""

    @property
    def porter(self) -> Porter: ...
