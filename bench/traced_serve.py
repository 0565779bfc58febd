"""`forkpoint serve` with tracemalloc: on SIGUSR2 it writes where its memory is, by part. For `bench.soak`.

The environment variable `FORKPOINT_BENCH_PARTS` names the file. One JSON object is written: `parts` in bytes (see
`bench.memory.PARTS`), `private_bytes`, and `tracing_bytes` of tracemalloc's own.
"""

import ctypes
import gc
import json
import os
import signal
import tracemalloc
from collections import Counter
from pathlib import Path

from bench.memory import part_of, private_bytes

FILE = "FORKPOINT_BENCH_PARTS"


def write_parts(path: Path) -> None:
    """Write where the memory of this process is."""
    # What an earlier look has freed goes back to the kernel, so that it is no growth.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    # Before the snapshot below, which takes memory itself.
    found = {
        "private_bytes": private_bytes(),
        "tracing_bytes": tracemalloc.get_tracemalloc_memory(),
    }
    parts: Counter[str] = Counter()
    for line in tracemalloc.take_snapshot().statistics("filename"):
        if (name := line.traceback[0].filename) != tracemalloc.__file__:
            parts[part_of(name)] += line.size
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps({**found, "parts": parts}))
    draft.rename(path)


def main() -> None:
    path = Path(os.environ[FILE])
    tracemalloc.start(1)
    signal.signal(signal.SIGUSR2, lambda _number, _frame: write_parts(path))
    # Imported after tracing has begun.
    from proxy.cli.main import main as serve  # noqa: PLC0415

    serve()


if __name__ == "__main__":
    main()
