"""Builds the images that tasks describe by a Dockerfile, once for each content.

The name of an image says what it was built from: the Dockerfile, its arguments, and every file of its context. So
trials of a task share an image, and a changed Dockerfile is another environment.
"""

import os
import shutil
import stat
import subprocess
import threading
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from forkpoint.compose_errors import ComposeFileError, Reason
from forkpoint.compose_mounts import below

REPOSITORY = "forkpoint-build"
"""The name of all images that are built here; the tag says what of."""
BUILD_S = 3600.0
"""Longest time that a build takes unless its task names one."""
_READ_BYTES = 1 << 20
_MEANT = frozenset({"context", "dockerfile", "dockerfile_inline", "args", "target"})
_IGNORED = frozenset({
    "cache_from", "cache_to", "labels", "network", "no_cache", "platforms", "pull", "shm_size", "tags", "ulimits",
})  # fmt: skip
"""Members of `build` that do not change what is in the image, or only how it is fetched."""
_HOW = (
    "Build it where Docker is and name it ([environment] docker_image in task.toml, `image` in a compose file or a "
    "spec), or bring it as a file that `docker save` wrote (docs/containers.md)."
)
_locks: dict[str, threading.Lock] = {}
"""Held while an image is built, by its name: trials of one task begin together."""


class _Build(NamedTuple):
    context: Path
    dockerfile: bytes
    args: Mapping[str, str]
    target: str


class ImageBuilder:
    """Builds images for tasks of one directory, with `docker`, or with `buildah` where that is missing."""

    def __init__(self, folder: Path, *, confined: bool = True, timeout_s: float = BUILD_S) -> None:
        """Create a builder for paths relative to a folder, and below it if `confined`, because a stranger's."""
        self._folder, self._confined, self._timeout_s = folder, confined, timeout_s

    def __call__(self, build: Any = ".") -> str:
        """Return the image of a `build` of a compose file; build it unless it exists. Raises ComposeFileError."""
        read = self._read(build if isinstance(build, dict) else {"context": str(build)})
        name = f"{REPOSITORY}:{_digest(read)[:24]}"
        with _locks.setdefault(name, threading.Lock()):
            if shutil.which("docker"):
                return self._with_docker(read, name)
            if shutil.which("buildah"):
                return self._with_buildah(read, name)
        raise ComposeFileError(
            Reason.NO_IMAGE, f"{self._folder} has a Dockerfile, and neither docker nor buildah is here to build it. "
            f"{_HOW}",
        )  # fmt: skip

    def _read(self, build: Mapping[str, Any]) -> _Build:
        if unknown := sorted(build.keys() - _MEANT - _IGNORED):
            raise ComposeFileError(Reason.UNKNOWN, f"`build` has {unknown[0]!r}, which is not known. {_HOW}")
        context = self._path(str(build.get("context") or "."))
        if not context.is_dir():
            raise ComposeFileError(Reason.NO_IMAGE, f"The context {context} (build) is no directory. {_HOW}")
        inline = build.get("dockerfile_inline")
        file = self._path(str(context / str(build.get("dockerfile") or "Dockerfile")))
        if inline is None and not file.is_file():
            raise ComposeFileError(Reason.NO_IMAGE, f"There is no {file} (build). {_HOW}")
        given = build.get("args") or {}
        pairs = given.items() if isinstance(given, dict) else (str(entry).partition("=")[::2] for entry in given)
        args = {str(key): "" if value is None else str(value) for key, value in pairs}
        return _Build(
            context, file.read_bytes() if inline is None else str(inline).encode(), args, str(build.get("target") or "")
        )

    def _path(self, path: str) -> Path:
        whole = self._folder / path
        if "://" in path or (self._confined and not whole.resolve().is_relative_to(self._folder.resolve())):
            raise ComposeFileError(
                Reason.HOST_FILES, f"{path} (build) is not in the task's directory {self._folder}. {_HOW}"
            )
        return whole

    def _with_docker(self, build: _Build, name: str) -> str:
        if _run(["docker", "image", "inspect", "--format", "{{.Id}}", name], 60).returncode:
            self._build(["docker", "build", "--tag", name, *_options(build)], build)
        return name

    def _with_buildah(self, build: _Build, name: str) -> str:
        # Without a daemon the proxy reads the image from a file.
        archive = _cache() / f"{name.partition(':')[2]}.tar"
        if not archive.exists():
            archive.parent.mkdir(parents=True, exist_ok=True)
            self._build(["buildah", "build", "--tag", name, *_options(build)], build)
            partial = archive.with_suffix(f".{os.getpid()}")
            pushed = _run(["buildah", "push", name, f"docker-archive:{partial}:{name}"], self._timeout_s)
            _require(pushed, "buildah push")
            partial.rename(archive)
        return str(archive)

    def _build(self, command: list[str], build: _Build) -> None:
        try:
            done = _run([*command, "--file", "-", str(build.context)], self._timeout_s, build.dockerfile)
        except subprocess.TimeoutExpired:
            raise ComposeFileError(
                Reason.NO_IMAGE, f"The image of {build.context} was not built within {self._timeout_s:g} s. {_HOW}"
            ) from None
        _require(done, f"{command[0]} build of {build.context}")


def _options(build: _Build) -> list[str]:
    args = [word for key, value in sorted(build.args.items()) for word in ("--build-arg", f"{key}={value}")]
    return [*args, *(["--target", build.target] if build.target else [])]


def _run(command: list[str], timeout_s: float, stdin: bytes = b"") -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(  # noqa: S603 - programs by their names, and arguments without a shell
        command, input=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout_s, check=False
    )


def _require(done: "subprocess.CompletedProcess[bytes]", what: str) -> None:
    if done.returncode:
        # The end of the output says why.
        output = "\n".join(done.stdout.decode(errors="replace").strip().splitlines()[-12:])
        raise ComposeFileError(Reason.NO_IMAGE, f"{what} failed with exit code {done.returncode}:\n{output}\n{_HOW}")


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "forkpoint" / "images"


def _digest(build: _Build) -> str:
    digest = sha256()
    for part in (build.dockerfile, repr(sorted(build.args.items())).encode(), build.target.encode()):
        digest.update(b"%d\0%s" % (len(part), part))
    for path in sorted(below(build.context)):
        status = path.lstat()
        digest.update(f"{path.relative_to(build.context)}\0{status.st_mode:o}\0".encode(errors="surrogateescape"))
        if stat.S_ISLNK(status.st_mode):
            digest.update(os.fsencode(path.readlink()))
        elif stat.S_ISREG(status.st_mode):
            digest.update(b"%d\0" % status.st_size)
            with path.open("rb") as opened:
                while piece := opened.read(_READ_BYTES):
                    digest.update(piece)
    return digest.hexdigest()
