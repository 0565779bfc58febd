"""A rollout can leave the tree wherever another one was, with real tools, and finds what it would find alone."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sandboxes.spec import EnvironmentSpec
from tests.machine import require_criu, require_sandboxes
from tests.proxy.serving import Running, serving
from tests.sandboxes.box import local_driver

GIT = "git -c user.name=a -c user.email=a@b"
SQL = "python3 -c 'import sqlite3, sys; d = sqlite3.connect(\"t.db\"); [*map(d.execute, sys.argv[1:])]; d.commit()'"
WALKS = {
    "hard links of git": [
        f"git init -q r && cd r && echo 1 > a && git add a && {GIT} commit -qm x; cd ..",
        "git clone -q r c; ls c", f"cd c && echo 2 >> a && {GIT} commit -qam y && git log --oneline | wc -l",
    ],
    "a link and the time": ["echo 1 > a", "ln a b; date +%N >> log; cat a", "echo 2 >> a; cat b"],
    "a copy of links": ["mkdir d; echo 1 > d/a; date +%N > d/t", "cp -al d e; ls e", "echo 2 >> e/a; cat d/a"],
    "a pid that was told": ["ls /etc | head -1", "git --version | wc -l", "sleep 1000 & echo $!", "echo 1 > a"],
    "a pid in a file": ["ls /", "ls /etc | wc -l", "sleep 1000 & echo $! > pid", "wc -l < pid", "kill $(cat pid)"],
    "a pid in a variable": ["ls /", "sleep 1000 & PID=$!", "kill -0 $PID; echo $?", "echo 1 > n", "kill $PID; ls n"],
    "a random number beside a process": ["ls /", "sleep 1000 & echo up", "date +%N > n; ls n", "rm n; echo 1 > a"],
    "a pid of a shell in a name": ["ls /etc | wc -l", "sleep 1000 & echo x > pid.$$", "ls / | wc -l", "rm pid.*"],
    "a pid that a program found": [
        "git --version | wc -l", "setsid -f sleep 1000; until pgrep -x sleep > pid; do :; done", "wc -l pid",
    ],
    "a server": [
        "mkdir s; echo page > s/page; cd s; python3 -m http.server -b 127.0.0.1 8000 > ../log 2>&1 & cd ..",
        "until curl -sf 127.0.0.1:8000/page; do sleep .05; done", "echo more > s/more; curl -s 127.0.0.1:8000/more",
    ],
    "a loop that waits": [
        "ls /", "sleep 1000 & for i in $(seq 999); do [ $RANDOM -lt 1000 ] && break; done", "echo 1 > a; cat a",
    ],
    "random numbers": ["echo $RANDOM > a; cat a | wc -l", "X=$RANDOM", "head -c 9 /dev/urandom > b", "wc -c b"],
    "a database": [
        f"{SQL} 'pragma journal_mode=wal' 'create table t(x)'", f"{SQL} 'insert into t values(random())'; ls t.db",
        "date +%N > n; ls t.db",
    ],
}  # fmt: skip
LEAVES = "ls -1 | grep -v -e pid -e log | sort; pgrep -c sleep; echo left > own; cat own"
"""What a rollout does where it leaves: it looks around and changes something."""


@contextmanager
def proxied(data: Path, *, checkpoints: bool) -> Iterator[Running]:
    driver = local_driver(data / "local", checkpoints=checkpoints)
    spec = EnvironmentSpec()
    with serving(data, drivers={"local": driver}, default_spec=spec, sandbox_idle_s=600.0) as proxy:
        proxy.client.put("/api/v1/tasks/private", json={"cache": "never"}).raise_for_status()
        yield proxy


@pytest.fixture(scope="module", params=[True, False], ids=["checkpoints", "no checkpoints"])
def proxy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    require_criu() if request.param else require_sandboxes()
    name = "checkpoints" if request.param else "none"
    with proxied(tmp_path_factory.mktemp(name), checkpoints=request.param) as running:
        yield running


@pytest.mark.parametrize("title", WALKS)
def test_every_node_can_be_left(proxy: Running, title: str) -> None:
    """After each call of one rollout, another one that made the same calls goes another way."""
    task, walk = title.replace(" ", "-"), WALKS[title]
    if title == "a random number beside a process" and "none" in proxy.engine.settings.data.name:
        pytest.skip("live processes that cannot be saved: a replay is tried, and may fail")
    proxy.client.put(f"/api/v1/tasks/{task}", json={}).raise_for_status()
    for call in walk:
        assert proxy.exec("first", call, task=task).status_code == 200
    for length in range(1, len(walk) + 1):
        alone, name = f"{task}-{length}", f"leaves-{length}"
        for call in walk[:length]:
            assert proxy.exec(name, call, task=task).status_code == 200
            assert proxy.exec(alone, call, task="private").status_code == 200
        left = proxy.exec(name, LEAVES, task=task)
        assert left.status_code == 200, left.text
        assert left.json()["stdout"] == proxy.exec(alone, LEAVES, task="private").json()["stdout"]
    assert proxy.exec("first", "echo on", task=task).json()["stdout"] == "on\n"


def test_files_can_be_made_beside_a_process(tmp_path: Path) -> None:
    """The answer has the file's time, which is another one in a replay: E2B's rollouts were lost there without CRIU."""
    require_sandboxes()
    with proxied(tmp_path, checkpoints=False) as proxy:
        for name in ("first", "second"):
            assert proxy.exec(name, "sleep 1000 & echo up", task="made").status_code == 200
            files = f"/t/made/r/{name}/e2b/filesystem.Filesystem"
            proxy.client.post(f"{files}/MakeDir", json={"path": "/root/d"}).raise_for_status()
        left = proxy.exec("second", "ls; echo > own", task="made")
        assert (left.status_code, left.json().get("stdout")) == (200, "d\n")


def test_older_processes_are_no_others(tmp_path: Path) -> None:
    """The first rollout thinks while its processes go on. Another one that comes later finds young ones."""
    require_criu()
    starts = "(sleep 3; echo built > out) > /dev/null 2>&1 & echo begun"
    with proxied(tmp_path, checkpoints=True) as proxy:
        assert proxy.exec("first", starts).json()["stdout"] == "begun\n"
        time.sleep(5)
        for name in ("second", "third"):
            assert proxy.exec(name, starts).headers["cache-status"] == "forkpoint; hit"
            assert proxy.exec(name, "ls").json()["stdout"] == "", "the file is made later"
        assert proxy.exec("first", "ls").json()["stdout"] == "out\n"
