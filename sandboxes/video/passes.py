"""One pass over a video: everything that is measured, without a picture more in memory than the one at hand."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sandboxes.video import container, decode, images, index, measurements, ranking
from sandboxes.video.faults import VideoError

VERSION = 1
"""Part of every prepared state's name: raise it when the same video and settings would give other files."""
_A_WHILE = 60
"""Pictures between two words about how far it is."""
_CANDIDATES_APART_S = 0.2


@dataclass(frozen=True, slots=True)
class PassProgress:
    """How far a preprocess is: stage, and seconds of the video."""

    stage: str
    at_s: float


@dataclass(slots=True)
class _SegmentImages:
    """What was seen of one segment so far."""

    motion: float = 0.0
    pictures: int = 0
    middle: NDArray[np.uint8] | None = None
    overlay: str | None = None


@dataclass(frozen=True, slots=True)
class _SegmentSound:
    level_db: float | None
    peak_db: float | None
    tone_hz: float | None


_NO_SOUND = _SegmentSound(None, None, None)


class MeasuringPass:
    """Makes the files of a prepared video in a folder. Iterating does the work, a piece at a time."""

    def __init__(self, source: Path, folder: Path, info: dict[str, Any], settings: dict[str, Any]) -> None:
        self._source, self._folder, self._info = source, folder, info
        self._segment_s, self._frame_s = float(settings["segment_s"]), float(settings["frame_s"])
        self._max_side = int(settings["max_side"])
        self._spans = measurements.segments(info["duration_s"], self._segment_s)
        self._seen = [_SegmentImages() for _ in self._spans]
        self._times, self._differences = array("d"), array("f")
        self._frames: list[tuple[float, int, int]] = []
        self._last_candidate_s = -1.0

    def __iter__(self) -> Iterator[PassProgress]:
        """Do the work.

        Raises:
            VideoError: the file has no picture that can be decoded.
        """
        yield from self._pictures()
        heard: list[_SegmentSound] = []
        yield from self._sound(heard)
        self._write(heard or [_NO_SOUND] * len(self._spans))

    # -- pictures ----------------------------------------------------------------------------------------------------

    def _pictures(self) -> Iterator[PassProgress]:
        with container.opened(self._source) as source, (self._folder / "frames.bin").open("wb") as out:
            video, before = decode.VideoFile(source), None
            for picture in video.all():
                small = video.small(picture)
                difference = 0.0 if before is None else measurements.difference(before, small)
                self._look(picture, small, difference)
                if self._is_kept(picture.t, difference):
                    self._keep(video, picture, out)
                before = small
                if len(self._times) % _A_WHILE == 0:
                    yield PassProgress("pictures", picture.t)
        if not self._times:
            raise VideoError("damaged", "no picture of this video can be decoded")

    def _look(self, picture: decode.Picture, small: NDArray[np.uint8], difference: float) -> None:
        self._times.append(picture.t)
        self._differences.append(difference)
        number = min(int(picture.t / self._segment_s), len(self._spans) - 1)
        start, end = self._spans[number]
        seen = self._seen[number]
        if difference <= measurements.CUT:
            seen.motion += difference
            seen.pictures += 1
        if seen.middle is None or picture.t <= (start + end) / 2:
            seen.middle = small

    def _is_kept(self, t: float, difference: float) -> bool:
        if not self._frames:
            return True
        last = self._frames[-1][0]
        if difference > measurements.CUT and t - self._last_candidate_s >= _CANDIDATES_APART_S:
            # It may be the first of a shot, which nothing before it can stand for.
            self._last_candidate_s = t
            return True
        return int((t + 1e-6) / self._frame_s) > int((last + 1e-6) / self._frame_s)

    def _keep(self, video: decode.VideoFile, picture: decode.Picture, out: Any) -> None:
        image = video.image(picture, self._max_side)
        data = images.encoded(image)
        at = self._frames[-1][1] + self._frames[-1][2] if self._frames else 0
        out.write(data)
        self._frames.append((picture.t, at, len(data)))
        seen = self._seen[min(int(picture.t / self._segment_s), len(self._spans) - 1)]
        seen.overlay = seen.overlay or measurements.overlay(np.asarray(image.convert("L")))

    # -- sound -------------------------------------------------------------------------------------------------------

    def _sound(self, heard: list[_SegmentSound]) -> Iterator[PassProgress]:
        if self._info["audio"] is None:
            return
        with container.opened(self._source) as source:
            start_s = decode.start_of(source)
        edges = [round(end * measurements.SAMPLE_RATE) for _, end in self._spans]
        held: list[NDArray[np.int16]] = []
        with container.opened(self._source) as source:
            for first, samples in decode.sound(source, start_s):
                left = samples[max(0, -first) :]
                at = max(0, first)
                while len(left) and len(heard) < len(edges):
                    room = edges[len(heard)] - at
                    held.append(left[: max(0, room)])
                    at, left = at + len(held[-1]), left[max(0, room) :]
                    if len(left):
                        heard.append(_heard(held))
                        yield PassProgress("sound", at / measurements.SAMPLE_RATE)
                        held = []
        while len(heard) < len(edges):
            heard.append(_heard(held))
            held = []

    # -- all together ------------------------------------------------------------------------------------------------

    def _write(self, heard: list[_SegmentSound]) -> None:
        differences = np.frombuffer(self._differences, dtype=np.float32).copy()
        end_s = self._info["duration_s"]
        shots = measurements.spans(measurements.cuts(self._times, differences), end_s)
        subtitles = self._subtitles()
        starts = [start for start, _ in shots]
        segments = [self._segment(n, starts, heard[n], subtitles) for n in range(len(self._spans))]
        index.write(self._folder, index.Measured(self._times, differences, shots, segments, self._frames, subtitles))

    def _segment(
        self,
        number: int,
        starts: list[float],
        heard: _SegmentSound,
        subtitles: list[tuple[int, str | None, float, float, str]],
    ) -> dict[str, Any]:
        (start, end), seen = self._spans[number], self._seen[number]
        motion = seen.motion / seen.pictures if seen.pictures else 0.0
        told: dict[str, Any] = {
            "start_s": start, "end_s": end, "first_shot": measurements.span_at(starts, start),
            "last_shot": measurements.span_at(starts, max(start, end - 1e-3)),
            "palette": [] if seen.middle is None else measurements.palette(seen.middle),
            "motion": round(motion, 5), "motion_word": measurements.motion_word(motion),
            "brightness": 0.0 if seen.middle is None else round(measurements.brightness(seen.middle), 3),
            "overlay": seen.overlay,
            "level_db": heard.level_db, "peak_db": heard.peak_db, "tone_hz": heard.tone_hz,
        }  # fmt: skip
        said = [text for _, _, begins, ends, text in subtitles if begins < end and ends > start]
        return told | {"line": ranking.line(told, list(dict.fromkeys(said)))}

    def _subtitles(self) -> list[tuple[int, str | None, float, float, str]]:
        found: list[tuple[int, str | None, float, float, str]] = []
        if not any(track["text"] for track in self._info["subtitles"]):
            return found
        with container.opened(self._source) as source:
            start_s = decode.start_of(source)
        for number, track in enumerate(self._info["subtitles"]):
            if track["text"]:
                with container.opened(self._source) as source:
                    for begins, ends, text in decode.subtitles(source, number):
                        times = round(begins - start_s, 3), round(ends - start_s, 3)
                        found.append((number, track["language"], *times, text))
        return found


def _heard(pieces: list[NDArray[np.int16]]) -> _SegmentSound:
    samples = np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int16)
    tone = measurements.tone_hz(samples)
    return _SegmentSound(
        round(measurements.level_db(samples), 1),
        round(measurements.peak_db(samples), 1),
        None if tone is None else round(tone, 1),
    )
