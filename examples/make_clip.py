"""Make a test clip with ffmpeg: scenes with hard cuts, each with burned-in text, a tone and a subtitle.

    python examples/make_clip.py clip.mp4                 180 s, 12 scenes of 15 s
    python examples/make_clip.py clip.mp4 --scene-s 3     36 s

The script draws everything itself, so no rights of others apply. `SCENES` says what each frame shows. `--truth` writes
the same as JSON.
"""

import json
import shutil
import subprocess
import tempfile
from argparse import ArgumentParser
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

WIDTH, HEIGHT, RATE = 640, 480, 30


@dataclass(frozen=True, slots=True)
class Scene:
    """A scene of the clip.

    Attributes:
        name: What the scene shows, in words.
        source: The source of its frames, for ffmpeg's lavfi.
        text: Text that is burned in near the lower edge; None for no text.
        tone_hz: Frequency of its sound, in hertz.
        box: Whether a white square is drawn over it.
    """

    name: str
    source: str
    text: str | None
    tone_hz: int
    box: bool = False

    @property
    def subtitle(self) -> str:
        """Text of the scene's subtitle."""
        return f"Scene of {self.name}, tone {self.tone_hz} Hz."


SCENES = (
    Scene("a red wall", "color=c=red", "A RED WALL", 220),
    Scene("test bars", "smptebars", None, 262),
    Scene("a blue field with a white box", "color=c=blue", "WHITE BOX", 294, box=True),
    Scene("a moving test picture", "testsrc", None, 330),
    Scene("a green meadow", "color=c=green", "GREEN MEADOW", 349),
    Scene("a zooming fractal", "mandelbrot=s=320x240:maxiter=256", "FRACTAL", 392),
    Scene("a black night", "color=c=black", None, 440),
    Scene("growing cells", "life=s=80x60:ratio=0.3:seed=7:mold=10:life_color=yellow:death_color=#603000", "CELLS", 494),
    Scene("a yellow sun", "color=c=yellow", "YELLOW SUN", 523),
    Scene("a second test picture", "testsrc2", None, 587),
    Scene("a white sheet", "color=c=white", "WHITE SHEET", 659),
    Scene("a purple curtain", "color=c=purple", "THE END", 698),
)


def caption(text: str, path: Path) -> None:
    """Draw white text on a dark strip that is as wide as a frame, and write it as a picture."""
    picture = Image.new("RGB", (WIDTH, 48), (16, 16, 16))
    font = ImageFont.load_default(32)
    draw = ImageDraw.Draw(picture)
    left, top, right, bottom = draw.textbbox((0, 0), text, font=font)
    draw.text(((WIDTH - right + left) / 2, (48 - bottom - top) / 2), text, font=font, fill=(255, 255, 255))
    picture.save(path)


def subtitles(scene_s: float) -> str:
    """Return the subtitles of all scenes as SubRip text."""
    entries = []
    for number, scene in enumerate(SCENES):
        begins, ends = number * scene_s + 0.2, (number + 1) * scene_s - 0.2
        entries.append(f"{number + 1}\n{_clock(begins)} --> {_clock(ends)}\n{scene.subtitle}\n")
    return "\n".join(entries)


def _clock(seconds: float) -> str:
    whole, thousandths = divmod(round(seconds * 1000), 1000)
    return f"{whole // 3600:02}:{whole // 60 % 60:02}:{whole % 60:02},{thousandths:03}"


def make(target: Path, scene_s: float = 15.0) -> None:
    """Write the clip.

    Raises:
        FileNotFoundError: ffmpeg is not installed.
        subprocess.CalledProcessError: ffmpeg failed. Its error is on stderr.
    """
    ffmpeg = shutil.which("ffmpeg")
    if ffmpeg is None:
        raise FileNotFoundError("ffmpeg is not installed: apt install ffmpeg")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "subtitles.srt").write_text(subtitles(scene_s))
        inputs, graph = [], []
        for number, scene in enumerate(SCENES):
            source = scene.source + f"{':' if '=' in scene.source else '='}r={RATE}"
            inputs += ["-f", "lavfi", "-t", str(scene_s), "-i", source]
            graph.append(_drawn(number, scene))
        pictures = len(SCENES)
        for number, scene in enumerate(SCENES):
            inputs += ["-f", "lavfi", "-t", str(scene_s), "-i", f"sine=f={scene.tone_hz}:r=44100"]
            if scene.text is not None:
                caption(scene.text, folder / f"{number}.png")
        texts = [number for number, scene in enumerate(SCENES) if scene.text is not None]
        for position, number in enumerate(texts):
            inputs += ["-i", str(folder / f"{number}.png")]
            above = HEIGHT - 80
            graph.append(f"[p{number}][{2 * pictures + position}:v]overlay=0:{above}[v{number}]")
        joined = "".join(f"[v{n}][{pictures + n}:a]" for n in range(pictures))
        graph.append(f"{joined}concat=n={pictures}:v=1:a=1[v][a]")
        inputs += ["-i", str(folder / "subtitles.srt")]
        last = 2 * pictures + len(texts)
        command = [
            ffmpeg, "-v", "error", "-y", *inputs, "-filter_complex", ";".join(graph),
            "-map", "[v]", "-map", "[a]", "-map", f"{last}:s", "-c:v", "libx264", "-preset", "veryfast", "-crf", "23",
            "-pix_fmt", "yuv420p", "-threads", "1", "-c:a", "aac", "-b:a", "64k", "-c:s", "mov_text",
            "-fflags", "+bitexact", "-flags:v", "+bitexact", "-flags:a", "+bitexact", "-movflags", "+faststart",
            str(target),
        ]  # fmt: skip
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


def _drawn(number: int, scene: Scene) -> str:
    steps = [f"scale={WIDTH}:{HEIGHT}:flags=neighbor", "setsar=1", f"fps={RATE}", "format=yuv420p"]
    if scene.box:
        steps.append("drawbox=x=0:y=200:w=80:h=80:color=white:t=fill")
    end = f"p{number}" if scene.text is not None else f"v{number}"
    return f"[{number}:v]{','.join(steps)}[{end}]"


def truth(scene_s: float) -> dict[str, object]:
    """Return what a clip of `make` shows, as JSON members."""
    scenes = [
        {"start_s": n * scene_s, "end_s": (n + 1) * scene_s, "name": s.name, "text": s.text, "tone_hz": s.tone_hz,
         "subtitle": s.subtitle}
        for n, s in enumerate(SCENES)
    ]  # fmt: skip
    return {"duration_s": len(SCENES) * scene_s, "width": WIDTH, "height": HEIGHT, "fps": RATE, "scenes": scenes}


def main() -> None:
    """Make the clip that the command line describes."""
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("--scene-s", type=float, default=15.0)
    parser.add_argument("--truth", type=Path, help="write what the clip shows to this file, as JSON")
    options = parser.parse_args()
    make(options.target, options.scene_s)
    if options.truth:
        options.truth.write_text(json.dumps(truth(options.scene_s), indent=2))


if __name__ == "__main__":
    main()
