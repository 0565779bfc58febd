"""A member whose store is slow while a file exists: `python -m tests.proxy.cluster.slow_store serve ...`.

The variable `SLOW_STORE` names the file. While it exists, a request to the store waits for up to `LONGEST_S`. So some
requests are answered late, and others are given up first. Most kept states go to the store, also those whose replay
takes little time.
"""

import asyncio
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import obstore
import structlog

from proxy.cluster.states import objects, worth

# Before the modules that import this value.
worth.WORTH_S = 0.02

log = structlog.get_logger()

LONGEST_S = 45.0
"""The longest wait of a request, in seconds. A third of the requests are given up (`OBJECT_PATIENCE_S`)."""
LOOK_S = 0.05
"""How often a request that waits looks whether the store is still slow, in seconds."""


class SlowStore:
    """obstore's functions, of which some wait first."""

    def __init__(self, file: Path) -> None:
        # Each member waits otherwise, and no secret depends on it.
        self._file, self._random = file, random.Random(os.getpid())  # noqa: S311

    def __getattr__(self, name: str) -> Any:
        """Return a function of obstore; those of requests wait first."""
        function = getattr(obstore, name)
        if name not in ("put_async", "get_async", "delete_async"):
            return function

        async def late(*arguments: Any, **options: Any) -> Any:
            await self._wait(name)
            return await function(*arguments, **options)

        return late

    async def list(self, *arguments: Any, **options: Any) -> AsyncIterator[Any]:
        """List objects; each page waits first."""
        async for page in obstore.list(*arguments, **options):
            await self._wait("list")
            yield page

    async def _wait(self, request: str) -> None:
        clock = asyncio.get_running_loop().time
        began, longest_s = clock(), self._random.uniform(0, LONGEST_S)
        if self._file.exists():
            while self._file.exists() and clock() < began + longest_s:  # noqa: ASYNC110 - another process removes it
                await asyncio.sleep(LOOK_S)
            log.info("the store was slow", request=request, seconds=round(clock() - began, 1))


setattr(objects, "obstore", SlowStore(Path(os.environ["SLOW_STORE"])))  # noqa: B010 - in place of the module

if __name__ == "__main__":
    from proxy.cli.main import main

    main()
