"""Opening of video files: containers and their stream of pictures. One of the three modules that use PyAV.

A file is hostile. All of this runs in worker processes only, which may be killed at any time. Only containers that hold
their media themselves are opened, because playlists and the like name other files.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import av
import av.error
from av.container import InputContainer

from sandboxes.video.faults import VideoError

_CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,flv,ogg,asf,mxf,gif,h264,hevc,ivf,nut"
"""FFmpeg's names of the container formats that are opened."""
_MAX_PIXELS = 8192 * 4608
"""Largest picture that is decoded. One in RGB takes 113 MB."""
_LARGE_PIXELS = 1280 * 720
"""Pictures above this size are decoded by several threads."""


@contextmanager
def opened(path: Path) -> Iterator[InputContainer]:
    """Open a container that holds a video.

    Raises:
        VideoError: `not-a-video` or `codec`.
    """
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
    """Return the stream of pictures, ready to be decoded. Cover images do not count.

    Raises:
        VideoError: `not-a-video` or `codec`.
    """
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
    return stream


def decoded_frames(container: InputContainer, stream: av.VideoStream) -> Iterator[av.VideoFrame]:
    """Yield the pictures from the container's position on. Pictures that cannot be decoded are left out.

    Raises:
        VideoError: `codec`.
    """
    for packet in container.demux(stream):
        try:
            yield from packet.decode()
        except av.error.FFmpegError as error:
            raise_if_out_of_memory(error)
            if isinstance(error, av.error.DecoderNotFoundError):
                raise VideoError("codec", f"no decoder is installed for {stream.codec_context.name}") from None
