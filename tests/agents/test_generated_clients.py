"""Clients that others' generators make of the OpenAPI description compile, and talk to a proxy."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.agents.clients import PYTHON, node_packages, packages
from tests.proxy.serving import serving

USE_TYPESCRIPT = """
import type { operations, paths } from "./api";
type Path = operations["get_path"]["responses"][200]["content"]["application/json"];
export const commands = (path: Path): (string | undefined)[] => path.items.map((node) => node.call?.title);
export type Begun = paths["/api/v1/tasks/{task}/rollouts"]["post"]["responses"][201]["content"]["application/json"];
export const token = (begun: Begun): string | null | undefined => begun.token;
"""
USE_PYTHON = """
import sys
from generated.api.rollouts import begin_rollout
from generated.api.trees import get_path
from generated.client import Client
from generated.models import BodyBeginRollout
with Client(base_url=sys.argv[1], raise_on_unexpected_status=True) as client:
    begun = begin_rollout.sync("demo", client=client, body=BodyBeginRollout(rollout="7"))
    print(begun.node, [node.id for node in get_path.sync("demo", begun.node, client=client).items])
"""


@pytest.fixture
def description(tmp_path: Path) -> Path:
    file = tmp_path / "openapi.json"
    with serving(tmp_path / "data") as proxy:
        file.write_bytes(proxy.client.get("/openapi.json").content)
    return file


def run(*command: str | Path, folder: Path, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=300, env=os.environ | environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_typescript_client_compiles(description: Path) -> None:
    """openapi-typescript makes types of every operation, and the compiler accepts them in strict mode."""
    modules = node_packages("openapi-typescript@7.13.0", "typescript@5.9.3") / "node_modules"
    folder = description.parent
    run("node", modules / "openapi-typescript/bin/cli.js", description, "-o", "api.ts", folder=folder)
    (folder / "use.ts").write_text(USE_TYPESCRIPT)
    run("node", modules / "typescript/bin/tsc", "--noEmit", "--strict", "use.ts", folder=folder)


def test_python_client_talks_to_a_proxy(description: Path) -> None:
    """openapi-python-client makes a package, every module of it compiles, and it begins a rollout."""
    place, folder = packages("openapi-python-client==0.29.1"), description.parent
    # Its formatter is left out: generated code needs no style here.
    (folder / "config.yml").write_text("post_hooks: []\npackage_name_override: generated\n")
    run(
        PYTHON, "-m", "openapi_python_client", "generate", "--path", description, "--meta", "none", "--config",
        "config.yml", "--output-path", "generated", folder=folder, PYTHONPATH=str(place),
    )  # fmt: skip
    run(PYTHON, "-m", "compileall", "-q", "generated", folder=folder)
    with serving(folder / "other") as proxy:
        url = str(proxy.client.base_url)
        output = run(PYTHON, "-c", USE_PYTHON, url, folder=folder, PYTHONPATH=f"{folder}:{place}")
    assert output == "n1 ['n1']\n"
