"""A parent with two workers, as a process of its own: `python -m tests.proxy.workers.supervised MODE FOLDER`.

Each worker notes its pid in the folder, and that it has ended in order.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from proxy.workers.supervisor import WorkerFailedError, supervise

FAILED = 3
"""The exit code after a worker that could not start."""


def main(mode: str, folder: Path) -> None:
    def note(name: str, text: str = "") -> None:
        (folder / f"{name}.draft").write_text(text)
        (folder / f"{name}.draft").rename(folder / name)

    def work(number: int, is_serving: Callable[[], None]) -> None:
        if mode == "stubborn":
            signal.signal(signal.SIGTERM, lambda *_: note(f"waits-{number}"))
            is_serving()
            while True:
                time.sleep(60)
        if mode == "failing" and number == 1:
            while not (folder / "pid-0").exists():
                time.sleep(0.01)
            raise SystemExit(1)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        note(f"pid-{number}", str(os.getpid()))
        is_serving()
        signal.sigwait({signal.SIGTERM})
        note(f"ended-{number}")

    try:
        supervise(2, work, lambda: note("ready"))
    except WorkerFailedError:
        raise SystemExit(FAILED) from None


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
