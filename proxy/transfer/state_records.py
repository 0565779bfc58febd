"""Snapshots in a bundle: how they are written, and what is checked before it is believed.

    part       begins a unit that a driver packed, and holds its name; its bytes follow in chunks, up to another part
    chunk      the next bytes of that unit
    snapshot   a state of a node: the driver's payload, and the units that it needs, each with size and SHA-256

A unit that no state names means nothing: reading it failed halfway through the export.
"""

import hashlib
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from proxy.transfer.format import CHUNK_BYTES, BundleError, Part, Writer
from sandboxes.driver import FrozenState
from sandboxes.effects import StateDigest
from sandboxes.errors import NotFreezableError
from sandboxes.portability import Porter, RecordingPorter
from snapshots.snapshot import Snapshot

RECORDING = "recording-"
"""How the names of units begin that are recordings. No state names them, so older versions skip them."""
MAX_STATES = 100_000
"""Most states in a bundle, and most units: no task has as many, so a file that does is an attack on memory."""
_Line = TypeVar("_Line", bound=BaseModel)
_DIGEST = r"^[0-9a-f]{64}$"

NodeNumber = Callable[[int], int | None]
"""Returns the number that a node of the store has in the bundle; None if it does not travel."""


class UnitRef(BaseModel):
    """A unit that a state needs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(max_length=200)
    sha256: str = Field(pattern=_DIGEST)
    size_bytes: int = Field(ge=0)


class UnitLine(BaseModel):
    """The content of a `part`: the name of the unit that it begins."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(max_length=200)


class StateLine(BaseModel):
    """The content of a `snapshot`: what its driver needs, digests as hex, and the seconds of a replay."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    node: int = Field(ge=0)
    driver: str = Field(max_length=100)
    kind: str = Field(max_length=100)
    payload: dict[str, Any]
    exact: str | None = Field(pattern=_DIGEST)
    content: str | None = Field(pattern=_DIGEST)
    cost_s: float = Field(ge=0, le=1e9, allow_inf_nan=False)
    units: tuple[UnitRef, ...]

    def frozen(self) -> FrozenState:
        """Return the state as the exporting driver had it."""
        state = None
        if self.exact is not None and self.content is not None:
            state = StateDigest(bytes.fromhex(self.exact), bytes.fromhex(self.content))
        return FrozenState(self.driver, self.kind, self.payload, 0, state, tuple(unit.name for unit in self.units))


def unit_of(part: Part) -> str:
    """Return the name of the unit that a `part` begins. Raises BundleError if the part is malformed."""
    return _parse(UnitLine, part).name


def state_of(part: Part) -> StateLine:
    """Return the content of a `snapshot`. Raises BundleError if the part is malformed."""
    return _parse(StateLine, part)


def _parse(model: type[_Line], part: Part) -> _Line:
    try:
        return model.model_validate(orjson.loads(part.data))
    except (ValidationError, orjson.JSONDecodeError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise BundleError(f"{part.name} cannot be read: {reason}.") from error


@dataclass(frozen=True, slots=True)
class ExportedStates:
    """The snapshots that an export has to contain."""

    snapshots: Sequence[Snapshot] = ()  # Snapshots of the tree, which stay while the export runs.
    porter: Porter | None = None  # Packs the states of their driver; None if its states cannot travel.
    load: Callable[[Snapshot], FrozenState] | None = None  # Reads what the driver stored with a snapshot.
    # Packs what the environment's programs received from hosts outside; None for nothing.
    recordings: RecordingPorter | None = None

    def count(self, number: NodeNumber) -> tuple[int, int]:
        """Return how many snapshots will travel if nothing fails, and how many will not."""
        travelling = sum(1 for _ in self._chosen(number))
        return travelling, len(self.snapshots) - travelling

    def parts(self, writer: Writer, number: NodeNumber) -> Iterator[bytes]:
        """Yield the parts of the bundle that hold these recordings and snapshots. Blocking."""
        if self.recordings is not None:
            for name in self.recordings.names():
                yield from _unit(writer, RECORDING + name, self.recordings.pack(name))
        sent: dict[str, UnitRef | None] = {}
        for snapshot, node in self._chosen(number):
            assert self.load is not None
            assert self.porter is not None
            try:
                frozen = self.load(snapshot)
            except (OSError, ValueError):
                # It is damaged, or was dropped meanwhile. The importing proxy can replay its state.
                continue
            for name in frozen.parts:
                if name not in sent:
                    sent[name] = yield from _unit(writer, name, self.porter.pack(name))
            units = [unit for name in frozen.parts if (unit := sent[name]) is not None]
            if len(units) == len(frozen.parts):
                yield writer.json("snapshot", state_line(frozen, units, node=node, cost_s=snapshot.cost_s).model_dump())

    def _chosen(self, number: NodeNumber) -> Iterator[tuple[Snapshot, int]]:
        """Yield the snapshots that can travel, each with its node's number, in the order of their nodes."""
        for snapshot in sorted(self.snapshots, key=lambda snapshot: snapshot.node):
            node = number(snapshot.node)
            if node is not None and self.porter is not None and self.porter.carries(snapshot.kind):
                yield snapshot, node


def _unit(writer: Writer, name: str, pieces: Iterator[bytes]) -> Generator[bytes, None, UnitRef | None]:
    """Yield a unit's parts; return its reference, or None if it could not be read to its end."""
    yield writer.json("part", {"name": name})
    digest, size, pending = hashlib.sha256(), 0, bytearray()
    try:
        for piece in pieces:
            digest.update(piece)
            size += len(piece)
            pending += piece
            if len(pending) >= CHUNK_BYTES:
                yield writer.part("chunk", bytes(pending))
                pending.clear()
    except (OSError, NotFreezableError, ValueError):
        return None
    if pending:
        yield writer.part("chunk", bytes(pending))
    return UnitRef(name=name, sha256=digest.hexdigest(), size_bytes=size)


def state_line(frozen: FrozenState, units: Sequence[UnitRef], *, node: int, cost_s: float) -> StateLine:
    """Return what travels of a frozen state beside its units, for its node where it goes; a replay takes `cost_s`."""
    state = frozen.state
    exact, content = (None, None) if state is None else (state.exact.hex(), state.content.hex())
    return StateLine(
        node=node, driver=frozen.driver, kind=frozen.kind, payload=frozen.payload, exact=exact, content=content,
        cost_s=cost_s, units=tuple(units),
    )  # fmt: skip


@dataclass(slots=True)
class BundleStates:
    """What the check of a bundle has observed about its snapshots."""

    # SHA-256 and size in bytes of each complete unit, by name.
    units: dict[str, tuple[str, int]] = field(default_factory=dict)
    # Names of the units that each state needs, in the order of the states.
    units_of_state: list[tuple[str, ...]] = field(default_factory=list)
    _nodes: set[int] = field(default_factory=set)
    _open: str | None = None
    _digest: Any = None
    _size: int = 0

    def add(self, part: Part, content_of: Callable[[int], str | None]) -> None:
        """Check the next part; `content_of` is a node's content digest. Raises BundleError if it is false."""
        if part.kind == "chunk":
            if self._open is None:
                raise BundleError(f"{part.name} belongs to no unit.")
            self._digest.update(part.data)
            self._size += len(part.data)
            return
        self.finish()
        if part.kind == "part":
            self._open, self._digest, self._size = unit_of(part), hashlib.sha256(), 0
            if self._open in self.units or len(self.units) >= MAX_STATES:
                raise BundleError(f"{part.name}: unit {self._open!r} is a duplicate, or there are too many units.")
        else:
            self._add_state(part, state_of(part), content_of)

    def finish(self) -> None:
        """Note that the unit before is complete: another part follows, or the file ends."""
        if self._open is not None:
            self.units[self._open] = (self._digest.hexdigest(), self._size)
            self._open = None

    def _add_state(self, part: Part, line: StateLine, content_of: Callable[[int], str | None]) -> None:
        if line.node in self._nodes or len(self.units_of_state) >= MAX_STATES:
            raise BundleError(f"{part.name}: node {line.node} has a state already, or there are too many states.")
        self._nodes.add(line.node)
        known = content_of(line.node)
        if known is not None and line.content != known:
            raise BundleError(f"{part.name}: the digest of this state is not that of node {line.node}.")
        for unit in line.units:
            if self.units.get(unit.name) != (unit.sha256, unit.size_bytes):
                raise BundleError(f"{part.name}: the digest of unit {unit.name!r} differs, or the file lacks it.")
        self.units_of_state.append(tuple(unit.name for unit in line.units))

    def recordings(self) -> set[str]:
        """Return the names of the units that are recordings (pure)."""
        of_states = {name for names in self.units_of_state for name in names}
        return {name for name in self.units if name.startswith(RECORDING)} - of_states

    def fitting(self, room_bytes: int) -> tuple[set[int], set[str]]:
        """Return which states fit into so many bytes, the first ones first, and which units they need (pure)."""
        states: set[int] = set()
        units: set[str] = set()
        for number, needed in enumerate(self.units_of_state):
            more = set(needed) - units
            size = sum(self.units[name][1] for name in more)
            if size <= room_bytes:
                room_bytes -= size
                states.add(number)
                units |= more
        return states, units
