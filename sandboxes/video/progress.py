"""Jobs: the preprocesses that run and the last ones that ended, for the log and the control plane."""

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import structlog

log = structlog.get_logger()

_LOG_INTERVAL_S = 5.0
"""Seconds between two log lines about one job."""
_MAX_JOBS = 64
"""How many jobs are remembered."""


@dataclass(slots=True)
class PreprocessJob:
    """One preprocess, of the video with this SHA-256."""

    video: str
    of_s: float  # The length of the video.
    stage: str = "waiting"
    at_s: float = 0.0  # How far the job is in the video.
    began_at: float = field(default_factory=time.monotonic)  # Seconds of the monotonic clock, as `logged_at`.
    logged_at: float = 0.0
    seconds: float | None = None  # How long the job took; None while it runs.
    error: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the members that the control plane shows; `seconds` counts while the job runs."""
        took = time.monotonic() - self.began_at if self.seconds is None else self.seconds
        share = min(1.0, self.at_s / self.of_s) if self.of_s else 0.0
        return {
            "video": self.video, "stage": self.stage, "at_s": round(self.at_s, 1), "of_s": self.of_s,
            "share": round(share, 3), "seconds": round(took, 3), "error": self.error,
        }  # fmt: skip

    def advanced(self, stage: str, at_s: float) -> None:
        """Record the progress, and log it from time to time."""
        self.stage, self.at_s = stage, at_s
        now = time.monotonic()
        if now - self.logged_at >= _LOG_INTERVAL_S:
            self.logged_at = now
            log.info("preprocess", video=self.video[:12], stage=stage, at_s=round(at_s, 1), of_s=self.of_s)


class PreprocessJobs:
    """The jobs of one driver; `slots` limits how many of them decode at once."""

    def __init__(self) -> None:
        self._jobs: list[PreprocessJob] = []
        # A job decodes on one core and needs about 80 MB; further jobs wait.
        self.slots = asyncio.Semaphore(max(2, os.cpu_count() or 2))

    def __iter__(self) -> Iterator[PreprocessJob]:
        return iter(self._jobs)

    @contextmanager
    def track(self, info: dict[str, Any]) -> Iterator[PreprocessJob]:
        """Record a job from its begin to its end, however it ends."""
        job = PreprocessJob(info["sha256"], info["duration_s"])
        self._jobs.append(job)
        del self._jobs[:-_MAX_JOBS]
        log.info("preprocess begins", video=job.video[:12], of_s=job.of_s)
        try:
            yield job
        except BaseException as error:
            job.seconds, job.stage, job.error = time.monotonic() - job.began_at, "failed", str(error) or repr(error)
            log.warning("preprocess failed", video=job.video[:12], error=job.error)
            raise
        job.seconds, job.stage, job.at_s = time.monotonic() - job.began_at, "done", job.of_s
        log.info("preprocess done", video=job.video[:12], seconds=round(job.seconds, 2))
