"""What an image says about the processes that run in it. Pure. A stranger has written it."""

import posixpath
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

_T = TypeVar("_T")


class ImageError(Exception):
    """An image, or a tarball of a root file system, is not what it should be."""


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """The configuration of an image, in Docker's and OCI's words."""

    environment: dict[str, str] = field(default_factory=dict)
    user: str = ""  # A user, or user and group, by name or number; empty for root.
    workdir: str = "/"  # An absolute path without `..`.
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    healthcheck: tuple[str, ...] | None = None  # Docker's test of a container (`Healthcheck.Test`).
    ports: tuple[str, ...] = ()  # Such as `80/tcp` (`ExposedPorts`).
    volumes: tuple[str, ...] = ()  # Absolute paths that Docker keeps apart from the container.
    labels: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, value: object) -> "ImageConfig":
        """Return what `Config` of `docker image inspect`, or `config` of an OCI image, says. None is an empty one."""
        config = _member({"config": value}, "config", _mapping) or {}
        pairs = [text.partition("=") for text in _member(config, "Env", _texts) or ()]
        health = _member(_member(config, "Healthcheck", _mapping) or {}, "Test", _texts)
        volumes = tuple(sorted(_member(config, "Volumes", _mapping) or {}))
        if not all(path.startswith("/") for path in volumes):
            raise ImageError("its configuration has a relative path among its `Volumes`")
        return cls(
            # As Docker takes them: the last one counts, and a name without a value is no variable.
            environment={name: text for name, is_set, text in pairs if name and is_set},
            user=_member(config, "User", _text) or "",
            # As a path of the image's root, so that no `..` leads out of it.
            workdir=posixpath.normpath("/" + (_member(config, "WorkingDir", _text) or "").lstrip("/")),
            entrypoint=_member(config, "Entrypoint", _texts) or (),
            command=_member(config, "Cmd", _texts) or (),
            healthcheck=None if health in {(), ("NONE",)} else health,
            ports=tuple(sorted(_member(config, "ExposedPorts", _mapping) or {})),
            volumes=volumes,
            labels={name: _text(text) for name, text in (_member(config, "Labels", _mapping) or {}).items()},
        )

    def members(self) -> dict[str, Any]:
        """Return what `parse` reads, without members that say nothing."""
        members = {
            "Env": [f"{name}={text}" for name, text in self.environment.items()], "User": self.user,
            "WorkingDir": self.workdir, "Entrypoint": list(self.entrypoint), "Cmd": list(self.command),
            "Healthcheck": {"Test": list(self.healthcheck)} if self.healthcheck else {},
            "ExposedPorts": {port: {} for port in self.ports}, "Volumes": {path: {} for path in self.volumes},
            "Labels": self.labels,
        }  # fmt: skip
        return {name: value for name, value in members.items() if value}


def _member(config: dict[str, Any], name: str, read: Callable[[object], _T]) -> _T | None:
    try:
        return None if config.get(name) is None else read(config[name])
    except ImageError as error:
        raise ImageError(f"its configuration has a wrong `{name}`: {error}") from error


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ImageError(f"{value!r:.100} is no text")
    # No program can be given such a text: neither a zero byte nor half of a character (JSON's \ud800).
    if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
        raise ImageError(f"{value!r:.100} has a character that no argument may have")
    return value


def _texts(value: object) -> tuple[str, ...]:
    # Docker takes one text for a list of one.
    if isinstance(value, str):
        return (_text(value),)
    if not isinstance(value, list | tuple):
        raise ImageError(f"{value!r:.100} is no list of texts")
    return tuple(map(_text, value))


def _mapping(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ImageError(f"{value!r:.100} is no object")
    return {_text(name): member for name, member in value.items()}
