"""The environment of a task in Harbor's format, as a spec: from the directory `environment` and a table of task.toml.

The first of these counts: `forkpoint.json`, a spec of the task's own; `docker-compose.yaml`; the image that the table
names; the `Dockerfile`.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from forkpoint.compose_errors import ComposeFileError, Reason
from forkpoint.compose_file import MAIN, spec_of
from forkpoint.compose_values import size_bytes
from forkpoint.image_builds import BUILD_S, ImageBuilder


def environment_of(
    folder: Path,
    table: Mapping[str, Any],
    *,
    force_build: bool = False,
    variables: Mapping[str, str] = MappingProxyType({}),
    build: Callable[[Any], str] | None = None,
    note: Callable[[str], object] = lambda _: None,
) -> dict[str, Any]:
    """Return the spec of a task's `environment`, directory and table of task.toml; build its images.

    With `force_build` the Dockerfile counts where the table names an image, too. `variables` are what the harness sets
    for compose files. `build` is None for Docker or buildah. Raises ComposeFileError.
    """
    if needed := [name for name in ("gpus", "tpu") if table.get(name)]:
        raise ComposeFileError(Reason.DEVICES, f"The task needs {needed[0]}, and a sandbox has no devices.")
    if str(table.get("os") or "linux") != "linux":
        raise ComposeFileError(Reason.VALUE, f"The task needs {table['os']!r} (os), and sandboxes run Linux.")
    build = build or ImageBuilder(folder, timeout_s=float(table.get("build_timeout_sec") or BUILD_S))
    limits = _limits(table)
    sizes = {"CPUS": str(limits.get("cpus", "")), "MEMORY": f"{limits['memory_mb']}M" if "memory_mb" in limits else ""}
    try:
        spec = _described(folder, table, {**sizes, **variables}, build, note, force_build=force_build)
    except (yaml.YAMLError, json.JSONDecodeError) as error:
        raise ComposeFileError(Reason.MALFORMED, f"A file of {folder} cannot be read: {error}") from error
    limits |= spec.get("limits") or {}
    return spec | ({"limits": limits} if limits else {})


def _described(
    folder: Path,
    table: Mapping[str, Any],
    variables: Mapping[str, str],
    build: Callable[[Any], str],
    note: Callable[[str], object],
    *,
    force_build: bool,
) -> dict[str, Any]:
    own, compose, has_dockerfile = folder / "forkpoint.json", folder / "docker-compose.yaml", _has_dockerfile(folder)
    if own.exists():
        # A task's files are a stranger's, so what they name of the proxy's machine must be among its `sources`.
        return {**json.loads(own.read_text()), "confined": True}
    image = None if force_build and has_dockerfile else table.get("docker_image")
    if compose.exists():
        # Its services become those of the sandbox: without them the task would be another one.
        file = yaml.safe_load(compose.read_text())
        if has_dockerfile and not image:
            file = _with_dockerfile(file)
        return spec_of(file, image, variables=variables, folder=folder, build=build, note=note)
    if not image and not has_dockerfile:
        raise ComposeFileError(
            Reason.NO_IMAGE, f"The task names no image (docker_image), and {folder} has no Dockerfile."
        )
    return {"image": image or build(".")}


def _has_dockerfile(folder: Path) -> bool:
    return (folder / "Dockerfile").is_file()


def _with_dockerfile(file: Any) -> Any:
    """Return a compose file whose main service, as in Harbor, is built from the Dockerfile unless it says what else."""
    services = file.get("services") if isinstance(file, dict) else None
    if not isinstance(services, dict):
        return file
    agent = services.get(MAIN) or {}
    if not isinstance(agent, dict) or agent.get("image") or agent.get("build"):
        return file
    return file | {"services": services | {MAIN: agent | {"build": "."}}}


def _limits(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the limits of a table; older ones have sizes such as `memory = "2G"`."""
    try:
        sizes = {
            name: table.get(key) or (size_bytes(table[older]) >> 20 if table.get(older) else None)
            for name, key, older in (("memory_mb", "memory_mb", "memory"), ("disk_mb", "storage_mb", "storage"))
        }
    except ValueError as error:
        raise ComposeFileError(Reason.VALUE, f"The task's limits (memory, storage): {error}.") from None
    return {name: limit for name, limit in {"cpus": table.get("cpus"), **sizes}.items() if limit}
