"""Kept states in a bundle: how they are written, and what is looked at before one is believed.

    part       begins a unit that a driver packed: its name. What it holds follows in chunks, up to whatever is no chunk
    snapshot   a state of a node: the driver's payload, and the units that it needs, each with size and SHA-256
A unit that no state names counts for nothing: reading it failed halfway.
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
from sandboxes.portability import Porter
from snapshots.snapshot import Snapshot

MOST = 100_000
"""States in a bundle, and units: more are no task's."""
_Line = TypeVar("_Line", bound=BaseModel)
_DIGEST = r"^[0-9a-f]{64}$"


class UnitOf(BaseModel):
    """A unit that a state needs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(max_length=200)
    sha256: str = Field(pattern=_DIGEST)
    size_bytes: int = Field(ge=0)


class UnitLine(BaseModel):
    """The beginning of a unit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(max_length=200)


class StateLine(BaseModel):
    """A kept state of a node, by its number. exact, content: its digests, as at the node."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    node: int = Field(ge=0)
    driver: str = Field(max_length=100)
    kind: str = Field(max_length=100)
    payload: dict[str, Any]
    exact: str | None = Field(pattern=_DIGEST)
    content: str | None = Field(pattern=_DIGEST)
    cost_s: float = Field(ge=0, le=1e9, allow_inf_nan=False)
    units: tuple[UnitOf, ...]

    def frozen(self) -> FrozenState:
        """Return the state as the driver elsewhere knew it."""
        state = None
        if self.exact is not None and self.content is not None:
            state = StateDigest(bytes.fromhex(self.exact), bytes.fromhex(self.content))
        return FrozenState(self.driver, self.kind, self.payload, 0, state, tuple(unit.name for unit in self.units))


def unit_of(part: Part) -> str:
    """Return the name of the unit that a part begins.

    Raises:
        BundleError: it says none.
    """
    return _line(UnitLine, part).name


def state_of(part: Part) -> StateLine:
    """Return what a part says of a kept state.

    Raises:
        BundleError: it cannot be read.
    """
    return _line(StateLine, part)


def _line(kind: type[_Line], part: Part) -> _Line:
    try:
        return kind.model_validate(orjson.loads(part.data))
    except (ValidationError, orjson.JSONDecodeError) as error:
        why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise BundleError(f"{part.name} cannot be read: {why}.") from error


# -- out ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outgoing:
    """Kept states that were asked for. porter: of their driver; None where its states cannot travel."""

    snapshots: Sequence[Snapshot] = ()
    porter: Porter | None = None
    load: Callable[[Snapshot], FrozenState] | None = None

    def count(self, number: Callable[[int], int | None]) -> tuple[int, int]:
        """Return how many will travel if nothing fails, and how many will not. number: of a node in the bundle."""
        travel = sum(1 for _ in self._chosen(number))
        return travel, len(self.snapshots) - travel

    def pieces(self, writer: Writer, number: Callable[[int], int | None]) -> Iterator[bytes]:
        """Yield the parts of the bundle that hold these states. Blocking."""
        sent: dict[str, UnitOf | None] = {}
        for snapshot, node in self._chosen(number):
            assert self.load is not None
            try:
                frozen = self.load(snapshot)
            except (OSError, ValueError):
                # Given up or damaged meanwhile: a replay reaches it.
                continue
            for name in frozen.parts:
                if name not in sent:
                    sent[name] = yield from self._unit(writer, name)
            units = [unit for name in frozen.parts if (unit := sent[name]) is not None]
            if len(units) == len(frozen.parts):
                yield writer.json("snapshot", _told(frozen, snapshot, node, units))

    def _chosen(self, number: Callable[[int], int | None]) -> Iterator[tuple[Snapshot, int]]:
        for snapshot in sorted(self.snapshots, key=lambda snapshot: snapshot.node):
            node = number(snapshot.node)
            if node is not None and self.porter is not None and self.porter.carries(snapshot.kind):
                yield snapshot, node

    def _unit(self, writer: Writer, name: str) -> Generator[bytes, None, UnitOf | None]:
        """Yield a unit's parts; return what it is, None where it cannot be read to its end."""
        assert self.porter is not None
        yield writer.json("part", {"name": name})
        digest, size, pending = hashlib.sha256(), 0, bytearray()
        try:
            for piece in self.porter.pack(name):
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
        return UnitOf(name=name, sha256=digest.hexdigest(), size_bytes=size)


def _told(frozen: FrozenState, snapshot: Snapshot, node: int, units: list[UnitOf]) -> dict[str, Any]:
    state = frozen.state
    exact, content = (None, None) if state is None else (state.exact.hex(), state.content.hex())
    return {
        "node": node, "driver": frozen.driver, "kind": frozen.kind, "payload": frozen.payload,
        "exact": exact, "content": content,
        "cost_s": snapshot.cost_s, "units": [unit.model_dump() for unit in units],
    }  # fmt: skip


# -- in ----------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Seen:
    """What a bundle's kept states were found to be, while it is checked. states: each one's units, in order."""

    units: dict[str, tuple[str, int]] = field(default_factory=dict)
    states: list[tuple[str, ...]] = field(default_factory=list)
    _nodes: set[int] = field(default_factory=set)
    _open: str | None = None
    _digest: Any = None
    _size: int = 0

    def see(self, part: Part, content_of: Callable[[int], str | None]) -> None:
        """Take in the next part that is none of the tree's. content_of: a node's digest; raises where there is none.

        Raises:
            BundleError: what it says is not so.
        """
        if part.kind == "chunk":
            if self._open is None:
                raise BundleError(f"{part.name} belongs to nothing.")
            self._digest.update(part.data)
            self._size += len(part.data)
            return
        self._close()
        if part.kind == "part":
            self._open, self._digest, self._size = unit_of(part), hashlib.sha256(), 0
            if self._open in self.units or len(self.units) >= MOST:
                raise BundleError(f"{part.name}: {self._open!r} is there twice, or it is one of too many.")
        else:
            self._state(part, state_of(part), content_of)

    def _close(self) -> None:
        if self._open is not None:
            self.units[self._open] = (self._digest.hexdigest(), self._size)
            self._open = None

    def _state(self, part: Part, line: StateLine, content_of: Callable[[int], str | None]) -> None:
        if line.node in self._nodes or len(self.states) >= MOST:
            raise BundleError(f"{part.name}: node {line.node} has a state already, or there are too many.")
        self._nodes.add(line.node)
        known = content_of(line.node)
        if known is not None and line.content != known:
            raise BundleError(f"{part.name}: the digest of this state is not that of node {line.node}.")
        for unit in line.units:
            if self.units.get(unit.name) != (unit.sha256, unit.size_bytes):
                raise BundleError(
                    f"{part.name}: the digest of unit {unit.name!r} is another, or it is not in the file."
                )
        self.states.append(tuple(unit.name for unit in line.units))

    def fitting(self, room_bytes: int) -> tuple[set[int], set[str]]:
        """Return which states, by their place, and so which units fit into room_bytes: the first ones (pure)."""
        states: set[int] = set()
        units: set[str] = set()
        for place, needed in enumerate(self.states):
            more = set(needed) - units
            size = sum(self.units[name][1] for name in more)
            if size <= room_bytes:
                room_bytes -= size
                states.add(place)
                units |= more
        return states, units
