"""The `video` driver: a sandbox is a video, its measurements and a model's captions, all of them shared."""

import asyncio
import hashlib
import itertools
import shutil
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from sandboxes.driver import FrozenState
from sandboxes.errors import SpecError
from sandboxes.linux.dir_lock import DirLock
from sandboxes.open_sandboxes import OpenSandboxes
from sandboxes.sources import SourceRules
from sandboxes.spec import EnvironmentSpec
from sandboxes.video.answer_memo import AnswerMemo
from sandboxes.video.catalogue import Catalogue, Contents, catalogue_of
from sandboxes.video.model_client import ModelClient
from sandboxes.video.pipeline import Pipeline
from sandboxes.video.progress import PreprocessJobs
from sandboxes.video.sandbox import LoadedVideos, VideoSandbox
from sandboxes.video.store import VideoStore
from sandboxes.workers.pool import WorkerPool

VERSION = 2
"""Version of the driver, part of every identity. Raise it when equal calls would give other results or digests."""
_ENGINE_MODULE = "sandboxes.video.worker_engine"


class VideoDriver:
    """Serves videos; see `sandboxes.driver.Driver`. A lock keeps a second instance out of the data directory."""

    name = "video"
    state_version = str(VERSION)

    def __init__(self, data_dir: Path, sources: SourceRules | None = None) -> None:
        self.data_dir = data_dir.resolve()
        self.store = VideoStore(self.data_dir)
        self.worker_pool = WorkerPool(_ENGINE_MODULE, self.data_dir)
        self.jobs = PreprocessJobs()
        self._memo = AnswerMemo(self.data_dir / "models.sqlite")
        self.models = ModelClient(self._memo)
        self._contents = Contents(self.data_dir / "contents.json", sources or SourceRules())
        self.pipeline = self._pipeline(self.store)
        self._sandboxes = OpenSandboxes[VideoSandbox]()
        self._ids = itertools.count(1)
        self._ownership = DirLock(self.data_dir)

    # -- life --------------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Take the data directory. The first call that needs a worker starts the workers."""
        self._ownership.acquire()
        await asyncio.to_thread(shutil.rmtree, self._own, ignore_errors=True)
        await asyncio.to_thread(self.store.open)
        self._contents.open()
        self._memo.open()

    async def trial(self) -> None:
        """Start a worker and end it, see `sandboxes.driver.TriedDriver`."""
        await self.worker_pool.trial()

    async def aclose(self) -> None:
        """Close all sandboxes, cancel all jobs, end the workers, and release the directory. Idempotent."""
        await self._sandboxes.close()
        await self.pipeline.aclose()
        await self.models.aclose()
        await self.worker_pool.aclose()
        self._memo.close()
        self._ownership.release()

    # -- states ------------------------------------------------------------------------------------------------------

    async def identity(self, spec: EnvironmentSpec) -> str:
        """Return a digest of the videos and of the libraries' versions. Files named one by one are read once."""
        catalogue = (await self._catalogue(spec)).identity
        versions = await self.pipeline.versions()
        return hashlib.blake2b(f"video\0{VERSION}\0{versions}\0{catalogue}".encode(), digest_size=32).hexdigest()

    async def start(self, spec: EnvironmentSpec) -> VideoSandbox:
        """Return a sandbox without a video. It needs no process and no file."""
        return self._adopt(spec, LoadedVideos((await self._catalogue(spec)).identity))

    async def restore(self, spec: EnvironmentSpec, frozen: FrozenState) -> VideoSandbox:
        """Return a sandbox at a frozen state. Raises StateGoneError if a part of the state is missing."""
        state = LoadedVideos(**frozen.payload)
        with self._sandboxes.holding(state.parts):
            for part in state.parts:
                await asyncio.to_thread(self.store.check, part)
            return self._adopt(spec, state)

    async def collect(self, keep: Iterable[str]) -> int:
        """Delete the parts that nothing keeps, uses or makes; return the bytes of the kept ones."""
        # Both are read before the first await: `keep` does not know parts that are made later.
        existing, in_use, kept = self.store.all(), self._sandboxes.parts_in_use(), set(keep)
        unneeded = {part for part in existing - kept - in_use if not self.pipeline.makes(part)}
        if unneeded:
            # Idle readers may hold deleted files open, which would keep the disk full.
            await self.worker_pool.renew()
            used = self._sandboxes.parts_in_use()
            gone = [part for part in unneeded if part not in used and not self.pipeline.makes(part)]
            await asyncio.to_thread(self.store.drop, gone)
        return sum(self.store.size_bytes(part) for part in kept & existing)

    # -- for the control plane ---------------------------------------------------------------------------------------

    def overview(self) -> dict[str, Any]:
        """Return the jobs that run, the last ones that ended, and how many questions models got."""
        return {
            "preprocesses": [job.to_json() for job in self.jobs],
            "model_questions": self.models.sent,
            "model_answers_reused": self.models.reused,
            "model_tokens": self.models.tokens,
        }

    # -- inside ------------------------------------------------------------------------------------------------------

    @property
    def _own(self) -> Path:
        """The directory of sandboxes that share nothing."""
        return self.data_dir / "own"

    async def _catalogue(self, spec: EnvironmentSpec) -> Catalogue:
        if spec.video is None:
            raise SpecError("driver 'video' needs `video`. See docs/video.md.")
        return await catalogue_of(spec.video, self._contents, confined=spec.confined)

    def _pipeline(self, store: VideoStore, *, fresh: bool = False) -> Pipeline:
        return Pipeline(store, self.worker_pool, self._contents, self.models, self.jobs, fresh=fresh)

    def _adopt(self, spec: EnvironmentSpec, state: LoadedVideos) -> VideoSandbox:
        name, pipeline = f"video-{next(self._ids)}", self.pipeline
        if spec.cache == "never":
            # A baseline makes everything itself: with shared parts it would measure nothing.
            pipeline = self._pipeline(VideoStore(self._own / name), fresh=True)
            pipeline.store.open()
        sandbox = VideoSandbox(name, spec, state, pipeline, partial(self._catalogue, spec), self._remove_own)
        self._sandboxes.add(sandbox)
        return sandbox

    async def _remove_own(self, sandbox: VideoSandbox) -> None:
        if (self._own / sandbox.id).exists():
            await asyncio.to_thread(shutil.rmtree, self._own / sandbox.id, ignore_errors=True)
