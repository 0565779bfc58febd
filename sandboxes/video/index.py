"""The index of a prepared video, as files: `index.sqlite`, `frames.bin`, `times.npy`, `differences.npy`.

Equal measurements give equal bytes, written once. What a model wrote of the segments is in a folder of its own:
`model.sqlite`, `texts.npy`, `images.npy`.
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
"""Start and end in seconds."""

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
    """The measurements of a video."""

    times: Sequence[float]  # The time of each picture in seconds.
    differences: NDArray[np.float32]  # Of each picture from its predecessor, 0 to 1.
    shots: Sequence[TimeSpan]
    segments: Sequence[dict[str, Any]]  # In order, each with the columns of the table.
    frames: Sequence[tuple[float, int, int]]  # Time, offset in `frames.bin` and size of each kept picture.
    # Track, language, start, end and text of each subtitle.
    subtitles: Sequence[tuple[int, str | None, float, float, str]]


def write(folder: Path, measured: Measured) -> None:
    """Write the index, except `frames.bin`, which was written while the video was decoded."""
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
    """Write a model's captions and objects by segment, and `vectors`: embeddings `texts` and `images`, if any."""
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
        # No journal and no sync: no process reads the file before it is complete, and incomplete files are removed.
        database.execute("PRAGMA journal_mode=OFF")
        database.execute("PRAGMA synchronous=OFF")
        database.executescript(schema)
        database.execute("BEGIN")
        for table, rows in tables.items():
            rows = list(rows)  # noqa: PLW2901 - its first row tells the number of columns
            if rows:
                database.executemany(f"INSERT INTO {table} VALUES ({','.join('?' * len(rows[0]))})", rows)
        database.execute("COMMIT")
    finally:
        database.close()


class Index:
    """A prepared video, open for reading."""

    def __init__(self, folder: Path, model: Path | None) -> None:
        """Open the index in the folder of the measurements, and in the folder of a model's captions if there is one."""
        self._folder, self._model = folder, model
        self._database = _open(folder / "index.sqlite")
        self._model_database = None if model is None else _open(model / "model.sqlite")

    def close(self) -> None:
        """Close the files."""
        self._database.close()
        if self._model_database is not None:
            self._model_database.close()

    @cached_property
    def shots(self) -> list[TimeSpan]:
        """The shots in order."""
        return [(start, end) for start, end in self._database.execute("SELECT start_s, end_s FROM shots ORDER BY id")]

    def shot_at(self, t: float) -> TimeSpan:
        """Return the shot that contains a time."""
        return self.shots[span_at(self._starts, t)]

    @cached_property
    def _starts(self) -> list[float]:
        return [start for start, _ in self.shots]

    @cached_property
    def segments(self) -> list[dict[str, Any]]:
        """The segments in order, with `motion_word` and a `caption`: the model's, or the measurements in words."""
        segments = []
        for row in self._database.execute(f"SELECT id, {', '.join(_SEGMENT)} FROM segments ORDER BY id"):
            segment = dict(zip(("id", *_SEGMENT), row, strict=True))
            segment["palette"] = json.loads(segment["palette"])
            segment["motion_word"] = motion_word(segment["motion"])
            segment["caption"] = self.captions[segment["id"]] if self.captions else segment["line"]
            segments.append(segment)
        return segments

    @cached_property
    def captions(self) -> list[str]:
        """The model's caption of each segment; empty without a model."""
        if self._model_database is None:
            return []
        return [text for (text,) in self._model_database.execute("SELECT caption FROM Segments ORDER BY segment_id")]

    @cached_property
    def objects(self) -> dict[str, list[int]]:
        """The numbers of the segments in which the model saw each object, by name."""
        objects: dict[str, list[int]] = {}
        if self._model_database is not None:
            rows = self._model_database.execute(
                "SELECT category, segment_id FROM Objects JOIN Objects_Segments USING (object_id) ORDER BY 1, 2"
            )
            for name, segment in rows:
                objects.setdefault(name, []).append(segment)
        return objects

    @cached_property
    def kept(self) -> list[float]:
        """The time of each kept picture."""
        return [t for (t,) in self._database.execute("SELECT t FROM frames ORDER BY id")]

    @cached_property
    def times(self) -> NDArray[np.float64]:
        """The time of each picture."""
        return np.asarray(np.load(self._folder / "times.npy"))

    @cached_property
    def differences(self) -> NDArray[np.float32]:
        """The difference of each picture from its predecessor."""
        return np.asarray(np.load(self._folder / "differences.npy"))

    def vectors(self, name: str) -> NDArray[np.float32] | None:
        """Return the unit vectors of `texts` or `images`, one row for each segment; None if no model made them."""
        if self._model is None:
            return None
        rows: NDArray[np.float32] = np.load(self._model / f"{name}.npy")
        return rows if rows.size else None

    def kept_at(self, t: float) -> int:
        """Return the number of the kept picture that represents a time."""
        return nearest(self.kept, self.shot_at(t), t)

    def jpeg(self, number: int) -> bytes:
        """Return a kept picture as a JPEG file."""
        offset, size = self._database.execute("SELECT at, size FROM frames WHERE id = ?", [number]).fetchone()
        with (self._folder / "frames.bin").open("rb") as file:
            file.seek(offset)
            return file.read(size)

    def subtitles(self, start_s: float, end_s: float) -> list[dict[str, Any]]:
        """Return the subtitles that are visible at some time between two times."""
        rows = self._database.execute(
            "SELECT track, language, start_s, end_s, text FROM subtitles WHERE start_s < ? AND end_s > ?"
            " ORDER BY track, start_s, rowid",
            [end_s, start_s],
        )
        return [dict(zip(("track", "language", "start_s", "end_s", "text"), row, strict=True)) for row in rows]


def _open(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", uri=True, isolation_level=None)
