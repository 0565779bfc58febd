"""Faults of the machine (full disk, no free descriptor, dead sandbox) are errors, are never recorded, and heal."""

import os
import resource
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.machine import (
    Proxy,
    alive,
    assert_nothing_left,
    data_directory,
    is_sandbox,
    needs_root,
    require_criu,
    require_sandboxes,
    served,
    wait_until,
)

BIG = "head -c 3000000 /dev/urandom > big && echo written"
LOUD = "head -c 600000 /dev/urandom | base64"


@pytest.fixture
def folder() -> Iterator[Path]:
    require_sandboxes()
    with data_directory() as made:
        yield made


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """Mount a small file system below a folder."""
    disk = folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(disk)], check=True)
    try:
        yield disk
    finally:
        # The kernel lets go of the files of a process only after it has ended.
        wait_until(lambda: subprocess.run(["umount", str(disk)], check=False).returncode == 0, f"{disk} stays in use")


def fill(disk: Path, *, but_for: int = 0) -> Path:
    """Fill the disk until only `but_for` bytes are free."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue
        file.truncate(file.tell() - but_for)
    return ballast


@contextmanager
def client_of(proxy: Proxy) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=proxy.url, timeout=60) as client:
        yield client


def exec_(client: httpx.Client, rollout: str, command: str) -> httpx.Response:
    return client.post(f"/t/task/r/{rollout}/shell/exec", json={"command": command})


def out(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    stdout: str = answer.json()["stdout"]
    return stdout


def assert_problem(answer: httpx.Response) -> None:
    assert answer.status_code in (503, 507), answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json().keys() == {"type", "title", "status", "detail"}
    assert "stored" not in answer.headers["cache-status"]


def known(client: httpx.Client) -> Any:
    """Return every recorded call of the tree."""
    nodes = client.get("/api/v1/tasks/task/tree").raise_for_status().json()["nodes"]
    return [(node["id"], node["call"], [seen["call"] for seen in node["observations"]]) for node in nodes]


def descriptors(proxy: Proxy) -> int:
    assert proxy.process is not None
    return len(list(Path(f"/proc/{proxy.process.pid}/fd").iterdir()))


@needs_root
def test_full_disk_is_an_error_and_not_recorded(folder: Path) -> None:
    with small_disk(folder, 320) as disk, served(disk) as proxy, client_of(proxy) as client:
        assert out(exec_(client, "r", "mkdir w; cd w; X=1; echo kept > f; cat f")) == "kept\n"
        assert out(exec_(client, "other", "true")) == ""
        before = known(client)
        ballast = fill(disk)
        for _ in range(3):
            # A small write frees no room and takes none, so the disk is as full after it as before.
            for command in (BIG, LOUD, f"{BIG}; {LOUD}", "echo more >> f"):
                assert_problem(exec_(client, "r", command))
        assert client.get("/readyz").status_code == 507
        assert known(client) == before
        assert out(exec_(client, "other", "mkdir w; cd w; X=1; echo kept > f; cat f")) == "kept\n", (
            "a hit needs no disk"
        )
        ballast.unlink()
        assert client.get("/readyz").is_success
        assert out(exec_(client, "r", "pwd; cat f; echo $X; ls")) == "/root/w\nkept\n1\nf\n"
        assert out(exec_(client, "r", BIG)) == "written\n"
        assert len(out(exec_(client, "r", LOUD))) > 800_000
        processes, groups = proxy.processes(), proxy.groups()
        proxy.stop()
        assert_nothing_left(proxy, processes, groups)


@needs_root
def test_a_call_without_room_costs_no_state(folder: Path) -> None:
    """A state cannot be kept, and no replay reaches it. While the disk is full its rollout waits, and then goes on."""
    with small_disk(folder, 320) as disk, served(disk, warm_sandboxes="0") as proxy, client_of(proxy) as client:
        exec_(client, "r", "ipcmk -S 1 >/dev/null; sleep 1000 >/dev/null 2>&1 & head -c 9 /dev/urandom | base64 > tag")
        tag = out(exec_(client, "r", "cat tag"))
        ballast = fill(disk)
        for _ in range(2):
            assert_problem(exec_(client, "r", "cat tag; true"))
        ballast.unlink()
        assert out(exec_(client, "r", "cat tag; true")) == tag


@needs_root
def test_failing_restores_of_processes_cost_no_answer(folder: Path) -> None:
    """With a full disk no restore works, and nothing is recorded. With a broken CRIU a replay takes its place."""
    require_criu()
    start = "sleep 1000 >/dev/null 2>&1 & echo $! > pid"
    look = "kill -0 $(cat pid) && echo alive"
    with (
        small_disk(folder, 320) as disk,
        served(disk, sandbox_idle_s="1", warm_sandboxes="0") as proxy,
        client_of(proxy) as client,
    ):
        exec_(client, "r", start)
        # The state is kept when its sandbox is closed.
        wait_until(lambda: proxy.view("sandboxes")["total"] == 0, "the sandbox is not closed", within_s=90)
        assert [kept["kind"] for kept in proxy.view("snapshots")["items"]].count("processes") == 1
        assert "hit" in exec_(client, "other", start).headers["cache-status"]
        ballast, before = fill(disk), known(client)
        assert_problem(exec_(client, "other", look))
        assert known(client) == before
        ballast.unlink()
        [library] = (proxy.data / "local" / "criu").rglob("libc.so.6")
        library.unlink()
        assert out(exec_(client, "other", look)) == "alive\n"
        assert "restore failed" in proxy.log()


@needs_root
def test_command_failed_by_full_disk_is_not_recorded(folder: Path) -> None:
    with small_disk(folder, 320) as disk, served(disk) as proxy, client_of(proxy) as client:
        assert out(exec_(client, "r", "echo kept > f; cat f")) == "kept\n"
        before = known(client)
        ballast = fill(disk, but_for=20 << 20)
        assert_problem(exec_(client, "r", "head -c 60000000 /dev/zero > big"))
        assert known(client) == before
        ballast.unlink()
        assert out(exec_(client, "r", "head -c 60000000 /dev/zero > big; echo $?; cat f")) == "0\nkept\n"


@needs_root
def test_full_disk_at_stop_loses_no_answer(folder: Path) -> None:
    with small_disk(folder, 320) as disk, served(disk) as proxy:
        with client_of(proxy) as client:
            before_stop = [out(exec_(client, "r", command)) for command in ("echo kept > f", "cat f", "cd /tmp", "pwd")]
            ballast = fill(disk)
            processes = proxy.processes()
            proxy.stop()
            assert alive(processes) == set()
        ballast.unlink()
        proxy.start()
        with client_of(proxy) as client:
            again = [exec_(client, "again", command) for command in ("echo kept > f", "cat f", "cd /tmp", "pwd")]
            assert [out(answer) for answer in again] == before_stop
            assert {answer.headers["cache-status"] for answer in again} == {"forkpoint; hit"}
            assert out(exec_(client, "r", "pwd; cat ~/f")) == "/tmp\nkept\n"
        processes, groups = proxy.processes(), proxy.groups()
        proxy.stop()
        assert_nothing_left(proxy, processes, groups)


@needs_root
def test_exhausted_descriptors_are_an_error_and_not_recorded(folder: Path) -> None:
    with served(folder, warm_sandboxes="0") as proxy, client_of(proxy) as client:
        assert proxy.process is not None
        assert out(exec_(client, "r", "cd /tmp; echo kept > f; cat f")) == "kept\n"
        assert out(exec_(client, "r", "cat f; date > /dev/null")) == "kept\n"
        before = known(client)
        limits = resource.prlimit(proxy.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(proxy.process.pid, resource.RLIMIT_NOFILE, (3, limits[1]))
        answers = [exec_(client, f"new{n}", f"echo {n} > g; cat g") for n in range(8)]
        for answer in answers:
            assert_problem(answer)
        held = descriptors(proxy)
        assert known(client) == before
        for n in range(8):
            assert_problem(exec_(client, f"new{n}", f"echo {n} > g; cat g"))
        assert descriptors(proxy) <= held, "an error keeps no descriptor"
        assert out(exec_(client, "new0", "cd /tmp; echo kept > f; cat f")) == "kept\n", "a hit needs no descriptor"
        resource.prlimit(proxy.process.pid, resource.RLIMIT_NOFILE, limits)
        assert out(exec_(client, "r", "pwd; cat f")) == "/tmp\nkept\n"
        for n in range(1, 8):
            assert out(exec_(client, f"new{n}", f"echo {n} > g; cat g")) == f"{n}\n"
        processes, groups = proxy.processes(), proxy.groups()
        proxy.stop()
        assert_nothing_left(proxy, processes, groups)


def test_sandbox_death_is_an_error_and_not_recorded(folder: Path) -> None:
    with served(folder) as proxy, client_of(proxy) as client:
        assert proxy.process is not None
        assert out(exec_(client, "r", "cd /tmp; X=1; echo kept > f; cat f")) == "kept\n"
        before = known(client)
        others = proxy.processes()
        answers: list[httpx.Response] = []
        calling = threading.Thread(target=lambda: answers.append(exec_(client, "r", "echo lost > f; sleep 1000")))
        calling.start()
        wait_until(lambda: "sleep" in commands(proxy), "the call does not run")
        for pid, _ in proxy.processes():
            if is_sandbox(pid):
                os.kill(pid, signal.SIGKILL)
        calling.join()
        assert_problem(answers[0])
        assert known(client) == before
        assert out(exec_(client, "r", "pwd; cat f; echo $X")) == "/tmp\nkept\n1\n"
        processes, groups = proxy.processes() | others, proxy.groups()
        proxy.stop()
        assert_nothing_left(proxy, processes, groups)


def commands(proxy: Proxy) -> set[str]:
    names = set()
    for pid, _ in proxy.processes():
        try:
            names.add(Path(f"/proc/{pid}/comm").read_text().strip())
        except OSError:
            continue
    return names
