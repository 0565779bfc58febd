"""Preprocesses under way, and the last ones that ended: how many run at once, for the log and the control plane."""

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import structlog

log = structlog.get_logger()

_TELL_EVERY_S = 5.0
_FINISHED = 64


@dataclass(slots=True)
class PreprocessJob:
    """One preprocess: whose, how far, and since when (seconds of a monotonic clock)."""

    video: str
    of_s: float
    stage: str = "waiting"
    at_s: float = 0.0
    began: float = field(default_factory=time.monotonic)
    told: float = 0.0
    seconds: float | None = None
    error: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return what the control plane shows. seconds: so far, or all that it took."""
        took = time.monotonic() - self.began if self.seconds is None else self.seconds
        share = min(1.0, self.at_s / self.of_s) if self.of_s else 0.0
        return {
            "video": self.video, "stage": self.stage, "at_s": round(self.at_s, 1), "of_s": self.of_s,
            "share": round(share, 3), "seconds": round(took, 3), "error": self.error,
        }  # fmt: skip

    def advanced(self, stage: str, at_s: float) -> None:
        """Note how far it is."""
        self.stage, self.at_s = stage, at_s
        now = time.monotonic()
        if now - self.told >= _TELL_EVERY_S:
            self.told = now
            log.info("preprocess", video=self.video[:12], stage=stage, at_s=round(at_s, 1), of_s=self.of_s)


class Works:
    """All of one driver, the last ones."""

    def __init__(self) -> None:
        self._works: list[PreprocessJob] = []
        # Each decodes on a core of its own, in some 80 MB; the others wait.
        self.turns = asyncio.Semaphore(max(2, os.cpu_count() or 2))

    def __iter__(self) -> Iterator[PreprocessJob]:
        return iter(self._works)

    @contextmanager
    def work(self, info: dict[str, Any]) -> Iterator[PreprocessJob]:
        """Note a piece of work from its begin to its end, however it ends."""
        work = PreprocessJob(info["sha256"], info["duration_s"])
        self._works.append(work)
        del self._works[:-_FINISHED]
        log.info("preprocess begins", video=work.video[:12], of_s=work.of_s)
        try:
            yield work
        except BaseException as error:
            work.seconds, work.stage, work.error = time.monotonic() - work.began, "failed", str(error) or repr(error)
            log.warning("preprocess failed", video=work.video[:12], error=work.error)
            raise
        work.seconds, work.stage, work.at_s = time.monotonic() - work.began, "done", work.of_s
        log.info("preprocess done", video=work.video[:12], seconds=round(work.seconds, 2))
