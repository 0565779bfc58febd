"""The engine of video workers; see `sandboxes.workers.engine`. It runs in a worker process.

| tool | what it does |
|---|---|
| `versions` | returns the versions of the libraries |
| `probe` | returns the properties of a file |
| `begin`, `advance` | preprocess a video, one piece for each `advance` |
| `describe` | writes the captions and vectors of a model |
| `read` | runs one of the tools that only read |
| `question`, `memory`, `segments` | return what questions to a model need |
"""

import errno
import io
import os
from collections import OrderedDict
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import orjson

from sandboxes.video.faults import VideoError
from sandboxes.workers.engine import Fields

# Before NumPy is loaded. Workers are forked, which a process with threads must not be; and the arrays are small.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy as np
from PIL import Image

from sandboxes.video import decode, images, index, measurements, passes, read_tools, video_file

if TYPE_CHECKING:
    from collections.abc import Iterator

PIECE_S = 0.5
"""Length of a piece of a preprocess: how often progress is reported, and how soon a cancelled one ends."""
_MAX_OPEN = 8
"""How many indexes stay open between requests."""


def prepare() -> None:
    """Use every library once. They load modules on first use, which a confined worker cannot."""
    picture = Image.new("RGB", (16, 16))
    for form in ("jpeg", "png"):
        images.decoded(images.encoded(picture, form), 8)
    images.sheet([picture], ["0"])
    measurements.tone_hz((np.arange(measurements.SAMPLE_RATE) % 40 * 500).astype(np.int16))
    measurements.cuts([0.0, 1.0], np.ones(2, dtype=np.float32))
    measurements.palette(np.zeros((*measurements.SMALL, 3), dtype=np.uint8))
    _unit(np.ones((1, 2)))
    out = io.BytesIO()
    np.save(out, np.zeros(1))
    np.load(io.BytesIO(out.getvalue()))
    decode.load_all()


class VideoEngine:
    """Serves requests one after the other. Between them it keeps open files, and the preprocess that has begun."""

    def __init__(self) -> None:
        self._indexes: OrderedDict[tuple[str, str | None], index.Index] = OrderedDict()
        self._infos: dict[str, dict[str, Any]] = {}
        self._work: Iterator[passes.PassProgress] | None = None

    def open(self, request: Fields) -> Fields:  # noqa: ARG002 - of the interface
        """Return nothing: there is nothing to prepare."""
        return {}

    def run(self, request: Fields, body: bytes) -> tuple[Fields, bytes]:
        """Run a request. An error that the agent can act on is returned as `fault`."""
        try:
            done: tuple[Fields, bytes] = getattr(self, f"_do_{request['tool']}")(request, body)
        except VideoError as fault:
            return {"fault": fault.to_json()}, b""
        except OSError as error:
            if error.errno != errno.EFBIG:
                raise
            # The largest file that the worker may write is limits.disk_mb.
            too_large = VideoError("limit", "a file that is made from this video exceeds limits.disk_mb")
            return {"fault": too_large.to_json()}, b""
        return done

    def close(self) -> None:
        """Close all files."""
        while self._indexes:
            self._indexes.popitem()[1].close()
        self._infos.clear()
        self._work = None

    # -- loading and preparing ---------------------------------------------------------------------------------------

    def _do_versions(self, _request: Fields, _body: bytes) -> tuple[Fields, bytes]:
        return {"versions": versions()}, b""

    def _do_probe(self, request: Fields, _body: bytes) -> tuple[Fields, bytes]:
        return {"info": video_file.probe(Path(request["path"]), request["max_duration_s"])}, b""

    def _do_begin(self, request: Fields, _body: bytes) -> tuple[Fields, bytes]:
        folder = Path(request["folder"])
        work = passes.MeasuringPass(Path(request["path"]), folder, request["info"], request["settings"])
        self._work = iter(work)
        return {}, b""

    def _do_advance(self, _request: Fields, _body: bytes) -> tuple[Fields, bytes]:
        assert self._work is not None
        until = monotonic() + PIECE_S
        for progress in self._work:
            if monotonic() >= until:
                return {"done": False, "stage": progress.stage, "at_s": progress.at_s}, b""
        return {"done": True}, b""

    def _do_describe(self, request: Fields, body: bytes) -> tuple[Fields, bytes]:
        vectors, at = {}, 0
        for name, (rows, columns) in request["vectors"].items():
            size = rows * columns * 4
            vectors[name] = _unit(np.frombuffer(body[at : at + size], dtype=np.float32).reshape(rows, columns))
            at += size
        index.write_model(Path(request["folder"]), request["captions"], request["objects"], vectors)
        return {}, b""

    # -- reading -----------------------------------------------------------------------------------------------------

    def _do_read(self, request: Fields, body: bytes) -> tuple[Fields, bytes]:
        loaded, name, arguments = self._loaded(request), request["name"], request["arguments"]
        if name == "segment_localization":
            vectors = {
                kind: _unit(np.array([v], dtype=np.float32))[0] for kind, v in orjson.loads(body or b"{}").items()
            }
            answer = read_tools.segment_localization(loaded, arguments, vectors)
        else:
            answer = read_tools.READERS[name](loaded, arguments)
        if len(answer.body) > request["limit_bytes"]:
            raise VideoError(
                "too-large", f"the result has {len(answer.body)} bytes, more than limits.output_bytes. Request less"
            )
        return {"media_type": answer.media_type, "frame_t": answer.frame_t}, answer.body

    def _do_question(self, request: Fields, _body: bytes) -> tuple[Fields, bytes]:
        segment, shown = read_tools.question(self._loaded(request), request["segment"])
        return {"segment": read_tools.shown(segment), "sizes": [len(data) for data in shown]}, b"".join(shown)

    def _do_segments(self, request: Fields, _body: bytes) -> tuple[Fields, bytes]:
        loaded = self._loaded(request)
        segments, shown = read_tools.segments_with_pictures(loaded, request["first"], request["count"])
        count = len(loaded.prepared("preprocess").segments)
        return {"segments": segments, "sizes": [len(data) for data in shown], "of": count}, b"".join(shown)

    def _do_memory(self, request: Fields, _body: bytes) -> tuple[Fields, bytes]:
        loaded = self._loaded(request)
        index = loaded.prepared("object_memory_querying")
        return {"objects": index.objects, "segments": len(index.segments)}, b""

    def _loaded(self, request: Fields) -> read_tools.Loaded:
        path = request["path"]
        if path not in self._infos:
            self._infos = {path: orjson.loads(Path(path).with_name("info.json").read_bytes())}
        opened = None if request["measured"] is None else self._index(request["measured"], request["described"])
        return read_tools.Loaded(Path(path), self._infos[path], opened, request["model"], request["limit_bytes"])

    def _index(self, measured: str, described: str | None) -> index.Index:
        key = measured, described
        opened = self._indexes.get(key)
        if opened is None:
            opened = index.Index(Path(measured), None if described is None else Path(described))
            self._indexes[key] = opened
            if len(self._indexes) > _MAX_OPEN:
                self._indexes.popitem(last=False)[1].close()
        self._indexes.move_to_end(key)
        return opened


def _unit(rows: Any) -> Any:
    """Return the rows scaled to length 1, so that their products are cosines."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(lengths == 0, 1, lengths)


def make_engine() -> VideoEngine:
    """Return the engine of a new worker."""
    return VideoEngine()


def versions() -> str:
    """Return the versions that the files of a prepared video depend on."""
    return f"{passes.VERSION} {decode.versions()} {images.versions()}"
