"""Portability: frozen states that travel to another machine. A driver need not offer it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, Protocol, runtime_checkable

from sandboxes.driver import FrozenState
from sandboxes.spec import EnvironmentSpec


class NotPortableError(ValueError):
    """Imported data is not a part or a state that `Porter.pack` made; the text says why."""


class NoImageError(ValueError):
    """A frozen state cannot become a container image; the text says why."""


class Unpacking(Protocol):
    """One import: takes parts first, then the states that consist of them."""

    def part(self, name: str, data: BinaryIO, sha256: str) -> None:
        """Store a part, by its name on the machine that exported it, under a new name of this driver. Blocking.

        `data` is all that `Porter.pack` yielded, and `sha256` its digest: a part that is packed again must have it.
        Raises NotPortableError if the data is no packed part, and OSError if the machine cannot store it.
        """
        ...

    def state(self, frozen: FrozenState) -> FrozenState:
        """Return an exported state in terms of the parts that were stored.

        Raises:
            NotPortableError: This driver did not freeze the state, or one of its parts was not imported.
        """
        ...


@runtime_checkable
class Porter(Protocol):
    """Exports and imports frozen states."""

    def carries(self, kind: str) -> bool:
        """Return whether states of a kind can travel. Images of live processes depend on their machine's kernel."""
        ...

    def pack(self, part: str) -> Iterator[bytes]:
        """Yield the bytes of a part. They are the same each time. Blocking.

        Raises:
            NotFreezableError: Something in the part cannot travel.
            OSError: The part is missing or cannot be read.
        """
        ...

    def unpacking(self) -> AbstractContextManager[Unpacking]:
        """Return a context for one import. Its parts are not collected before the end of the context."""
        ...


@runtime_checkable
class PortableDriver(Protocol):
    """A driver whose frozen states can travel."""

    @property
    def porter(self) -> Porter:
        """The part of the driver that exports and imports."""
        ...


@runtime_checkable
class ImagingDriver(Protocol):
    """A driver whose frozen states can become container images."""

    async def image(self, spec: EnvironmentSpec, frozen: FrozenState, name: str, target: Path | None) -> str:
        """Make an image of a state, and return its id. Of live processes, it has nothing but their files.

        `name` is such as `repository:tag`, or empty. `target` is the new file of the image's archive, in a directory
        with room for the files twice; the caller removes what is left after an error. None gives the image to the
        Docker daemon. Raises NoImageError, and StateGoneError if the data of the state is missing or damaged.
        """
        ...


class RecordingPorter(Protocol):
    """Exports and imports responses of hosts outside that programs of one environment received, for its replays."""

    def names(self) -> list[str]:
        """Return their names. Blocking."""
        ...

    def pack(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of a recording; `ValueError` if it is damaged, `OSError` if it cannot be read. Blocking."""
        ...

    def take(self, name: str, file: Path) -> None:
        """Add a recording by its exporter's name, unless there is one of the request. Blocking.

        The file may become the recording. Raises NotPortableError if the data is none, and OSError if it cannot be
        stored.
        """
        ...

    async def settle(self) -> None:
        """Make what was taken count towards the driver's limit."""
        ...


def recording_porter_of(driver: object, spec: EnvironmentSpec) -> RecordingPorter | None:
    """Return the recordings of a spec's environment, by the driver's method `recordings`; None if it has none."""
    # Each lease in a cluster calls this, and `isinstance` of a protocol takes 20 us.
    recordings: Callable[[EnvironmentSpec], RecordingPorter | None] | None = getattr(driver, "recordings", None)
    return None if recordings is None else recordings(spec)


def porter_of(driver: object) -> Porter | None:
    """Return the porter of a driver; None if its states cannot travel, or for no driver."""
    # Each miss of a cluster needs this, and `isinstance` of a protocol takes 20 us.
    porter: Porter | None = getattr(driver, "porter", None)
    return porter
