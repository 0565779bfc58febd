"""Promise 1 with videos: each rollout gets the answers of a driver of its own, whatever happens around it."""

import asyncio
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.engine import Engine, build_engine
from proxy.settings import Settings
from proxy.tree.keys import call_key
from sandboxes.calls import ToolResult
from sandboxes.errors import SandboxError
from sandboxes.pool.pool import OverloadedError
from sandboxes.spec import EnvironmentSpec
from sandboxes.video.driver import VideoDriver
from snapshots.policy import Reuse
from tests.proxy.rig import KEEPS_ALL
from tests.proxy.sql_walks import Trouble
from tests.sandboxes.box import opened
from tests.sandboxes.videos import call_of, make, spec_of

Word = tuple[str, dict[str, Any]]
WORDS: tuple[Word, ...] = (
    ("load_video", {"name": "a.mp4"}), ("load_video", {"name": "b.mp4"}), ("load_video", {"name": "c.mp4"}),
    ("load_video", {"name": "notes.txt"}), ("preprocess", {}), ("preprocess", {}), ("video_info", {}),
    ("sample_frames", {"n": 3}), ("sample_frames", {"at": [1.0, 3.5]}), ("get_frame", {"t": 1.95}),
    ("get_frame", {"t": 1.95, "exact": True}), ("get_frame", {"t": 5.0}), ("contact_sheet", {"n": 4}),
    ("detect_shots", {}), ("detect_shots", {"threshold": 0.9}), ("get_subtitles", {"end": 2.0}), ("audio_profile", {}),
    ("segment_localization", {"description": "blue", "k": 2}), ("caption_retrieval", {"start": 0, "end": 1}),
    ("caption_retrieval", {"start": 2, "end": 3}), ("object_memory_querying", {"question": "red?"}),
    ("visual_question_answering", {"question": "Who?", "segment": 1}),
)  # fmt: skip
MOVES = st.sampled_from([word for word in WORDS if word[0] in ("load_video", "preprocess")])
walks = st.lists(st.lists(st.one_of(MOVES, st.sampled_from(WORDS)), max_size=10), min_size=1, max_size=6)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("videos")
    make(folder / "a.mp4", ["red", "blue"])
    make(folder / "b.mp4", ["green", "white", "blue"], sound=False, subtitles=False)
    # Another name for the same content.
    (folder / "c.mp4").write_bytes((folder / "a.mp4").read_bytes())
    (folder / "notes.txt").write_text("no video")
    return folder


async def alone(walked: list[Word], driver: VideoDriver, spec: EnvironmentSpec) -> list[ToolResult]:
    """Return what a sandbox of its own says, that shares nothing and knows nothing."""
    sandbox = await driver.start(spec.model_copy(update={"cache": "never"}))
    answers = [(await sandbox.execute(call_of(tool, **arguments))).result for tool, arguments in walked]
    await sandbox.close()
    return answers


async def walk(engine: Engine, name: str, walked: list[Word], trouble: Trouble) -> list[ToolResult]:
    """Walk one rollout; a call that fails is made again, as an agent's client would."""
    answers = []
    for tool, arguments in walked:
        await trouble.between_calls(engine)
        rollout = await engine.tasks.rollout("task", name)
        call = call_of(tool, **arguments)
        for _ in range(100):
            try:
                record = engine.step.known(rollout, call_key(call))
                if record is None:
                    record = (await engine.step.run(rollout, call, call_key(call))).record
            except (SandboxError, OverloadedError):
                continue
            result = engine.store.records.result(record)
            # A decoder that was killed twice looks broken by its file: the caller gets an error, and repeats the call.
            if b'"kind":"crashed"' not in result.body:
                answers.append(result)
                break
        else:
            pytest.fail(f"{tool} never got an answer")
    return answers


async def together(
    rollouts: list[list[Word]], folder: Path, spec: EnvironmentSpec, seed: int, trouble: float, reuse: Reuse, most: int
) -> list[list[ToolResult]]:
    driver = VideoDriver(folder / "video")
    options: dict[str, Any] = {"default_spec": spec, "warm_sandboxes": 0, "max_sandboxes": most}
    engine = build_engine(Settings(data=folder / "data", **options), {"video": driver})
    engine.snapshot_value.reuse = reuse
    luck = Trouble(
        seed,
        trouble,
        lambda: [worker.pid for worker in driver.worker_pool.workers],
        lambda pid: os.kill(pid, signal.SIGKILL),
    )
    try:
        await engine.open()
        answers = await asyncio.gather(*(walk(engine, f"r{n}", each, luck) for n, each in enumerate(rollouts)))
        await engine.capture.drain()
        engine.pool.roster.check()
        (await engine.tasks.open("task")).tree.check()
        assert engine.counts.divergences == 0
    finally:
        await engine.aclose()
    return answers


@settings(max_examples=int(os.environ.get("VIDEO_WALKS", "8")))
@given(
    walks, st.integers(), st.sampled_from([0, 0.15]), st.sampled_from([KEEPS_ALL, Reuse()]), st.sampled_from([1, 3, 64])
)
def test_each_rollout_is_answered_as_if_alone(
    source: Path, rollouts: list[list[Word]], seed: int, trouble: float, reuse: Reuse, most: int
) -> None:
    spec = spec_of(str(source))

    async def go(folder: Path) -> None:
        got = await together(rollouts, folder, spec, seed, trouble, reuse, most)
        async with opened(own := VideoDriver(folder / "own")):
            for number, walked in enumerate(rollouts):
                assert got[number] == await alone(walked, own, spec), walked

    with tempfile.TemporaryDirectory() as name:
        asyncio.run(go(Path(name)))
