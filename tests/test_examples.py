"""The clip and the video agent of examples/ do what their docstrings say."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from examples.make_clip import SCENES, make, truth
from forkpoint.ephemeral_proxy import ephemeral_proxy
from sandboxes.video.driver import VideoDriver
from tests.sandboxes.videos import ask, driven, prepared, spec_of

REPOSITORY = Path(__file__).parent.parent
SCENE_S = 2.0


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("ffmpeg") is None:
        if os.environ.get("FORKPOINT_NEEDS_FFMPEG"):
            pytest.fail("ffmpeg is not installed, and this run promised it")
        pytest.skip("needs ffmpeg: apt install ffmpeg")
    path = tmp_path_factory.mktemp("clips") / "clip.mp4"
    make(path, SCENE_S)
    return path


def test_clip_shows_its_scenes(tmp_path: Path, clip: Path) -> None:
    expected = truth(SCENE_S)

    async def test(driver: VideoDriver) -> None:
        sandbox = await prepared(driver, spec_of(clip))
        info = (await ask(sandbox, "video_info")).json
        assert [info[name] for name in ("duration_s", "width", "height", "fps")] == [
            expected[name] for name in ("duration_s", "width", "height", "fps")
        ]
        shots = (await ask(sandbox, "detect_shots")).json["shots"]
        assert [shot["start_s"] for shot in shots] == pytest.approx([n * SCENE_S for n in range(len(SCENES))])
        sounds = (await ask(sandbox, "audio_profile")).json["segments"]
        assert [each["tone_hz"] for each in sounds] == pytest.approx([scene.tone_hz for scene in SCENES], abs=5)
        texts = (await ask(sandbox, "get_subtitles")).json["subtitles"]
        assert [each["text"] for each in texts] == [scene.subtitle for scene in SCENES]
        captions = (await ask(sandbox, "caption_retrieval", start=0, end=len(SCENES) - 1)).json["captions"]
        burned_in = ["text near the lower edge" in each["caption"] for each in captions]
        assert burned_in == [scene.text is not None for scene in SCENES]

    driven(tmp_path, test)


def test_second_run_of_video_agent_is_all_hits(tmp_path: Path, clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent reports the right scene and a frame of it. Its second run reports the same without a miss."""
    monkeypatch.setenv("FORKPOINT_DRIVERS", '["video"]')
    with ephemeral_proxy() as proxy:
        command = [
            sys.executable, "examples/video_agent.py", str(clip), "a green meadow", "--proxy", proxy.url,
            "--save", str(tmp_path / "frame.jpg"),
        ]  # fmt: skip
        runs = [
            subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True) for _ in range(2)
        ]  # fmt: skip
    meadow = next(n for n, scene in enumerate(SCENES) if scene.name == "a green meadow")
    assert f"from {meadow * SCENE_S:g} s to {(meadow + 1) * SCENE_S:g} s" in runs[0].stdout
    assert "[no model]" in runs[0].stdout
    assert runs[0].stdout == runs[1].stdout
    assert runs[1].stderr.count(" hit\n") == len(runs[1].stderr.splitlines())
    assert (tmp_path / "frame.jpg").read_bytes().startswith(b"\xff\xd8")
