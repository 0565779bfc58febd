"""Pictures, sound and subtitles of video files, in order. One of the three modules that use PyAV."""

import itertools
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Self

import av
import av.error
import numpy as np
from av.container import InputContainer
from av.subtitles.subtitle import AssSubtitle
from av.video.reformatter import VideoReformatter
from numpy.typing import NDArray
from PIL import Image

from sandboxes.video.measurements import SAMPLE_RATE, SMALL, seek_pays
from sandboxes.video.messages import VideoError
from sandboxes.video.video_file import (
    decoded_frames,
    has_presentation_times,
    opened,
    pictures_of,
    raise_if_out_of_memory,
    sample_aspect,
)


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture of a video, with its time in seconds after the first picture."""

    t: float
    frame: av.VideoFrame


_EPSILON_S = 1e-6
"""Times that are closer than this are equal."""
_FAILED_SEEKS = 3
"""After so many seeks that lead nowhere, one request for several pictures reads on instead of trying more."""
_GROUPS_BACK = (0, 1.5, 6)
"""How many groups of pictures before the wanted time a seek aims at, in turn. MPEG-TS leads to the next key picture
after its target, so the first attempt fails there and the second one succeeds; groups of uneven length need the
third."""


def _timed(container: InputContainer, stream: av.VideoStream) -> Iterator[tuple[float | None, av.VideoFrame]]:
    """Yield pictures in the order of presentation, each with its time in the file; None if the file does not say it."""
    base = float(stream.time_base or 0)
    has_times = has_presentation_times(container)
    for frame in decoded_frames(container, stream):
        # AVI has no presentation times, and those that the library guesses are not in order. The time counts at which
        # the packet was due that completed the picture, as the ffmpeg program does it.
        at = frame.pts if has_times else frame.dts
        yield (None if at is None else at * base), frame


def _from_key(
    frames: Iterator[tuple[float | None, av.VideoFrame]], until_s: float
) -> Iterator[tuple[float | None, av.VideoFrame]]:
    """Leave out what comes before the first key picture; yield nothing if that is later than a time, or has none."""
    for at, frame in frames:
        if at is None or at > until_s + _EPSILON_S:
            return
        if frame.key_frame:
            yield at, frame
            break
    yield from frames


class VideoFile:
    """Decodes a video, in order or at chosen times. A context: it opens the file, and closes it.

    Theory of operation. Reading from the beginning is always right, and a seek only saves time. So a seek happens in a
    second opening of the file, beside the one that reads on, and it is believed only under these conditions:

    1. The packets show that seeks can be trusted (`info["seekable"]`, see `video_file.probe`).
    2. The first picture after the seek is a key picture. Pictures before it in presentation order need others that the
       decoder does not have (open groups of pictures), so they are left out.
    3. That key picture has a time, and is not later than the wanted time. Containers without an index (MPEG-TS) often
       lead past it; then earlier targets are tried, and at last the file is read on from where it is.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._reading = path, ExitStack()
        self._small, self._large = VideoReformatter(), VideoReformatter()
        self._start_s: float | None = None

    def __enter__(self) -> Self:
        self._container = self._reading.enter_context(opened(self._path))
        self._stream = pictures_of(self._container)
        self._aspect = sample_aspect(self._stream)
        return self

    def __exit__(self, *_error: object) -> None:
        self._reading.close()

    def all(self) -> Iterator[Picture]:
        """Yield every picture with rising times. A picture without a time follows its predecessor at the mean rate."""
        return self._risen(_timed(self._container, self._stream))

    def _risen(self, frames: Iterator[tuple[float | None, av.VideoFrame]]) -> Iterator[Picture]:
        last: float | None = None
        lasts = 1 / float(self._stream.average_rate or 25)
        for at, frame in frames:
            if self._start_s is None:
                self._start_s = at or 0.0
            t = 0.0 if last is None else last + lasts
            t = round(t if at is None else at - self._start_s, 6)
            if last is None or t > last:
                last = t
                yield Picture(t, frame)

    def at(self, times: Sequence[float], info: dict[str, Any], shown: Callable[[Picture], Any]) -> list[Any]:
        """Return what a function makes of the picture on screen at each of some rising times, in seconds."""
        gop_s = info["duration_s"] / max(1, info["key_frames"])
        gop, fps = info["frames"] / max(1, info["key_frames"]), info["frames"] / info["duration_s"]
        # Videos that an older version loaded have no such member.
        attempts = _FAILED_SEEKS if info.get("seekable") else 0
        results: list[Any] = []
        pictures = self.all()
        # `held` is on screen at t once `ahead` begins after t.
        ahead, held = next(pictures, None), None
        for t in times:
            here = held.t if held is not None else 0.0
            if attempts and seek_pays((t - here) * fps, gop):
                landed = self._seek(t, here, gop_s)
                if landed is not None:
                    pictures, ahead, held = *landed, None
                else:
                    attempts -= 1
            while ahead is not None and (held is None or ahead.t <= t + _EPSILON_S):
                held, ahead = ahead, next(pictures, None)
            if held is None:
                raise VideoError("damaged", f"no picture can be decoded at {t:g} s")
            results.append(shown(held))
        return results

    def _seek(self, t: float, here: float, gop_s: float) -> tuple[Iterator[Picture], Picture] | None:
        """Return the pictures from a key picture at or before a time on, with that key picture."""
        # None if no seek leads to a key picture between `here`, up to which the file was read, and `t`: going back
        # further saves nothing. The file then is where it was.
        assert self._start_s is not None  # The first picture was decoded before.
        reading = ExitStack()
        container = reading.enter_context(opened(self._path))
        stream = pictures_of(container)
        base = float(stream.time_base or 0)
        for groups in _GROUPS_BACK:
            target = t - groups * gop_s
            if target < here or not base:
                break
            try:
                container.seek(round((target + self._start_s) / base), stream=stream, backward=True)
            except av.error.FFmpegError as error:
                raise_if_out_of_memory(error)
                break
            pictures = self._risen(_from_key(_timed(container, stream), self._start_s + t))
            first = next(pictures, None)
            if first is not None and here < first.t <= t + _EPSILON_S:
                # Only one opening is kept: each has a decoder with its pictures in memory.
                self._reading.close()
                self._reading = reading
                return pictures, first
        reading.close()
        return None

    def small(self, picture: Picture) -> NDArray[np.uint8]:
        """Return a picture at the size at which pictures are compared, as rows of pixels of red, green and blue."""
        width, height = SMALL
        frame = self._small.reformat(picture.frame, width, height, "rgb24", interpolation="AREA")
        return np.asarray(frame.to_ndarray(), dtype=np.uint8)

    def image(self, picture: Picture, max_side: int) -> Image.Image:
        """Return a picture as it is shown: upright, with square pixels, its longer side at most `max_side` pixels."""
        frame = picture.frame
        # Players widen pictures with wide pixels and leave the height alone, so this does too.
        shown = frame.width * float(self._aspect), float(frame.height)
        scale = min(1.0, max_side / max(shown))
        width, height = (max(2, round(side * scale / 2) * 2) for side in shown)
        scaled = self._large.reformat(frame, width, height, "rgb24", interpolation="AREA")
        image: Image.Image = scaled.to_image()  # type: ignore[no-untyped-call]
        turned = int(frame.rotation) % 360
        return image.rotate(turned, expand=True) if turned else image


def sound(container: InputContainer, start_s: float) -> Iterator[tuple[int, NDArray[np.int16]]]:
    """Yield the first sound track, mono at `SAMPLE_RATE`: pieces in order, with the number of their first sample."""
    # Sample 0 lies at `start_s`, the file's time of the first picture.
    stream = next(iter(container.streams.audio), None)
    if stream is None or stream.codec_context is None:
        return
    resampler = av.AudioResampler(format="s16", layout="mono", rate=SAMPLE_RATE)
    at: int | None = None
    decoded = itertools.chain.from_iterable(_decoded_sound(container, stream))
    for frame in itertools.chain(decoded, [None]):
        if at is None:
            at = round(((frame.time if frame is not None else 0.0) or 0.0) * SAMPLE_RATE - start_s * SAMPLE_RATE)
        for piece in resampler.resample(frame):
            samples = piece.to_ndarray()[0]
            yield at, samples
            at += len(samples)


def _decoded_sound(container: InputContainer, stream: Any) -> Iterator[list[av.AudioFrame]]:
    for packet in container.demux(stream):
        try:
            yield packet.decode()
        except av.error.FFmpegError as error:
            raise_if_out_of_memory(error)


def subtitles(container: InputContainer, track: int) -> Iterator[tuple[float, float, str]]:
    """Yield start, end and text of the subtitles of a track, in the file's own time."""
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
    """Return the time of the first picture of a container, in the file's own time."""
    stream = pictures_of(container)
    for frame in decoded_frames(container, stream):
        return float((frame.pts or 0) * (stream.time_base or 0))
    return 0.0


def versions() -> str:
    """Return the versions of the libraries that decode and measure: other versions may find other values."""
    libraries = ",".join(f"{name}{'.'.join(map(str, number))}" for name, number in sorted(av.library_versions.items()))
    return f"av{av.__version__} {libraries} numpy{np.__version__}"


def load_all() -> None:
    """Load all modules of PyAV. It loads most of them on first use, which a confined worker could not."""
    for module in pkgutil.walk_packages(av.__path__, "av."):
        if not module.name.rpartition(".")[2].startswith("__"):
            import_module(module.name)
