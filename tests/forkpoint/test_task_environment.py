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


def _environment(folder: Path, table: str | dict[str, Any], files: dict[str, str], **more: Any) -> dict[str, Any]:
    environment = folder / "environment"
    environment.mkdir()
    for name, text in files.items():
        (environment / name).write_text(text)
    sizes = "cpus = 1\nmemory_mb = 512\n" if "CPUS" in str(files) else ""
    parsed = table if isinstance(table, dict) else tomllib.loads(f"{sizes}{table}")
    return environment_of(environment, parsed, build=lambda build: f"built:{build}", **more)


@pytest.mark.parametrize(("seen", "table", "files", "refusal"), SHAPES)
def test_published_task_runs_or_names_its_reason(
    seen: int, table: str, files: dict[str, str], refusal: str, tmp_path: Path
) -> None:
    del seen  # for the test below
    _check(table, files, refusal, tmp_path)


def _check(table: str | dict[str, Any], files: dict[str, str], refusal: str, tmp_path: Path) -> None:
    if not refusal:
        assert EnvironmentSpec.model_validate(_environment(tmp_path, table, files)).image
        return
    reason, member = refusal.split(": ")
    with pytest.raises(ComposeFileError) as error:
        _environment(tmp_path, table, files)
    assert (error.value.reason, member in str(error.value)) == (Reason(reason), True), error.value


def test_nearly_all_published_tasks_run() -> None:
    assert sum(seen for seen, *_, refusal in SHAPES if not refusal) >= 0.95 * sum(seen for seen, *_ in SHAPES)


_HEAD = """version = "1.0"
[metadata]
difficulty = "hard"
tags = ["git"]
expert_time_estimate_min = 60.0
[verifier]
timeout_sec = 900.0
[agent]
timeout_sec = 1800.0
"""
_NEWER = """schema_version = "1.2"
artifacts = ["/app/output"]
[task]
name = "lab/task"
keywords = ["mcp"]
[[task.authors]]
name = "A"
[agent]
timeout_sec = 120.0
user = "agent"
"""
_FROM = {"Dockerfile": "FROM x\n"}
_SIDE = {**_FROM, "docker-compose.yaml": "services: {main: {}, world: {image: lab/world}}\n"}
TASK_FILES: list[tuple[int, str, dict[str, str], str]] = [
    # Whole files, and about how many of a hundred public ones are alike: Terminal-Bench 2, Harbor's registry, others.
    (25, _HEAD + '[environment]\ndocker_image = "lab/task:2025"\ncpus = 1\nmemory = "2G"\nstorage = "10G"\n', {}, ""),
    (30, _HEAD + '[environment]\nbuild_timeout_sec = 600.0\ncpus = 2\nmemory = "4G"\nstorage = "10G"\n', _FROM, ""),
    (20, _HEAD + f"[environment]\n{_SIZES}gpus = 0\nallow_internet = true\n[solution.env]\nA = '1'\n", _FROM, ""),
    (5, _HEAD + '[environment]\nmemory = "2G"\nmemory_mb = 4096\nstorage = "10G"\nstorage_mb = 10240\n', _FROM, ""),
    (5, _HEAD + f'[environment]\n{_SIZES}[[environment.mcp_servers]]\nname = "w"\nurl = "http://w:1/mcp"\n', _SIDE, ""),
    (
        4,
        _NEWER + '[environment]\nos = "linux"\nskills_dir = "/skills"\nworkdir = "/app"\nnetwork_mode = "no-network"\n'
        '[environment.healthcheck]\ncommand = "true"\nretries = 15\n[[artifacts_of]]\nsource = "/a"\n',
        _FROM, "",
    ),
    (
        3,
        _NEWER + '[verifier]\nenvironment_mode = "separate"\n[verifier.environment]\nnetwork_mode = "public"\n'
        '[[verifier.collect]]\nservice = "main"\ncommand = "true"\n[[steps]]\nname = "one"\n[environment]\n',
        _FROM, "",
    ),
    (3, _HEAD, _FROM, ""),
    (2, _HEAD + '[vendor.unknown]\nlevel = 3\n[environment]\nunknown = {a = 1}\n', _FROM, ""),
    (1, _HEAD + '[environment]\ngpus = 1\ngpu_types = ["H100"]\n', _FROM, "devices: gpus"),
    (1, _HEAD + '[environment]\ntpu = {type = "v5e", topology = "2x4"}\n', _FROM, "devices: tpu"),
    (1, _HEAD + '[environment]\ncpus = 1\n', {}, "no image: docker_image"),
]  # fmt: skip
"""Shapes of whole task files with the files of their environment, and the reason and the member of a refusal."""


@pytest.mark.parametrize(("seen", "text", "files", "refusal"), TASK_FILES)
def test_whole_task_file_runs_or_names_its_reason(
    seen: int, text: str, files: dict[str, str], refusal: str, tmp_path: Path
) -> None:
    """Of a task file only the table `environment` says what a sandbox is; Harbor reads the others."""
    del seen  # for the test below
    _check(tomllib.loads(text).get("environment", {}), files, refusal, tmp_path)


def test_nearly_all_whole_task_files_run() -> None:
    assert sum(seen for seen, *_ in TASK_FILES) == 100
    assert sum(seen for seen, *_, refusal in TASK_FILES if not refusal) >= 95


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
