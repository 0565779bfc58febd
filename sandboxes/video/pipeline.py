"""Where videos are brought in and prepared: each once, however many sandboxes and tasks ask, in worker processes."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from sandboxes.errors import SandboxError
from sandboxes.spec import EnvironmentSpec
from sandboxes.video import prompts
from sandboxes.video.captioning import Captioner, limits_of
from sandboxes.video.catalogue import Contents
from sandboxes.video.faults import VideoError
from sandboxes.video.model_client import ModelClient
from sandboxes.video.progress import PreprocessJob, PreprocessJobs
from sandboxes.video.store import INFO, VIDEO, VideoStore, part_name
from sandboxes.workers.pool import Worker, WorkerLostError, WorkerPool, WorkerStuckError

READ_S = 30.0
"""A read takes some milliseconds; what takes so long is stuck in a hostile file."""
_PIECE_S = 60.0


@dataclass(frozen=True, slots=True)
class PreparedVideo:
    """The parts of a prepared video. described: what a model said; None where none was asked."""

    measured: str
    described: str | None


class Pipeline:
    """Makes parts of one store. fresh: a sandbox's own, in which nothing is known before and no answer is repeated."""

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
        self._making: list[str] = []
        self._versions: str | None = None

    async def aclose(self) -> None:
        """End what is being made."""
        for flight in list(self._flights.values()):
            flight.cancel()
        await asyncio.gather(*self._flights.values(), return_exceptions=True)

    async def versions(self) -> str:
        """Return what the content of parts depends on beside videos and settings."""
        if self._versions is None:
            fields, _ = await self.read({"tool": "versions"}, {})
            self._versions = str(fields["versions"])
        return self._versions

    def makes(self, part: str) -> bool:
        """Say whether somebody waits for a part, or just got it, and no sandbox has it yet."""
        return part.startswith(tuple(self._making))

    @contextmanager
    def _for_someone(self, part: str) -> Iterator[None]:
        self._making.append(part)
        try:
            yield
        finally:
            self._making.remove(part)

    # -- workers -----------------------------------------------------------------------------------------------------

    async def read(
        self, request: dict[str, Any], limits: dict[str, int], body: bytes = b"", *, timeout_s: float = READ_S
    ) -> tuple[dict[str, Any], bytes]:
        """Have a shared worker run a request; once again where it died, for that may have been another's doing.

        Raises:
            VideoError: the file's or the agent's.
            SandboxError: workers cannot be started, or are killed.
        """
        for last in (False, True):
            try:
                async with self._worker_pool.reader() as worker:
                    return await _run(worker, request, limits, body, timeout_s)
            except WorkerLostError as lost:
                if last or lost.cause == "memory":
                    raise _fault_of(lost) from lost
            except WorkerStuckError:
                raise VideoError("timeout", f"this took more than {timeout_s:g} s, and was ended") from None
        raise AssertionError("the second attempt returns or raises")

    # -- loading -----------------------------------------------------------------------------------------------------

    async def load(self, source: Path, spec: EnvironmentSpec) -> str:
        """Bring a file in and return its part; one of this content that is there already is not read again.

        Raises:
            VideoError: it is no video, or more than this task takes.
            OSError: it cannot be read, or there is no room.
        """
        assert spec.video is not None
        # Which one it will be is not known yet.
        with self._for_someone("v-"):
            digest = None if self.fresh else await asyncio.to_thread(self._contents.known, source)
            if digest is None or not self.store.has(part_name("v", digest)):
                digest = await self._bring_in(source, spec)
        part = part_name("v", digest)
        info = self.store.info(part)
        if info["duration_s"] > spec.video.max_duration_s:
            most = spec.video.max_duration_s
            raise VideoError("limit", f"this video lasts {info['duration_s']:.0f} s; this task takes up to {most:g} s")
        if info["size_bytes"] > spec.limits.disk_mb << 20:
            raise VideoError(
                "limit", f"this file has {info['size_bytes'] >> 20} MB; this task takes {spec.limits.disk_mb}"
            )
        return part

    async def _bring_in(self, source: Path, spec: EnvironmentSpec) -> str:
        assert spec.video is not None
        folder = self.store.new()
        try:
            most = spec.limits.disk_mb << 20
            digest = await asyncio.to_thread(self._contents.copy, source, folder / VIDEO, most)
            part = part_name("v", digest)
            if not self.store.has(part):
                request = {"tool": "probe", "path": str(folder / VIDEO), "max_duration_s": spec.video.max_duration_s}
                told, _ = await self.read(request, limits_of(spec), timeout_s=spec.limits.timeout_s)
                info = told["info"] | {"sha256": digest, "size_bytes": (folder / VIDEO).stat().st_size}
                (folder / INFO).write_bytes(orjson.dumps(info))
                await asyncio.to_thread(self.store.adopt, folder, part)
        finally:
            await asyncio.to_thread(self.store.discard, folder)
        return digest

    # -- preparing ---------------------------------------------------------------------------------------------------

    async def prepare(self, part: str, spec: EnvironmentSpec) -> PreparedVideo:
        """Return the parts that a video's preprocess makes; they are made where they are not there.

        Raises:
            VideoError: it cannot be decoded, or takes more than its limits.
            SandboxError: the machine or the model failed.
        """
        assert spec.video is not None
        settings, info = spec.video.measurement_settings(), self.store.info(part)
        measured = part_name("m", info["sha256"], settings, await self.versions())
        with self._for_someone(measured):
            if not self.store.has(measured):
                await self._once(measured, spec, lambda: self._measure(part, measured, info, spec))
            model = spec.video.model
            if model is None:
                return PreparedVideo(measured, None)
            asked = part_name("d", measured, model.fingerprint(), prompts.VERSION)
            with self._for_someone(asked):
                described = self._described(asked)
                if described is None:
                    described = await self._once(asked, spec, lambda: self._describe(part, measured, asked, spec))
                return PreparedVideo(measured, described)

    def _described(self, asked: str) -> str | None:
        """Return the part of what a model said, once it was asked so. A model may say other things when asked again, so
        that what it said is in the part's name, too.
        """
        return next(
            (part for part in sorted(self.store.all()) if part.startswith(asked) and self.store.has(part)), None
        )

    async def _once(self, part: str, spec: EnvironmentSpec, make: Callable[[], Awaitable[str]]) -> str:
        assert spec.video is not None
        # What one task's limits end must not end another's.
        name = f"{part} {spec.limits.memory_mb} {spec.limits.disk_mb} {spec.video.preprocess_s}"
        flight = self._flights.get(name)
        if flight is None:
            flight = asyncio.ensure_future(make())
            self._flights[name] = flight
            flight.add_done_callback(lambda done: self._landed(name, done))
        # Whoever goes away leaves the job to those who still want it, and to the next.
        return await asyncio.shield(flight)

    def _landed(self, name: str, flight: "asyncio.Task[str]") -> None:
        self._flights.pop(name, None)
        if not flight.cancelled():
            # Nobody may be waiting any more.
            flight.exception()

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

    async def _describe(self, part: str, measured: str, asked: str, spec: EnvironmentSpec) -> str:
        reading = self.reading(part, PreparedVideo(measured, None), spec)
        captioner = Captioner(self.store, self.models, self.read, spec, fresh=self.fresh)
        with self._jobs.track(self.store.info(part)) as job:
            return await captioner.describe(job, reading, asked)

    async def _run_through(
        self, job: PreprocessJob, part: str, folder: Path, info: dict[str, Any], spec: EnvironmentSpec
    ) -> None:
        assert spec.video is not None
        request = {
            "tool": "begin", "path": str(self.store.path(part) / VIDEO), "folder": str(folder), "info": info,
            "settings": spec.video.measurement_settings(),
        }  # fmt: skip
        worker = await self._worker_pool.dedicated()
        try:
            await _run(worker, request, limits_of(spec), b"", _PIECE_S)
            while not (told := (await _run(worker, {"tool": "advance"}, {}, b"", _PIECE_S))[0])["done"]:
                job.advanced(told["stage"], told["at_s"])
        except WorkerLostError as lost:
            raise _fault_of(lost) from lost
        except WorkerStuckError:
            raise VideoError("timeout", f"decoding stood still for {_PIECE_S:g} s, and was ended") from None
        finally:
            await worker.close()

    # -- asking a worker about a state -------------------------------------------------------------------------------

    def reading(self, part: str, prepared: PreparedVideo | None, spec: EnvironmentSpec) -> dict[str, Any]:
        """Return the members of a request that say what is read."""
        assert spec.video is not None
        measured = None if prepared is None else str(self.store.path(prepared.measured))
        described = None if prepared is None or prepared.described is None else self.store.path(prepared.described)
        return {
            "path": str(self.store.path(part) / VIDEO), "measured": measured,
            "described": None if described is None else str(described),
            "model": "none" if spec.video.model is None else spec.video.model.model,
            "limit_bytes": spec.limits.output_bytes,
        }  # fmt: skip


async def _run(
    worker: Worker, request: dict[str, Any], limits: dict[str, int], body: bytes, timeout_s: float
) -> tuple[dict[str, Any], bytes]:
    message = await worker.request({"op": "run", "limits": limits, **request}, body, timeout_s=timeout_s)
    if "fault" in message.fields:
        raise VideoError.from_json(message.fields["fault"])
    return message.fields, message.body


def _fault_of(lost: WorkerLostError) -> Exception:
    if lost.cause == "memory":
        return VideoError("memory", "this took more memory than limits.memory_mb")
    if lost.cause == "crashed":
        return VideoError("crashed", f"the decoder broke on this file: {lost}")
    return SandboxError(f"a worker failed: {lost}")
