"""Pictures, sound and subtitles of video files, in order. One of the three modules that use PyAV."""

import itertools
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
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
from sandboxes.video.video_file import decoded_frames, pictures_of, raise_if_out_of_memory


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture of a video.

    Attributes:
        t: Its time in seconds after the first picture.
        frame: The decoded picture.
    """

    t: float
    frame: av.VideoFrame


class VideoFile:
    """Decodes a video, in order or at chosen times."""

    def __init__(self, container: InputContainer) -> None:
        self._container, self._stream = container, pictures_of(container)
        self._base = float(self._stream.time_base or 0)
        self._small, self._large = VideoReformatter(), VideoReformatter()
        self._start: float | None = None

    def all(self) -> Iterator[Picture]:
        """Yield every picture with rising times. A picture without a time follows its predecessor at the mean rate."""
        last = -1.0
        lasts = 1 / float(self._stream.average_rate or 25)
        for frame in decoded_frames(self._container, self._stream):
            at = frame.pts * self._base if frame.pts is not None else None
            if self._start is None:
                self._start = at or 0.0
            t = round(last + lasts if at is None else at - self._start, 6)
            if t > last:
                last = t
                yield Picture(t, frame)

    def at(self, times: Sequence[float], info: dict[str, Any], shown: Callable[[Picture], Any]) -> list[Any]:
        """Return what a function makes of the picture that is on screen at each of some times.

        Args:
            times: Seconds after the first picture, rising.
            info: The properties of the video, from `probe`.
            shown: Called once for each time.

        Raises:
            VideoError: `damaged`: nothing can be decoded at one of the times.
        """
        gop, fps = info["frames"] / max(1, info["key_frames"]), info["frames"] / info["duration_s"]
        results: list[Any] = []
        pictures = self.all()
        # `held` is on screen at t once `ahead` begins after t.
        ahead, held = next(pictures, None), None
        for t in times:
            here = held.t if held is not None else 0.0
            if seek_pays((t - here) * fps, gop):
                pictures, ahead, held = self._seek(t)
            while ahead is not None and (held is None or ahead.t <= t + 1e-6):
                held, ahead = ahead, next(pictures, None)
            if held is None:
                raise VideoError("damaged", f"no picture can be decoded at {t:g} s")
            results.append(shown(held))
        return results

    def _seek(self, t: float) -> tuple[Iterator[Picture], Picture | None, Picture | None]:
        """Go to the key picture before a time, or to the beginning if the file's index leads past that time."""
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
        """Return a picture at the size at which pictures are compared, as rows of pixels of red, green and blue."""
        width, height = SMALL
        frame = self._small.reformat(picture.frame, width, height, "rgb24", interpolation="AREA")
        return np.asarray(frame.to_ndarray(), dtype=np.uint8)

    def image(self, picture: Picture, max_side: int) -> Image.Image:
        """Return a picture upright, its longer side at most `max_side` pixels."""
        frame = picture.frame
        scale = min(1.0, max_side / max(frame.width, frame.height))
        width, height = (max(2, round(side * scale / 2) * 2) for side in (frame.width, frame.height))
        scaled = self._large.reformat(frame, width, height, "rgb24", interpolation="AREA")
        image: Image.Image = scaled.to_image()  # type: ignore[no-untyped-call]
        turned = int(frame.rotation) % 360
        return image.rotate(turned, expand=True) if turned else image


def sound(container: InputContainer, start_s: float) -> Iterator[tuple[int, NDArray[np.int16]]]:
    """Yield the first sound track, mono at `SAMPLE_RATE`: pieces in order, each with the number of its first sample.

    Args:
        container: The video.
        start_s: The file's time at which sample number 0 lies: the time of the first picture.
    """
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
