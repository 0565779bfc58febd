"""A task in a repository, in sandboxes of an image and by `docker exec`: `python -m bench.repository`.

Four rollouts of 15 calls each clone a repository (toolz), make a virtual environment, install a wheel, edit, test and
commit. The first 8 calls of all are equal. The same calls are made by `docker exec` in a container for each rollout, in
turns. All answers must be equal; it exits with 1 otherwise. It starts a Docker daemon of its own. The image is made by
debootstrap, once for each `--cache`.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections import Counter
from pathlib import Path
from typing import Any

import docker
import httpx

from bench.machine import console, median, table
from sandboxes.linux.files import remove_tree
from tests.dockerd import Dockerd, dockerd
from tests.machine import data_directory, served

ROLLOUTS = 4
NAME = "forkpoint-bench-repository:1"
PACKAGES = "ca-certificates,git,python3,python3-pip,python3-pytest,python3-venv"
REPOSITORY, WHEEL = "toolz==1.0.0", "more-itertools==10.5.0"
DATES = {"GIT_AUTHOR_DATE": "2026-01-01T00:00:00Z", "GIT_COMMITTER_DATE": "2026-01-01T00:00:00Z"}
"""Commits have equal hashes."""
WHO = "-c user.name=me -c user.email=me@example.org"
TEST = "../venv/bin/python -m pytest -q -p no:cacheprovider {} 2>&1 | sed 's/ in [0-9.]*s.*//'"
SHARED = (
    "cd /root && git clone -q file:///srv/toolz repo && cd repo && echo __pycache__ > .git/info/exclude && git log",
    "python3 -m venv --system-site-packages ../venv && ls ../venv",
    "../venv/bin/pip install -q --no-index --find-links /srv/wheels more-itertools && ../venv/bin/pip list | grep more",
    "git ls-files | wc -l && ls",
    "grep -n '^def ' toolz/itertoolz.py | head -n 20",
    TEST.format("toolz/tests/test_itertoolz.py"),
    "sed -n '1,60p' toolz/itertoolz.py",
    "git switch -q -c work && sed -i 's/^import itertools/import itertools  #/' toolz/itertoolz.py && git diff --stat",
)
OWN = (
    "printf '\\n\\ndef twice(seq):\\n    return [x * 2 + {n} - {n} for x in seq]\\n' >> toolz/itertoolz.py",
    r"""cat > toolz/tests/test_twice_{n}.py << 'END'
from toolz.itertoolz import twice


def test_{n}():
    assert twice([{n}]) == [{n} * 2]
END""",
    TEST.format("toolz/tests/test_twice_{n}.py"),
    f"git add -A && git {WHO} commit -qm 'twice {{n}}' && git rev-parse HEAD",
    "../venv/bin/python -c 'from toolz.itertoolz import twice; print(twice(range({n}, 9)))'",
    TEST.format("toolz/tests/test_itertoolz.py toolz/tests/test_dicttoolz.py"),
    "git diff HEAD~1 --stat && git status --short",
)
"""Calls of one rollout alone; `{n}` is its number."""

Answer = tuple[str, str, int]


def calls(number: int) -> list[str]:
    """Return the calls of a rollout."""
    return [*SHARED, *(command.replace("{n}", str(number)) for command in OWN)]


def make_image(cache: Path, daemon: Dockerd) -> Path:
    """Return the archive of the image, and load it into the daemon; a minute, and some seconds if it exists."""
    archive = cache / "image.tar"
    if not archive.exists():
        folder = cache / "root"
        remove_tree(folder)
        _run("debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", folder)
        _fill(folder / "srv", cache)
        with subprocess.Popen(["tar", "--create", "--directory", folder, "."], stdout=subprocess.PIPE) as files:
            _run("docker", "--host", daemon.host, "import", "-", NAME, stdin=files.stdout)
        daemon.ask("save", NAME, "--output", f"{archive}.part")
        Path(f"{archive}.part").rename(archive)
        remove_tree(folder)
    daemon.ask("load", "--input", str(archive))
    return archive


def _fill(folder: Path, cache: Path) -> None:
    """Put a repository with one commit, and a wheel, into a directory."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest"]
    _run(*pip, folder / "wheels", WHEEL)
    _run(*pip, cache / "source", "--no-binary", ":all:", REPOSITORY)
    [source] = (cache / "source").glob("*.tar.gz")
    shutil.unpack_archive(source, cache / "source", filter="data")
    shutil.move(source.with_suffix("").with_suffix(""), folder / "toolz")
    remove_tree(cache / "source")
    for line in ("init -q -b main", "add -A", f"{WHO} commit -qm begin"):
        _run("git", "-C", folder / "toolz", *line.split())


def _run(*command: object, **options: object) -> None:
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL, **options)  # type: ignore[call-overload]


class Ours:
    """Calls through a proxy."""

    def __init__(self, url: str, image: Path) -> None:
        self._client = httpx.Client(base_url=url, timeout=300, trust_env=False)
        self.seconds: list[float] = []
        self.outcomes: Counter[str] = Counter()
        spec = {"image": str(image), "workdir": "/root", "env": DATES}
        self._client.put("/api/v1/tasks/repository", json=spec).raise_for_status()

    def __call__(self, rollout: int, command: str) -> Answer:
        began = time.perf_counter()
        url = f"/t/repository/r/{rollout}/shell/exec"
        response = self._client.post(url, json={"command": command, "timeout_s": 200})
        if not response.is_success:
            raise SystemExit(f"{command!r}: {response.text}")
        self.seconds.append(time.perf_counter() - began)
        self.outcomes["hit" if "hit" in response.headers["cache-status"] else "miss"] += 1
        body = response.json()
        return body["stdout"], body["stderr"], body["exit_code"]


class Theirs:
    """Calls by `docker exec`, in a container for each rollout."""

    def __init__(self, daemon: Dockerd) -> None:
        self._client = docker.DockerClient(base_url=daemon.host, timeout=300)
        self.seconds: list[float] = []
        self._containers = [
            self._client.containers.run(
                NAME, ["sleep", "100000"], detach=True, network_mode="none", environment=DATES, working_dir="/root"
            )
            for _ in range(ROLLOUTS)
        ]

    def __call__(self, rollout: int, command: str) -> Answer:
        began = time.perf_counter()
        # A command of its own each time, which begins where the last one of a session would.
        line = command if command.startswith("cd ") else f"cd /root/repo && {command}"
        answer: Any = self._containers[rollout].exec_run(
            ["bash", "-c", line], environment={"HOME": "/root"}, demux=True
        )
        self.seconds.append(time.perf_counter() - began)
        out, err = ((part or b"").decode() for part in answer.output)
        return out, err, answer.exit_code

    def close(self) -> None:
        for container in self._containers:
            container.remove(force=True)
        self._client.close()


def main() -> None:
    """Measure both and print a table."""
    parser = ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--cache", type=Path, help="directory that keeps the image; default: a temporary one")
    given = parser.parse_args()
    cache = given.cache or Path(tempfile.mkdtemp(prefix="forkpoint-bench-", dir="/var/tmp"))
    cache.mkdir(exist_ok=True)
    differing: list[tuple[int, str, Answer, Answer]] = []
    try:
        with dockerd() as daemon, data_directory() as folder:
            image = make_image(cache, daemon)
            with served(folder) as proxy:
                ours, theirs = Ours(proxy.url, image), Theirs(daemon)
                for number in range(ROLLOUTS):
                    for command in calls(number):
                        answers = ours(number, command), theirs(number, command)
                        if answers[0] != answers[1]:
                            differing.append((number, command, *answers))
                theirs.close()
    finally:
        if given.cache is None:
            remove_tree(cache)
    shown = table(
        f"A repository: {ROLLOUTS} rollouts of {len(calls(0))} calls", "", "forkpoint", "docker exec", "ratio"
    )
    sums, medians = ((figure(ours.seconds), figure(theirs.seconds)) for figure in (sum, median))
    shown.add_row("tool seconds", f"{sums[0]:.1f}", f"{sums[1]:.1f}", f"{sums[1] / sums[0]:.2f}")
    shown.add_row(
        "median call, ms", f"{medians[0] * 1e3:.1f}", f"{medians[1] * 1e3:.1f}", f"{medians[1] / medians[0]:.2f}"
    )
    shown.add_row("hits", f"{ours.outcomes['hit']} of {ours.outcomes.total()}", "-", "-")
    shown.add_row("answers that differ", str(len(differing)), "-", "-")
    console.print(shown)
    for row in differing[:5]:
        console.print(*row, sep="\n  ", markup=False)
    if differing:
        sys.exit("Some answers differ.")


if __name__ == "__main__":
    main()
