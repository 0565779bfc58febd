"""Captions: what a model says of each segment of a video. It gets each question once; the answers are state."""

import asyncio
from array import array
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol, TypeVar

import orjson

from sandboxes.errors import ServerError
from sandboxes.ipc.codec import AnswerT, IpcRequest
from sandboxes.spec import EnvironmentSpec
from sandboxes.task_owner import start
from sandboxes.video import prompts
from sandboxes.video.messages import Reading, ShowSegments, VideoFault, WriteModel
from sandboxes.video.model_client import ModelClient, Vector
from sandboxes.video.progress import PreprocessJob
from sandboxes.video.store import VideoStore
from sandboxes.video_spec import VideoModel
from sandboxes.workers.messages import SetLimits

_BATCH = 64
"""How many segments are read, or texts embedded, with one request."""
T = TypeVar("T")
Caption = tuple[str, list[str]]
"""A caption, and the names of the objects in the picture."""


class Read(Protocol):
    """Runs a request in a worker, within limits; see `Pipeline.read`."""

    async def __call__(
        self, request: IpcRequest[AnswerT | VideoFault], limits: SetLimits | None = None, body: bytes = b""
    ) -> tuple[AnswerT, bytes]:
        """Run a request; see `Pipeline.read`."""
        ...


@dataclass(frozen=True, slots=True)
class Captioner:
    """Asks a model about all segments of a video."""

    store: VideoStore  # The captions become a part of it.
    models: ModelClient
    read: Read  # Runs a request in a worker.
    spec: EnvironmentSpec
    fresh: bool  # Ignore earlier answers of the model.

    async def describe(self, job: PreprocessJob, video: Reading, prefix: str) -> str:
        """Make the part with the captions and return its name: the prefix, and a digest of the content."""
        # The digest is there because a model may answer the same question differently later. After a ServerError, the
        # answers that came before it are in the memo and are not requested again.
        segments, shown = await self._segments(video)
        captions = await self._captions(job, segments, shown)
        vectors = await self._vectors(job, [text for text, _ in captions], shown)
        folder = self.store.new()
        try:
            return await self._write(folder, prefix, captions, vectors)
        finally:
            await asyncio.to_thread(self.store.discard, folder)

    @property
    def _model(self) -> VideoModel:
        assert self.spec.video is not None
        assert self.spec.video.model is not None
        return self.spec.video.model

    async def _segments(self, video: Reading) -> tuple[list[dict[str, Any]], list[bytes]]:
        segments: list[dict[str, Any]] = []
        shown: list[bytes] = []
        count = 1
        while len(segments) < count:
            part, body = await self.read(ShowSegments(video, len(segments), _BATCH), limits_of(self.spec))
            segments += part.segments
            shown += split(body, part.sizes)
            count = part.of
        return segments, shown

    async def _captions(self, job: PreprocessJob, segments: list[dict[str, Any]], shown: list[bytes]) -> list[Caption]:
        done = 0

        async def caption(segment: dict[str, Any], picture: bytes) -> Caption:
            nonlocal done
            text = prompts.DESCRIBE.format(start=segment["start_s"], end=segment["end_s"])
            answer = await self.models.chat(self._model, text, [picture], fresh=self.fresh)
            done += 1
            job.advanced("captions", job.of_s * done / len(segments))
            return prompts.described(answer)

        return await together([caption(s, p) for s, p in zip(segments, shown, strict=True)])

    async def _vectors(self, job: PreprocessJob, captions: list[str], shown: list[bytes]) -> dict[str, list[Vector]]:
        vectors: dict[str, list[Vector]] = {}
        model, models, fresh = self._model, self.models, self.fresh
        job.advanced("vectors", 0)
        if model.embed_model is not None:
            batches = [captions[n : n + _BATCH] for n in range(0, len(captions), _BATCH)]
            rows = await together([models.embed(model, model.embed_model, batch, fresh=fresh) for batch in batches])
            vectors["texts"] = [row for batch in rows for row in batch]
        if model.image_embed_model is not None:
            name = model.image_embed_model
            vectors["images"] = await together([models.embed_picture(model, name, p, fresh=fresh) for p in shown])
        if any(len({len(row) for row in rows}) != 1 for rows in vectors.values()):
            raise ServerError(
                "the model's vectors differ in length. Call preprocess again, or check the model's server."
            )
        return vectors

    async def _write(self, folder: Path, prefix: str, captions: list[Caption], vectors: dict[str, list[Vector]]) -> str:
        texts, objects = [text for text, _ in captions], [objects for _, objects in captions]
        shapes = {name: (len(rows), len(rows[0])) for name, rows in vectors.items()}
        body = b"".join(array("f", row).tobytes() for rows in vectors.values() for row in rows)
        content = blake2b(
            orjson.dumps([{"captions": texts, "objects": objects}, shapes]) + body, digest_size=8
        ).hexdigest()
        await self.read(WriteModel(str(folder), shapes, texts, objects), limits_of(self.spec), body)
        part = f"{prefix}-{content}"
        await asyncio.to_thread(self.store.adopt, folder, part)
        return part


def limits_of(spec: EnvironmentSpec) -> SetLimits:
    """Return what a worker may use for a request of a task."""
    return SetLimits(spec.limits.memory_mb, spec.limits.disk_mb)


def split(body: bytes, sizes: Sequence[int]) -> list[bytes]:
    """Return the pieces of a body, given their sizes."""
    pieces, offset = [], 0
    for size in sizes:
        pieces.append(body[offset : offset + size])
        offset += size
    return pieces


async def together(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines at the same time and return their results in order. The first error cancels the others."""
    tasks = [start(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
