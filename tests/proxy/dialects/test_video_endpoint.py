"""The video endpoint as agents see it: on a socket, over MCP, and in the protocol of TVCACHE's authors."""

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from proxy.dialects.video import for_rollout, listed
from sandboxes.video.driver import VideoDriver
from tests.model_server import ModelServer, model_server
from tests.proxy.serving import Running, serving
from tests.sandboxes.videos import call_of, make, spec_of


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    data = tmp_path_factory.mktemp("data")
    with serving(data, drivers={"video": VideoDriver(data / "video")}) as running:
        yield running


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("clips") / "clip.mp4")


@pytest.fixture
def server() -> Iterator[ModelServer]:
    with model_server() as running:
        yield running


class Task:
    """A task over a clip, and calls of its rollouts."""

    def __init__(self, proxy: Running, name: str, clip: Path, **video: Any) -> None:
        self.client, self.name = proxy.client, name
        outside: dict[str, Any] = {name: video.pop(name) for name in ("cache", "share") if name in video}
        spec: dict[str, Any] = {"driver": "video", "video": {"source": str(clip), **video}, **outside}
        self.client.put(f"/api/v1/tasks/{name}", json=spec).raise_for_status()

    def ask(self, rollout: str, tool: str, **arguments: Any) -> httpx.Response:
        return self.client.post(f"/t/{self.name}/r/{rollout}/video/{tool}", json=arguments)

    def ready(self, rollout: str) -> list[str]:
        """Load and prepare; return how each was answered."""
        answers = [self.ask(rollout, "load_video", name="clip.mp4"), self.ask(rollout, "preprocess")]
        assert [answer.status_code for answer in answers] == [200, 200], answers[-1].text
        return [status(answer) for answer in answers]

    def wire(self, verb: str, **body: Any) -> httpx.Response:
        return self.client.post(f"/t/{self.name}/video/{verb}", json=body)

    def mcp(self, method: str, **params: Any) -> dict[str, Any]:
        payload = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        answer: dict[str, Any] = self.client.post(f"/t/{self.name}/r/m/mcp", json=payload).json()
        return answer["result"]  # type: ignore[no-any-return]


def status(answer: httpx.Response) -> str:
    return answer.headers["cache-status"].removeprefix("forkpoint; ")


def test_rollouts_and_tasks_share_video_records(proxy: Running, clip: Path) -> None:
    one, two = Task(proxy, "first", clip), Task(proxy, "second", clip)
    assert one.ready("a") == ["fwd=miss; stored"] * 2
    assert one.ready("b") == two.ready("c") == ["hit"] * 2
    first = one.ask("a", "get_frame", t=3.0)
    assert (first.headers["content-type"], status(first)) == ("image/jpeg", "fwd=miss; stored")
    again = two.ask("c", "get_frame", t=3)
    assert (again.content, status(again)) == (first.content, "hit")
    assert again.headers["x-frame-time"] == first.headers["x-frame-time"] == "3.000"
    assert Image.open(io.BytesIO(first.content)).size == (160, 120)


def test_unshared_task_shares_the_prepared_video(proxy: Running, clip: Path) -> None:
    Task(proxy, "shared", clip).ready("a")
    before = len(proxy.client.get("/api/v1/videos").json()["preprocesses"])
    own = Task(proxy, "own", clip, share="off")
    assert own.ready("a") == ["fwd=miss; stored"] * 2
    assert len(proxy.client.get("/api/v1/videos").json()["preprocesses"]) == before


def test_defaults_do_not_change_the_key(proxy: Running, clip: Path) -> None:
    task = Task(proxy, "defaults", clip)
    task.ready("a")
    task.ask("a", "sample_frames")
    assert status(task.ask("a", "sample_frames", n=8, max_side=448, start=None)) == "hit"
    assert status(task.ask("a", "sample_frames", n=7)) != "hit"


def test_progress_of_preprocessing_is_shown(proxy: Running, clip: Path) -> None:
    Task(proxy, "progress", clip, segment_s=1.0).ready("a")
    last = proxy.client.get("/api/v1/videos").json()["preprocesses"][-1]
    assert (last["stage"], last["share"], last["of_s"], last["error"]) == ("done", 1.0, 8.0, None)
    assert last["seconds"] > 0


def test_tools_are_listed_with_their_arguments(proxy: Running, clip: Path) -> None:
    task = Task(proxy, "listing", clip)
    answer = proxy.client.get("/t/listing/r/a/video/tools").json()["tools"]
    assert {tool["name"] for tool in answer} == {
        "load_video", "preprocess", "video_info", "sample_frames", "get_frame", "contact_sheet", "detect_shots",
        "get_subtitles", "audio_profile", "segment_localization", "caption_retrieval", "visual_question_answering",
        "object_memory_querying",
    }  # fmt: skip
    reads = {tool["name"] for tool in answer if tool["annotations"]["readOnlyHint"]}
    assert {tool["name"] for tool in answer} - reads == {"load_video", "preprocess"}
    assert task.mcp("tools/list")["tools"] == answer == listed()


def test_mcp_result_has_images(proxy: Running, clip: Path) -> None:
    task = Task(proxy, "mcp", clip)
    task.ready("a")
    assert task.mcp("tools/call", name="load_video", arguments={"name": "clip.mp4"})["isError"] is False
    task.mcp("tools/call", name="preprocess")
    picture, at = task.mcp("tools/call", name="get_frame", arguments={"t": 3.0})["content"]
    assert (picture["type"], picture["mimeType"], at["text"]) == ("image", "image/jpeg", "at 3.000 s")
    assert base64.b64decode(picture["data"]) == task.ask("a", "get_frame", t=3.0).content
    frames = task.mcp("tools/call", name="sample_frames", arguments={"n": 2})["content"]
    assert [part["type"] for part in frames] == ["text", "image"] * 2
    shots = task.mcp("tools/call", name="detect_shots")
    assert len(shots["structuredContent"]["shots"]) == 4
    wrong = task.mcp("tools/call", name="get_frame", arguments={"t": 99})
    assert (wrong["isError"], "0 to 8 s" in wrong["content"][0]["text"]) == (True, True)


@pytest.mark.parametrize(
    ("method", "path", "content", "code", "detail"),
    [
        ("POST", "get_frame", b"{", 400, "not JSON"),
        ("POST", "get_frame", b"[]", 422, "JSON object"),
        ("POST", "get_frame", b"{}", 422, "t: Field required"),
        ("POST", "get_frame", b'{"t": "1"}', 422, "valid number"),
        ("POST", "get_frame", b'{"t": 1, "format": "gif"}', 422, "format"),
        ("POST", "get_frame", b'{"t": 1, "size": 1}', 422, "size"),
        ("POST", "sample_frames", b'{"n": 3, "every_s": 1}', 422, "one of"),
        ("POST", "sample_frames", b'{"n": 65}', 422, "n:"),
        ("POST", "caption_retrieval", b'{"start": 0.5, "end": 1}', 422, "start"),
        ("POST", "preprocess", b'{"now": true}', 422, "takes nothing"),
        ("POST", "nothing", b"{}", 404, "get_frame"),
        ("GET", "get_frame", b"", 405, "POST"),
    ],
)
def test_bad_requests_are_explained(
    proxy: Running, clip: Path, method: str, path: str, content: bytes, code: int, detail: str
) -> None:
    Task(proxy, "refusals", clip)
    answer = proxy.client.request(method, f"/t/refusals/r/a/video/{path}", content=content)
    assert (answer.status_code, detail in answer.json()["detail"]) == (code, True), answer.text


@pytest.mark.parametrize(
    ("spec", "detail"),
    [
        ({"driver": "video"}, "needs `video`"),
        ({"driver": "local", "video": {"source": "/x"}}, "only driver"),
        ({"driver": "video", "video": {"source": "x.mp4"}}, "source"),
        ({"driver": "video", "video": {"source": "/nowhere.mp4"}}, "/nowhere.mp4"),
        ({"driver": "video", "video": {"source": "/x"}, "setup": ["ls"]}, "runs no shell"),
        ({"driver": "video", "video": {"source": "/x", "model": {"base_url": "ftp://x", "model": "m"}}}, "base_url"),
        ({"driver": "video", "video": {"source": "/x", "variants": 0}}, "variants"),
    ],
)
def test_invalid_specs_are_refused(proxy: Running, spec: dict[str, Any], detail: str) -> None:
    answer = proxy.client.put("/api/v1/tasks/wrong", json=spec)
    assert (answer.status_code, detail in answer.json()["detail"]) == (422, True), answer.text


def test_missing_endpoints_name_the_available(proxy: Running, clip: Path) -> None:
    task = Task(proxy, "only-video", clip)
    shell = proxy.client.post("/t/only-video/r/a/shell/exec", json={"command": "ls"})
    assert (shell.status_code, "video endpoint" in shell.json()["detail"]) == (404, True)
    other = proxy.client.post("/t/only-video/r/a/nothing/x", json={})
    assert "mcp, video" in other.json()["detail"]
    assert task.wire("get_frame", t=1).status_code == 400


# -- models -----------------------------------------------------------------------------------------------------------


def test_model_failure_is_not_recorded(proxy: Running, clip: Path, server: ModelServer) -> None:
    task = Task(proxy, "ill", clip, model={"base_url": server.url, "model": "seer"})
    task.ask("a", "load_video", name="clip.mp4")
    server.mood = "not json"
    failed = task.ask("a", "preprocess")
    assert (failed.status_code, failed.json()["type"]) == (502, "urn:forkpoint:tool-server")
    server.mood = "well"
    assert status(task.ask("a", "preprocess")) == "fwd=miss; stored"
    assert task.ask("a", "caption_retrieval", start=0, end=0).json()["label"] == "sampled"
    assert proxy.client.get("/api/v1/videos").json()["model_questions"] > 0


def test_tokens_of_models_are_recorded_and_saved(proxy: Running, clip: Path, server: ModelServer) -> None:
    """An answer carries what its call cost; the report shows what hits would have cost again."""
    task = Task(proxy, "tokens", clip, model={"base_url": server.url, "model": "seer"})
    header, before = "x-model-tokens", proxy.client.get("/api/v1/videos").json()["model_tokens"]
    saved = proxy.client.get("/api/v1/stats").json()["model_tokens_saved"]

    def walk(rollout: str) -> list[int]:
        answers = [
            task.ask(rollout, "load_video", name="clip.mp4"), task.ask(rollout, "preprocess"),
            task.ask(rollout, "visual_question_answering", question="What counts?", segment=0),
        ]  # fmt: skip
        return [int(answer.headers.get(header, 0)) for answer in answers]

    first = walk("a")
    assert (first[0], first[1] > 0, first[2] > 0) == (0, True, True)
    assert [walk("b"), walk("c")] == [first, first]
    assert proxy.client.get("/api/v1/stats").json()["model_tokens_saved"] - saved == 2 * sum(first)
    assert f"forkpoint_model_tokens_saved_total {saved + 2.0 * sum(first)}" in proxy.client.get("/metrics").text
    for by in ("task", "endpoint"):
        (row,) = proxy.client.get(f"/api/v1/tasks/tokens/report?by={by}").json()["rows"]
        assert (row["executed_tokens"], row["saved_tokens"]) == (sum(first), 2 * sum(first))
    assert proxy.client.get("/api/v1/videos").json()["model_tokens"] - before == sum(first)


def test_rollout_always_gets_the_same_variant(proxy: Running, clip: Path, server: ModelServer) -> None:
    task = Task(proxy, "variants", clip, model={"base_url": server.url, "model": "seer"}, variants=2)
    question = {"question": "What is seen?", "segment": 0}
    said = {}
    for rollout in ("r0", "r1", "r2", "r3"):
        task.ready(rollout)
        answers = [task.ask(rollout, "visual_question_answering", **question) for _ in range(2)]
        assert answers[0].content == answers[1].content
        said[rollout] = answers[0].json()["answer"], status(answers[0])
    assert said["r0"][0] == said["r2"][0] != said["r1"][0] == said["r3"][0]
    assert [how for _, how in said.values()] == ["fwd=miss; stored"] * 2 + ["hit"] * 2


def test_variant_depends_on_the_rollout_name() -> None:
    spec = spec_of("/x", model={"base_url": "http://x/v1", "model": "m"}, variants=4)
    call = call_of("object_memory_querying", question="Where?")
    dealt = [for_rollout(call, f"group-{n}", spec).arguments["variant"] for n in range(8)]
    assert dealt == [0, 1, 2, 3] * 2
    named = {for_rollout(call, name, spec).arguments["variant"] for name in ("a", "b", "c", "d", "e", "f", "g", "h")}
    assert len(named) > 1
    assert for_rollout(call, "7", spec_of("/x", variants=4)) == call
    assert for_rollout(call_of("detect_shots"), "7", spec) == call_of("detect_shots")


# -- the authors' wire ------------------------------------------------------------------------------------------------


class SandboxClient:
    """What the authors' client does: posts, looks at no status, and takes `result`."""

    def __init__(self, task: Task, sandbox_id: str) -> None:
        self._task, self.sandbox_id = task, sandbox_id

    def execute(self, command: str, argument: str = "") -> str:
        answer = self._task.wire("execute", sandbox_id=self.sandbox_id, command=command, argument=argument)
        try:
            return str(answer.json()["result"])
        except KeyError:
            return "Failed to execute"


def test_tvcache_client_needs_only_the_base_url(proxy: Running, clip: Path) -> None:
    task = Task(proxy, "authors", clip)
    assert task.wire("start", sandbox_id="sandbox_1").json()["success"] is True
    client = SandboxClient(task, "sandbox_1")
    assert client.execute("load_video_into_sandbox", "clip.mp4") == "Successfully loaded video into the sandbox"
    assert client.execute("preprocess") == "Preprocessing completed"
    captions = client.execute("caption_retrieval", "(0, 2)")
    assert captions.startswith(
        "\nThere are 4 segments in total, ranging from 0 to 3. Caption of segments from 0 to 2 is {0: "
    )
    assert "The most relevant segments are: {2: " in client.execute("segment_localization", "the green one")
    answer = client.execute("visual_question_answering", "('what is he doing', 1)")
    assert answer.startswith("\nSegment description: [no model] ")
    assert "\nAnswer to the question: [no model] " in answer
    assert client.execute("object_memory_querying", "where is the cup?") == "I cannot answer that question"
    forked = task.wire("fork", sandbox_id="sandbox_1").json()["sandbox_id"]
    assert SandboxClient(task, forked).execute("caption_retrieval", "(0, 2)") == captions
    assert task.wire("stop", sandbox_id="sandbox_1").json() == {"success": True, "sandbox_id": "sandbox_1"}
    assert client.execute("preprocess") == "Failed to execute"


def test_tvcache_calls_share_records_with_tools(proxy: Running, clip: Path) -> None:
    task = Task(proxy, "one-record", clip)
    task.ready("native")
    task.ask("native", "caption_retrieval", start=1, end=2)
    task.wire("start", sandbox_id="s")
    for command, argument in (
        ("load_video_into_sandbox", "clip.mp4"),
        ("preprocess", ""),
        ("caption_retrieval", "(1, 2)"),
    ):
        answer = task.wire("execute", sandbox_id="s", command=command, argument=argument)
        assert (answer.status_code, status(answer)) == (200, "hit"), command


@pytest.mark.parametrize(
    ("body", "code", "detail"),
    [
        ({"command": "preprocess"}, 400, "sandbox_id"),
        ({"sandbox_id": "w"}, 400, "command"),
        ({"sandbox_id": "w", "command": "rm"}, 400, "no command 'rm'"),
        ({"sandbox_id": "nobody", "command": "preprocess"}, 404, "session"),
        ({"sandbox_id": "../x", "command": "preprocess"}, 400, "name"),
        ({"sandbox_id": "w", "command": "segment_localization"}, 400, "argument"),
    ],
)
def test_tvcache_errors_have_their_form(
    proxy: Running, clip: Path, body: dict[str, str], code: int, detail: str
) -> None:
    task = Task(proxy, "authors-errors", clip)
    task.wire("start", sandbox_id="w")
    answer = task.wire("execute", **body)
    assert (answer.status_code, detail in answer.json()["error"]) == (code, True), answer.text


@pytest.mark.parametrize(
    "argument", ["(0, 1", "0", "(0, 1, 2)", "('a', 'b')", "__import__('os')", "", "(1.5, 2)", "(True, 1)"]
)
def test_bad_tuple_is_reported_and_not_recorded(proxy: Running, clip: Path, argument: str) -> None:
    task = Task(proxy, "tuples", clip)
    task.wire("start", sandbox_id="w")
    client = SandboxClient(task, "w")
    for command in ("caption_retrieval", "visual_question_answering"):
        assert client.execute(command, argument) == "Invalid input tuple!"
    assert client.execute("load_video_into_sandbox", "clip.mp4").startswith("Successfully")
    assert client.execute("load_video_into_sandbox", "nothing.mp4").startswith("there is no video")
