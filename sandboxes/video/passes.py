"""The measuring pass: everything that is measured in a video.

Theory of operation. Three passes read the file, so that memory stays constant however long the video is:

1. Pictures. Each is reduced to `SMALL` and compared with its predecessor. A JPEG is kept once in each interval of
   `frame_s`, and where a shot may begin, because no earlier picture represents a new shot.
2. Sound. Samples arrive in pieces that do not match the segments, so they are cut at the ends of segments.
3. Subtitles, if the file has a text track.

Cuts are decided at the end, because their threshold depends on the whole video's median. The pass is an iterator: a
worker runs it piece by piece, reports progress in between, and can be ended at any piece.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sandboxes.video import decode, images, index, measurements, ranking, video_file
from sandboxes.video.messages import VideoError

VERSION = 2
"""Version of the pass, part of the name of every measurement. Raise it when equal videos would give other files."""
_PROGRESS_PICTURES = 60
"""How many pictures lie between two reports of progress."""
_MIN_CANDIDATE_GAP_S = 0.2
"""Shortest time between two pictures that are kept because a shot may begin. Flicker would keep every picture."""


@dataclass(frozen=True, slots=True)
class PassProgress:
    """The stage of a pass, `pictures` or `sound`, and how far it is in seconds of the video."""

    stage: str
    at_s: float


@dataclass(slots=True)
class _SegmentImages:
    motion: float = 0.0  # The sum of the differences that are no cuts.
    pictures: int = 0  # How many differences were added.
    middle: NDArray[np.uint8] | None = None  # The picture in the middle of the segment, reduced.
    overlay: str | None = None  # The edge near which a picture has text; None if none was found.


@dataclass(frozen=True, slots=True)
class _SegmentSound:
    level_db: float | None
    peak_db: float | None
    tone_hz: float | None


_NO_SOUND = _SegmentSound(None, None, None)


class MeasuringPass:
    """Makes the index of a video in a folder. Iterating runs the pass, one piece at a time."""

    def __init__(self, source: Path, folder: Path, info: dict[str, Any], settings: dict[str, Any]) -> None:
        self._source, self._folder, self._info = source, folder, info
        self._segment_s, self._frame_s = float(settings["segment_s"]), float(settings["frame_s"])
        self._max_side = int(settings["max_side"])
        self._spans = measurements.segments(info["duration_s"], self._segment_s)
        self._segments_seen = [_SegmentImages() for _ in self._spans]
        self._times, self._differences = array("d"), array("f")
        self._frames: list[tuple[float, int, int]] = []
        self._last_candidate_s = -1.0

    def __iter__(self) -> Iterator[PassProgress]:
        """Run the pass. Raises VideoError (`damaged`) if no picture can be decoded."""
        yield from self._pictures()
        sounds: list[_SegmentSound] = []
        yield from self._sound(sounds)
        self._write(sounds or [_NO_SOUND] * len(self._spans))

    # -- pictures ----------------------------------------------------------------------------------------------------

    def _pictures(self) -> Iterator[PassProgress]:
        with decode.VideoFile(self._source) as video, (self._folder / "frames.bin").open("wb") as out:
            before: NDArray[np.uint8] | None = None
            for picture in video.all():
                small = video.small(picture)
                difference = 0.0 if before is None else measurements.difference(before, small)
                self._measure(picture, small, difference)
                if self._is_kept(picture.t, difference):
                    self._keep(video, picture, out)
                before = small
                if len(self._times) % _PROGRESS_PICTURES == 0:
                    yield PassProgress("pictures", picture.t)
        if not self._times:
            raise VideoError("damaged", "no picture of the video can be decoded")

    def _measure(self, picture: decode.Picture, small: NDArray[np.uint8], difference: float) -> None:
        self._times.append(picture.t)
        self._differences.append(difference)
        number = min(int(picture.t / self._segment_s), len(self._spans) - 1)
        start, end = self._spans[number]
        seen = self._segments_seen[number]
        # A cut is no motion.
        if difference <= measurements.CUT:
            seen.motion += difference
            seen.pictures += 1
        if seen.middle is None or picture.t <= (start + end) / 2:
            seen.middle = small

    def _is_kept(self, t: float, difference: float) -> bool:
        if not self._frames:
            return True
        last = self._frames[-1][0]
        if difference > measurements.CUT and t - self._last_candidate_s >= _MIN_CANDIDATE_GAP_S:
            # A shot may begin here, and no earlier picture represents it.
            self._last_candidate_s = t
            return True
        return int((t + 1e-6) / self._frame_s) > int((last + 1e-6) / self._frame_s)

    def _keep(self, video: decode.VideoFile, picture: decode.Picture, out: Any) -> None:
        image = video.image(picture, self._max_side)
        data = images.encoded(image)
        at = self._frames[-1][1] + self._frames[-1][2] if self._frames else 0
        out.write(data)
        self._frames.append((picture.t, at, len(data)))
        seen = self._segments_seen[min(int(picture.t / self._segment_s), len(self._spans) - 1)]
        seen.overlay = seen.overlay or measurements.overlay(np.asarray(image.convert("L")))

    # -- sound -------------------------------------------------------------------------------------------------------

    def _sound(self, sounds: list[_SegmentSound]) -> Iterator[PassProgress]:
        if self._info["audio"] is None:
            return
        with video_file.opened(self._source) as source:
            start_s = decode.start_of(source)
        edges = [round(end * measurements.SAMPLE_RATE) for _, end in self._spans]
        held: list[NDArray[np.int16]] = []
        with video_file.opened(self._source) as source:
            for first, samples in decode.sound(source, start_s):
                # Samples before the first picture belong to no segment.
                remaining = samples[max(0, -first) :]
                at = max(0, first)
                while len(remaining) and len(sounds) < len(edges):
                    room = edges[len(sounds)] - at
                    held.append(remaining[: max(0, room)])
                    at, remaining = at + len(held[-1]), remaining[max(0, room) :]
                    if len(remaining):
                        sounds.append(_measure_sound(held))
                        yield PassProgress("sound", at / measurements.SAMPLE_RATE)
                        held = []
        while len(sounds) < len(edges):
            sounds.append(_measure_sound(held))
            held = []

    # -- the index ------------------------------------------------------------------------------------------------

    def _write(self, sounds: list[_SegmentSound]) -> None:
        differences = np.frombuffer(self._differences, dtype=np.float32).copy()
        end_s = self._info["duration_s"]
        shots = measurements.spans(measurements.cuts(self._times, differences), end_s)
        subtitles = self._subtitles()
        starts = [start for start, _ in shots]
        segments = [self._segment(n, starts, sounds[n], subtitles) for n in range(len(self._spans))]
        index.write(self._folder, index.Measured(self._times, differences, shots, segments, self._frames, subtitles))

    def _segment(
        self,
        number: int,
        starts: list[float],
        sound: _SegmentSound,
        subtitles: list[tuple[int, str | None, float, float, str]],
    ) -> dict[str, Any]:
        (start, end), seen = self._spans[number], self._segments_seen[number]
        motion = seen.motion / seen.pictures if seen.pictures else 0.0
        segment: dict[str, Any] = {
            "start_s": start, "end_s": end, "first_shot": measurements.span_at(starts, start),
            "last_shot": measurements.span_at(starts, max(start, end - 1e-3)),
            "palette": [] if seen.middle is None else measurements.palette(seen.middle),
            "motion": round(motion, 5), "motion_word": measurements.motion_word(motion),
            "brightness": 0.0 if seen.middle is None else round(measurements.brightness(seen.middle), 3),
            "overlay": seen.overlay,
            "level_db": sound.level_db, "peak_db": sound.peak_db, "tone_hz": sound.tone_hz,
        }  # fmt: skip
        texts = [text for _, _, begins, ends, text in subtitles if begins < end and ends > start]
        return segment | {"line": ranking.line(segment, list(dict.fromkeys(texts)))}

    def _subtitles(self) -> list[tuple[int, str | None, float, float, str]]:
        entries: list[tuple[int, str | None, float, float, str]] = []
        if not any(track["text"] for track in self._info["subtitles"]):
            return entries
        with video_file.opened(self._source) as source:
            start_s = decode.start_of(source)
        for number, track in enumerate(self._info["subtitles"]):
            if track["text"]:
                with video_file.opened(self._source) as source:
                    for begins, ends, text in decode.subtitles(source, number):
                        times = round(begins - start_s, 3), round(ends - start_s, 3)
                        entries.append((number, track["language"], *times, text))
        return entries


def _measure_sound(pieces: list[NDArray[np.int16]]) -> _SegmentSound:
    samples = np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int16)
    tone = measurements.tone_hz(samples)
    return _SegmentSound(
        round(measurements.level_db(samples), 1),
        round(measurements.peak_db(samples), 1),
        None if tone is None else round(tone, 1),
    )
