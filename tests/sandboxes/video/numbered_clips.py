"""Clips whose pictures show their own numbers, made with the `ffmpeg` program, and what that program sees in them."""

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

WIDTH, HEIGHT, RATE, BARS = 160, 120, 25, 10
"""Each picture has one bar for each bit of its number, black or white, so that no codec makes it another number."""

_B = ["-bf", "2"]
_X264, _X265 = ["-c:v", "libx264", "-preset", "veryfast"], ["-c:v", "libx265", "-x265-params"]
FORMS: dict[str, tuple[str, Sequence[str]]] = {
    "mp4": (".mp4", [*_X264, "-g", "30"]),
    "mp4-open-gop": (".mp4", [*_X264, "-x264-params", "open-gop=1:keyint=25:bframes=3"]),
    "mp4-intra-refresh": (".mp4", [*_X264, "-x264-params", "intra-refresh=1:keyint=30"]),
    "mp4-fragments": (".mp4", [*_X264, "-g", "30", "-movflags", "frag_keyframe+empty_moov"]),
    "mp4-hevc": (".mp4", [*_X265, "log-level=none:keyint=25:open-gop=1"]),
    "mov": (".mov", ["-c:v", "mjpeg", "-q:v", "3"]),
    "mkv": (".mkv", [*_X264, "-x264-params", "open-gop=1:keyint=25:bframes=3"]),
    "webm-vp8": (".webm", ["-c:v", "libvpx", "-g", "30", "-auto-alt-ref", "1", "-b:v", "1M"]),
    "webm-vp9": (".webm", ["-c:v", "libvpx-vp9", "-g", "30", "-b:v", "1M", "-cpu-used", "8"]),
    "ts": (".ts", [*_X264, "-g", "30"]),
    "ts-open-gop": (".ts", [*_X264, "-x264-params", "open-gop=1:keyint=40:bframes=3"]),
    "ts-hevc": (".ts", [*_X265, "log-level=none:keyint=40:open-gop=1"]),
    "ts-mpeg2": (".ts", ["-c:v", "mpeg2video", "-g", "40", *_B, "-q:v", "3"]),
    "ts-wrap": (".ts", [*_X264, "-g", "30", "-output_ts_offset", "95440"]),
    "m2ts": (".m2ts", [*_X264, "-g", "50"]),
    "mpg": (".mpg", ["-c:v", "mpeg2video", "-g", "40", *_B, "-q:v", "3"]),
    "mpg-1": (".mpg", ["-c:v", "mpeg1video", "-g", "40", *_B, "-q:v", "3"]),
    "vob": (".vob", ["-c:v", "mpeg2video", "-g", "15", *_B, "-q:v", "3"]),
    "avi": (".avi", ["-c:v", "mpeg4", "-g", "30", "-q:v", "3"]),
    "avi-b": (".avi", ["-c:v", "mpeg4", "-g", "30", *_B, "-q:v", "3"]),
    "avi-h264": (".avi", [*_X264, "-g", "30", *_B]),
    "flv": (".flv", [*_X264, "-g", "30"]),
    "flv1": (".flv", ["-c:v", "flv", "-g", "30", "-q:v", "3", "-ar", "44100"]),
    "ogg": (".ogv", ["-c:v", "libtheora", "-g", "32", "-q:v", "9"]),
    "asf": (".asf", ["-c:v", "wmv2", "-g", "30", "-q:v", "3"]),
    "gif": (".gif", []),
    "nut": (".nut", ["-c:v", "mpeg4", "-g", "30", *_B, "-q:v", "3"]),
    "mxf": (".mxf", ["-c:v", "mpeg2video", "-g", "15", *_B, "-q:v", "3", "-ar", "48000"]),
    "ivf": (".ivf", ["-c:v", "libvpx", "-g", "30", "-b:v", "1M"]),
    "raw-h264": (".h264", [*_X264, "-g", "30"]),
    "raw-hevc": (".hevc", [*_X265, "log-level=none:keyint=30"]),
}
"""Kinds of clips by name: the suffix of the file, and the options for its codec. Those with a soundtrack get one."""
_SILENT = {"gif", "ivf", "raw-h264", "raw-hevc"}
TIMINGS: dict[str, Sequence[str]] = {
    "steady": [],
    "offset": ["-output_ts_offset", "7.3"],
    "variable": ["-vf", "setpts='(N+0.8*mod(N*N,7)/7)/25/TB'", "-fps_mode", "vfr", "-enc_time_base", "1/1000"],
    "gaps": ["-vf", "select='lt(mod(n,20),13)'", "-fps_mode", "vfr"],
}
"""Times of the pictures by name, as options."""


def require_ffmpeg() -> None:
    """Skip the test where there is no `ffmpeg` program."""
    if shutil.which("ffmpeg") is None:
        pytest.skip("no ffmpeg program makes clips and judges frames here")


def run(*arguments: str, data: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["ffmpeg", "-hide_banner", "-y", *arguments], input=data, capture_output=True, check=False)


def numbered(count: int) -> bytes:
    """Return pictures with the numbers 0 to count - 1, in grey."""
    bits = (np.arange(count)[:, None] >> np.arange(BARS)[None, :]) & 1
    rows = np.repeat(np.where(bits, 230, 20).astype(np.uint8), WIDTH // BARS, axis=1)
    return np.repeat(rows[:, None, :], HEIGHT, axis=1).tobytes()


def make(folder: Path, form: str, timing: str = "steady", *, count: int = 150, more: Sequence[str] = ()) -> Path:
    """Write a clip with so many pictures; more: options before the name of the file."""
    suffix, codec = FORMS[form]
    path = folder / f"{form}-{timing}{suffix}"
    sound = [] if form in _SILENT else ["-f", "lavfi", "-i", f"sine=440:d={count / RATE}"]
    pictures = ["-f", "rawvideo", "-pix_fmt", "gray", "-s", f"{WIDTH}x{HEIGHT}", "-r", str(RATE), "-i", "pipe:"]
    pixels = [] if form in ("gif", "mov") else ["-pix_fmt", "yuv420p"]
    options = [*codec, *pixels, *TIMINGS[timing], *more]
    made = run(*pictures, *sound, *options, str(path), data=numbered(count))
    assert path.exists(), made.stderr.decode()[-2000:]
    assert made.returncode == 0, made.stderr.decode()[-2000:]
    return path


def number_of(picture: NDArray[np.uint8]) -> int:
    """Return the number that a grey picture shows, in whatever orientation it is."""
    upright = picture if picture.shape[1] >= picture.shape[0] else picture.T
    bars = [part.mean() > 125 for part in np.array_split(upright, BARS, axis=1)]
    return sum(1 << n for n, white in enumerate(bars) if white)


def seen(path: Path) -> list[tuple[float, int]]:
    """Return the time and the number of each picture as the ffmpeg program shows them, from the first picture on."""
    shown = run("-i", str(path), "-map", "0:v:0", "-fps_mode", "passthrough", "-vf", "scale=64:64,showinfo",
                "-pix_fmt", "gray", "-f", "rawvideo", "pipe:")  # fmt: skip
    times = [float(t) for t in re.findall(r"pts_time:(-?[\d.]+)", shown.stderr.decode())]
    pictures = np.frombuffer(shown.stdout, dtype=np.uint8).reshape(-1, 64, 64)
    assert len(times) == len(pictures) > 0, shown.stderr.decode()[-2000:]
    return [(t - times[0], number_of(picture)) for t, picture in zip(times, pictures, strict=True)]
