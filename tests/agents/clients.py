"""Clients and servers that others wrote, from PyPI: installed once in a cache, run by the machine's own Python.

That is the Python that sandboxes of the base `host` see, so the same packages serve on both sides of the wire. Nothing
of this project is on their path.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

PYTHON = "/usr/bin/python3"


@cache
def packages(*requirements: str, bare: tuple[str, ...] = (), python: str = PYTHON) -> Path:
    """Return a directory with requirements, as `pip install --target` makes it; skip where none can be got.

    In CI it is no skip but a failure. bare: what is put there without all that it says it needs. python: what imports
    them.
    """
    version = subprocess.run(
        [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], capture_output=True, text=True, check=True
    ).stdout.strip()
    steps = [[*_installer(version), *more, "--target"] for more in ([], ["--no-deps"])]
    return _installed(version, list(zip(steps, (requirements, bare), strict=True)))


@cache
def newer_python() -> str:
    """Return a Python 3.12 or 3.13, for packages that need one; skip the test where there is none."""
    for name in ("python3.12", "python3.13"):
        for candidate in [shutil.which(name), *Path.home().glob(f".pyenv/versions/{name[6:]}.*/bin/python")]:
            # pyenv has a command of the name for versions that are not active too; it fails.
            if candidate and not subprocess.run([candidate, "-c", ""], capture_output=True, check=False).returncode:
                return str(candidate)
    pytest.skip("needs Python 3.12 or 3.13")


@cache
def node_packages(*requirements: str) -> Path:
    """Return a directory whose node_modules has requirements, as npm makes it; skip where none can be got.

    In CI it is no skip but a failure.
    """
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        missing = "node and npm are not installed"
        assert not os.environ.get("FORKPOINT_NEEDS_NODE"), missing
        pytest.skip(missing)
    command = [npm, "install", "--silent", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix"]
    return _installed("node", [(command, requirements)])


def _installed(kind: str, steps: list[tuple[list[str], tuple[str, ...]]]) -> Path:
    """Return the directory that steps fill, once for all: each a command, given that and what it is to install."""
    words = [word for _, wanted in steps for word in wanted]
    name = hashlib.blake2b(" ".join([kind, *words]).encode(), digest_size=8).hexdigest()
    place = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "forkpoint-clients" / name
    place.parent.mkdir(parents=True, exist_ok=True)
    # Other processes run tests that want the same packages. They wait, and find them.
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            made = Path(tempfile.mkdtemp(dir=place.parent))
            for command, wanted in steps:
                if wanted:
                    _install([*command, str(made), *wanted], made)
            made.chmod(0o755)
            made.rename(place)
    return place


def _install(command: list[str], made: Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        shutil.rmtree(made)
        assert not os.environ.get("CI"), done.stderr
        pytest.skip(f"{' '.join(command[-3:])} cannot be installed: {done.stderr[-300:]}")


def _installer(version: str) -> list[str]:
    uv = shutil.which("uv")
    if uv:
        return [uv, "pip", "install", "--quiet", "--python-version", version, "--only-binary", ":all:"]
    options = ["--quiet", "--python-version", version, "--only-binary=:all:", "--disable-pip-version-check"]
    return [sys.executable, "-m", "pip", "install", *options]


def run(
    place: Path,
    script: str,
    *arguments: str,
    within_s: float = 300.0,
    python: str = PYTHON,
    env: Mapping[str, str] | None = None,
    **more: str,
) -> Any:
    """Run a script of this directory with packages from place; return the JSON of the last line it prints.

    python: what runs it. env, more: of its environment.

    One in JavaScript is run by node, beside the packages that npm installed at place.
    """
    file = Path(__file__).with_name(script)
    own = {"PYTHONPATH": str(place), "HOME": str(place / "home"), "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        program = [python, str(file)]
        if file.suffix == ".mjs":
            # What it imports is looked for beside it.
            Path(folder, "node_modules").symlink_to(place / "node_modules")
            program = ["node", str(shutil.copy(file, folder))]
        done = subprocess.run(
            [*program, *arguments],
            env={"PATH": os.environ["PATH"], **own, **(env or {}), **more},
            capture_output=True, text=True, check=False, timeout=within_s,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])
