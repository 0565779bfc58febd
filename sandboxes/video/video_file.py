"""Video files: opening them, and what they are by their packets, without decoding. One of the modules that use PyAV.

A file is hostile. All of this runs in worker processes only, which may be killed at any time. Only containers that hold
their media themselves are opened, because playlists and the like name other files.
"""

import errno
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import av.error
from av.container import InputContainer

from sandboxes.video.messages import VideoError

_CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,flv,ogg,asf,mxf,gif,h264,hevc,ivf,nut"
"""FFmpeg's names of the container formats that are opened."""
_UNSTAMPED = frozenset({"mpeg"})
"""Containers whose packets have times only now and then. After a seek, the library guesses other times for the pictures
in between than it does from the beginning, by a whole picture or a half."""
_MAX_PIXELS = 8192 * 4608
"""Largest picture that is decoded. One in RGB takes 113 MB."""
_MAX_ASPECT = 10
"""Largest ratio of a pixel's sides that is believed. Real ones lie between 1/3 and 3; a false one would leave a picture
of two pixels' width."""
_LARGE_PIXELS = 1280 * 720
"""Pictures above this size are decoded by several threads."""


@contextmanager
def opened(path: Path) -> Iterator[InputContainer]:
    """Open a container that holds a video. Raises VideoError (`not-a-video` or `codec`) if it holds none."""
    options = {"format_whitelist": _CONTAINERS, "protocol_whitelist": "file"}
    try:
        container = av.open(str(path), options=options, container_options=options)
    except (av.error.FFmpegError, ValueError, OSError) as error:
        raise_if_out_of_memory(error)
        raise VideoError(
            "not-a-video",
            f"the file cannot be read as a video, or its beginning or index is missing ({reason_of(error)})",
        ) from None
    with container:
        yield container


def raise_if_out_of_memory(error: Exception) -> None:
    """Raise MemoryError if the library failed for want of memory, which is not the file's fault."""
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        raise MemoryError(str(error)) from None


def reason_of(error: Exception) -> str:
    """Return the library's reason for an error, without its file name."""
    return str(getattr(error, "strerror", None) or error)


def pictures_of(container: InputContainer) -> av.VideoStream:
    """Return the stream of pictures, ready to be decoded; VideoError as for `opened`. Cover images do not count."""
    attached = av.stream.Disposition.attached_pic
    streams = [stream for stream in container.streams.video if not stream.disposition & attached]
    if not streams:
        raise VideoError("not-a-video", "the file has no video stream")
    stream = streams[0]
    context = stream.codec_context
    if context is None:
        raise VideoError("codec", "no decoder is installed for the pictures of this file")
    context.options = {"max_pixels": str(_MAX_PIXELS)}
    # The number of threads does not change the pictures. For small pictures, threads cost more than they save.
    context.thread_count = 4 if (context.width or 0) * (context.height or 0) > _LARGE_PIXELS else 1
    if not has_presentation_times(container):
        # Threads that decode one picture each would say of another packet that it completed the picture.
        context.thread_type = "SLICE"
    return stream


def sample_aspect(stream: av.VideoStream) -> Fraction:
    """Return how much wider than high a pixel is shown. It is 1 where the file does not say it, or says nonsense."""
    try:
        aspect = stream.sample_aspect_ratio
    # Hostile headers have zeros and numbers that no fraction takes.
    except (ZeroDivisionError, ValueError, OverflowError):
        aspect = None
    return Fraction(aspect) if aspect is not None and 1 / _MAX_ASPECT <= aspect <= _MAX_ASPECT else Fraction(1)


def has_presentation_times(container: InputContainer) -> bool:
    """Return whether a container says when a picture is shown; AVI says only in which order packets are decoded."""
    return container.format.name != "avi"


def decoded_frames(container: InputContainer, stream: av.VideoStream) -> Iterator[av.VideoFrame]:
    """Yield the pictures from the container's position on that can be decoded; VideoError (`codec`): none can."""
    for packet in container.demux(stream):
        try:
            yield from packet.decode()
        except av.error.FFmpegError as error:
            raise_if_out_of_memory(error)
            if isinstance(error, av.error.DecoderNotFoundError):
                raise VideoError("codec", f"no decoder is installed for {stream.codec_context.name}") from None


_MAX_PACKET_BYTES = 256 << 20
"""The largest packet that is reckoned with. The value is an estimate: a packet of raw 8K pictures has 100 MB."""
_EARLY_S, _EARLY_SHARE = 0.5, 0.03
"""How much earlier than its header says a file may end, in seconds and as a share, before it counts as cut off."""


def probe(path: Path, max_duration_s: float) -> dict[str, Any]:
    """Return a video's properties by its packets and first picture; VideoError: `not-a-video`, `limit` and others."""
    if not path.stat().st_size:
        raise VideoError("empty", "the file has 0 bytes")
    with opened(path) as container:
        stream = pictures_of(container)
        claimed = (container.duration or 0) / 1_000_000
        _require_duration(claimed, max_duration_s)
        summary = _read_packets(container, stream, max_duration_s)
        if not summary.frames:
            _require_memory(stream, path.stat().st_size)
            raise VideoError("empty", "the video has no pictures: 0 frames")
        _not_cut_off(claimed, stream, summary)
        # Some rates leave less than a millisecond, or than a float of that size can tell.
        length = max(0.001, summary.end_s - summary.start_s)
    with opened(path) as container:
        stream = pictures_of(container)
        first = next(decoded_frames(container, stream), None)
        if first is None:
            raise VideoError("damaged", "no picture of the file can be decoded")
        return {
            "duration_s": round(length, 3),
            "frames": summary.frames,
            "key_frames": summary.key_frames,
            "fps": round(float(stream.average_rate or 0), 3) or round(summary.frames / length, 3),
            "width": first.width,
            "height": first.height,
            "sample_aspect": float(sample_aspect(stream)),
            "rotation": int(first.rotation) % 360,
            "seekable": summary.seekable,
            "codec": stream.codec_context.name,
            "pixel_format": first.format.name,
            "container": container.format.name,
            "audio": _audio_of(container),
            "subtitles": [_track(each) for each in container.streams.subtitles],
        }


def _require_memory(stream: av.VideoStream, file_bytes: int) -> None:
    """Raise MemoryError unless there is memory for a picture and for the largest packet of a file."""
    # Without it FFmpeg may report the end of the file instead of the error, and a video would pass for an empty one.
    width, height = stream.codec_context.width or 0, stream.codec_context.height or 0
    # 4 bytes a pixel; written to, because untouched memory costs nothing.
    bytearray(b"x") * (min(file_bytes, _MAX_PACKET_BYTES) + 4 * min(width * height, _MAX_PIXELS))


def _require_duration(seconds: float, max_s: float) -> None:
    if seconds > max_s:
        raise VideoError(
            "limit", f"this video lasts {seconds:.0f} s; this task takes up to {max_s:g} s (`max_duration_s`)"
        )


@dataclass(slots=True)
class _PacketSummary:
    frames: int = 0
    key_frames: int = 0  # Pictures that can be decoded without others.
    start_s: float = math.inf  # When the first picture begins.
    end_s: float = -math.inf  # When the last picture ends.
    first_s: float = math.inf  # When the first packet of any stream begins.
    last_s: float = -math.inf  # When the last packet of any stream begins.
    latest_s: float = -math.inf  # The latest time at which a picture begins.
    # Whether a seek leads to pictures with the times that they have when the file is read from the beginning. Each
    # packet of a picture says its own time and place; and each key picture is shown after everything before it, so
    # times never go back.
    seekable: bool = True

    def add_picture(self, packet: "av.Packet[av.stream.Stream]", begins: float, ends: float, *, trusted: bool) -> None:
        self.frames += 1
        self.key_frames += packet.is_keyframe
        # `end_s` may be the end of a picture, so the beginnings are compared.
        self.seekable &= trusted and not (packet.is_keyframe and begins <= self.latest_s)
        self.latest_s = max(self.latest_s, begins)
        self.start_s, self.end_s = min(self.start_s, begins), max(self.end_s, ends)


def _read_packets(container: InputContainer, stream: av.VideoStream, max_duration_s: float) -> _PacketSummary:
    summary = _PacketSummary()
    lasts = 1 / float(stream.average_rate) if stream.average_rate else 0.04
    has_times, is_stamped = has_presentation_times(container), container.format.name not in _UNSTAMPED
    try:
        for packet in container.demux():
            if not packet.size:
                continue
            base = float(packet.time_base or 0)
            at = packet.pts if packet.pts is not None else packet.dts
            begins = summary.frames * lasts if at is None else at * base
            ends = begins + float(packet.duration or 0) * base
            summary.first_s, summary.last_s = min(summary.first_s, begins), max(summary.last_s, ends)
            if packet.stream_index == stream.index:
                trusted = is_stamped and packet.pts is not None and packet.pos is not None
                # Without presentation times, a seek is right only if pictures are decoded in the order of presentation.
                trusted = trusted and (has_times or packet.pts == packet.dts)
                summary.add_picture(packet, begins, max(ends, begins + lasts / 2), trusted=trusted)
                _require_duration(summary.end_s - summary.start_s, max_duration_s)
    except av.error.FFmpegError as error:
        raise_if_out_of_memory(error)
        raise VideoError(
            "truncated", f"the file breaks off after {summary.frames} pictures ({reason_of(error)})"
        ) from None
    return summary


def _not_cut_off(claimed_s: float, stream: av.VideoStream, summary: _PacketSummary) -> None:
    """Raise an error if a file holds clearly less than its header says. Some headers say nothing, or too little."""
    length = summary.last_s - min(summary.first_s, 0.0)
    if claimed_s - length > max(_EARLY_S, _EARLY_SHARE * claimed_s):
        raise VideoError("truncated", f"the file ends after {length:.1f} s, but its header says {claimed_s:.1f} s")
    # Headers of AVI count a picture for each interval of the rate, also where none is stored. So fewer pictures alone
    # are no sign; they must also end before that many would. Headers of IVF count units of time instead of pictures.
    claimed_frames = 0 if stream.container.format.name == "ivf" else stream.frames
    expected = (1 - _EARLY_SHARE) * claimed_frames - 2
    ends_s = summary.end_s - min(summary.start_s, 0.0)
    if summary.frames < expected and ends_s * float(stream.average_rate or 1) < expected:
        raise VideoError("truncated", f"the file has {summary.frames} pictures, but its header says {stream.frames}")


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
