"""Trajectories as files: JSON Lines, Parquet, or a directory that Hugging Face's `datasets` loads.

This runs in commands and in other programs, and loads nothing of the proxy. It alone imports pyarrow (extra `parquet`).
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any, Literal

Format = Literal["jsonl", "parquet", "hf"]
MARKS = ("timeout", "memory", "disk", "pids", "output", "broken", "machine")
"""The marks of calls, which a test compares with those of the proxy."""
_GROUP_BYTES = 8 << 20
"""JSON bytes of the rows that one row group holds. As objects in memory they take up to ten times as much."""
_SHARD_BYTES = 1 << 30
"""JSON bytes of the rows in one file of a dataset: some hundred megabytes of Parquet."""
_CARD = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*.parquet
---
Rollouts of agents with their tool calls, exported by Forkpoint. Each row is one rollout, or one response of its model;
docs/data.md of Forkpoint describes the columns.
"""


class TrajectoryFileError(ValueError):
    """A file cannot be written as requested; the text says what to do."""


def format_of(path: Path) -> Format:
    """Return the format of a path's suffix, a dataset for none. Raises TrajectoryFileError for another suffix."""
    formats: Mapping[str, Format] = {".jsonl": "jsonl", ".json": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
    if not path.suffix:
        return "hf"
    if path.suffix not in formats:
        raise TrajectoryFileError(f"the format of {path.name} is not known. Choose one: jsonl, parquet or hf.")
    return formats[path.suffix]


class Lines:
    """Splits a chunked response into lines at line feeds alone: answers may hold other characters that end lines."""

    def __init__(self) -> None:
        self._pending: list[bytes] = []

    def of(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the lines that end in a chunk, without their line ends. Every line of the proxy ends in one."""
        *ended, rest = chunk.split(b"\n")
        for line in ended:
            yield b"".join([*self._pending, line])
            self._pending.clear()
        self._pending.append(rest)


def lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of a response that arrives in chunks, without their line ends."""
    split = Lines()
    for chunk in chunks:
        yield from split.of(chunk)


def write(chunks: Iterable[bytes], path: Path, kind: Format | None = None, *, turns: bool = False) -> None:
    """Write a response of `GET …/trajectories` to a file or a new directory, which appears when it is complete.

    Without a format the name says it. With `turns`, the lines are turns and not rollouts. Raises
    TrajectoryFileError, or OSError if it cannot be written.
    """
    chosen: dict[Format, Callable[[Iterable[bytes], Path], None]] = {
        "jsonl": _write_jsonl,
        "parquet": partial(_write_parquet, turns=turns),
        "hf": partial(_write_dataset, turns=turns),
    }
    kind = kind or format_of(path)
    if kind == "hf" and path.exists():
        raise TrajectoryFileError(f"{path} exists. Choose a directory that does not.")
    draft = path.with_name(f"{path.name}.part")
    try:
        chosen[kind](chunks, draft)
        draft.rename(path)
    finally:
        if draft.is_dir():
            shutil.rmtree(draft)
        else:
            draft.unlink(missing_ok=True)


def _write_jsonl(chunks: Iterable[bytes], path: Path) -> None:
    with path.open("wb") as file:
        for chunk in chunks:
            file.write(chunk)


def _write_parquet(chunks: Iterable[bytes], path: Path, *, turns: bool) -> None:
    _write_shards(lines(chunks), lambda _: path, None, turns)


def _write_dataset(chunks: Iterable[bytes], path: Path, *, turns: bool) -> None:
    (path / "data").mkdir(parents=True)
    (path / "README.md").write_text(_CARD)
    _write_shards(lines(chunks), lambda number: path / "data" / f"train-{number:05d}.parquet", _SHARD_BYTES, turns)


def _write_shards(rows: Iterator[bytes], path: Callable[[int], Path], shard_bytes: int | None, turns: bool) -> None:
    """Write rows to numbered files: the first one always, another one after each `shard_bytes`; None for one file."""
    _write_shard(_up_to(rows, shard_bytes), path(0), turns)
    for number in count(1):
        first = next(rows, None)
        if first is None:
            return
        _write_shard(_up_to(chain((first,), rows), shard_bytes), path(number), turns)


def _up_to(rows: Iterator[bytes], size_bytes: int | None) -> Iterator[bytes]:
    written = 0
    for row in rows:
        yield row
        written += len(row)
        if size_bytes is not None and written >= size_bytes:
            return


def _write_shard(rows: Iterator[bytes], path: Path, turns: bool) -> None:
    try:
        import pyarrow as pa  # noqa: PLC0415 - optional, and slow to load
        from pyarrow import parquet  # noqa: PLC0415 - optional, and slow to load
    except ImportError:
        raise TrajectoryFileError("this format needs pyarrow: pip install 'forkpoint[parquet]'.") from None
    schema, row = (_turn_schema(pa), dict) if turns else (_schema(pa), _row)
    with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        while True:
            group = [row(json.loads(line)) for line in _up_to(rows, _GROUP_BYTES)]
            if not group:
                return
            writer.write_table(pa.Table.from_pylist(group, schema=schema))


def _row(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line as a row: the labels that most trainers use are columns, and all of them one JSON text."""
    labels, totals = line["labels"], line["totals"]
    named = {name: labels.get(name) for name in ("run", "group", "policy", "step", "epoch")}
    return {
        **line,
        **named,
        "labels": json.dumps(labels, ensure_ascii=False, separators=(",", ":")),
        **{f"total_{name}": totals[name] for name in totals},
        **{f"mark_{mark}": line["marks"].get(mark, 0) for mark in MARKS},
    }


def _turn_schema(pa: Any) -> Any:
    text = pa.string()
    return pa.schema([
        ("task", text), ("rollout", text), ("turn", pa.int64()), ("node", text), ("parent", text), ("prompt", text),
        ("response", text), ("reward", pa.float64()),
    ])  # fmt: skip


def _schema(pa: Any) -> Any:
    text, seconds, whole = pa.string(), pa.float64(), pa.int64()
    function = pa.struct([("name", text), ("arguments", text)])
    tool_call = pa.struct([("id", text), ("type", text), ("function", function)])
    message = pa.struct([
        ("role", text), ("content", text), ("tool_calls", pa.list_(tool_call)), ("tool_call_id", text), ("name", text),
    ])  # fmt: skip
    used = pa.struct([
        ("cpu_s", seconds), ("peak_bytes", whole), ("read_bytes", whole), ("written_bytes", whole),
    ])  # fmt: skip
    call = pa.struct([
        ("turn", whole), ("id", text), ("outcome", text), ("hit", pa.bool_()), ("record", whole), ("endpoint", text),
        ("tool", text), ("status", whole), ("media_type", text), ("encoding", text), ("truncated", pa.bool_()),
        ("exit_code", whole), ("effect", pa.list_(text)), ("node", text), ("tool_s", seconds), ("recorded_at", seconds),
        ("resources", used), ("marks", pa.list_(text)),
    ])  # fmt: skip
    return pa.schema([
        ("task", text), ("rollout", text), ("id", whole), ("run", text), ("step", whole), ("epoch", whole),
        ("group", text), ("policy", text), ("reward", seconds), ("labels", text), ("finished", pa.bool_()),
        ("complete", pa.bool_()), ("created_at", seconds), ("used_at", seconds), ("start", text), ("node", text),
        ("messages", pa.list_(message)), ("calls", pa.list_(call)),
        *((f"total_{name}", whole) for name in ("calls", "hits", "waits", "misses", "bypasses")),
        *((f"total_{name}", seconds) for name in ("executed_s", "saved_s", "restored_s", "replayed_s", "waited_s")),
        *((f"mark_{mark}", whole) for mark in MARKS),
    ])  # fmt: skip
