"""Short clips with known content, made here with PyAV, and the driver on them."""

import asyncio
import struct
from collections.abc import Awaitable, Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import orjson

from sandboxes.calls import Execution, ToolCall
from sandboxes.driver import Sandbox
from sandboxes.spec import EnvironmentSpec
from sandboxes.video.driver import VideoDriver
from tests.sandboxes.box import opened

RATE, SCENE_S, WIDTH, HEIGHT = 10, 2.0, 160, 120
SOUND_RATE = 16_000
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (230, 20, 20), "blue": (20, 40, 230), "green": (20, 150, 40), "white": (255, 255, 255)
}  # fmt: skip
TONES = (300, 500, 800, 1200)
CLIP_S = SCENE_S * len(COLOURS)
_ASS_HEADER = b"""[Script Info]
ScriptType: v4.00+
[V4+ Styles]
Format: Name, Fontname, Fontsize
Style: Default,Arial,16
[Events]
Format: Layer, Start, End, Style, Text
"""
Test = Callable[[VideoDriver], Awaitable[None]]


def make(
    path: Path,
    colours: Sequence[str] = tuple(COLOURS),
    *,
    sound: bool = True,
    subtitles: bool = True,
    codec: str = "mpeg4",
    gop: int = 12,
    shade: int = 0,
) -> Path:
    """Write a clip: for each colour a scene, with a moving square, a tone, and its name as subtitle.

    shade: makes another video of otherwise equal ones.
    """
    form = {".mp4": "mp4", ".mkv": "matroska", ".avi": "avi", ".ts": "mpegts"}[path.suffix]
    with av.open(str(path), "w", format=form) as out:
        # Typed as the library does not: by what kind of stream a codec makes.
        video: Any = out.add_stream(codec, rate=RATE)
        video.width, video.height, video.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        video.codec_context.gop_size = gop
        video.codec_context.thread_count = 1
        audio: Any = out.add_stream("aac", rate=SOUND_RATE, layout="mono") if sound else None
        texts: Any = out.add_stream("mov_text") if subtitles and form == "mp4" else None
        if texts is not None:
            texts.codec_context.subtitle_header = _ASS_HEADER
        for n in range(int(len(colours) * SCENE_S * RATE)):
            frame = av.VideoFrame.from_ndarray(picture(colours, n, shade), format="rgb24")
            frame.pts, frame.time_base = n, Fraction(1, RATE)
            out.mux(video.encode(frame))
        out.mux(video.encode(None))
        if audio is not None:
            _sound(out, audio, len(colours))
        if texts is not None:
            _subtitles(out, texts, colours)
    return path


def picture(colours: Sequence[str], number: int, shade: int = 0) -> Any:
    """Return the picture of a number: a colour with a square that moves."""
    pixels = np.empty((HEIGHT, WIDTH, 3), dtype=np.uint8)
    pixels[:] = COLOURS[colours[int(number / (SCENE_S * RATE))]]
    left = number % int(SCENE_S * RATE) * 4
    pixels[50:66, left : left + 16] = (10, 10, 10 + shade)
    return pixels


def _sound(out: Any, stream: Any, scenes: int) -> None:
    times = np.arange(int(scenes * SCENE_S * SOUND_RATE)) / SOUND_RATE
    tones = np.repeat(np.array(TONES[:scenes]), int(SCENE_S * SOUND_RATE))
    samples = (np.sin(2 * np.pi * tones * times) * 12_000).astype(np.int16)
    for at in range(0, len(samples), 1024):
        frame = av.AudioFrame.from_ndarray(samples[at : at + 1024].reshape(1, -1), format="s16", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = SOUND_RATE, at, Fraction(1, SOUND_RATE)
        out.mux(stream.encode(frame))
    out.mux(stream.encode(None))


def _subtitles(out: Any, stream: Any, colours: Sequence[str]) -> None:
    for n, name in enumerate(colours):
        text = f"This is {name}.".encode()
        packet = av.Packet(struct.pack(">H", len(text)) + text)
        packet.stream, packet.time_base = stream, Fraction(1, 1000)
        packet.pts = packet.dts = int((n * SCENE_S + 0.2) * 1000)
        packet.duration = int((SCENE_S - 0.4) * 1000)
        out.mux(packet)


def spec_of(
    source: Path | str | dict[str, str], *, model: dict[str, Any] | None = None, **more: Any
) -> EnvironmentSpec:
    """Return a spec; members of `video` that more names go there."""
    outside = {name: more.pop(name) for name in ("limits", "cache", "share") if name in more}
    payload = {"source": str(source) if isinstance(source, Path) else source, "model": model, **more}
    return EnvironmentSpec.model_validate({"driver": "video", "video": payload, **outside})


class VideoAnswer:
    """The answer of a video tool, and what its execution reported."""

    def __init__(self, execution: Execution) -> None:
        result = execution.result
        self.status, self.kind, self.body = result.status, result.media_type, result.body
        self.json: Any = orjson.loads(result.body) if result.media_type == "application/json" else {}
        self.fault: str = self.json["error"]["kind"] if self.status != 200 else ""
        self.message: str = self.json["error"]["message"] if self.status != 200 else ""
        self.frame_t = float(dict(result.headers).get("x-frame-time", -1))
        self.effect, self.state, self.shareable = execution.effect, execution.state, execution.shareable


def call_of(tool: str, **arguments: Any) -> ToolCall:
    """Return a call as the endpoint makes it, defaults and all."""
    from proxy.dialects import video  # noqa: PLC0415 - tests of sandboxes know the proxy here alone

    return video.call_of(tool, arguments, spec_of("/"))


async def ask(sandbox: Sandbox, tool: str, **arguments: Any) -> VideoAnswer:
    return VideoAnswer(await sandbox.execute(call_of(tool, **arguments)))


async def prepared(driver: VideoDriver, spec: EnvironmentSpec, name: str = "clip.mp4") -> Sandbox:
    """Return a sandbox with a video loaded and preprocessed."""
    sandbox = await driver.start(spec)
    for line in (await ask(sandbox, "load_video", name=name), await ask(sandbox, "preprocess")):
        assert line.status == 200, line.json
    return sandbox


def driven(data: Path, test: Test) -> None:
    async def go() -> None:
        async with opened(driver := VideoDriver(data)):
            await test(driver)

    asyncio.run(go())


def parts(driver: VideoDriver, kind: str = "") -> set[str]:
    return {part for part in driver.store.all() if part.startswith(kind)}


def everything(folder: Path) -> dict[str, bytes]:
    """Return all files below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


async def until(holds: Callable[[], object]) -> None:
    """Let others run until something holds."""
    for _ in range(5_000_000):
        if holds():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never did")


def entries(folder: Path) -> list[Path]:
    return list(folder.iterdir())
