"""The parent of the workers: they are started, started again, and ended together."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.machine import wait_until
from tests.proxy.workers.supervised import FAILED

REPOSITORY = Path(__file__).parents[3]
WITHIN_S = 30.0


@contextmanager
def supervised(folder: Path, mode: str = "") -> Iterator["subprocess.Popen[bytes]"]:
    """Run a parent with two workers; it is killed at the end if it still runs, and its workers end with it."""
    # As a shell starts a command in the background: it ignores SIGINT.
    shell = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]
    command = [*shell, sys.executable, "-m", "tests.proxy.workers.supervised", mode, str(folder)]
    parent = subprocess.Popen(command, cwd=REPOSITORY)
    try:
        yield parent
    finally:
        parent.kill()
        parent.wait()


def exists(folder: Path, *names: str) -> Callable[[], bool]:
    return lambda: all((folder / name).exists() for name in names)


def pid_of(folder: Path, number: int) -> int:
    return int((folder / f"pid-{number}").read_text())


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_all_end_with_sigterm(tmp_path: Path) -> None:
    with supervised(tmp_path) as parent:
        wait_until(exists(tmp_path, "ready"), "not all workers serve")
        parent.terminate()
        assert parent.wait(WITHIN_S) == 0
    assert exists(tmp_path, "ended-0", "ended-1")()


def test_workers_have_their_own_sessions(tmp_path: Path) -> None:
    """Ctrl-C at the parent's terminal does not reach them, and each can let its session run first."""
    with supervised(tmp_path) as parent:
        wait_until(exists(tmp_path, "ready"), "not all workers serve")
        workers = [pid_of(tmp_path, number) for number in range(2)]
        assert [os.getsid(pid) for pid in workers] == workers
        parent.terminate()
        assert parent.wait(WITHIN_S) == 0


def test_dead_worker_is_started_again(tmp_path: Path) -> None:
    """The other one goes on meanwhile."""
    with supervised(tmp_path) as parent:
        wait_until(exists(tmp_path, "ready"), "not all workers serve")
        first, other = pid_of(tmp_path, 0), pid_of(tmp_path, 1)
        subprocess.run(["kill", "-9", str(first)], check=True)
        wait_until(lambda: pid_of(tmp_path, 0) != first, "it was not started again")
        assert pid_of(tmp_path, 1) == other
        parent.terminate()
        assert parent.wait(WITHIN_S) == 0


def test_killed_parent_ends_its_workers(tmp_path: Path) -> None:
    """The kernel tells them, and they end in order."""
    with supervised(tmp_path) as parent:
        wait_until(exists(tmp_path, "ready"), "not all workers serve")
        workers = [pid_of(tmp_path, number) for number in range(2)]
        parent.kill()
    wait_until(lambda: not any(map(is_alive, workers)), "a worker goes on without its parent")
    assert exists(tmp_path, "ended-0", "ended-1")()


def test_start_fails_with_a_worker(tmp_path: Path) -> None:
    """What a worker cannot use at the first start is no reason to try for ever. The others are ended in order."""
    with supervised(tmp_path, "failing") as parent:
        assert parent.wait(WITHIN_S) == FAILED
    assert exists(tmp_path, "ended-0")()
    assert not exists(tmp_path, "ready")()


def test_second_signal_does_not_wait(tmp_path: Path) -> None:
    """A worker that waits for its calls after SIGTERM ends with the SIGINT that follows."""
    with supervised(tmp_path, "stubborn") as parent:
        wait_until(exists(tmp_path, "ready"), "not all workers serve")
        parent.terminate()
        wait_until(exists(tmp_path, "waits-0", "waits-1"), "SIGTERM was not passed on")
        parent.send_signal(signal.SIGTERM)
        assert parent.wait(WITHIN_S) == 0
