"""What a worker process does with videos. See `sandboxes.sqlbox.engine.Engine`, whose workers these are.

Requests name a `tool`: `probe`; `begin` and `advance`, a preprocess piece by piece; `describe`, which writes what a
model said; `read`, `question`, `memory`, `segments` of a loaded video; `versions`.
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

# One thread for each worker: pictures are small, and a process that has threads cannot be forked.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy as np
from PIL import Image

from sandboxes.video import decode, images, index, measurements, passes, probe, read_tools

if TYPE_CHECKING:
    from collections.abc import Iterator

PIECE_S = 0.5
"""How long a piece of a preprocess takes."""
_OPEN = 8


def prepare() -> None:
    """Load what is loaded when it is first used: once rights are given up, no module can be read."""
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
    """Serves one request after the other; what it keeps between them is open files."""

    def __init__(self) -> None:
        self._indexes: OrderedDict[tuple[str, str | None], index.Index] = OrderedDict()
        self._infos: dict[str, dict[str, Any]] = {}
        self._work: Iterator[passes.PassProgress] | None = None

    def open(self, request: Fields) -> Fields:  # noqa: ARG002 - of the interface
        """Nothing to get ready."""
        return {}

    def run(self, request: Fields, body: bytes) -> tuple[Fields, bytes]:
        """Run one request; a fault of the agent's or the file's is told as `fault`."""
        try:
            done: tuple[Fields, bytes] = getattr(self, f"_do_{request['tool']}")(request, body)
        except VideoError as fault:
            return {"fault": fault.to_json()}, b""
        except OSError as error:
            if error.errno != errno.EFBIG:
                raise
            told = VideoError("limit", "a file that is made of this video exceeds limits.disk_mb")
            return {"fault": told.to_json()}, b""
        return done

    def close(self) -> None:
        """Let go of all files."""
        while self._indexes:
            self._indexes.popitem()[1].close()
        self._infos.clear()
        self._work = None

    # -- loading and preparing ---------------------------------------------------------------------------------------

    def _do_versions(self, _request: Fields, _body: bytes) -> tuple[Fields, bytes]:
        return {"versions": versions()}, b""

    def _do_probe(self, request: Fields, _body: bytes) -> tuple[Fields, bytes]:
        return {"info": probe.probe(Path(request["path"]), request["max_duration_s"])}, b""

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
                "too-large", f"this answer is {len(answer.body)} bytes, more than limits.output_bytes. Ask for less"
            )
        return {"media_type": answer.media_type, "frame_t": answer.frame_t}, answer.body

    def _do_question(self, request: Fields, _body: bytes) -> tuple[Fields, bytes]:
        segment, shown = read_tools.question(self._loaded(request), request["segment"])
        return {"segment": read_tools.shown(segment), "sizes": [len(data) for data in shown]}, b"".join(shown)

    def _do_segments(self, request: Fields, _body: bytes) -> tuple[Fields, bytes]:
        loaded = self._loaded(request)
        segments, shown = read_tools.stand_ins(loaded, request["first"], request["count"])
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
        found = self._indexes.get(key)
        if found is None:
            found = index.Index(Path(measured), None if described is None else Path(described))
            self._indexes[key] = found
            if len(self._indexes) > _OPEN:
                self._indexes.popitem(last=False)[1].close()
        self._indexes.move_to_end(key)
        return found


def _unit(rows: Any) -> Any:
    """Return rows of length 1, so that a product is a cosine."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(lengths == 0, 1, lengths)


def make_engine() -> VideoEngine:
    return VideoEngine()


def versions() -> str:
    """Return what the files of a prepared video depend on, beside the video and the settings."""
    return f"{passes.VERSION} {decode.versions()} {images.versions()}"
