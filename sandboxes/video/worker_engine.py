"""The engine of video workers; see `sandboxes.workers.engine`. It runs in a worker process."""

import errno
import io
import os
from collections import OrderedDict
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import orjson

from sandboxes.ipc.codec import IpcMessage
from sandboxes.ipc.messages import Done
from sandboxes.video.messages import (
    BeginPreprocess,
    LibraryVersions,
    ObjectsSeen,
    PieceDone,
    PreprocessPiece,
    ProbeVideo,
    Reading,
    ReadObjects,
    ReadVersions,
    RunVideoTool,
    SegmentsShown,
    ShowSegment,
    ShowSegments,
    VideoError,
    VideoFault,
    VideoProbed,
    VideoToolDone,
    WriteModel,
)
from sandboxes.workers.engine import Answer

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

    def answer(self, request: IpcMessage, body: bytes) -> Answer:
        """Answer a request. An error that the agent can act on is returned as a `VideoFault`."""
        try:
            return self._answer(request, body)
        except VideoError as fault:
            return VideoFault(fault.kind, str(fault)), b""
        except OSError as error:
            if error.errno != errno.EFBIG:
                raise
            # The largest file that the worker may write is limits.disk_mb.
            return VideoFault("limit", "a file that is made from this video exceeds limits.disk_mb"), b""

    def _answer(self, request: IpcMessage, body: bytes) -> Answer:
        match request:
            case ReadVersions():
                return LibraryVersions(versions()), b""
            case ProbeVideo(path, max_duration_s):
                return VideoProbed(video_file.probe(Path(path), max_duration_s)), b""
            case BeginPreprocess(path, folder, info, settings):
                self._work = iter(passes.MeasuringPass(Path(path), Path(folder), info, settings))
                return Done(), b""
            case PreprocessPiece():
                return self._advance(), b""
            case WriteModel():
                return _write_model(request, body), b""
            case RunVideoTool():
                return self._read(request, body)
            case ShowSegment(video, number):
                segment, shown = read_tools.question(self._loaded(video), number)
                return SegmentsShown([read_tools.shown(segment)], [len(data) for data in shown], 1), b"".join(shown)
            case ShowSegments(video, first, count):
                loaded = self._loaded(video)
                segments, shown = read_tools.segments_with_pictures(loaded, first, count)
                of = len(loaded.prepared("preprocess").segments)
                return SegmentsShown(segments, [len(data) for data in shown], of), b"".join(shown)
            case ReadObjects(video):
                prepared = self._loaded(video).prepared("object_memory_querying")
                return ObjectsSeen(prepared.objects, len(prepared.segments)), b""
        raise AssertionError(f"{request.op} is not for this engine")

    def close(self) -> None:
        """Close all files."""
        while self._indexes:
            self._indexes.popitem()[1].close()
        self._infos.clear()
        self._work = None

    def _advance(self) -> PieceDone:
        assert self._work is not None
        until = monotonic() + PIECE_S
        for progress in self._work:
            if monotonic() >= until:
                return PieceDone(progress.stage, progress.at_s)
        return PieceDone()

    def _read(self, request: RunVideoTool, body: bytes) -> Answer:
        loaded, name, arguments = self._loaded(request.video), request.name, request.arguments
        if name == "segment_localization":
            vectors = {
                kind: _unit(np.array([v], dtype=np.float32))[0] for kind, v in orjson.loads(body or b"{}").items()
            }
            answer = read_tools.segment_localization(loaded, arguments, vectors)
        else:
            answer = read_tools.READERS[name](loaded, arguments)
        if len(answer.body) > request.video.limit_bytes:
            raise VideoError(
                "too-large", f"the result has {len(answer.body)} bytes, more than limits.output_bytes. Request less"
            )
        return VideoToolDone(answer.media_type, answer.frame_t), answer.body

    def _loaded(self, video: Reading) -> read_tools.Loaded:
        if video.path not in self._infos:
            self._infos = {video.path: orjson.loads(Path(video.path).with_name("info.json").read_bytes())}
        opened = None if video.measured is None else self._index(video.measured, video.described)
        return read_tools.Loaded(Path(video.path), self._infos[video.path], opened, video.model, video.limit_bytes)

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


def _write_model(request: WriteModel, body: bytes) -> Done:
    vectors, at = {}, 0
    for name, (rows, columns) in request.vectors.items():
        size = rows * columns * 4
        vectors[name] = _unit(np.frombuffer(body[at : at + size], dtype=np.float32).reshape(rows, columns))
        at += size
    index.write_model(Path(request.folder), request.captions, request.objects, vectors)
    return Done()


def _unit(rows: Any) -> Any:
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(lengths == 0, 1, lengths)


def make_engine() -> VideoEngine:
    """Return the engine of a new worker."""
    return VideoEngine()


def versions() -> str:
    """Return the versions that the files of a prepared video depend on."""
    return f"{passes.VERSION} {decode.versions()} {images.versions()}"
