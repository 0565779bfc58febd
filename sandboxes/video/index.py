"""What was measured in a video, as files: `index.sqlite`, `frames.bin`, `times.npy`, `differences.npy`.

They are written once, by one worker, and then only read. The same measurements give the same bytes.
"""

import json
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sandboxes.video.measurements import motion_word, nearest, span_at

TimeSpan = tuple[float, float]

_SCHEMA = """
CREATE TABLE shots (id INTEGER PRIMARY KEY, start_s REAL NOT NULL, end_s REAL NOT NULL);
CREATE TABLE segments (id INTEGER PRIMARY KEY, start_s REAL NOT NULL, end_s REAL NOT NULL, first_shot INT NOT NULL,
    last_shot INT NOT NULL, palette TEXT NOT NULL, motion REAL NOT NULL, brightness REAL NOT NULL, overlay TEXT,
    level_db REAL, peak_db REAL, tone_hz REAL, line TEXT NOT NULL);
CREATE TABLE frames (id INTEGER PRIMARY KEY, t REAL NOT NULL, at INT NOT NULL, size INT NOT NULL);
CREATE TABLE subtitles (track INT NOT NULL, language TEXT, start_s REAL NOT NULL, end_s REAL NOT NULL,
    text TEXT NOT NULL);
"""
_MODEL_SCHEMA = """
CREATE TABLE Segments (segment_id INTEGER PRIMARY KEY, caption TEXT NOT NULL);
CREATE TABLE Objects (object_id INTEGER PRIMARY KEY, category TEXT NOT NULL UNIQUE);
CREATE TABLE Objects_Segments (object_id INT NOT NULL, segment_id INT NOT NULL, PRIMARY KEY (object_id, segment_id));
"""
_SEGMENT = (
    "start_s", "end_s", "first_shot", "last_shot", "palette", "motion", "brightness", "overlay", "level_db",
    "peak_db", "tone_hz", "line",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Measured:
    """All that was measured. segments: members of the table of this name. frames: time, place and size of each JPEG."""

    times: Sequence[float]
    differences: NDArray[np.float32]
    shots: Sequence[TimeSpan]
    segments: Sequence[dict[str, Any]]
    frames: Sequence[tuple[float, int, int]]
    subtitles: Sequence[tuple[int, str | None, float, float, str]]


def write(folder: Path, measured: Measured) -> None:
    """Write everything but `frames.bin`, which was written on the way."""
    np.save(folder / "times.npy", np.array(measured.times, dtype=np.float64))
    np.save(folder / "differences.npy", measured.differences)
    rows = [
        (n, *(json.dumps(s[name]) if name == "palette" else s[name] for name in _SEGMENT))
        for n, s in enumerate(measured.segments)
    ]
    _write(
        folder / "index.sqlite",
        _SCHEMA,
        {
            "shots": [(n, *shot) for n, shot in enumerate(measured.shots)],
            "segments": rows,
            "frames": [(n, *frame) for n, frame in enumerate(measured.frames)],
            "subtitles": measured.subtitles,
        },
    )


def write_model(
    folder: Path, captions: Sequence[str], objects: Sequence[Sequence[str]], vectors: dict[str, NDArray[np.float32]]
) -> None:
    """Write what a model said of each segment. vectors: of `texts` and `images`, a row for each segment."""
    names = sorted({name for each in objects for name in each})
    numbers = {name: n for n, name in enumerate(names)}
    pairs = sorted({(numbers[name], segment) for segment, each in enumerate(objects) for name in each})
    rows: dict[str, Iterable[Sequence[Any]]] = {
        "Segments": list(enumerate(captions)), "Objects": [(n, name) for name, n in numbers.items()],
        "Objects_Segments": pairs,
    }  # fmt: skip
    _write(folder / "model.sqlite", _MODEL_SCHEMA, rows)
    for name in ("texts", "images"):
        np.save(folder / f"{name}.npy", vectors.get(name, np.zeros((0, 0), dtype=np.float32)))


def _write(path: Path, schema: str, tables: dict[str, Iterable[Sequence[Any]]]) -> None:
    database = sqlite3.connect(path, isolation_level=None)
    try:
        # Nothing reads it before it is whole, and what is not whole is removed.
        database.execute("PRAGMA journal_mode=OFF")
        database.execute("PRAGMA synchronous=OFF")
        database.executescript(schema)
        database.execute("BEGIN")
        for table, rows in tables.items():
            rows = list(rows)  # noqa: PLW2901 - to see how wide they are
            if rows:
                database.executemany(f"INSERT INTO {table} VALUES ({','.join('?' * len(rows[0]))})", rows)
        database.execute("COMMIT")
    finally:
        database.close()


class Index:
    """A prepared video, open for reading. model: the folder of what a model said; None where none was asked."""

    def __init__(self, folder: Path, model: Path | None) -> None:
        self._folder, self._model = folder, model
        self._database = _open(folder / "index.sqlite")
        self._said = None if model is None else _open(model / "model.sqlite")

    def close(self) -> None:
        self._database.close()
        if self._said is not None:
            self._said.close()

    @cached_property
    def shots(self) -> list[TimeSpan]:
        return [(start, end) for start, end in self._database.execute("SELECT start_s, end_s FROM shots ORDER BY id")]

    def shot_at(self, t: float) -> TimeSpan:
        """Return the shot that a time is in."""
        return self.shots[span_at(self._starts, t)]

    @cached_property
    def _starts(self) -> list[float]:
        return [start for start, _ in self.shots]

    @cached_property
    def segments(self) -> list[dict[str, Any]]:
        """All segments, with `palette` as a list, `motion_word`, and `caption`: a model's, or what was measured."""
        found = []
        for row in self._database.execute(f"SELECT id, {', '.join(_SEGMENT)} FROM segments ORDER BY id"):
            segment = dict(zip(("id", *_SEGMENT), row, strict=True))
            segment["palette"] = json.loads(segment["palette"])
            segment["motion_word"] = motion_word(segment["motion"])
            segment["caption"] = self.captions[segment["id"]] if self.captions else segment["line"]
            found.append(segment)
        return found

    @cached_property
    def captions(self) -> list[str]:
        """What a model said of each segment; empty where none was asked."""
        if self._said is None:
            return []
        return [text for (text,) in self._said.execute("SELECT caption FROM Segments ORDER BY segment_id")]

    @cached_property
    def objects(self) -> dict[str, list[int]]:
        """The segments in which a model saw each object, by its name."""
        found: dict[str, list[int]] = {}
        if self._said is not None:
            rows = self._said.execute(
                "SELECT category, segment_id FROM Objects JOIN Objects_Segments USING (object_id) ORDER BY 1, 2"
            )
            for name, segment in rows:
                found.setdefault(name, []).append(segment)
        return found

    @cached_property
    def kept(self) -> list[float]:
        """The times of the kept pictures."""
        return [t for (t,) in self._database.execute("SELECT t FROM frames ORDER BY id")]

    @cached_property
    def times(self) -> NDArray[np.float64]:
        return np.asarray(np.load(self._folder / "times.npy"))

    @cached_property
    def differences(self) -> NDArray[np.float32]:
        return np.asarray(np.load(self._folder / "differences.npy"))

    def vectors(self, name: str) -> NDArray[np.float32] | None:
        """Return the vectors of `texts` or `images`, of length 1; None where no model made any."""
        if self._model is None:
            return None
        found: NDArray[np.float32] = np.load(self._model / f"{name}.npy")
        return found if found.size else None

    def standing_for(self, t: float) -> int:
        """Return the number of the kept picture that stands for a time."""
        return nearest(self.kept, self.shot_at(t), t)

    def jpeg(self, number: int) -> bytes:
        """Return a kept picture."""
        at, size = self._database.execute("SELECT at, size FROM frames WHERE id = ?", [number]).fetchone()
        with (self._folder / "frames.bin").open("rb") as file:
            file.seek(at)
            return file.read(size)

    def subtitles(self, start_s: float, end_s: float) -> list[dict[str, Any]]:
        """Return the subtitles that are seen between two times."""
        rows = self._database.execute(
            "SELECT track, language, start_s, end_s, text FROM subtitles WHERE start_s < ? AND end_s > ?"
            " ORDER BY track, start_s, rowid",
            [end_s, start_s],
        )
        return [dict(zip(("track", "language", "start_s", "end_s", "text"), row, strict=True)) for row in rows]


def _open(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", uri=True, isolation_level=None)
