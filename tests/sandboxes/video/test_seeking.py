"""The picture at a time is the one that the ffmpeg program shows then, in every container and wherever a seek leads."""

import io
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from sandboxes.video import decode, video_file
from sandboxes.video.index import Index
from sandboxes.video.messages import VideoError
from sandboxes.video.passes import MeasuringPass
from tests.sandboxes.video import numbered_clips
from tests.sandboxes.video.numbered_clips import FORMS, make, number_of, require_ffmpeg, run, seen

Truth = list[tuple[float, int]]
KINDS = [(form, "steady") for form in FORMS] + [
    (form, timing)
    for form in ("mp4", "mkv", "ts", "avi", "avi-b", "avi-h264", "flv", "ogg")
    for timing in ("offset", "variable", "gaps")
] + [("mpg", "gaps"), ("vob", "gaps"), ("ivf", "variable")]  # fmt: skip
shares = st.lists(st.floats(0, 1), min_size=1, max_size=4)


def number_in(image: Image.Image) -> int:
    return number_of(np.asarray(image.convert("L").resize((64, 64), Image.Resampling.BOX)))


def at(path: Path, times: Sequence[float], info: dict[str, Any]) -> list[int]:
    with decode.VideoFile(path) as video:
        numbers: list[int] = video.at(times, info, lambda picture: number_in(video.image(picture, 160)))
        return numbers


def expected(truth: Truth, t: float) -> int:
    return next(number for begins, number in reversed(truth) if begins <= t)


def assert_shown(path: Path, truth: Truth, info: dict[str, Any], parts: Sequence[float]) -> None:
    """Compare the pictures in the middle between some pictures and their successors, in one request and one by one."""
    places = sorted({min(int(part * len(truth)), len(truth) - 2) for part in parts})
    times = [(truth[n][0] + truth[n + 1][0]) / 2 for n in places]
    wanted = [expected(truth, t) for t in times]
    assert at(path, times, info) == wanted
    assert [at(path, [t], info)[0] for t in times] == wanted


@cache
def clip(folder: Path, form: str, timing: str) -> tuple[Path, Truth, dict[str, Any]]:
    path = make(folder, form, timing)
    return path, seen(path), video_file.probe(path, 1e6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_ffmpeg()
    return tmp_path_factory.mktemp("clips")


@pytest.mark.parametrize(("form", "timing"), KINDS)
def test_each_picture_is_the_one_at_its_time(folder: Path, form: str, timing: str) -> None:
    """Seeks in MPEG-TS lead past their target, and in MPEG-PS to pictures whose times are guessed otherwise.

    The clips have reordered pictures, open groups, times that begin late, vary or have gaps, and sound beside them.
    """
    path, truth, info = clip(folder, form, timing)

    @settings(max_examples=10)
    @given(parts=shares)
    def check(parts: list[float]) -> None:
        assert_shown(path, truth, info, parts)

    check()


@pytest.mark.parametrize("form", ["mp4", "mkv", "ts", "m2ts", "flv", "webm-vp9", "mxf"])
def test_a_far_picture_is_reached_by_a_seek(folder: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A seek is the reason why a picture of a long video takes no minute; few pictures are decoded for it."""
    path, truth, info = clip(folder, form, "steady")
    decoded: list[Any] = []

    def counted(*arguments: Any) -> Any:
        for frame in decode_all(*arguments):
            decoded.append(frame)
            yield frame

    decode_all = video_file.decoded_frames
    monkeypatch.setattr(decode, "decoded_frames", counted)
    t = truth[-3][0] + 0.01
    assert at(path, [t], info) == [expected(truth, t)]
    assert len(decoded) < 100


def test_kept_pictures_are_those_of_their_times(folder: Path, tmp_path: Path) -> None:
    """The pictures that a preprocess keeps and the ones that `exact` decodes have equal times and contents."""
    path, truth, info = clip(folder, "ts-open-gop", "gaps")
    for _ in MeasuringPass(path, tmp_path, info, {"segment_s": 2, "frame_s": 0.5, "max_side": 160}):
        pass
    index = Index(tmp_path, None)
    times = index.kept
    kept = [number_in(Image.open(io.BytesIO(index.jpeg(n)))) for n in range(len(times))]
    assert kept == [expected(truth, t + 1e-4) for t in times] == at(path, [t + 1e-4 for t in times], info)


def test_edit_lists_and_rotation_are_obeyed(folder: Path) -> None:
    """A copy that begins in the middle of a group has an edit list; a phone's clip says that it is turned."""
    whole = make(folder, "mp4", "offset")
    edited, turned = folder / "edited.mp4", folder / "turned.mov"
    run("-ss", "1.7", "-i", str(whole), "-c", "copy", str(edited))
    run("-i", str(whole), "-c", "copy", "-metadata:s:v", "rotate=90", str(turned))
    for path in (edited, turned):
        truth, info = seen(path), video_file.probe(path, 1e6)
        assert_shown(path, truth, info, (0.0, 0.2, 0.5, 0.99))
    assert info["rotation"] in (90, 270)
    with decode.VideoFile(turned) as video:
        assert video.image(next(video.all()), 160).size == (120, 160)


def test_times_that_go_back_are_read_in_order(folder: Path, tmp_path: Path) -> None:
    """Two recordings in one file: a seek could lead into the wrong one, so none is tried."""
    twice = tmp_path / "twice.ts"
    twice.write_bytes(clip(folder, "ts", "steady")[0].read_bytes() * 2)
    info = video_file.probe(twice, 1e6)
    assert not info["seekable"]
    assert at(twice, [4.01], info) == [100]


def test_wide_pixels_are_shown_wide(folder: Path) -> None:
    """A DVD's pixels are no squares: its pictures come in the size in which a player shows them."""
    path = make(folder, "mpg-1", more=["-vf", "setsar=64/45"])
    info = video_file.probe(path, 1e6)
    assert (info["width"], info["height"], round(info["sample_aspect"], 2)) == (160, 120, 1.42)
    with decode.VideoFile(path) as video:
        assert video.image(next(video.all()), 4000).size == (228, 120)
        assert video.image(next(video.all()), 114).size == (114, 60)


@pytest.mark.parametrize("aspect", ["1/4000", "4000/1"])
def test_absurd_pixels_count_as_squares(folder: Path, aspect: str) -> None:
    """A hostile header asks for a picture of any width."""
    path = make(folder, "mkv", more=["-vf", f"setsar={aspect}:max=5000"])
    with decode.VideoFile(path) as video:
        assert video.image(next(video.all()), 4000).size == (160, 120)


def test_a_file_without_bytes_is_empty(tmp_path: Path) -> None:
    """The documentation names the kind `empty`; an empty file has it."""
    (tmp_path / "none.mp4").touch()
    with pytest.raises(VideoError, match="0 bytes") as raised:
        video_file.probe(tmp_path / "none.mp4", 10)
    assert raised.value.kind == "empty"


def test_numbers_survive_coding() -> None:
    """The helper of this module reads the numbers that it draws."""
    pictures = np.frombuffer(numbered_clips.numbered(40), dtype=np.uint8).reshape(40, 120, 160)
    assert [number_of(picture) for picture in pictures] == list(range(40))
