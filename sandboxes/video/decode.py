"""Video files: what is in them, and their pictures, sound and subtitles in order. The one door to PyAV.

A file is hostile. All of this runs in worker processes only, and opens containers that hold their media themselves:
playlists and the like name other files.
"""

import errno
import itertools
import math
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import av
import av.error
import numpy as np
from av.container import InputContainer
from av.subtitles.subtitle import AssSubtitle
from av.video.reformatter import VideoReformatter
from numpy.typing import NDArray
from PIL import Image

from sandboxes.video.faults import VideoError
from sandboxes.video.measurements import SAMPLE_RATE, SMALL, seek_pays

_CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,flv,ogg,asf,mxf,gif,h264,hevc,ivf,nut"
_MAX_PIXELS = 8192 * 4608
_EARLY_S, _EARLY_SHARE = 0.5, 0.03
"""How much sooner than it says a file may end, in seconds and as a share, before it counts as cut off."""
_LARGE_PIXELS = 1280 * 720


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture of a video, at its time in seconds from the first one."""

    t: float
    frame: av.VideoFrame


@contextmanager
def opened(path: Path) -> Iterator[InputContainer]:
    """Open a container that holds a video.

    Raises:
        Fault: not-a-video, codec.
    """
    options = {"format_whitelist": _CONTAINERS, "protocol_whitelist": "file"}
    try:
        container = av.open(str(path), options=options, container_options=options)
    except (av.error.FFmpegError, ValueError, OSError) as error:
        _memory_first(error)
        text = "this is no video that can be read, or its beginning or index is missing"
        raise VideoError("not-a-video", f"{text} ({_reason(error)})") from None
    with container:
        yield container


def _memory_first(error: Exception) -> None:
    """Raise MemoryError where that is what the library said."""
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        raise MemoryError(str(error)) from None


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)


def pictures_of(container: InputContainer) -> av.VideoStream:
    """Return the stream of pictures, ready to be decoded.

    Raises:
        Fault: not-a-video, codec.
    """
    attached = av.stream.Disposition.attached_pic
    found = [stream for stream in container.streams.video if not stream.disposition & attached]
    if not found:
        raise VideoError("not-a-video", "there are no pictures in this file")
    stream = found[0]
    context = stream.codec_context
    if context is None:
        raise VideoError("codec", "nothing here decodes the pictures of this file")
    context.options = {"max_pixels": str(_MAX_PIXELS)}
    # Threads by slice or picture give the same pictures; for small ones they only cost.
    context.thread_count = 4 if (context.width or 0) * (context.height or 0) > _LARGE_PIXELS else 1
    return stream


def probe(path: Path, max_duration_s: float) -> dict[str, Any]:
    """Return what a video is, from its packets; nothing but the first picture is decoded.

    Raises:
        Fault: not-a-video, codec, empty, truncated, limit.
    """
    with opened(path) as container:
        stream = pictures_of(container)
        claimed = (container.duration or 0) / 1_000_000
        _within(claimed, max_duration_s)
        found = _packets(container, stream, max_duration_s)
        if not found.frames:
            raise VideoError("empty", "this video has no pictures: 0 frames")
        _not_cut_off(claimed, stream.frames, found)
        length = found.end_s - found.start_s
    with opened(path) as container:
        stream = pictures_of(container)
        first = next(_frames(container, stream), None)
        if first is None:
            raise VideoError("damaged", "no picture of this file can be decoded")
        return {
            "duration_s": round(length, 3),
            "frames": found.frames,
            "key_frames": found.key_frames,
            "fps": round(float(stream.average_rate or 0), 3) or round(found.frames / length, 3),
            "width": first.width,
            "height": first.height,
            "rotation": int(first.rotation) % 360,
            "codec": stream.codec_context.name,
            "pixel_format": first.format.name,
            "container": container.format.name,
            "audio": _audio_of(container),
            "subtitles": [_track(each) for each in container.streams.subtitles],
        }


def _within(seconds: float, most: float) -> None:
    if seconds > most:
        raise VideoError(
            "limit", f"this video lasts {seconds:.0f} s; this task takes up to {most:g} s (`max_duration_s`)"
        )


@dataclass(slots=True)
class _Found:
    """Pictures and key pictures, when the first begins and the last ends, and when all there is begins and ends."""

    frames: int = 0
    key_frames: int = 0
    start_s: float = math.inf
    end_s: float = -math.inf
    first_s: float = math.inf
    last_s: float = -math.inf


def _packets(container: InputContainer, stream: av.VideoStream, max_duration_s: float) -> _Found:
    found = _Found()
    lasts = 1 / float(stream.average_rate) if stream.average_rate else 0.04
    try:
        for packet in container.demux():
            if not packet.size:
                continue
            base = float(packet.time_base or 0)
            at = packet.pts if packet.pts is not None else packet.dts
            begins = found.frames * lasts if at is None else at * base
            ends = begins + float(packet.duration or 0) * base
            found.first_s, found.last_s = min(found.first_s, begins), max(found.last_s, ends)
            if packet.stream_index == stream.index:
                found.frames += 1
                found.key_frames += packet.is_keyframe
                found.start_s, found.end_s = min(found.start_s, begins), max(found.end_s, ends, begins + lasts / 2)
                _within(found.end_s - found.start_s, max_duration_s)
    except av.error.FFmpegError as error:
        _memory_first(error)
        raise VideoError(
            "truncated", f"this file breaks off after {found.frames} pictures ({_reason(error)})"
        ) from None
    return found


def _not_cut_off(claimed_s: float, claimed_frames: int, found: _Found) -> None:
    """Raise where a file holds clearly less than its header says; some say nothing, or less than there is."""
    length = found.last_s - min(found.first_s, 0.0)
    if claimed_s - length > max(_EARLY_S, _EARLY_SHARE * claimed_s):
        raise VideoError("truncated", f"this file says that it lasts {claimed_s:.1f} s, and ends after {length:.1f} s")
    if found.frames < (1 - _EARLY_SHARE) * claimed_frames - 2:
        raise VideoError("truncated", f"this file says that it has {claimed_frames} pictures, and has {found.frames}")


def _frames(container: InputContainer, stream: av.VideoStream) -> Iterator[av.VideoFrame]:
    """Yield the pictures from where the container stands, without those that cannot be decoded."""
    for packet in container.demux(stream):
        try:
            yield from packet.decode()
        except av.error.FFmpegError as error:
            _memory_first(error)
            if isinstance(error, av.error.DecoderNotFoundError):
                raise VideoError("codec", f"nothing here decodes {stream.codec_context.name}") from None


def _audio_of(container: InputContainer) -> dict[str, Any] | None:
    stream = next(iter(container.streams.audio), None)
    if stream is None or stream.codec_context is None:
        return None
    context = stream.codec_context
    return {"codec": context.name, "sample_rate": context.sample_rate, "channels": context.channels}


def _track(stream: Any) -> dict[str, Any]:
    context = stream.codec_context
    text = context is not None and context.name in _TEXT_CODECS
    return {"codec": None if context is None else context.name, "language": stream.language, "text": text}


_TEXT_CODECS = frozenset({"mov_text", "subrip", "srt", "ass", "ssa", "webvtt", "text"})


class VideoFile:
    """A video that is decoded in order, or here and there."""

    def __init__(self, container: InputContainer) -> None:
        self._container, self._stream = container, pictures_of(container)
        self._base = float(self._stream.time_base or 0)
        self._small, self._large = VideoReformatter(), VideoReformatter()
        self._start: float | None = None

    def all(self) -> Iterator[Picture]:
        """Yield every picture, times rising."""
        last = -1.0
        lasts = 1 / float(self._stream.average_rate or 25)
        for frame in _frames(self._container, self._stream):
            at = frame.pts * self._base if frame.pts is not None else None
            if self._start is None:
                self._start = at or 0.0
            t = round(last + lasts if at is None else at - self._start, 6)
            if t > last:
                last = t
                yield Picture(t, frame)

    def at(self, times: Sequence[float], info: dict[str, Any], shown: Callable[[Picture], Any]) -> list[Any]:
        """Return what shown makes of the picture on screen at each of times, which must rise."""
        gop, fps = info["frames"] / max(1, info["key_frames"]), info["frames"] / info["duration_s"]
        found: list[Any] = []
        pictures = self.all()
        ahead, held = next(pictures, None), None
        for t in times:
            here = held.t if held is not None else 0.0
            if seek_pays((t - here) * fps, gop):
                pictures, ahead, held = self._sought(t)
            while ahead is not None and (held is None or ahead.t <= t + 1e-6):
                held, ahead = ahead, next(pictures, None)
            if held is None:
                raise VideoError("damaged", f"no picture can be decoded at {t:g} s")
            found.append(shown(held))
        return found

    def _sought(self, t: float) -> tuple[Iterator[Picture], Picture | None, Picture | None]:
        """Go to the key picture before t; to the very beginning where the file's index leads past it."""
        start = self._start or 0.0
        for target in (t, 0.0):
            ticks = round((target + start) / self._base) if self._base else 0
            try:
                self._container.seek(ticks, stream=self._stream, backward=True)
            except av.error.FFmpegError:
                continue
            pictures = self.all()
            first = next(pictures, None)
            if first is not None and (first.t <= t + 1e-6 or target == 0.0):
                return pictures, first, None
        raise VideoError("damaged", f"nothing can be decoded at {t:g} s")

    def small(self, picture: Picture) -> NDArray[np.uint8]:
        """Return a picture at the size at which pictures are compared."""
        width, height = SMALL
        frame = self._small.reformat(picture.frame, width, height, "rgb24", interpolation="AREA")
        return np.asarray(frame.to_ndarray(), dtype=np.uint8)

    def image(self, picture: Picture, max_side: int) -> Image.Image:
        """Return a picture upright, its longer side at most max_side."""
        frame = picture.frame
        scale = min(1.0, max_side / max(frame.width, frame.height))
        width, height = (max(2, round(side * scale / 2) * 2) for side in (frame.width, frame.height))
        scaled = self._large.reformat(frame, width, height, "rgb24", interpolation="AREA")
        image: Image.Image = scaled.to_image()  # type: ignore[no-untyped-call]
        turned = int(frame.rotation) % 360
        return image.rotate(turned, expand=True) if turned else image


def sound(container: InputContainer, start_s: float) -> Iterator[tuple[int, NDArray[np.int16]]]:
    """Yield the first sound track in order, mono at `SAMPLE_RATE`, each piece with the number of its first sample.

    start_s: of the pictures, where number 0 is.
    """
    stream = next(iter(container.streams.audio), None)
    if stream is None or stream.codec_context is None:
        return
    resampler = av.AudioResampler(format="s16", layout="mono", rate=SAMPLE_RATE)
    at: int | None = None
    decoded = itertools.chain.from_iterable(_sounds(container, stream))
    for frame in itertools.chain(decoded, [None]):
        if at is None:
            at = round(((frame.time if frame is not None else 0.0) or 0.0) * SAMPLE_RATE - start_s * SAMPLE_RATE)
        for piece in resampler.resample(frame):
            samples = piece.to_ndarray()[0]
            yield at, samples
            at += len(samples)


def _sounds(container: InputContainer, stream: Any) -> Iterator[list[av.AudioFrame]]:
    for packet in container.demux(stream):
        try:
            yield packet.decode()
        except av.error.FFmpegError as error:
            _memory_first(error)


def subtitles(container: InputContainer, track: int) -> Iterator[tuple[float, float, str]]:
    """Yield start, end and text of the subtitles of one track, in the file's own time."""
    stream = container.streams.subtitles[track]
    base = float(stream.time_base or 0)
    for packet in container.demux(stream):
        if not packet.size or packet.pts is None:
            continue
        begins, ends = packet.pts * base, (packet.pts + (packet.duration or 0)) * base
        try:
            texts = [s.dialogue.decode(errors="replace") for s in packet.decode() if isinstance(s, AssSubtitle)]
        except av.error.FFmpegError:
            continue
        text = " ".join(" ".join(texts).replace("\\N", " ").split())
        if text:
            yield begins, ends, text


def start_of(container: InputContainer) -> float:
    """Return when the pictures of a container begin, in its own time."""
    stream = pictures_of(container)
    for frame in _frames(container, stream):
        return float((frame.pts or 0) * (stream.time_base or 0))
    return 0.0


def versions() -> str:
    """Return what decodes and measures here: other versions may find other values."""
    libraries = ",".join(f"{name}{'.'.join(map(str, number))}" for name, number in sorted(av.library_versions.items()))
    return f"av{av.__version__} {libraries} numpy{np.__version__}"


def load_all() -> None:
    """Load the library's modules, most of which it loads when a file first needs them."""
    for module in pkgutil.walk_packages(av.__path__, "av."):
        if not module.name.rpartition(".")[2].startswith("__"):
            import_module(module.name)
