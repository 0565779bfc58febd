"""`forkpoint serve` that writes the parts of its private memory to a file on SIGUSR2. For `bench.soak`.

The environment variable `FORKPOINT_BENCH_PARTS` names the file, to which the parts are written as one JSON object (see
`bench.resident.parts`). With `FORKPOINT_BENCH_TRACED`, allocations are traced, so that the parts name their owners.
"""

import asyncio
import gc
import json
import os
import signal
import tracemalloc
from pathlib import Path

from bench.resident import parts

FILE = "FORKPOINT_BENCH_PARTS"
TRACED = "FORKPOINT_BENCH_TRACED"


def write_parts(path: Path) -> None:
    """Write the parts of this process's memory. A child measures them, so that the measurement does not count."""
    gc.collect()
    pid = os.getpid()
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        draft = path.with_suffix(".part")
        draft.write_text(json.dumps(parts(pid)))
        draft.rename(path)
    finally:
        os._exit(0)


def main() -> None:
    path = Path(os.environ[FILE])
    if os.environ.get(TRACED):
        tracemalloc.start(1)
    # Not in the handler: it may interrupt code with a lock that `os.fork` takes.
    signal.signal(
        signal.SIGUSR2,
        lambda _number, _frame: asyncio.get_running_loop().call_soon_threadsafe(write_parts, path),
    )
    # Imported after tracing has begun.
    from proxy.cli.main import main as serve  # noqa: PLC0415

    serve()


if __name__ == "__main__":
    main()
