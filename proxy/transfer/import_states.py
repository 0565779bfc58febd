"""Kept states out of a checked bundle, into a driver. Blocking, for a thread."""

import contextlib
from pathlib import Path
from typing import BinaryIO

import structlog

from proxy.transfer.format import BundleError, read
from proxy.transfer.state_records import Seen, StateLine, state_of, unit_of
from sandboxes.driver import FrozenState
from sandboxes.portability import NotPortableError, Unpacking

log = structlog.get_logger()


def bring(
    file: BinaryIO, seen: Seen, unpacking: Unpacking, scratch: Path, *, driver: str, room_bytes: int
) -> list[tuple[StateLine, FrozenState]]:
    """Unpack the kept states of a bundle that fit into room_bytes; return those that are whole.

    scratch: a file for one unit at a time; it does not exist yet, and does not afterwards.

    Raises:
        BundleError: one is not what it says it is, and which.
    """
    states, units = seen.fitting(room_bytes)
    bringing = _Bringing(seen, unpacking, scratch, units)
    found = []
    place = -1
    try:
        for part in read(file):
            if part.kind == "chunk":
                bringing.more(part.data)
                continue
            bringing.close()
            if part.kind == "part":
                bringing.begin(unit_of(part))
            elif part.kind == "snapshot":
                place += 1
                line = state_of(part)
                if place in states and line.driver == driver and not bringing.failed.intersection(seen.states[place]):
                    found.append((line, _state(unpacking, line, part.name)))
    finally:
        bringing.drop()
    return found


def _state(unpacking: Unpacking, line: StateLine, where: str) -> FrozenState:
    try:
        return unpacking.state(line.frozen())
    except NotPortableError as error:
        raise BundleError(f"{where}: the state of node {line.node} is not taken: {error}.") from error


class _Bringing:
    """Unpacks one unit after another. failed: those that this machine could not hold."""

    def __init__(self, seen: Seen, unpacking: Unpacking, scratch: Path, units: set[str]) -> None:
        self._seen, self._unpacking, self._scratch, self._units = seen, unpacking, scratch, units
        self._name: str | None = None
        self._writing: BinaryIO | None = None
        self.failed: set[str] = set()

    def begin(self, name: str) -> None:
        if name in self._units:
            self._name, self._writing = name, self._scratch.open("w+b")

    def more(self, data: bytes) -> None:
        if self._writing is not None:
            try:
                self._writing.write(data)
            except OSError as error:
                self._fail(error)

    def close(self) -> None:
        if self._writing is None or self._name is None:
            return
        try:
            self._writing.seek(0)
            self._unpacking.part(self._name, self._writing, self._seen.units[self._name][0])
        except NotPortableError as error:
            raise BundleError(f"unit {self._name!r} is not taken: {error}.") from error
        except OSError as error:
            self._fail(error)
        self.drop()

    def _fail(self, error: OSError) -> None:
        assert self._name is not None
        log.warning("a kept state was left out of an import", unit=self._name, error=str(error))
        self.failed.add(self._name)
        self.drop()

    def drop(self) -> None:
        if self._writing is not None:
            with contextlib.suppress(OSError):
                self._writing.close()
            self._writing = None
        self._scratch.unlink(missing_ok=True)
