"""Files that are no videos, broken ones, and requests outside the video get errors, and nothing of them is kept."""

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import pytest

from sandboxes.effects import Effect
from sandboxes.video.driver import VideoDriver
from tests.sandboxes.videos import CLIP_S, VideoAnswer, ask, driven, entries, make, parts, prepared, spec_of


def loaded(tmp_path: Path, source: Path, **spec: Any) -> VideoAnswer:
    """Return what loading source says; one that fails leaves nothing."""
    results: list[VideoAnswer] = []

    async def test(driver: VideoDriver) -> None:
        sandbox = await driver.start(spec_of(source, **spec))
        answer = await ask(sandbox, "load_video", name=source.name)
        if answer.fault:
            assert (answer.status, answer.effect) == (422, Effect.NONE)
            assert parts(driver) == set()
            assert entries(driver.store.folder / "work") == []
        results.append(answer)

    driven(tmp_path / "data", test)
    return results[0]


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    return make(tmp_path / "clip.mp4")


def remade(source: Path, target: Path, wanted: Callable[[Any], bool], **options: str) -> None:
    """Write those packets of a clip that are wanted into another file, which has tracks for its pictures and sound."""
    with av.open(str(source)) as held, av.open(str(target), "w", options=options) as out:
        tracks = {
            track.index: out.add_stream_from_template(track) for track in held.streams if track.type != "subtitle"
        }
        for packet in held.demux():
            if packet.dts is not None and packet.stream_index in tracks and wanted(packet):
                packet.stream = tracks[packet.stream_index]
                out.mux(packet)


def test_video_of_a_moment_has_a_length(tmp_path: Path) -> None:
    """A hostile rate leaves less than a millisecond to a picture."""
    with av.open(str(tmp_path / "moment.mp4"), "w") as out:
        stream = out.add_stream("mpeg4", rate=60_000)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        out.mux([*stream.encode(av.VideoFrame(64, 48)), *stream.encode(None)])
    answer = loaded(tmp_path, tmp_path / "moment.mp4")
    assert (answer.status, answer.json["duration_s"]) == (200, 0.001)


@pytest.mark.parametrize("content", [b"#!/bin/sh\necho no video\n", bytes(range(256)) * 64])
def test_file_without_video_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "notes.mp4").write_bytes(content)
    answer = loaded(tmp_path, tmp_path / "notes.mp4")
    assert (answer.fault, answer.shareable) == ("not-a-video", True)


def test_playlist_is_no_video(tmp_path: Path, clip: Path) -> None:
    (tmp_path / "list.m3u8").write_text(f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:8,\n{clip}\n#EXT-X-ENDLIST\n")
    assert loaded(tmp_path, tmp_path / "list.m3u8").fault == "not-a-video"
    (tmp_path / "list.ffconcat").write_text(f"ffconcat version 1.0\nfile '{clip}'\n")
    assert loaded(tmp_path, tmp_path / "list.ffconcat").fault == "not-a-video"


def test_sound_file_is_no_video(tmp_path: Path, clip: Path) -> None:
    sound = tmp_path / "sound.mp4"
    with av.open(str(clip)) as source, av.open(str(sound), "w") as out:
        stream = out.add_stream_from_template(source.streams.audio[0])
        for packet in source.demux(source.streams.audio[0]):
            if packet.dts is not None:
                packet.stream = stream
                out.mux(packet)
    answer = loaded(tmp_path, sound)
    assert (answer.fault, "no video stream" in answer.message) == ("not-a-video", True)


@pytest.mark.parametrize("suffix", [".mp4", ".mkv", ".ts", ".avi"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_cut_off_file_is_truncated_or_shorter(tmp_path: Path, suffix: str, share: float) -> None:
    whole = make(tmp_path / f"whole{suffix}")
    cut = tmp_path / f"cut{suffix}"
    shutil.copyfile(whole, cut)
    os.truncate(cut, int(whole.stat().st_size * share))
    answer = loaded(tmp_path, cut)
    if answer.status == 200:
        # Without a word in it about its length, what is left is all that there is to know.
        assert (suffix, answer.json["duration_s"] < CLIP_S) == (".ts", True)
    else:
        assert answer.fault in {"truncated", "not-a-video", "empty", "damaged"}


def test_cut_off_file_with_leading_index_is_truncated(tmp_path: Path, clip: Path) -> None:
    front = tmp_path / "front.mp4"
    remade(clip, front, lambda _: True, movflags="+faststart")
    os.truncate(front, front.stat().st_size // 2)
    answer = loaded(tmp_path, front)
    assert (answer.fault, f"{CLIP_S:.1f} s" in answer.message) == ("truncated", True)


def test_video_without_pictures_is_an_error(tmp_path: Path, clip: Path) -> None:
    none = tmp_path / "none.mkv"
    remade(clip, none, lambda packet: packet.stream.type == "audio")
    answer = loaded(tmp_path, none)
    assert (answer.fault, "0 frames" in answer.message) == ("empty", True)


def test_unknown_codec_is_an_error(tmp_path: Path) -> None:
    strange = make(tmp_path / "strange.mkv")
    data = strange.read_bytes()
    assert data.count(b"V_MPEG4/ISO/ASP") == 1
    strange.write_bytes(data.replace(b"V_MPEG4/ISO/ASP", b"V_MPEG4/ISO/XYZ"))
    assert loaded(tmp_path, strange).fault == "codec"


def test_damaged_pictures_are_skipped(tmp_path: Path, clip: Path) -> None:
    hurt = tmp_path / "hurt.mp4"
    data = bytearray(clip.read_bytes())
    middle = data.index(b"mdat") + 4000
    data[middle : middle + 1500] = os.urandom(1500)
    hurt.write_bytes(data)

    async def test(driver: VideoDriver) -> None:
        sandbox = await driver.start(spec_of(hurt))
        assert (await ask(sandbox, "load_video", name="hurt.mp4")).status == 200
        made = await ask(sandbox, "preprocess")
        assert made.status == 200 or made.fault == "damaged"

    driven(tmp_path / "data", test)


def test_too_long_or_large_video_is_refused(tmp_path: Path, clip: Path) -> None:
    answer = loaded(tmp_path, clip, max_duration_s=5)
    assert (answer.fault, "max_duration_s" in answer.message, answer.shareable) == ("limit", True, True)
    large = tmp_path / "large.mp4"
    shutil.copyfile(clip, large)
    os.truncate(large, 3 << 20)
    answer = loaded(tmp_path, large, limits={"disk_mb": 2})
    assert (answer.fault, "disk_mb" in answer.message) == ("limit", True)


def test_limits_apply_to_known_videos_too(tmp_path: Path, clip: Path) -> None:
    async def test(driver: VideoDriver) -> None:
        await prepared(driver, spec_of(clip))
        strict = await driver.start(spec_of(clip, max_duration_s=5))
        assert (await ask(strict, "load_video", name="clip.mp4")).fault == "limit"

    driven(tmp_path / "data", test)


def test_claimed_length_over_limit_is_refused_unread(tmp_path: Path) -> None:
    """Ten hours, according to the header of a file of some kilobytes."""
    long = tmp_path / "long.mkv"
    with av.open(str(long), "w") as out:
        stream = out.add_stream("mpeg4", rate=1)
        stream.width = stream.height = 32
        for n in (0, 36_000):
            frame = av.VideoFrame(32, 32, "yuv420p")
            frame.pts = n
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    answer = loaded(tmp_path, long)
    assert (answer.fault, "36001" in answer.message or "36000" in answer.message) == ("limit", True)


def test_out_of_memory_is_not_shared(tmp_path: Path) -> None:
    wide = tmp_path / "wide.mkv"
    with av.open(str(wide), "w") as out:
        stream = out.add_stream("ffv1", rate=1)
        stream.width, stream.height, stream.pix_fmt = 6000, 4000, "yuv420p"
        out.mux(stream.encode(av.VideoFrame(6000, 4000, "yuv420p")))
        out.mux(stream.encode(None))
    answer = loaded(tmp_path, wide, limits={"memory_mb": 16})
    assert (answer.fault, answer.shareable) == ("memory", False)


def test_made_files_respect_disk_limit(tmp_path: Path) -> None:
    source = make(tmp_path / "clip.mp4", ["red", "blue"] * 24, sound=False, subtitles=False)
    assert source.stat().st_size < 1 << 20

    async def test(driver: VideoDriver) -> None:
        sandbox = await driver.start(spec_of(source, frame_s=0.1, limits={"disk_mb": 1}))
        assert (await ask(sandbox, "load_video", name="clip.mp4")).status == 200
        answer = await ask(sandbox, "preprocess")
        assert (answer.fault, "disk_mb" in answer.message, answer.shareable) == ("limit", True, True)
        assert parts(driver, "m-") == set()

    driven(tmp_path / "data", test)


def test_preprocess_has_a_time_limit(tmp_path: Path, clip: Path) -> None:
    async def test(driver: VideoDriver) -> None:
        sandbox = await driver.start(spec_of(clip, preprocess_s=0.001))
        await ask(sandbox, "load_video", name="clip.mp4")
        answer = await ask(sandbox, "preprocess")
        assert (answer.fault, answer.shareable, answer.effect) == ("timeout", False, Effect.NONE)
        assert parts(driver, "m-") == set()
        assert [job.stage for job in driver.jobs] == ["failed"]
        assert (await ask(await prepared(driver, spec_of(clip)), "detect_shots")).status == 200

    driven(tmp_path / "data", test)


def test_limits_of_one_task_end_no_other_job(tmp_path: Path, clip: Path) -> None:
    async def test(driver: VideoDriver) -> None:
        strict, other = await driver.start(spec_of(clip, preprocess_s=0.001)), await driver.start(spec_of(clip))
        for sandbox in (strict, other):
            await ask(sandbox, "load_video", name="clip.mp4")
        answers = await asyncio.gather(ask(strict, "preprocess"), ask(other, "preprocess"))
        assert [answer.fault for answer in answers] == ["timeout", ""]

    driven(tmp_path / "data", test)


def test_video_without_sound_has_none(tmp_path: Path) -> None:
    source = make(tmp_path / "clip.mp4", sound=False, subtitles=False)

    async def test(driver: VideoDriver) -> None:
        sandbox = await prepared(driver, spec_of(source))
        assert (await ask(sandbox, "audio_profile")).json["audio"] is None
        assert (await ask(sandbox, "get_subtitles")).json["subtitles"] == []
        assert "no sound track" in (await ask(sandbox, "caption_retrieval", start=0, end=0)).body.decode()

    driven(tmp_path / "data", test)


OUTSIDE = (
    ("get_frame", {"t": -0.1}), ("get_frame", {"t": 8.1}), ("sample_frames", {"at": [1.0, 99.0]}),
    ("sample_frames", {"every_s": 0.01}), ("sample_frames", {"start": 5.0, "end": 5.0, "n": 2}),
    ("contact_sheet", {"start": 6.0, "end": 2.0}), ("get_subtitles", {"start": 9.0}), ("audio_profile", {"end": 9.0}),
    ("caption_retrieval", {"start": 0, "end": 4}), ("caption_retrieval", {"start": 2, "end": 1}),
    ("caption_retrieval", {"start": -1, "end": 1}), ("visual_question_answering", {"question": "x", "segment": 4}),
)  # fmt: skip


def test_time_out_of_range_names_the_range(tmp_path: Path, clip: Path) -> None:
    async def test(driver: VideoDriver) -> None:
        sandbox = await prepared(driver, spec_of(clip))
        for tool, arguments in OUTSIDE:
            answer = await ask(sandbox, tool, **arguments)
            assert (answer.fault, answer.effect, answer.shareable) == ("range", Effect.NONE, True), (tool, arguments)

    driven(tmp_path / "data", test)


def test_calls_in_wrong_order_are_errors(tmp_path: Path, clip: Path) -> None:
    async def test(driver: VideoDriver) -> None:
        sandbox = await driver.start(spec_of(clip))
        assert (await ask(sandbox, "preprocess")).fault == "not-loaded"
        assert (await ask(sandbox, "video_info")).fault == "not-loaded"
        answer = await ask(sandbox, "load_video", name="other.mp4")
        assert (answer.fault, "clip.mp4" in answer.message) == ("no-such-video", True)
        await ask(sandbox, "load_video", name="clip.mp4")
        assert (await ask(sandbox, "caption_retrieval", start=0, end=0)).fault == "not-preprocessed"

    driven(tmp_path / "data", test)


def test_output_size_is_limited(tmp_path: Path, clip: Path) -> None:
    async def test(driver: VideoDriver) -> None:
        sandbox = await prepared(driver, spec_of(clip, limits={"output_bytes": 900}))
        assert (await ask(sandbox, "sample_frames", n=64)).fault == "too-large"
        assert (await ask(sandbox, "get_frame", t=1.0)).fault == "too-large"
        assert (await ask(sandbox, "get_frame", t=1.0, max_side=16)).status == 200

    driven(tmp_path / "data", test)


def test_directory_knows_only_its_files(tmp_path: Path, clip: Path) -> None:
    async def test(driver: VideoDriver) -> None:
        sandbox = await driver.start(spec_of(str(clip.parent)))
        assert (await ask(sandbox, "load_video", name="../clip.mp4")).fault == "no-such-video"
        assert (await ask(sandbox, "load_video", name="clip.mp4")).status == 200

    folder = tmp_path / "videos"
    folder.mkdir()
    clip = clip.rename(folder / "clip.mp4")
    (folder / ".hidden.mp4").touch()
    driven(tmp_path / "data", test)
