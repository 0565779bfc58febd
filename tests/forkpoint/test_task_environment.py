"""Tasks in Harbor's format: what their table of task.toml and their files say about the environment."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from forkpoint.compose_errors import ComposeFileError, Reason
from forkpoint.task_environment import environment_of
from sandboxes.spec import EnvironmentSpec

_SIZES = "build_timeout_sec = 600.0\ncpus = 1\nmemory_mb = 2048\nstorage_mb = 10240\n"
SHAPES: list[tuple[int, str, dict[str, str], str]] = [
    # About how many of 3,576 published tasks have the shape; 1 also for those that only Harbor's model has.
    (3566, _SIZES + "gpus = 0\nallow_internet = true\nmcp_servers = []\n", {"Dockerfile": "FROM x\n"}, ""),
    (5, _SIZES, {"Dockerfile": "FROM x\n"}, ""),
    (4, _SIZES, {"Dockerfile": "FROM x\n", "docker-compose.yaml": "services: {main: {}, api: {build: ./api}}\n"}, ""),
    (1, _SIZES + '[env]\nKEY = "${KEY:-none}"\n[[mcp_servers]]\nname = "d"\n', {"Dockerfile": "FROM x\n"}, ""),
    (1, 'docker_image = "lab/task:1"\nworkdir = "/app"\n', {}, ""),
    (1, 'cpus = 2\nmemory = "4G"\nstorage = "10G"\n', {"Dockerfile": "FROM x\n"}, ""),
    (1, "", {"docker-compose.yaml": "services: {main: {image: lab/a, cpus: '${CPUS}', mem_limit: '${MEMORY}'}}\n"}, ""),
    (1, "gpus = 1\n", {"Dockerfile": "FROM x\n"}, "devices: gpus"),
    (1, 'os = "windows"\n', {"Dockerfile": "FROM x\n"}, "value: os"),
    (1, 'memory = "much"\n', {"Dockerfile": "FROM x\n"}, "value: memory"),
    (1, "", {}, "no image: docker_image"),
    (1, "", {"docker-compose.yaml": "services: ["}, "malformed: environment"),
]
"""Shapes of the table `environment` with the task's files, and the reason and the member of a refusal."""


def _environment(folder: Path, table: str, files: dict[str, str], **more: Any) -> dict[str, Any]:
    environment = folder / "environment"
    environment.mkdir()
    for name, text in files.items():
        (environment / name).write_text(text)
    parsed = tomllib.loads(f"cpus = 1\nmemory_mb = 512\n{table}" if "CPUS" in str(files) else table)
    return environment_of(environment, parsed, build=lambda build: f"built:{build}", **more)


@pytest.mark.parametrize(("seen", "table", "files", "refusal"), SHAPES)
def test_published_task_runs_or_names_its_reason(
    seen: int, table: str, files: dict[str, str], refusal: str, tmp_path: Path
) -> None:
    del seen  # for the test below
    if not refusal:
        assert EnvironmentSpec.model_validate(_environment(tmp_path, table, files)).image
        return
    reason, member = refusal.split(": ")
    with pytest.raises(ComposeFileError) as error:
        _environment(tmp_path, table, files)
    assert (error.value.reason, member in str(error.value)) == (Reason(reason), True), error.value


def test_nearly_all_published_tasks_run() -> None:
    assert sum(seen for seen, *_, refusal in SHAPES if not refusal) >= 0.95 * sum(seen for seen, *_ in SHAPES)


def test_table_limits_the_sandbox(tmp_path: Path) -> None:
    """A limit of the compose file, which may use the harness's variables, precedes the table's."""
    spec = _environment(tmp_path, 'cpus = 2\nmemory = "4G"\nstorage_mb = 10240\n', {"Dockerfile": ""})
    assert spec == {"image": "built:.", "limits": {"cpus": 2, "memory_mb": 4096, "disk_mb": 10240}}
    (tmp_path / "2").mkdir()
    file = "services: {main: {image: a, cpus: 1, mem_limit: '${MEMORY}'}}\n"
    limits = _environment(tmp_path / "2", "cpus = 2\nmemory_mb = 512\n", {"docker-compose.yaml": file})["limits"]
    assert limits == {"cpus": 1.0, "memory_mb": 512}


def test_spec_of_the_task_comes_first_and_is_confined(tmp_path: Path) -> None:
    """It is a stranger's file, which must not choose among the files of the proxy's machine."""
    files = {"forkpoint.json": json.dumps({"env": {"A": "1"}, "confined": False}), "Dockerfile": "FROM x\n"}
    assert _environment(tmp_path, "", files) == {"env": {"A": "1"}, "confined": True}


@pytest.mark.parametrize(("force", "image"), [(False, "lab/a"), (True, "built:.")])
def test_image_of_the_table_precedes_its_dockerfile(force: bool, image: str, tmp_path: Path) -> None:
    """Unless the harness is told to build."""
    files = {"Dockerfile": "", "docker-compose.yaml": "services: {main: {}}\n"}
    assert _environment(tmp_path, 'docker_image = "lab/a"\n', files, force_build=force)["image"] == image
