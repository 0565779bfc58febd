"""Unpacks the snapshots of a checked bundle into a driver. Blocking: for a thread.

1. A bundle holds units (a driver's layers, for example) in pieces, and states that name the units they need. A unit
   comes before the states that need it, and several states may share one.
2. `check` has read the whole file before. `BundleStates.fitting` has chosen the states that fit, and so the units that
   are needed; the others are skipped as they pass.
3. The pieces of one unit are collected in a scratch file. When the unit is complete, the driver takes it.
4. A unit that this machine cannot hold (a full disk) is left out with the states that need it: a replay reaches them
   too. A unit or state that the driver refuses is a false file, and the import ends.
5. A unit may be a recording of a host's response. One that cannot be used is left out: its request goes out again.
"""

import contextlib
from pathlib import Path
from typing import BinaryIO

import structlog

from proxy.transfer.format import BundleError, read
from proxy.transfer.state_records import RECORDING, BundleStates, StateLine, state_of, unit_of
from sandboxes.driver import FrozenState
from sandboxes.portability import NotPortableError, RecordingPorter, Unpacking

log = structlog.get_logger()


def unpack_states(
    file: BinaryIO,
    states: BundleStates,
    unpacking: Unpacking,
    scratch: Path,
    *,
    driver: str,
    room_bytes: int,
    recordings: RecordingPorter | None = None,
) -> list[tuple[StateLine, FrozenState]]:
    """Unpack the snapshots of a bundle that fit in `room_bytes`, and return each with its line in the file.

    States of another driver are skipped. Recordings are left out without `recordings`. The scratch file, for one unit
    at a time, does not exist before or afterwards. Raises BundleError, which names a false unit or state.
    """
    fitting, units = states.fitting(room_bytes)
    unpacker = _UnitUnpacker(states, unpacking, scratch, units, recordings)
    unpacked = []
    number = -1
    try:
        for part in read(file):
            if part.kind == "chunk":
                unpacker.write(part.data)
                continue
            # Any other part ends the unit before it.
            unpacker.finish()
            if part.kind == "part":
                unpacker.begin(unit_of(part))
            elif part.kind == "snapshot":
                number += 1
                line = state_of(part)
                is_whole = not unpacker.failed.intersection(states.units_of_state[number])
                if number in fitting and line.driver == driver and is_whole:
                    unpacked.append((line, _state(unpacking, line, part.name)))
    finally:
        unpacker.discard()
    return unpacked


def _state(unpacking: Unpacking, line: StateLine, part: str) -> FrozenState:
    try:
        return unpacking.state(line.frozen())
    except NotPortableError as error:
        raise BundleError(f"{part}: the driver refuses the state of node {line.node}: {error}.") from error


class _UnitUnpacker:
    def __init__(
        self,
        states: BundleStates,
        unpacking: Unpacking,
        scratch: Path,
        units: set[str],
        recordings: RecordingPorter | None,
    ) -> None:
        self._states, self._unpacking, self._scratch, self._units = states, unpacking, scratch, units
        self._recordings, self._recorded = recordings, states.recordings() if recordings is not None else set()
        self._name: str | None = None
        self._writing: BinaryIO | None = None
        self.failed: set[str] = set()  # Names of the units that this machine could not hold.

    def begin(self, name: str) -> None:
        if name in self._units or name in self._recorded:
            self._name, self._writing = name, self._scratch.open("w+b")

    def write(self, data: bytes) -> None:
        if self._writing is not None:
            try:
                self._writing.write(data)
            except OSError as error:
                self._fail(error)

    def finish(self) -> None:
        if self._writing is None or self._name is None:
            return
        try:
            self._writing.seek(0)
            if self._recordings is not None and self._name in self._recorded:
                self._recordings.take(self._name.removeprefix(RECORDING), self._scratch)
            else:
                digest, _ = self._states.units[self._name]
                self._unpacking.part(self._name, self._writing, digest)
        except NotPortableError as error:
            if self._name in self._recorded:
                self._fail(error)
                return
            raise BundleError(f"the driver refuses unit {self._name!r}: {error}.") from error
        except OSError as error:
            self._fail(error)
        self.discard()

    def discard(self) -> None:
        if self._writing is not None:
            with contextlib.suppress(OSError):
                self._writing.close()
            self._writing = None
        self._scratch.unlink(missing_ok=True)

    def _fail(self, error: OSError | NotPortableError) -> None:
        assert self._name is not None
        log.warning("unit left out of an import", unit=self._name, error=str(error))
        self.failed.add(self._name)
        self.discard()
