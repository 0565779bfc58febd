"""The sandbox of the `video` driver: up to three names of the store's parts, which a fork copies."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from typing import Any

import orjson

from sandboxes.calls import MODEL_TOKENS, Execution, ToolCall, ToolResult, in_order
from sandboxes.driver import FrozenState
from sandboxes.effects import Effect, StateDigest
from sandboxes.errors import SandboxError
from sandboxes.ipc.codec import AnswerT, IpcRequest
from sandboxes.spec import EnvironmentSpec
from sandboxes.video import prompts
from sandboxes.video.captioning import limits_of, split
from sandboxes.video.catalogue import Catalogue
from sandboxes.video.messages import TRANSIENT, Reading, ReadObjects, RunVideoTool, ShowSegment, VideoError, VideoFault
from sandboxes.video.model_client import SPENT, Spent
from sandboxes.video.pipeline import Pipeline, PreparedVideo

_JSON = "application/json"
_NAMES_SHOWN = 20
"""How many names an error lists."""
FRAME_TIME = "x-frame-time"
"""Header with the time of the picture that a response consists of, in seconds."""


@dataclass(frozen=True, slots=True)
class LoadedVideos:
    """The state of a sandbox, as names of parts of the store."""

    catalogue: str  # The identity of the videos that `load_video` knows.
    video: str | None = None  # None before `load_video`.
    measured: str | None = None  # None before `preprocess`.
    described: str | None = None  # None without a model.

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that the state needs."""
        return tuple(part for part in (self.video, self.measured, self.described) if part is not None)

    @property
    def prepared(self) -> PreparedVideo | None:
        """The parts of the preprocess; None before it."""
        return None if self.measured is None else PreparedVideo(self.measured, self.described)

    def digest(self) -> StateDigest:
        """Return the digest of the state. The catalogue is part of the root state already."""
        digest = blake2b(orjson.dumps([self.video, self.measured, self.described]), digest_size=32).digest()
        return StateDigest(digest, digest)

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON members, which are also its constructor's arguments."""
        return asdict(self)


class VideoSandbox:
    """A sandbox with one video; see `sandboxes.driver.Sandbox`."""

    def __init__(
        self,
        name: str,
        spec: EnvironmentSpec,
        state: LoadedVideos,
        pipeline: Pipeline,
        catalogue: Callable[[], Awaitable[Catalogue]],
        gone: Callable[["VideoSandbox"], Awaitable[None]],
    ) -> None:
        self.id = name
        self.alive = True
        self._spec, self._state, self._pipeline = spec, state, pipeline
        self._catalogue, self._gone = catalogue, gone

    @property
    def closed(self) -> bool:
        """Whether the sandbox was closed; nothing else ends it."""
        return not self.alive

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that the sandbox needs."""
        return self._state.parts

    async def execute(self, call: ToolCall) -> Execution:
        """Run a tool. What the agent can act on is a result with status 422."""
        if not self.alive:
            raise SandboxError(f"sandbox {self.id} is dead")
        before, began, shareable = self._state, time.perf_counter(), True
        # Tasks that are started for this call copy its context, so their requests are counted for it too.
        spent = Spent()
        SPENT.set(spent)
        try:
            result = await self._run(call)
        except VideoError as fault:
            result = ToolResult(422, _JSON, orjson.dumps({"error": fault.to_json()}), marks=in_order([fault.kind]))
            shareable = fault.kind not in TRANSIENT
        except OSError as error:
            raise SandboxError(f"the video's files cannot be read or written: {error}") from error
        if spent.tokens:
            own = result.headers or (
                ("content-type", result.media_type), ("content-length", str(len(result.body)))
            )  # fmt: skip
            result = replace(result, headers=(*own, (MODEL_TOKENS, str(spent.tokens))))
        effect = Effect.NONE if self._state == before else Effect.FILES
        return Execution(result, effect, time.perf_counter() - began, self._state.digest(), shareable=shareable)

    async def freeze(self) -> FrozenState:
        """Return the state. Its parts are on the disk already."""
        if not self.alive:
            raise SandboxError(f"sandbox {self.id} is dead")
        size = self._pipeline.store.size_bytes(self._state.parts[-1]) if self._state.parts else 0
        return FrozenState("video", "files", self._state.to_json(), size, self._state.digest(), self._state.parts)

    async def close(self) -> None:
        """Forget the sandbox. Idempotent."""
        if self.alive:
            self.alive = False
            await self._gone(self)

    # -- tools -------------------------------------------------------------------------------------------------------

    async def _run(self, call: ToolCall) -> ToolResult:
        if call.tool == "load_video":
            return await self._load(str(call.arguments["name"]))
        if self._state.video is None:
            raise VideoError("not-loaded", "no video is loaded. Call load_video first")
        if call.tool == "preprocess":
            return await self._preprocess(self._state.video)
        assert self._spec.video is not None
        if self._spec.video.model is not None and self._state.described is not None:
            with_model = {
                "visual_question_answering": self._question, "object_memory_querying": self._memory,
                "segment_localization": self._localization,
            }.get(call.tool)  # fmt: skip
            if with_model is not None:
                return await with_model(call)
        return await self._read(call)

    async def _load(self, name: str) -> ToolResult:
        catalogue = await self._catalogue()
        if catalogue.identity != self._state.catalogue:
            raise SandboxError(
                "the videos of this task have changed since its tree began. PUT the task again and begin a new rollout."
            )
        if name not in catalogue.files:
            known = ", ".join(list(catalogue.files)[:_NAMES_SHOWN]) or "none"
            more = f" and {len(catalogue.files) - _NAMES_SHOWN} more" if len(catalogue.files) > _NAMES_SHOWN else ""
            raise VideoError("no-such-video", f"there is no video {name!r}. Known are: {known}{more}")
        part = await self._pipeline.load(catalogue.files[name], self._spec)
        if part != self._state.video:
            self._state = LoadedVideos(self._state.catalogue, part)
        info = self._pipeline.store.info(part)
        return _json_result({"loaded": name, "duration_s": info["duration_s"]})

    async def _preprocess(self, part: str) -> ToolResult:
        if self._state.measured is None:
            prepared = await self._pipeline.prepare(part, self._spec)
            self._state = LoadedVideos(self._state.catalogue, part, prepared.measured, prepared.described)
        return _json_result({"preprocessed": True, "model": self._reading().model})

    async def _read(self, call: ToolCall, vectors: bytes = b"") -> ToolResult:
        answer, body = await self._ask(RunVideoTool(self._reading(), call.tool, dict(call.arguments)), vectors)
        if answer.frame_t is None:
            return ToolResult(200, answer.media_type, body)
        headers = (
            ("content-type", answer.media_type), ("content-length", str(len(body))),
            (FRAME_TIME, f"{answer.frame_t:.3f}"),
        )  # fmt: skip
        return ToolResult(200, answer.media_type, body, headers)

    async def _question(self, call: ToolCall) -> ToolResult:
        part, body = await self._ask(ShowSegment(self._reading(), call.arguments["segment"]))
        (segment,) = part.segments
        text = prompts.ask_about(segment, call.arguments["question"])
        answer = await self._chat(text, split(body, part.sizes), call)
        return _json_result({**segment, "answer": answer, "answered": True, "model": self._reading().model}, "sampled")

    async def _memory(self, call: ToolCall) -> ToolResult:
        assert self._spec.video is not None
        seen, _ = await self._ask(ReadObjects(self._reading()))
        text = prompts.ask_memory(seen.objects, seen.segments, self._spec.video.segment_s, call.arguments["question"])
        answer = await self._chat(text, [], call)
        return _json_result(
            {"answer": answer, "answered": True, "segments": [], "model": self._reading().model}, "sampled"
        )

    async def _localization(self, call: ToolCall) -> ToolResult:
        assert self._spec.video is not None
        model, texts = self._spec.video.model, [str(call.arguments["description"])]
        assert model is not None
        vectors = {}
        for kind, name in (("texts", model.embed_model), ("images", model.image_embed_model)):
            if name is not None:
                vectors[kind] = (await self._pipeline.models.embed(model, name, texts, fresh=self._pipeline.fresh))[0]
        return await self._read(call, orjson.dumps(vectors) if vectors else b"")

    async def _chat(self, text: str, pictures: list[bytes], call: ToolCall) -> str:
        assert self._spec.video is not None
        assert self._spec.video.model is not None
        return await self._pipeline.models.chat(
            self._spec.video.model, text, pictures, variant=call.arguments["variant"], fresh=self._pipeline.fresh
        )

    def _reading(self) -> Reading:
        assert self._state.video is not None
        return self._pipeline.reading(self._state.video, self._state.prepared, self._spec)

    async def _ask(self, request: IpcRequest[AnswerT | VideoFault], body: bytes = b"") -> tuple[AnswerT, bytes]:
        return await self._pipeline.read(request, limits_of(self._spec), body, timeout_s=self._spec.limits.timeout_s)


def _json_result(members: dict[str, Any], label: str = "pure") -> ToolResult:
    return ToolResult(200, _JSON, orjson.dumps(members | {"label": label}))
