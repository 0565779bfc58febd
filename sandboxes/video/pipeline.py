"""The pipeline: loads and prepares videos, each once, however many sandboxes and tasks need them.

Theory of operation. The stages make parts of a store, and the name of a part is a digest of all that its content
follows from. So a part that exists is never made again, and two tasks that want the same one share it:

| stage | part | made by | named by |
|---|---|---|---|
| load | `v-` | a copy and a probe in a shared worker | the content of the file |
| measure | `m-` | a dedicated worker, piece by piece | the video, the settings, the libraries' versions |
| describe | `d-` | questions to a model | the measurement, the model, the prompts, and its own content |

A part that is being made has one task (`_flights`). A sandbox that is cancelled leaves it running: the next one needs
it. The limits of a task are part of the task's name, because one task's limits must not end another's job.

Hostile files can crash or hang their decoder. A worker is a process with limits, so a crash is an error of the file. A
shared worker is tried once more, because another file may have killed it.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from sandboxes.errors import SandboxError
from sandboxes.ipc.codec import AnswerT, IpcRequest
from sandboxes.spec import EnvironmentSpec
from sandboxes.task_owner import TaskOwner
from sandboxes.video import prompts
from sandboxes.video.captioning import Captioner, limits_of
from sandboxes.video.catalogue import Contents
from sandboxes.video.messages import (
    BeginPreprocess,
    PreprocessPiece,
    ProbeVideo,
    Reading,
    ReadVersions,
    VideoError,
    VideoFault,
)
from sandboxes.video.model_client import ModelClient
from sandboxes.video.progress import PreprocessJob, PreprocessJobs
from sandboxes.video.store import INFO, VIDEO, VideoStore, part_name
from sandboxes.workers.messages import SetLimits
from sandboxes.workers.pool import PooledWorker, WorkerLostError, WorkerPool, WorkerStuckError

READ_S = 30.0
"""Time limit of a read. Reads take milliseconds; one that takes this long is stuck in a hostile file."""
_PIECE_S = 60.0
"""Time limit of one piece of a preprocess."""


@dataclass(frozen=True, slots=True)
class PreparedVideo:
    """The parts of a prepared video: its measurements, and a model's captions (None without a model)."""

    measured: str
    described: str | None


class Pipeline:
    """Makes the parts of one store."""

    def __init__(
        self,
        store: VideoStore,
        worker_pool: WorkerPool,
        contents: Contents,
        models: ModelClient,
        jobs: PreprocessJobs,
        *,
        fresh: bool = False,
    ) -> None:
        self.store, self.models, self.fresh = store, models, fresh
        self._worker_pool, self._contents, self._jobs = worker_pool, contents, jobs
        self._flights: dict[str, asyncio.Task[str]] = {}
        self._owner = TaskOwner()
        self._making: list[str] = []
        self._versions: str | None = None

    async def aclose(self) -> None:
        """Cancel everything that is being made."""
        await self._owner.end()

    async def versions(self) -> str:
        """Return the versions of the libraries, on which the content of parts depends."""
        if self._versions is None:
            self._versions = (await self.read(ReadVersions()))[0].versions
        return self._versions

    def makes(self, part: str) -> bool:
        """Return whether a part is being made, or was just made and is not in any sandbox yet."""
        return part.startswith(tuple(self._making))

    @contextmanager
    def _making_part(self, part: str) -> Iterator[None]:
        self._making.append(part)
        try:
            yield
        finally:
            self._making.remove(part)

    # -- workers -----------------------------------------------------------------------------------------------------

    async def read(
        self,
        request: IpcRequest[AnswerT | VideoFault],
        limits: SetLimits | None = None,
        body: bytes = b"",
        *,
        timeout_s: float = READ_S,
    ) -> tuple[AnswerT, bytes]:
        """Run a request in a shared worker, and once more if the worker died: another request may have killed it."""
        for last in (False, True):
            try:
                async with self._worker_pool.reader() as worker:
                    return await _run(worker, request, limits, body, timeout_s)
            except WorkerLostError as lost:
                if last or lost.cause == "memory":
                    raise _fault_of(lost) from lost
            except WorkerStuckError:
                raise VideoError("timeout", f"the call took more than {timeout_s:g} s and was ended") from None
        raise AssertionError("the second attempt returns or raises")

    # -- loading -----------------------------------------------------------------------------------------------------

    async def load(self, source: Path, spec: EnvironmentSpec) -> str:
        """Load a file and return its part. A file whose content is loaded already is not read again."""
        assert spec.video is not None
        # The name follows from the content, which is not known yet: no video may be collected meanwhile.
        with self._making_part("v-"):
            digest = None if self.fresh else await asyncio.to_thread(self._contents.known, source)
            if digest is None or not await asyncio.to_thread(self.store.is_whole, part_name("v", digest)):
                digest = await self._import(source, spec)
        part = part_name("v", digest)
        info = self.store.info(part)
        if info["duration_s"] > spec.video.max_duration_s:
            max_s = spec.video.max_duration_s
            raise VideoError("limit", f"this video lasts {info['duration_s']:.0f} s; this task takes up to {max_s:g} s")
        if info["size_bytes"] > spec.limits.disk_mb << 20:
            raise VideoError(
                "limit", f"this file has {info['size_bytes'] >> 20} MB; this task takes {spec.limits.disk_mb}"
            )
        return part

    async def _import(self, source: Path, spec: EnvironmentSpec) -> str:
        assert spec.video is not None
        folder = self.store.new()
        try:
            max_bytes = spec.limits.disk_mb << 20
            digest = await asyncio.to_thread(
                self._contents.copy, source, folder / VIDEO, max_bytes, confined=spec.confined
            )
            part = part_name("v", digest)
            if not await asyncio.to_thread(self.store.is_whole, part):
                request = ProbeVideo(str(folder / VIDEO), spec.video.max_duration_s)
                probed, _ = await self.read(request, limits_of(spec), timeout_s=spec.limits.timeout_s)
                info = probed.info | {"sha256": digest, "size_bytes": (folder / VIDEO).stat().st_size}
                (folder / INFO).write_bytes(orjson.dumps(info))
                await asyncio.to_thread(self.store.adopt, folder, part)
        finally:
            await asyncio.to_thread(self.store.discard, folder)
        return digest

    # -- preparing ---------------------------------------------------------------------------------------------------

    async def prepare(self, part: str, spec: EnvironmentSpec) -> PreparedVideo:
        """Return the parts of a video, prepared if missing. VideoError blames the video, SandboxError the machine."""
        assert spec.video is not None
        settings, info = spec.video.measurement_settings(), self.store.info(part)
        measured = part_name("m", info["sha256"], settings, await self.versions())
        with self._making_part(measured):
            if not await asyncio.to_thread(self.store.is_whole, measured):
                await self._once(measured, spec, lambda: self._measure(part, measured, info, spec))
            model = spec.video.model
            if model is None:
                return PreparedVideo(measured, None)
            prefix = part_name("d", measured, model.fingerprint(), prompts.VERSION)
            with self._making_part(prefix):
                described = self._find_described(prefix)
                if described is None:
                    described = await self._once(prefix, spec, lambda: self._describe(part, measured, prefix, spec))
                return PreparedVideo(measured, described)

    def _find_described(self, prefix: str) -> str | None:
        """Return the part of the captions whose name begins with a prefix; None if the model has no question yet."""
        return next(
            (part for part in sorted(self.store.all()) if part.startswith(prefix) and self.store.is_whole(part)), None
        )

    async def _once(self, part: str, spec: EnvironmentSpec, make: Callable[[], Coroutine[Any, Any, str]]) -> str:
        assert spec.video is not None
        # The limits belong to the name: one task's limits must not end another task's job.
        name = f"{part} {spec.limits.memory_mb} {spec.limits.disk_mb} {spec.video.preprocess_s}"
        flight = self._flights.get(name)
        if flight is None:
            flight = self._flights[name] = self._owner.spawn("make a part", make(), awaited=True)
            flight.add_done_callback(lambda _: self._flights.pop(name, None))
        # A caller that is cancelled leaves the job to the others, and the part to the next.
        return await asyncio.shield(flight)

    async def _measure(self, part: str, measured: str, info: dict[str, Any], spec: EnvironmentSpec) -> str:
        assert spec.video is not None
        max_s, folder = spec.video.preprocess_s, self.store.new()
        try:
            with self._jobs.track(info) as job:
                async with self._jobs.slots, asyncio.timeout(max_s):
                    await self._run_through(job, part, folder, info, spec)
                await asyncio.to_thread(self.store.adopt, folder, measured)
        except TimeoutError:
            raise VideoError("timeout", f"the preprocess took more than {max_s:g} s (`preprocess_s`)") from None
        finally:
            await asyncio.to_thread(self.store.discard, folder)
        return measured

    async def _describe(self, part: str, measured: str, prefix: str, spec: EnvironmentSpec) -> str:
        reading = self.reading(part, PreparedVideo(measured, None), spec)
        captioner = Captioner(self.store, self.models, self.read, spec, fresh=self.fresh)
        with self._jobs.track(self.store.info(part)) as job:
            return await captioner.describe(job, reading, prefix)

    async def _run_through(
        self, job: PreprocessJob, part: str, folder: Path, info: dict[str, Any], spec: EnvironmentSpec
    ) -> None:
        assert spec.video is not None
        settings = spec.video.measurement_settings()
        request = BeginPreprocess(str(self.store.path(part) / VIDEO), str(folder), info, settings)
        worker = await self._worker_pool.dedicated()
        try:
            await _run(worker, request, limits_of(spec), b"", _PIECE_S)
            while (piece := (await _run(worker, PreprocessPiece(), None, b"", _PIECE_S))[0]).stage is not None:
                job.advanced(piece.stage, piece.at_s)
        except WorkerLostError as lost:
            raise _fault_of(lost) from lost
        except WorkerStuckError:
            raise VideoError("timeout", f"decoding made no progress for {_PIECE_S:g} s and was ended") from None
        finally:
            await worker.close()

    # -- requests about a state ---------------------------------------------------------------------------------------

    def reading(self, part: str, prepared: PreparedVideo | None, spec: EnvironmentSpec) -> Reading:
        """Return the members of a request that say which video is read, and within which limits."""
        assert spec.video is not None
        measured = None if prepared is None else str(self.store.path(prepared.measured))
        described = None if prepared is None or prepared.described is None else self.store.path(prepared.described)
        return Reading(
            str(self.store.path(part) / VIDEO), measured, None if described is None else str(described),
            "none" if spec.video.model is None else spec.video.model.model, spec.limits.output_bytes,
        )  # fmt: skip


async def _run(
    worker: PooledWorker,
    request: IpcRequest[AnswerT | VideoFault],
    limits: SetLimits | None,
    body: bytes,
    timeout_s: float,
) -> tuple[AnswerT, bytes]:
    message, output, _ = await worker.ask(request, body, limits=limits, timeout_s=timeout_s)
    if isinstance(message, VideoFault):
        raise VideoError(message.kind, message.message)
    return message, output


def _fault_of(lost: WorkerLostError) -> Exception:
    """Return the error for a lost worker: of the file if it needed too much memory or crashed its decoder."""
    if lost.cause == "memory":
        return VideoError("memory", "the call needed more memory than limits.memory_mb")
    if lost.cause == "crashed":
        return VideoError("crashed", f"the decoder crashed on this file: {lost}")
    return SandboxError(f"a worker failed: {lost}")
