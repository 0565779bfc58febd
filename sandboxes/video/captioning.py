"""What a model says of each segment of a video: asked once, then part of the prepared state."""

import asyncio
from array import array
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol, TypeVar

import orjson

from sandboxes.errors import ServerError
from sandboxes.spec import EnvironmentSpec
from sandboxes.video import prompts
from sandboxes.video.model_client import ModelClient, Vector
from sandboxes.video.progress import PreprocessJob
from sandboxes.video.store import VideoStore
from sandboxes.video_spec import VideoModel

_BATCH = 64
T = TypeVar("T")
Caption = tuple[str, list[str]]
"""A caption, and the objects seen."""


class Read(Protocol):
    """Has a worker run a request: its fields and body, and within which limits."""

    async def __call__(
        self, request: dict[str, Any], limits: dict[str, int], body: bytes = b""
    ) -> tuple[dict[str, Any], bytes]: ...


@dataclass(frozen=True, slots=True)
class Captioner:
    """Asks a model about all segments of a video. fresh: what it said before counts for nothing."""

    store: VideoStore
    models: ModelClient
    read: Read
    spec: EnvironmentSpec
    fresh: bool

    async def describe(self, job: PreprocessJob, reading: dict[str, Any], asked: str) -> str:
        """Return the part of what was said: its name begins with asked and ends with a digest of the content.

        reading: says which measured video. What was answered when a later question fails is not asked again.

        Raises:
            ServerError: the model failed.
        """
        segments, shown = await self._segments(reading)
        said = await self._captions(job, segments, shown)
        vectors = await self._vectors(job, [caption for caption, _ in said], shown)
        folder = self.store.new()
        try:
            return await self._written(folder, asked, said, vectors)
        finally:
            await asyncio.to_thread(self.store.discard, folder)

    @property
    def _model(self) -> VideoModel:
        assert self.spec.video is not None
        assert self.spec.video.model is not None
        return self.spec.video.model

    async def _segments(self, reading: dict[str, Any]) -> tuple[list[dict[str, Any]], list[bytes]]:
        """Return all segments, and of each the picture that stands for it."""
        segments: list[dict[str, Any]] = []
        shown: list[bytes] = []
        count = 1
        while len(segments) < count:
            request = {"tool": "segments", "first": len(segments), "count": _BATCH, **reading}
            told, body = await self.read(request, limits_of(self.spec))
            segments += told["segments"]
            shown += split(body, told["sizes"])
            count = told["of"]
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
        found: dict[str, list[Vector]] = {}
        model, models, fresh = self._model, self.models, self.fresh
        job.advanced("vectors", 0)
        if model.embed_model is not None:
            batches = [captions[n : n + _BATCH] for n in range(0, len(captions), _BATCH)]
            rows = await together([models.embed(model, model.embed_model, batch, fresh=fresh) for batch in batches])
            found["texts"] = [row for batch in rows for row in batch]
        if model.image_embed_model is not None:
            name = model.image_embed_model
            found["images"] = await together([models.embed_picture(model, name, p, fresh=fresh) for p in shown])
        if any(len({len(row) for row in rows}) != 1 for rows in found.values()):
            raise ServerError("the model's vectors differ in length. Ask again, or look at its server.")
        return found

    async def _written(self, folder: Path, asked: str, said: list[Caption], vectors: dict[str, list[Vector]]) -> str:
        told = {"captions": [caption for caption, _ in said], "objects": [objects for _, objects in said]}
        shapes = {name: [len(rows), len(rows[0])] for name, rows in vectors.items()}
        body = b"".join(array("f", row).tobytes() for rows in vectors.values() for row in rows)
        content = blake2b(orjson.dumps([told, shapes]) + body, digest_size=8).hexdigest()
        request = {"tool": "describe", "folder": str(folder), "vectors": shapes, **told}
        await self.read(request, limits_of(self.spec), body)
        named = f"{asked}-{content}"
        await asyncio.to_thread(self.store.adopt, folder, named)
        return named


def limits_of(spec: EnvironmentSpec) -> dict[str, int]:
    """Return what a worker may use for a request of a task."""
    return {"memory_mb": spec.limits.memory_mb, "disk_mb": spec.limits.disk_mb}


def split(body: bytes, sizes: Sequence[int]) -> list[bytes]:
    """Return the pieces of a body that have these sizes."""
    found, at = [], 0
    for size in sizes:
        found.append(body[at : at + size])
        at += size
    return found


async def together(asking: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results in order; where one fails, the others are ended and its error is raised."""
    tasks = [asyncio.ensure_future(each) for each in asking]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
