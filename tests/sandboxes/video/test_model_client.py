"""ModelClient behind a real HTTP endpoint: well, down, slow, and talking nonsense."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sandboxes.errors import ServerError
from sandboxes.video.answer_memo import AnswerMemo
from sandboxes.video.driver import VideoDriver
from sandboxes.video.model_client import ModelClient
from sandboxes.video_spec import VideoModel
from tests.model_server import ModelServer, Mood, model_server
from tests.sandboxes.videos import VideoAnswer, ask, call_of, driven, entries, make, parts, prepared, spec_of, until

QUESTION = {"question": "What is seen?", "segment": 1}


@pytest.fixture
def server() -> Iterator[ModelServer]:
    with model_server() as running:
        yield running


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("clips") / "clip.mp4")


def model(server: ModelServer, **more: Any) -> dict[str, Any]:
    return {"base_url": server.url, "model": "seer", **more}


def asked(tmp_path: Path, test: Callable[[ModelClient], Awaitable[None]]) -> None:
    """Run test on a `ModelClient` with a memory of its own."""

    async def go() -> None:
        memo = AnswerMemo(tmp_path / "models.sqlite")
        memo.open()
        models = ModelClient(memo)
        try:
            await test(models)
        finally:
            await models.aclose()
            memo.close()

    asyncio.run(go())


# -- one question -----------------------------------------------------------------------------------------------------


def test_request_has_settings_and_images(tmp_path: Path, server: ModelServer) -> None:
    async def test(models: ModelClient) -> None:
        await models.chat(VideoModel(**model(server, seed=7)), "What?", [b"one", b"two"], variant=2)
        (body,) = server.chats()
        assert (body["temperature"], body["seed"], body["model"]) == (0.0, 9, "seer")
        kinds = [part["type"] for part in body["messages"][0]["content"]]
        assert kinds == ["text", "image_url", "image_url"]
        assert body["messages"][0]["content"][1]["image_url"]["url"].startswith("data:image/jpeg;base64,")

    asked(tmp_path, test)


def test_equal_questions_share_one_request(tmp_path: Path, server: ModelServer) -> None:
    seer = VideoModel(**model(server))

    async def test(models: ModelClient) -> None:
        answers = await asyncio.gather(*(models.chat(seer, "What?", [b"x"]) for _ in range(5)))
        assert len({*answers, await models.chat(seer, "What?", [b"x"])}) == 1
        assert (models.sent, models.reused, len(server.asked)) == (1, 5, 1)
        others = [
            models.chat(seer, "Who?", [b"x"]), models.chat(seer, "What?", [b"y"]),
            models.chat(seer, "What?", [b"x"], variant=1),
            models.chat(VideoModel(**model(server, temperature=0.5)), "What?", [b"x"]),
        ]  # fmt: skip
        await asyncio.gather(*others)
        assert len(server.asked) == 5
        assert await models.chat(seer, "What?", [b"x"], fresh=True) == answers[0]
        assert len(server.asked) == 6

    asked(tmp_path, test)

    async def later(models: ModelClient) -> None:
        await models.chat(seer, "What?", [b"x"])
        assert len(server.asked) == 6

    asked(tmp_path, later)


def test_cancelled_caller_leaves_request_to_others(tmp_path: Path, server: ModelServer) -> None:
    server.mood = "silent"

    async def test(models: ModelClient) -> None:
        one, two = (asyncio.create_task(models.chat(VideoModel(**model(server)), "What?", [])) for _ in range(2))
        await until(lambda: server.asked)
        one.cancel()
        server.gate.set()
        assert "answer" in await two
        assert len(server.asked) == 1

    asked(tmp_path, test)


MOODS: list[tuple[Mood, bool]] = [
    ("down", False), ("refuses", False), ("not json", False), ("no choices", False), ("empty", False), ("silent", True)
]  # fmt: skip


@pytest.mark.parametrize(("mood", "silent"), MOODS)
def test_failing_endpoint_is_an_error_and_not_kept(
    tmp_path: Path, server: ModelServer, mood: Mood, silent: bool
) -> None:
    seer = VideoModel(**model(server, timeout_s=0.3 if silent else 30))

    async def test(models: ModelClient) -> None:
        server.mood = mood
        with pytest.raises(ServerError) as error:
            await models.chat(seer, "What?", [])
        assert error.value.silent is silent
        server.mood = "well"
        server.gate.set()
        assert "answer" in await models.chat(seer.model_copy(update={"timeout_s": 30.0}), "What?", [])

    asked(tmp_path, test)


def test_missing_endpoint_is_an_error(tmp_path: Path) -> None:
    async def test(models: ModelClient) -> None:
        with pytest.raises(ServerError, match="cannot be reached"):
            await models.chat(VideoModel(base_url="http://127.0.0.1:9/v1", model="seer"), "What?", [])

    asked(tmp_path, test)


def test_busy_endpoint_is_retried(tmp_path: Path, server: ModelServer) -> None:
    server.mood = "busy once"

    async def test(models: ModelClient) -> None:
        assert "answer" in await models.chat(VideoModel(**model(server)), "What?", [])
        assert len(server.asked) == 2

    asked(tmp_path, test)


def test_vectors_are_in_order_of_texts(tmp_path: Path, server: ModelServer) -> None:
    seer = VideoModel(**model(server))

    async def test(models: ModelClient) -> None:
        together = await models.embed(seer, "embedder", ["a", "b", "c"])
        assert [(await models.embed(seer, "embedder", [text]))[0] for text in "abc"] == together
        server.mood = "short"
        with pytest.raises(ServerError, match="wrong form"):
            await models.embed(seer, "embedder", ["d", "e"])

    asked(tmp_path, test)


def test_key_comes_from_the_environment(tmp_path: Path, server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    seer = VideoModel(**model(server, api_key_env="SEER_KEY"))

    async def test(models: ModelClient) -> None:
        with pytest.raises(ServerError, match="SEER_KEY"):
            await models.chat(seer, "What?", [])
        monkeypatch.setenv("SEER_KEY", "secret")
        await models.chat(seer, "What?", [])
        assert server.keys == ["Bearer secret"]

    asked(tmp_path, test)
    assert b"secret" not in (tmp_path / "models.sqlite").read_bytes()


def test_answer_memo_stays_within_budget(tmp_path: Path) -> None:
    memo = AnswerMemo(tmp_path / "models.sqlite", budget_bytes=1 << 20)
    memo.open()
    for n in range(200):
        memo.keep(n.to_bytes(4, "big"), b"x" * 20_000)
        memo.keep(n.to_bytes(4, "big"), b"another")
    assert memo.find((0).to_bytes(4, "big")) is None
    assert memo.find((199).to_bytes(4, "big")) == b"x" * 20_000
    memo.close()
    (tmp_path / "models.sqlite").write_bytes(b"no database at all, and longer than a header " * 9)
    memo.open()
    assert memo.find((199).to_bytes(4, "big")) is None
    memo.close()


# -- a whole video ----------------------------------------------------------------------------------------------------


def test_each_segment_is_described_once(tmp_path: Path, clip: Path, server: ModelServer) -> None:
    async def test(driver: VideoDriver) -> None:
        spec = spec_of(clip, model=model(server))
        sandbox = await prepared(driver, spec)
        assert len(server.chats()) == 4
        captions = (await ask(sandbox, "caption_retrieval", start=0, end=3)).json
        assert (captions["label"], captions["model"]) == ("sampled", "seer")
        assert all(each["caption"].startswith("A thing called") for each in captions["captions"])
        await prepared(driver, spec)
        assert len(server.chats()) == 4
        assert {job.stage for job in driver.jobs} == {"done"}

    driven(tmp_path, test)


def test_questions_send_pictures_and_object_lists(tmp_path: Path, clip: Path, server: ModelServer) -> None:
    async def test(driver: VideoDriver) -> None:
        sandbox = await prepared(driver, spec_of(clip, model=model(server)))
        answer = await ask(sandbox, "visual_question_answering", **QUESTION)
        assert (answer.json["answered"], answer.json["label"], answer.json["model"]) == (True, "sampled", "seer")
        shown = server.chats()[-1]["messages"][0]["content"]
        assert "What is seen?" in shown[0]["text"]
        assert 2 <= len(shown) - 1 <= 6
        assert answer.json["answer"].startswith("answer")
        await ask(sandbox, "object_memory_querying", question="Where is the square?")
        (memory,) = server.chats()[-1]["messages"][0]["content"]
        assert "square: 0-3" in memory["text"]
        before = len(server.asked)
        again = await ask(
            await prepared(driver, spec_of(clip, model=model(server))), "visual_question_answering", **QUESTION
        )
        assert (again.body, len(server.asked)) == (answer.body, before)

    driven(tmp_path, test)


def test_vectors_localize_described_segment(tmp_path: Path, clip: Path, server: ModelServer) -> None:
    async def test(driver: VideoDriver) -> None:
        spec = model(server, embed_model="embedder", image_embed_model="seer-embedder")
        sandbox = await prepared(driver, spec_of(clip, model=spec))
        captions = (await ask(sandbox, "caption_retrieval", start=0, end=3)).json["captions"]
        for each in captions:
            result = (await ask(sandbox, "segment_localization", description=each["caption"], k=4)).json
            assert (result["by"], result["label"], len(result["found"])) == ("vectors", "sampled", 4)
        text_only = await prepared(driver, spec_of(clip, model=model(server, embed_model="embedder")))
        for each in captions:
            result = (await ask(text_only, "segment_localization", description=each["caption"])).json
            assert result["found"][0]["segment"] == each["segment"]

    driven(tmp_path, test)


def test_other_model_shares_measurements(tmp_path: Path, clip: Path, server: ModelServer) -> None:
    async def test(driver: VideoDriver) -> None:
        states = []
        for answer in (None, model(server), model(server, seed=5), model(server, model="prophet")):
            sandbox = await prepared(driver, spec_of(clip, model=answer))
            states.append((await ask(sandbox, "video_info")).state)
        assert len(set(states)) == 4
        assert len(parts(driver, "m-")) == 1
        assert len(parts(driver, "d-")) == 3

    driven(tmp_path, test)


@pytest.mark.parametrize(("mood", "silent"), MOODS)
def test_preprocess_continues_after_model_failure(
    tmp_path: Path, clip: Path, server: ModelServer, mood: Mood, silent: bool
) -> None:
    async def test(driver: VideoDriver) -> None:
        spec = spec_of(clip, model=model(server, timeout_s=2 if silent else 30))
        sandbox = await driver.start(spec)
        loaded = await ask(sandbox, "load_video", name="clip.mp4")
        server.mood = mood
        with pytest.raises(ServerError):
            await sandbox.execute(call_of("preprocess"))
        assert parts(driver, "d-") == set()
        assert entries(driver.store.folder / "work") == []
        assert (await ask(sandbox, "video_info")).state == loaded.state
        # A question that was under way beside the one that failed is answered as it was asked.
        await asyncio.gather(*driver.models._flights.values(), return_exceptions=True)
        server.mood = "well"
        server.gate.set()
        jobs = len(list(driver.jobs))
        assert (await ask(sandbox, "preprocess")).status == 200
        # What was measured is not measured again.
        assert len(list(driver.jobs)) == jobs + 1

    driven(tmp_path, test)


def test_different_captions_make_another_state(tmp_path: Path, clip: Path, server: ModelServer) -> None:
    states = []
    for name in ("one", "two"):

        async def test(driver: VideoDriver) -> None:
            sandbox = await prepared(driver, spec_of(clip, model=model(server)))
            states.append((await ask(sandbox, "video_info")).state)

        server.salt = name
        driven(tmp_path / name, test)
    assert states[0] != states[1]


def test_each_variant_is_recorded(tmp_path: Path, clip: Path, server: ModelServer) -> None:
    async def test(driver: VideoDriver) -> None:
        sandbox = await prepared(driver, spec_of(clip, model=model(server), variants=3))

        async def draw(variant: int) -> VideoAnswer:
            call = call_of("visual_question_answering", **QUESTION)
            return VideoAnswer(
                await sandbox.execute(type(call)(call.endpoint, call.tool, {**call.arguments, "variant": variant}))
            )

        answers = [(await draw(variant)).json["answer"] for variant in (0, 1, 2, 0, 1, 2)]
        assert answers[:3] == answers[3:]
        assert len(set(answers)) == 3
        assert [body["seed"] for body in server.chats()[-3:]] == [0, 1, 2]

    driven(tmp_path, test)
