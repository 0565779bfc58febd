"""The tools that only read a loaded video or its index. They run in a worker process."""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from sandboxes.video import decode, images, measurements, ranking
from sandboxes.video.index import Index
from sandboxes.video.messages import VideoError

JSON = "application/json"
VISUAL_WEIGHT, TEXTUAL_WEIGHT = 18.0, 11.0
"""Weights of the two kinds of vectors in a segment's score, as in VideoAgent's code."""
QUESTION_PICTURES = 6
"""How many pictures a model is shown with a question."""
_MAX_SAMPLES = 64
"""Most pictures of one `sample_frames`."""


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """The output of a tool."""

    media_type: str
    body: bytes
    frame_t: float | None = None  # The time of the picture in the body; None for other bodies.


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded video."""

    path: Path
    info: dict[str, Any]  # From `probe`.
    index: Index | None  # None before `preprocess`.
    model: str  # The name of the model, or `none`.
    limit_bytes: int  # Largest output.

    @property
    def end_s(self) -> float:
        """The length of the video in seconds."""
        return float(self.info["duration_s"])

    def prepared(self, tool: str) -> Index:
        """Return the index that a tool needs. Raises VideoError (`not-preprocessed`) if there is none."""
        if self.index is None:
            raise VideoError("not-preprocessed", f"{tool} needs a preprocessed video. Call preprocess first")
        return self.index


Arguments = Mapping[str, Any]


def _json(members: dict[str, Any], *, label: str = "pure") -> ToolOutput:
    return ToolOutput(JSON, orjson.dumps(members | {"label": label}))


# -- times ------------------------------------------------------------------------------------------------------------


def _time(loaded: Loaded, name: str, t: float) -> float:
    if not 0 <= t <= loaded.end_s:
        raise VideoError("range", f"{name} is {t:g}, but this video has 0 to {loaded.end_s:g} s")
    return t


def _span(loaded: Loaded, arguments: Arguments) -> tuple[float, float]:
    start = _time(loaded, "start", arguments["start"] or 0.0)
    end = loaded.end_s if arguments["end"] is None else _time(loaded, "end", arguments["end"])
    if end <= start:
        raise VideoError("range", f"end is {end:g}, but must be after start, which is {start:g}")
    return start, end


def _segment(index: Index, name: str, number: int) -> int:
    if not 0 <= number < len(index.segments):
        raise VideoError("range", f"{name} is {number}, but this video has the segments 0 to {len(index.segments) - 1}")
    return number


# -- pictures ---------------------------------------------------------------------------------------------------------


def _pictures(
    loaded: Loaded, times: Sequence[float], *, exact: bool, max_side: int, form: images.ImageFormat
) -> list[tuple[float, bytes]]:
    """Return pictures at rising times as files, each with its own time; kept ones with an index, unless `exact`."""
    if loaded.index is not None and not exact:
        kept = loaded.index.kept
        numbers = [loaded.index.kept_at(t) for t in times]
        return [(kept[n], images.converted(loaded.index.jpeg(n), form, max_side)) for n in numbers]
    with decode.VideoFile(loaded.path) as video:

        def drawn(picture: decode.Picture) -> tuple[float, bytes]:
            return picture.t, images.encoded(video.image(picture, max_side), form)

        return video.at(times, loaded.info, drawn)


def get_frame(loaded: Loaded, arguments: Arguments) -> ToolOutput:
    """Return one picture as an image file."""
    t = _time(loaded, "t", arguments["t"])
    form, exact, max_side = arguments["format"], arguments["exact"], arguments["max_side"]
    ((frame_t, data),) = _pictures(loaded, [t], exact=exact, max_side=max_side, form=form)
    return ToolOutput(images.MEDIA_TYPES[form], data, frame_t)


def sample_frames(loaded: Loaded, arguments: Arguments) -> ToolOutput:
    """Return several pictures as base64, at given times or evenly spaced."""
    times = _sampled(loaded, arguments)
    form = arguments["format"]
    by_time = dict(
        zip(
            sorted(set(times)),
            _pictures(loaded, sorted(set(times)), exact=arguments["exact"], max_side=arguments["max_side"], form=form),
            strict=True,
        )
    )
    if sum(len(data) for _, data in by_time.values()) * 4 > 3 * loaded.limit_bytes:
        raise VideoError(
            "too-large", "these pictures are larger than limits.output_bytes. Request fewer, or a smaller max_side"
        )
    frames = [
        {"t": t, "frame_t": by_time[t][0], "media_type": images.MEDIA_TYPES[form],
         "data": base64.b64encode(by_time[t][1]).decode()}
        for t in times
    ]  # fmt: skip
    return _json({"frames": frames})


def _sampled(loaded: Loaded, arguments: Arguments) -> list[float]:
    if arguments["at"] is not None:
        return [_time(loaded, "at", t) for t in arguments["at"]]
    start, end = _span(loaded, arguments)
    if arguments["every_s"] is None:
        return [round(t, 3) for t in measurements.evenly(start, end, arguments["n"])]
    count = int((end - start - 1e-9) / arguments["every_s"]) + 1
    if count > _MAX_SAMPLES:
        raise VideoError(
            "range", f"every {arguments['every_s']:g} s gives {count} pictures; the limit is {_MAX_SAMPLES}"
        )
    return [round(start + n * arguments["every_s"], 3) for n in range(count)]


def contact_sheet(loaded: Loaded, arguments: Arguments) -> ToolOutput:
    """Return evenly spaced pictures on one sheet."""
    start, end = _span(loaded, arguments)
    times = [round(t, 3) for t in measurements.evenly(start, end, arguments["n"])]
    side, form = arguments["max_side"], arguments["format"]
    frames = _pictures(loaded, times, exact=False, max_side=10_000, form="jpeg")
    small = [images.decoded(data, side) for _, data in frames]
    sheet = images.sheet(small, [f"{t:.1f} s" for t, _ in frames])
    return ToolOutput(images.MEDIA_TYPES[form], images.encoded(sheet, form))


# -- measurements ----------------------------------------------------------------------------------------------------


def video_info(loaded: Loaded, _arguments: Arguments) -> ToolOutput:
    """Return the properties of the video."""
    prepared = loaded.index is not None
    # Whether seeks can be trusted concerns the decoder only.
    shown = {name: value for name, value in loaded.info.items() if name != "seekable"}
    members: dict[str, Any] = {**shown, "preprocessed": prepared, "model": loaded.model}
    if loaded.index is not None:
        members |= {"segments": len(loaded.index.segments), "shots": len(loaded.index.shots)}
    return _json(members)


def detect_shots(loaded: Loaded, arguments: Arguments) -> ToolOutput:
    """Return the shots, with the default threshold or the agent's."""
    index = loaded.prepared("detect_shots")
    shots: Sequence[measurements.MeasuredSpan] = index.shots
    if arguments["threshold"] is not None:
        starts = measurements.cuts(index.times.tolist(), index.differences, arguments["threshold"])
        shots = measurements.spans(starts, loaded.end_s)
    return _json({"shots": [{"id": n, "start_s": start, "end_s": end} for n, (start, end) in enumerate(shots)]})


def get_subtitles(loaded: Loaded, arguments: Arguments) -> ToolOutput:
    """Return the subtitles of a span."""
    index = loaded.prepared("get_subtitles")
    tracks = loaded.info["subtitles"]
    return _json({"tracks": tracks, "subtitles": index.subtitles(*_span(loaded, arguments))})


def audio_profile(loaded: Loaded, arguments: Arguments) -> ToolOutput:
    """Return level, peak and tone of the segments of a span."""
    index = loaded.prepared("audio_profile")
    start, end = _span(loaded, arguments)
    names = ("start_s", "end_s", "level_db", "peak_db", "tone_hz")
    if loaded.info["audio"] is None:
        return _json({"audio": None, "segments": []})
    segments = [{"segment": s["id"]} | {name: s[name] for name in names} for s in index.segments]
    return _json(
        {"audio": loaded.info["audio"], "segments": [s for s in segments if s["start_s"] < end and s["end_s"] > start]}
    )


# -- segments ---------------------------------------------------------------------------------------------------------


def shown(segment: dict[str, Any]) -> dict[str, Any]:
    """Return the members of a segment that agents see."""
    return {"segment": segment["id"]} | {name: segment[name] for name in ("start_s", "end_s", "caption")}


def _label(loaded: Loaded) -> str:
    return "pure" if loaded.model == "none" else "sampled"


def caption_retrieval(loaded: Loaded, arguments: Arguments) -> ToolOutput:
    """Return the captions of segments."""
    index = loaded.prepared("caption_retrieval")
    start, end = _segment(index, "start", arguments["start"]), _segment(index, "end", arguments["end"])
    if end < start:
        raise VideoError("range", f"end is {end}, but must not be before start, which is {start}")
    members = {"segments": len(index.segments), "captions": [shown(s) for s in index.segments[start : end + 1]]}
    return _json(members | {"model": loaded.model}, label=_label(loaded))


def segment_localization(loaded: Loaded, arguments: Arguments, vectors: Mapping[str, Sequence[float]]) -> ToolOutput:
    """Return the segments that a description fits best, by its embeddings (`vectors`), or else by words."""
    index = loaded.prepared("segment_localization")
    scores = _by_vectors(index, vectors) if vectors else ranking.bm25(arguments["description"], _lines(index))
    matches = [
        shown(index.segments[n]) | {"score": round(scores[n], 4)}
        for n in ranking.best(scores, arguments["k"])
        if vectors or scores[n] > 0
    ]
    members = {"segments": len(index.segments), "found": matches, "by": "vectors" if vectors else "words"}
    return _json(members | {"model": loaded.model}, label=_label(loaded))


def _lines(index: Index) -> list[str]:
    return [f"{s['caption']} {s['line']}" if index.captions else s["line"] for s in index.segments]


def _by_vectors(index: Index, vectors: Mapping[str, Sequence[float]]) -> list[float]:
    scores = np.zeros(len(index.segments))
    for name, weight in (("images", VISUAL_WEIGHT), ("texts", TEXTUAL_WEIGHT)):
        known, wanted = index.vectors(name), np.asarray(vectors.get(name, ()), dtype=np.float32)
        if known is None or not wanted.size:
            continue
        if known.shape[1] != wanted.size:
            raise VideoError("damaged", f"the model's vectors have {wanted.size} members now, but had {known.shape[1]}")
        scores += weight * (known @ wanted)
    return [float(score) for score in scores]


def question(loaded: Loaded, number: int) -> tuple[dict[str, Any], list[bytes]]:
    """Return a segment and the pictures that a model is shown, with some from just before and after it."""
    index = loaded.prepared("visual_question_answering")
    segment = index.segments[_segment(index, "segment", number)]
    length = segment["end_s"] - segment["start_s"]
    around = segment["start_s"] - length, segment["end_s"] + length
    near = [n for n, t in enumerate(index.kept) if around[0] <= t < around[1]]
    if not near:
        near = [index.kept_at(segment["start_s"])]
    step = max(1.0, len(near) / QUESTION_PICTURES)
    chosen = [near[int(n * step)] for n in range(min(len(near), QUESTION_PICTURES))]
    return segment, [index.jpeg(n) for n in chosen]


def visual_question_answering(loaded: Loaded, arguments: Arguments) -> ToolOutput:
    """Return that no model can answer."""
    index = loaded.prepared("visual_question_answering")
    segment = index.segments[_segment(index, "segment", arguments["segment"])]
    answer = f"{ranking.NO_MODEL} no answer can be given: this task has no model that sees. What was measured is above."
    return _json({**shown(segment), "answer": answer, "answered": False, "model": "none"})


def object_memory_querying(loaded: Loaded, arguments: Arguments) -> ToolOutput:
    """Return that no model can answer, with the segments in which words of the question occur."""
    index = loaded.prepared("object_memory_querying")
    scores = ranking.bm25(arguments["question"], _lines(index))
    matches = [shown(index.segments[n]) for n in ranking.best(scores, 5) if scores[n] > 0]
    answer = f"{ranking.NO_MODEL} no objects were looked for: this task has no model that sees."
    return _json({"answer": answer, "answered": False, "segments": matches, "model": "none"})


def segments_with_pictures(loaded: Loaded, first: int, count: int) -> tuple[list[dict[str, Any]], list[bytes]]:
    """Return segments, and for each the kept picture nearest to its middle."""
    index = loaded.prepared("preprocess")
    chosen = index.segments[first : first + count]
    middles = [(segment["start_s"] + segment["end_s"]) / 2 for segment in chosen]
    numbers = [index.kept_at(t) for t in middles]
    return [shown(segment) for segment in chosen], [index.jpeg(n) for n in numbers]


READERS: dict[str, Callable[[Loaded, Arguments], ToolOutput]] = {
    "video_info": video_info, "sample_frames": sample_frames, "get_frame": get_frame, "contact_sheet": contact_sheet,
    "detect_shots": detect_shots, "get_subtitles": get_subtitles, "audio_profile": audio_profile,
    "caption_retrieval": caption_retrieval, "visual_question_answering": visual_question_answering,
    "object_memory_querying": object_memory_querying,
}  # fmt: skip
"""The tools by name, except `segment_localization`, which also takes vectors."""
