"""Images of tasks that are described by a Dockerfile: named by their content, built once, by what is there."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from forkpoint.compose_errors import ComposeFileError, Reason
from forkpoint.image_builds import REPOSITORY, ImageBuilder
from tests.sandboxes.docker import require_docker

FAKE = """#!/bin/sh
echo "$@" >>"$LOG"
case $1 in
image) test -e "$LOG.built" ;;
build) cat >"$LOG.dockerfile"; touch "$LOG.built"; echo "step 1: $FAKE_SAYS"; exit "${FAKE_EXIT:-0}" ;;
push) p=${3#docker-archive:}; echo image >"${p%%:*}" ;;
esac
"""
"""A builder that notes what it is called with."""


def _task(folder: Path, dockerfile: str = "FROM scratch\nCOPY text /text\n") -> Path:
    (folder / "sub").mkdir(parents=True)
    (folder / "Dockerfile").write_text(dockerfile)
    (folder / "text").write_text("a\n")
    (folder / "sub" / "link").symlink_to("../text")
    return folder


@pytest.fixture
def called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The log of a builder, of which the test makes `docker` or `buildah`. There is no other one."""
    (tmp_path / "bin").mkdir()
    for program in ("sh", "cat", "touch", "test"):
        (tmp_path / "bin" / program).symlink_to(f"/bin/{program}")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "log"


def _install(called: Path, name: str) -> None:
    program = called.parent / "bin" / name
    program.write_text(FAKE)
    program.chmod(0o755)


def test_image_is_built_once_for_each_content(called: Path) -> None:
    """Copies of a task share an image. A changed file, mode, link, argument or target is another one."""
    _install(called, "docker")
    first = _task(called.parent / "1")
    names = [ImageBuilder(first)(), ImageBuilder(_task(called.parent / "2"))(".")]
    (first / "text").write_text("b\n")
    names.append(ImageBuilder(first)())
    (first / "text").chmod(0o755)
    names.append(ImageBuilder(first)())
    (first / "sub" / "link").unlink()
    names.append(ImageBuilder(first)())
    names += [ImageBuilder(first)(build) for build in ({"context": ".", "args": {"A": 1}}, {"target": "one"})]
    assert names[0] == names[1]
    assert len(set(names)) == 6
    assert all(name.startswith(f"{REPOSITORY}:") for name in names)
    lines = called.read_text().splitlines()
    assert sum(line.startswith("build ") for line in lines) == 1, "the fake says that the others are there"
    assert called.with_name("log.dockerfile").read_text() == "FROM scratch\nCOPY text /text\n"


def test_buildah_makes_a_file_that_the_proxy_reads(called: Path) -> None:
    _install(called, "buildah")
    builder = ImageBuilder(_task(called.parent / "1"))
    image = builder({"context": ".", "args": ["A=1"]})
    assert Path(image).read_text() == "image\n"
    assert builder({"context": ".", "args": {"A": "1"}}) == image
    lines = called.read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["build", "push"]
    assert "--build-arg A=1" in lines[0]


@pytest.mark.parametrize(
    ("build", "why"),
    [
        ({"context": "../"}, "not in the task's directory"),
        ({"dockerfile": "/etc/passwd"}, "not in the task's directory"),
        ({"context": "https://example.com/x.git"}, "not in the task's directory"),
        ({"dockerfile": "Other"}, "There is no"),
        ({"context": "none"}, "is no directory"),
        ({"secrets": ["key"]}, "'secrets', which is not known"),
        (".", "neither docker nor buildah"),
    ],
)
def test_what_cannot_be_built_says_how_to_bring_an_image(called: Path, build: Any, why: str) -> None:
    with pytest.raises(ComposeFileError, match=why) as refusal:
        ImageBuilder(_task(called.parent / "1"))(build)
    assert "docker save" in str(refusal.value)


def test_failed_build_shows_its_end(called: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(called, "docker")
    monkeypatch.setenv("FAKE_EXIT", "3")
    monkeypatch.setenv("FAKE_SAYS", "no such package")
    with pytest.raises(ComposeFileError, match=r"exit code 3:\nstep 1: no such package") as refusal:
        ImageBuilder(_task(called.parent / "1"))()
    assert refusal.value.reason is Reason.NO_IMAGE


def test_contexts_of_trusted_code_may_be_beside_its_directory(called: Path) -> None:
    _install(called, "docker")
    (called.parent / "eval").mkdir()
    _task(called.parent / "shared")
    assert ImageBuilder(called.parent / "eval", confined=False)({"context": "../shared"})


def test_docker_builds_from_a_dockerfile(tmp_path: Path) -> None:
    """With the real one. The second call finds the image."""
    require_docker()
    task = _task(tmp_path, f"FROM scratch\nCOPY text /text\nENV OF={os.getpid()}\n")
    image = ImageBuilder(task)()
    try:
        show = ["docker", "image", "inspect", "--format", "{{.Id}} {{.Config.Env}}", image]
        shown = subprocess.run(show, capture_output=True, text=True, check=True).stdout
        assert f"OF={os.getpid()}" in shown
        assert ImageBuilder(task)({"context": ".", "dockerfile": "Dockerfile"}) == image
        assert subprocess.run(show, capture_output=True, text=True, check=True).stdout == shown
    finally:
        subprocess.run(["docker", "rmi", image], capture_output=True, check=False)
