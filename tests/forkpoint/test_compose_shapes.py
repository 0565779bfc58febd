"""The shapes of public tasks' compose files: nearly all of them run, and each refusal says which member it is about."""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from forkpoint.compose_errors import ComposeFileError, Reason
from forkpoint.compose_file import default_of, spec_of
from sandboxes.spec import EnvironmentSpec

SHAPES: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("compose_shapes.yaml").read_text())
_HARNESS = {"T_IMAGE": "task:1", "T_TESTS": "/tests", "T_LOGS_INSIDE": "/logs", "T_AGENT_LOGS_INSIDE": "/agent-logs"}
"""Variables that a harness sets. Those of its own directories have no value for the sandbox."""


def _spec(shape: dict[str, Any], folder: Path, notes: list[str]) -> EnvironmentSpec:
    """Return the environment of a shape, whose files are in a directory of the task below `folder`."""
    task = folder / "task"
    for name, text in {"compose.yaml": "", **shape.get("files", {})}.items():
        (task / name).parent.mkdir(parents=True, exist_ok=True)
        (task / name).write_text(text)
    file = shape["file"] if "file" in shape else yaml.safe_load(shape["text"])
    main = next((name for name in ("client", "main") if name in file["services"]), "") or default_of(file)
    spec = spec_of(
        file, None, main, variables=_HARNESS, folder=task, build=lambda build: f"built:{len(str(build))}",
        note=notes.append,
    )  # fmt: skip
    return EnvironmentSpec.model_validate(spec)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: str(shape["shape"]))
def test_public_shape_runs_or_names_its_reason(shape: dict[str, Any], tmp_path: Path) -> None:
    """A refusal has a reason of one list, and names the service and the member."""
    if "reason" not in shape:
        assert _spec(shape, tmp_path, []).image
        return
    with pytest.raises(ComposeFileError) as refusal:
        _spec(shape, tmp_path, [])
    assert refusal.value.reason is Reason(shape["reason"])
    assert shape["member"] in str(refusal.value)


def test_nearly_all_published_files_run() -> None:
    """At least 95 of 100, by how often each shape was seen. The test above says that these are the ones that run."""
    runs = sum(shape["seen"] for shape in SHAPES if "reason" not in shape)
    assert runs >= 0.95 * sum(shape["seen"] for shape in SHAPES)


def _of(name: str, folder: Path) -> tuple[EnvironmentSpec, str]:
    notes: list[str] = []
    spec = _spec(next(shape for shape in SHAPES if shape["shape"] == name), folder, notes)
    return spec, "\n".join(notes)


def test_mounted_files_of_the_task_are_copied(tmp_path: Path) -> None:
    """Into the main container and into services. What they say about writing is noted."""
    spec, _ = _of("the task's directory as the working directory", tmp_path / "1")
    assert {"/app/solve.py": "print(1)\n", "/app/data/in.txt": "1\n"}.items() <= spec.files.items()
    spec, notes = _of("a configured web server", tmp_path / "2")
    assert spec.files["/.services/web/etc/nginx/nginx.conf"] == "events {}\n"
    assert spec.files["/.services/web/usr/share/nginx/html/index.html"] == "hi\n"
    assert notes.count("is writable") == 2


def test_mounted_program_stays_a_program(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("#!/bin/sh\n")
    (tmp_path / "run.sh").chmod(0o755)
    file = {"services": {"main": {"image": "i", "volumes": ["./run.sh:/run.sh"]}}}
    assert spec_of(file, None, folder=tmp_path)["setup"] == ["chmod +x -- /run.sh"]


@pytest.mark.parametrize("source", ["./link", "./binary", "./large", "./pipe"])
def test_files_that_cannot_be_copied_are_refused(source: str, tmp_path: Path) -> None:
    """A link out of the task's directory would bring a stranger's choice of this machine's files."""
    task = tmp_path / "task"
    task.mkdir()
    (tmp_path / "secret").write_text("s")
    (task / "link").symlink_to(tmp_path / "secret")
    (task / "binary").write_bytes(b"\xff\0")
    (task / "large").write_text("x" * (513 << 10))
    os.mkfifo(task / "pipe")
    file = {"services": {"main": {"image": "i", "volumes": [f"{source}:/x"]}}}
    with pytest.raises(ComposeFileError, match="cannot be copied"):
        spec_of(file, None, folder=task)


def test_services_have_all_their_names(tmp_path: Path) -> None:
    """Tasks name a target by its container's name, a link, or an alias of its network."""
    spec, _ = _of("an attacker beside a target on a network", tmp_path / "1")
    assert spec.aliases == ("attacker", "files", "target_box")
    assert spec.services["target"].ready_s == 270
    spec, _ = _of("links of the first version", tmp_path / "2")
    assert (spec.aliases, list(spec.services)) == (("client", "mysql"), ["db"])
    spec, notes = _of("further hosts", tmp_path / "3")
    assert (spec.aliases, "host.docker.internal (extra_hosts)" in notes) == (("me",), True)


def test_variables_come_from_files_beside_the_compose_file(tmp_path: Path) -> None:
    assert _of("a file of variables", tmp_path / "1")[0].env == {"A": "1", "B": "two words"}
    assert _of("values beside the file", tmp_path / "2")[0].image == "postgres:16"
    spec, notes = _of("variables without a value", tmp_path / "3")
    assert (spec.env, "ACCESS_KEY" in notes) == ({"URL": "http://here"}, True)


def test_no_link_brings_variables_of_this_machine(tmp_path: Path) -> None:
    """A task's files are a stranger's."""
    (tmp_path / "task").mkdir()
    (tmp_path / "secret").write_text("KEY=secret\n")
    (tmp_path / "task" / ".env").symlink_to(tmp_path / "secret")
    file = {"services": {"main": {"image": "i", "environment": ["A=${KEY:-none}"]}}}
    assert spec_of(file, None, folder=tmp_path / "task")["env"] == {"A": "none"}


def test_limits_and_memory_file_systems(tmp_path: Path) -> None:
    assert _of("limits of processes and the kernel", tmp_path / "1")[0].limits.pids == 200
    setup = _of("memory file systems", tmp_path / "2")[0].setup
    assert setup == ("mkdir -p -m 1777 -- /cache /run/x /scratch",)


def test_service_that_only_waits_is_ready(tmp_path: Path) -> None:
    spec, _ = _of("one service that is built here and one that is fetched", tmp_path)
    assert spec.services["checker"].healthcheck == ("CMD-SHELL", ":")


def test_service_with_a_profile_is_left_out(tmp_path: Path) -> None:
    assert _of("a service that starts on demand", tmp_path)[0].services == {}
