"""What the video driver promises, as every driver does, and what its tools tell of a clip whose content is known."""

import asyncio
import io
import os
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image

from sandboxes.effects import Effect
from sandboxes.errors import SandboxError, SpecError, StateGoneError
from sandboxes.spec import EnvironmentSpec
from sandboxes.video.driver import VideoDriver
from sandboxes.video.messages import ProbeVideo
from sandboxes.workers.messages import SetLimits
from tests.sandboxes.videos import (
    CLIP_S,
    COLOURS,
    HEIGHT,
    SCENE_S,
    TONES,
    WIDTH,
    VideoAnswer,
    ask,
    call_of,
    driven,
    entries,
    everything,
    make,
    parts,
    prepared,
    spec_of,
    until,
)

if TYPE_CHECKING:
    from sandboxes.driver import FrozenState


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("clips") / "clip.mp4")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("others") / "other.mp4", ["blue", "red"], sound=False, subtitles=False)


def both(clip: Path, other: Path) -> EnvironmentSpec:
    return spec_of({"clip.mp4": str(clip), "other.mp4": str(other)})


# -- the driver's promises --------------------------------------------------------------------------------------------


def test_only_load_and_preprocess_have_effects(tmp_path: Path, clip: Path) -> None:
    async def test(driver: VideoDriver) -> None:
        sandbox = await driver.start(spec_of(clip))
        loaded = await ask(sandbox, "load_video", name="clip.mp4")
        again = await ask(sandbox, "load_video", name="clip.mp4")
        made = await ask(sandbox, "preprocess")
        more = await ask(sandbox, "preprocess")
        assert [line.effect for line in (loaded, again, made, more)] == [Effect.FILES, Effect.NONE] * 2
        for tool, arguments in READS:
            answer = await ask(sandbox, tool, **arguments)
            assert (answer.status, answer.effect, answer.state) == (200, Effect.NONE, made.state), tool

    driven(tmp_path, test)


READS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("video_info", {}), ("sample_frames", {"n": 3}), ("sample_frames", {"every_s": 2.0, "exact": True}),
    ("sample_frames", {"at": [5.0, 1.0, 5.0]}), ("get_frame", {"t": 3.3}), ("get_frame", {"t": 3.3, "exact": True}),
    ("get_frame", {"t": 8.0, "format": "png", "max_side": 64}), ("contact_sheet", {"n": 4}), ("detect_shots", {}),
    ("detect_shots", {"threshold": 0.9}), ("get_subtitles", {}), ("audio_profile", {"start": 2.0}),
    ("segment_localization", {"description": "a green picture"}), ("caption_retrieval", {"start": 0, "end": 3}),
    ("visual_question_answering", {"question": "What is seen?", "segment": 2}),
    ("object_memory_querying", {"question": "Where is the white one?"}),
)  # fmt: skip


def test_restored_state_gives_equal_results(tmp_path: Path, clip: Path) -> None:
    async def test(driver: VideoDriver) -> None:
        spec = spec_of(clip)
        sandbox = await prepared(driver, spec)
        before = [await ask(sandbox, tool, **arguments) for tool, arguments in READS]
        frozen = await sandbox.freeze()
        await sandbox.close()
        restored = await driver.restore(spec, frozen)
        after = [await ask(restored, tool, **arguments) for tool, arguments in READS]
        assert [output.body for output in after] == [line.body for line in before]
        assert frozen.state == after[0].state

    driven(tmp_path, test)


def test_frozen_sandbox_continues(tmp_path: Path, clip: Path, other: Path) -> None:
    async def test(driver: VideoDriver) -> None:
        spec = both(clip, other)
        sandbox = await prepared(driver, spec)
        frozen = await sandbox.freeze()
        assert (await ask(sandbox, "load_video", name="other.mp4")).status == 200
        one = await driver.restore(spec, frozen)
        assert (await ask(one, "video_info")).json["duration_s"] == CLIP_S
        assert (await ask(sandbox, "video_info")).json["duration_s"] == 2 * SCENE_S
        assert (await ask(sandbox, "detect_shots")).fault == "not-preprocessed"

    driven(tmp_path, test)


def test_equal_states_have_equal_digests(tmp_path: Path, clip: Path, other: Path) -> None:
    async def test(driver: VideoDriver) -> None:
        spec = both(clip, other)
        direct = await prepared(driver, spec)
        detour = await driver.start(spec)
        seen = [
            await ask(detour, "load_video", name="other.mp4"), await ask(detour, "preprocess"),
            await ask(detour, "load_video", name="clip.mp4"), await ask(detour, "preprocess"),
        ]  # fmt: skip
        assert seen[-1].state == (await ask(direct, "video_info")).state
        assert len({line.state for line in seen}) == 4

    driven(tmp_path, test)


def test_equal_videos_share_identity_and_preprocess(tmp_path: Path, clip: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    twin = tmp_path / "elsewhere" / "clip.mp4"
    twin.write_bytes(clip.read_bytes())

    async def test(driver: VideoDriver) -> None:
        assert await driver.identity(spec_of(clip)) == await driver.identity(spec_of(twin))
        one = await prepared(driver, spec_of(clip))
        two = await prepared(driver, spec_of(str(tmp_path / "elsewhere")))
        assert (await ask(one, "video_info")).state == (await ask(two, "video_info")).state
        assert len(list(driver.jobs)) == 1

    driven(tmp_path / "data", test)


def test_other_settings_make_another_state(tmp_path: Path, clip: Path) -> None:
    async def test(driver: VideoDriver) -> None:
        one, two = await prepared(driver, spec_of(clip)), await prepared(driver, spec_of(clip, segment_s=1.0))
        assert (await ask(one, "video_info")).state != (await ask(two, "video_info")).state
        assert (await ask(two, "video_info")).json["segments"] == 2 * (await ask(one, "video_info")).json["segments"]

    driven(tmp_path, test)


def test_collect_spares_kept_and_used_parts(tmp_path: Path, clip: Path, other: Path) -> None:
    async def test(driver: VideoDriver) -> None:
        spec = both(clip, other)
        kept, dropped = await prepared(driver, spec), await prepared(driver, spec, "other.mp4")
        states = [await kept.freeze(), await dropped.freeze()]
        await kept.close()
        assert await driver.collect(states[0].parts) > 0
        assert len(parts(driver)) == 4
        await dropped.close()
        used = await driver.collect(states[0].parts)
        assert parts(driver) == set(states[0].parts)
        assert used == sum(driver.store.size_bytes(part) for part in parts(driver))
        assert (await ask(await driver.restore(spec, states[0]), "detect_shots")).status == 200
        with pytest.raises(StateGoneError):
            await driver.restore(spec, states[1])

    driven(tmp_path, test)


def test_part_in_the_making_is_not_collected(tmp_path: Path, clip: Path) -> None:
    async def test(driver: VideoDriver) -> None:
        sandbox = await driver.start(spec_of(clip))
        await ask(sandbox, "load_video", name="clip.mp4")
        making = asyncio.create_task(ask(sandbox, "preprocess"))
        while not making.done():
            await driver.collect(())
            await asyncio.sleep(0)
        assert (await making).status == 200
        assert (await ask(sandbox, "detect_shots")).status == 200

    driven(tmp_path, test)


def test_damaged_part_is_gone_and_remade(tmp_path: Path, clip: Path) -> None:
    async def test(driver: VideoDriver) -> None:
        spec = spec_of(clip)
        sandbox = await prepared(driver, spec)
        frozen = await sandbox.freeze()
        await sandbox.close()
        (measured,) = parts(driver, "m-")
        os.truncate(driver.store.path(measured) / "frames.bin", 10)
        with pytest.raises(StateGoneError):
            await driver.restore(spec, frozen)
        await driver.worker_pool.renew()
        again = await prepared(driver, spec)
        assert (await ask(again, "get_frame", t=1.0)).status == 200

    driven(tmp_path, test)


@pytest.mark.parametrize("kind", ["v-", "m-"])
def test_a_changed_byte_is_not_served(tmp_path: Path, clip: Path, kind: str) -> None:
    """A byte of a part changes on disk, and its times do not. A new process makes the part again."""
    spec = spec_of(clip)

    async def freeze(driver: VideoDriver) -> None:
        sandbox = await prepared(driver, spec)
        frozen.append(await sandbox.freeze())
        shots.append((await ask(sandbox, "detect_shots")).body)

    async def refuse(driver: VideoDriver) -> None:
        (part,) = parts(driver, kind)
        path = max(driver.store.path(part).iterdir(), key=lambda file: file.stat().st_size)
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        with pytest.raises(StateGoneError):
            await driver.restore(spec, frozen[0])
        again = await prepared(driver, spec)
        assert (await ask(again, "detect_shots")).body == shots[0]
        assert path.read_bytes() != content

    frozen: list[FrozenState] = []
    shots: list[bytes] = []
    for act in (freeze, refuse):
        driven(tmp_path, act)


def test_close_is_idempotent_and_dead_sandbox_raises(tmp_path: Path, clip: Path) -> None:
    async def test(driver: VideoDriver) -> None:
        sandbox = await driver.start(spec_of(clip))
        await sandbox.close()
        await sandbox.close()
        assert not sandbox.alive
        with pytest.raises(SandboxError):
            await sandbox.execute(call_of("video_info"))

    driven(tmp_path, test)


def test_missing_source_is_a_spec_error(tmp_path: Path) -> None:
    async def test(driver: VideoDriver) -> None:
        with pytest.raises(SpecError, match="nowhere"):
            await driver.identity(spec_of("/nowhere/at/all.mp4"))

    driven(tmp_path, test)


def test_changed_source_is_another_identity(tmp_path: Path, other: Path) -> None:
    source = make(tmp_path / "clip.mp4", ["red"])
    changed = other.read_bytes()

    async def test(driver: VideoDriver) -> None:
        before, sandbox = await driver.identity(spec_of(source)), await driver.start(spec_of(source))
        await asyncio.to_thread(source.write_bytes, changed)
        assert await driver.identity(spec_of(source)) != before
        with pytest.raises(SandboxError, match="changed"):
            await ask(sandbox, "load_video", name="clip.mp4")

    driven(tmp_path / "data", test)


# -- once -------------------------------------------------------------------------------------------------------------


def test_concurrent_preprocesses_run_once(tmp_path: Path, clip: Path) -> None:
    async def test(driver: VideoDriver) -> None:
        sandboxes = [await driver.start(spec_of(clip)) for _ in range(6)]
        for sandbox in sandboxes:
            await ask(sandbox, "load_video", name="clip.mp4")
        answers = await asyncio.gather(*(ask(sandbox, "preprocess") for sandbox in sandboxes))
        assert len({answer.state for answer in answers}) == 1
        assert len(list(driver.jobs)) == 1

    driven(tmp_path, test)


def test_slots_limit_concurrent_decoding(tmp_path: Path) -> None:
    (tmp_path / "videos").mkdir()
    names = [make(tmp_path / "videos" / f"{n}.mp4", ["red"], shade=20 * n).name for n in range(4)]

    async def test(driver: VideoDriver) -> None:
        driver.jobs.slots = asyncio.Semaphore(1)
        await driver.pipeline.versions()
        sandboxes = [await driver.start(spec_of(str(tmp_path / "videos"))) for _ in names]
        for sandbox, name in zip(sandboxes, names, strict=True):
            await ask(sandbox, "load_video", name=name)
        before, most = set(driver.worker_pool.workers), 0
        making = asyncio.gather(*(ask(sandbox, "preprocess") for sandbox in sandboxes))

        def done() -> bool:
            nonlocal most
            most = max(most, len(driver.worker_pool.workers - before))
            return making.done()

        await until(done)
        assert ({line.status for line in await making}, most) == ({200}, 1)
        assert len(list(driver.jobs)) == 4

    driven(tmp_path / "data", test)


def test_cancelled_caller_leaves_job_to_others(tmp_path: Path, clip: Path) -> None:
    async def test(driver: VideoDriver) -> None:
        one, two = await driver.start(spec_of(clip)), await driver.start(spec_of(clip))
        for sandbox in (one, two):
            await ask(sandbox, "load_video", name="clip.mp4")
        leaving, staying = (asyncio.create_task(ask(sandbox, "preprocess")) for sandbox in (one, two))
        await until(lambda: list(driver.jobs))
        leaving.cancel()
        assert (await staying).status == 200
        assert [job.error for job in driver.jobs] == [None]

    driven(tmp_path, test)


def test_two_runs_make_equal_bytes(tmp_path: Path, clip: Path) -> None:
    made = []
    for name in ("one", "two"):

        async def test(driver: VideoDriver) -> None:
            await prepared(driver, spec_of(clip))
            made.append(everything(driver.store.folder / "parts"))

        driven(tmp_path / name, test)
    assert made[0] == made[1]
    assert len(made[0]) == 8


def test_later_instance_reuses_prepared_parts(tmp_path: Path, clip: Path) -> None:
    async def first(driver: VideoDriver) -> None:
        await prepared(driver, spec_of(clip))

    async def second(driver: VideoDriver) -> None:
        await prepared(driver, spec_of(clip))
        assert list(driver.jobs) == []

    driven(tmp_path, first)
    driven(tmp_path, second)


def test_baseline_shares_nothing_and_gets_equal_results(tmp_path: Path, clip: Path) -> None:
    async def test(driver: VideoDriver) -> None:
        shared = await prepared(driver, spec_of(clip))
        alone = await prepared(driver, spec_of(clip, cache="never"))
        assert len(list(driver.jobs)) == 2
        for tool, arguments in READS:
            one, two = await ask(shared, tool, **arguments), await ask(alone, tool, **arguments)
            assert (one.body, one.state) == (two.body, two.state), tool
        await alone.close()
        assert entries(driver.data_dir / "own") == []

    driven(tmp_path, test)


def test_killed_worker_leaves_no_incomplete_part(tmp_path: Path, clip: Path) -> None:
    async def test(driver: VideoDriver) -> None:
        sandbox = await driver.start(spec_of(clip))
        loaded = await ask(sandbox, "load_video", name="clip.mp4")
        making = asyncio.create_task(sandbox.execute(call_of("preprocess")))
        before = set(driver.worker_pool.workers)
        await until(lambda: driver.worker_pool.workers - before)
        os.kill((driver.worker_pool.workers - before).pop().pid, signal.SIGKILL)
        with pytest.raises(SandboxError):
            await making
        assert parts(driver, "m-") == set()
        assert entries(driver.store.folder / "work") == []
        assert (await ask(sandbox, "video_info")).state == loaded.state
        assert (await ask(sandbox, "preprocess")).status == 200

    driven(tmp_path, test)


def test_workers_are_confined(tmp_path: Path, clip: Path) -> None:
    async def test(driver: VideoDriver) -> None:
        await driver.pipeline.versions()
        if os.geteuid() != 0 or not driver.worker_pool.confined:
            pytest.skip("workers are confined where the proxy is root and the kernel has Landlock")
        shutil.copyfile(clip, tmp_path / "data" / "here.mp4")
        inside, limits = str(tmp_path / "data" / "here.mp4"), SetLimits(512, 10)
        assert (await driver.pipeline.read(ProbeVideo(inside, 100.0), limits))[0].info["frames"] == 80
        with pytest.raises(Exception, match="denied"):
            await driver.pipeline.read(ProbeVideo(str(clip), 100.0), limits)

    driven(tmp_path / "data", test)


# -- what tools tell --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, clip: Path) -> dict[str, VideoAnswer]:
    """What each tool says of the clip."""
    entries: dict[str, VideoAnswer] = {}

    async def test(driver: VideoDriver) -> None:
        sandbox = await prepared(driver, spec_of(clip))
        for tool, arguments in READS:
            entries.setdefault(tool, await ask(sandbox, tool, **arguments))
        entries["subtitles early"] = await ask(sandbox, "get_subtitles", start=0.3, end=1.0)

    driven(tmp_path_factory.mktemp("answers"), test)
    return entries


def test_info_matches_the_synthetic_clip(answers: dict[str, VideoAnswer]) -> None:
    info = answers["video_info"].json
    assert (info["duration_s"], info["frames"], info["fps"]) == (CLIP_S, 80, 10)
    assert (info["width"], info["height"], info["codec"]) == (WIDTH, HEIGHT, "mpeg4")
    assert info["audio"] == {"codec": "aac", "sample_rate": 16_000, "channels": 1}
    assert (info["segments"], info["shots"], info["model"]) == (4, 4, "none")


def test_measurements_match_the_synthetic_scenes(answers: dict[str, VideoAnswer]) -> None:
    shots = answers["detect_shots"].json["shots"]
    assert [shot["start_s"] for shot in shots] == [n * SCENE_S for n in range(4)]
    heard = answers["audio_profile"].json["segments"]
    assert [segment["tone_hz"] for segment in heard] == pytest.approx(TONES[1:], abs=1)
    texts = [(s["start_s"], s["text"]) for s in answers["get_subtitles"].json["subtitles"]]
    assert texts == [(n * SCENE_S + 0.2, f"This is {name}.") for n, name in enumerate(COLOURS)]
    assert len(answers["subtitles early"].json["subtitles"]) == 1


def test_answers_without_model_state_measurements(answers: dict[str, VideoAnswer]) -> None:
    captions = answers["caption_retrieval"].json
    assert captions["model"] == "none"
    for name, each in zip(COLOURS, captions["captions"], strict=True):
        assert each["caption"].startswith("[no model] ")
        assert f"colours {name}" in each["caption"]
    result = answers["segment_localization"].json
    assert result["found"][0]["segment"] == 2
    question = answers["visual_question_answering"].json
    assert (question["answered"], question["answer"].startswith("[no model]")) == (False, True)
    memory = answers["object_memory_querying"].json
    assert (memory["answered"], memory["segments"][0]["segment"]) == (False, 3)
    assert {answer.json["label"] for answer in answers.values() if answer.json} == {"pure"}


def dominant(data: bytes) -> str:
    red, green, blue = Image.open(io.BytesIO(data)).convert("RGB").resize((1, 1), Image.Resampling.BOX).getpixel((0, 0))  # type: ignore[misc]
    return min(
        COLOURS, key=lambda name: sum((a - b) ** 2 for a, b in zip(COLOURS[name], (red, green, blue), strict=True))
    )


def test_pictures_show_the_scene_of_their_time(tmp_path: Path, clip: Path) -> None:
    async def test(driver: VideoDriver) -> None:
        loaded = await driver.start(spec_of(clip))
        await ask(loaded, "load_video", name="clip.mp4")
        ready = await prepared(driver, spec_of(clip))
        names = list(COLOURS)
        # Also the first and last picture of a scene: the nearest kept one may be on the other side of the cut.
        for t in (0.0, 1.95, 2.0, 2.4, 3.9, 5.99, 6.0, 7.99, 8.0):
            for sandbox, exact in ((loaded, False), (ready, False), (ready, True)):
                answer = await ask(sandbox, "get_frame", t=t, exact=exact)
                assert dominant(answer.body) == names[min(3, int(t / SCENE_S))], (t, exact)
                if exact or sandbox is loaded:
                    assert answer.frame_t == pytest.approx(min(int(t * 10 + 1e-6), 79) / 10)
                else:
                    assert abs(answer.frame_t - t) <= 1.0

    driven(tmp_path, test)


@pytest.mark.parametrize("gop", [1, 12, 80])
def test_seeking_and_decoding_find_equal_pictures(tmp_path: Path, gop: int) -> None:
    source = make(tmp_path / "clip.mp4", gop=gop)

    async def test(driver: VideoDriver) -> None:
        sandbox = await driver.start(spec_of(source))
        await ask(sandbox, "load_video", name="clip.mp4")
        times = [0.05, 1.0, 1.1, 4.44, 6.7]
        at_once = (await ask(sandbox, "sample_frames", at=times)).json["frames"]
        one_by_one = [(await ask(sandbox, "sample_frames", at=[t])).json["frames"][0] for t in times]
        assert at_once == one_by_one
        assert [frame["frame_t"] for frame in at_once] == [0.0, 1.0, 1.1, 4.4, 6.7]

    driven(tmp_path / "data", test)


def test_pictures_have_requested_format_and_size(tmp_path: Path, clip: Path) -> None:
    async def test(driver: VideoDriver) -> None:
        sandbox = await prepared(driver, spec_of(clip))
        png = await ask(sandbox, "get_frame", t=1.0, format="png", max_side=64)
        assert (png.kind, Image.open(io.BytesIO(png.body)).size) == ("image/png", (64, 48))
        jpeg = await ask(sandbox, "get_frame", t=1.0)
        assert (jpeg.kind, Image.open(io.BytesIO(jpeg.body)).size) == ("image/jpeg", (WIDTH, HEIGHT))
        sheet = Image.open(io.BytesIO((await ask(sandbox, "contact_sheet", n=4)).body))
        assert sheet.width > 2 * WIDTH
        frames = (await ask(sandbox, "sample_frames", every_s=4.0)).json["frames"]
        assert [frame["t"] for frame in frames] == [0.0, 4.0]

    driven(tmp_path, test)
