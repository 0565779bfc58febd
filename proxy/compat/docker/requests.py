"""Docker's Engine API: what its requests ask for, which calls they make, and what is refused (pure).

A container is a rollout; one that was only created or started has run nothing. What runs is an exec, a copy, or a main
command that is more than waiting: its words, variables, directory, user, terminal and input are its key. Ids, names and
labels are in no key.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any
from urllib.parse import parse_qsl, unquote

import orjson

from proxy.refusals import RefusalError
from proxy.tree.environments import EnvironmentRequest
from sandboxes.calls import ToolCall

API, OLDEST_API = (1, 44), (1, 24)
ENGINE = "25.0.5"
"""What is claimed: new enough for today's clients, and nothing in it that they would look for and not find."""
_VERSION = re.compile(r"v(\d{1,3})\.(\d{1,3})")
_NAME = re.compile(r"/?[a-zA-Z0-9][a-zA-Z0-9_.-]+")
_LONG_S = 60
"""A main command that sleeps for this long, or longer, is there to wait."""
_SLEEP = re.compile(r"(?:exec +)?(?:/(?:usr/)?bin/)?sleep +(?:(inf\w*)|(\d+)(?:\.\d*)?([smhd]?))")
_WAITS = re.compile(
    r"(?:exec +)?tail +(?:-f|-F|--follow) +/dev/null|"
    r"(?:trap [^;]*; *)?(?:exec +)?sleep +inf\w*( *& *wait)?|"
    r"while +(?:true|:|\[ 1 \]) *; *do +sleep +\S+ *; *done|/?pause"
)
_SHELLS = frozenset({"sh", "bash", "ash", "dash", "zsh", "cat", "python", "python3"})
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True, slots=True)
class DockerRequest:
    """A request below the endpoint: its words without the API's version, and its query."""

    method: str
    words: tuple[str, ...]
    query: Mapping[str, str]
    body: bytes

    def flag(self, name: str) -> bool:
        """Whether a boolean of the query is set, as Docker reads one."""
        return self.query.get(name, "").strip().lower() not in {"", "0", "no", "false", "none"}

    def json(self) -> dict[str, Any]:
        """Return the body, an object; an empty one is one without members.

        Raises:
            Refused: 400, it is none.
        """
        if not self.body.strip():
            return {}
        try:
            value = orjson.loads(self.body)
        except orjson.JSONDecodeError as error:
            raise RefusalError(400, "docker", f"invalid JSON: {error}") from None
        if not isinstance(value, dict):
            raise RefusalError(400, "docker", "invalid JSON: an object is wanted")
        return value


def asked(method: str, path: str, query: str, body: bytes) -> DockerRequest:
    """Read a request. path: as it was sent; words are told apart before they are decoded.

    Raises:
        Refused: 400, the client's version of the API is too new or too old.
    """
    words = [unquote(word) for word in path.split("/") if word]
    if words and (version := _VERSION.fullmatch(words[0])):
        words = words[1:]
        told = (int(version[1]), int(version[2]))
        if told > API:
            raise RefusalError(
                400,
                "docker",
                f"client version {told[0]}.{told[1]} is too new. Maximum supported API version is {_dotted(API)}",
            )
        if told < OLDEST_API:
            raise RefusalError(
                400,
                "docker",
                f"client version {told[0]}.{told[1]} is too old. Minimum supported API version is "
                f"{_dotted(OLDEST_API)}, please upgrade your client to a newer version",
            )
    return DockerRequest(method, tuple(words), dict(parse_qsl(query, keep_blank_values=True)), body)


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


NO_PAGE = RefusalError(404, "docker", "page not found")


@dataclass(frozen=True, slots=True)
class Created:
    """What a create request says of its container. main: its own command, where that is more than waiting.

    background: whether main is an entrypoint before a command that only waits: it is started, and nobody waits for its
    end. image_id: what its image is called where names may change. body: the request's, as its client finds it again
    when it inspects the container.
    """

    image: str
    image_id: str
    main: tuple[str, ...]
    user: str
    tty: bool
    stdin: bool
    auto_remove: bool
    background: bool
    body: dict[str, Any]


def name_of(query: Mapping[str, str]) -> str:
    """Return the name that a create request gives its container; empty where it gives none.

    Raises:
        Refused: 400, no container can have it.
    """
    name = query.get("name", "")
    if name and _NAME.fullmatch(name) is None:
        raise RefusalError(
            400,
            "docker",
            f"Invalid container name ({name[:100]}), only [a-zA-Z0-9][a-zA-Z0-9_.-] are allowed",
        )
    return name.removeprefix("/")


def created(body: dict[str, Any], config: Mapping[str, Any]) -> Created:
    """Read a create request; config: what its image's containers are started with by default.

    Raises:
        Refused: 400, it asks for what Forkpoint does not have.
    """
    image = body.get("Image")
    if not isinstance(image, str) or not image:
        raise RefusalError(400, "docker", "config cannot be empty in order to create a container: name an Image")
    host = body.get("HostConfig") or {}
    _refuse(host, body)
    own = _words(body, "Cmd")
    entry = _words(body, "Entrypoint")
    if entry is None:
        entry = _words(config, "Entrypoint") or []
        own = _words(config, "Cmd") or [] if own is None else own
    argv = tuple(word for word in (*entry, *(own or [])) if word or len(entry) + len(own or []) > 1)
    stdin, tty = bool(body.get("OpenStdin")), bool(body.get("Tty"))
    # With its input attached it has something to read; on a terminal, or detached, it waits for somebody who types.
    fed = bool(body.get("AttachStdin")) and not tty
    main = () if waits(argv, interactive=(stdin or tty) and not fed) else argv
    number, background = (
        str(config.get("Id") or image_id(image)),
        bool(main and entry and own) and waits(tuple(own or ()), interactive=False),
    )
    return Created(
        image, number, main, str(body.get("User") or ""), tty, stdin, bool(host.get("AutoRemove")), background, body
    )


def image_id(name: str) -> str:
    """Return the id of an image that only has a name here."""
    return name if name.startswith("sha256:") else f"sha256:{sha256(name.encode()).hexdigest()}"


def _words(body: Mapping[str, Any], name: str) -> list[str] | None:
    value = body.get(name)
    if value is None:
        return None
    words = [value] if isinstance(value, str) else value
    if not (isinstance(words, list) and all(isinstance(word, str) for word in words)):
        raise RefusalError(400, "docker", f"{name} must be a list of strings")
    return words


_UNSUPPORTED = {
    "Binds": "mounts nothing of the host: copy files in (docker cp), or give them in the task's spec",
    "Mounts": "mounts nothing of the host: copy files in (docker cp), or give them in the task's spec",
    "VolumesFrom": "has no volumes: copy files in (docker cp)",
    "PortBindings": "publishes no ports: reach servers by docker exec, or as `servers` of the task's spec",
    "Devices": "passes no devices on",
}


def _refuse(host: Mapping[str, Any], body: Mapping[str, Any]) -> None:
    for name, why in _UNSUPPORTED.items():
        if host.get(name):
            raise RefusalError(400, "docker", f"HostConfig.{name}: Forkpoint {why}.")
    if str(host.get("NetworkMode") or "").startswith("container:"):
        raise RefusalError(
            400, "docker", "HostConfig.NetworkMode: Forkpoint's containers share no network with others."
        )
    if not isinstance(body.get("Env") or [], list):
        raise RefusalError(400, "docker", "Env must be a list of strings")


def waits(argv: tuple[str, ...], *, interactive: bool) -> bool:
    """Whether a main command is only there to keep its container alive, so that nothing has to run it."""
    if not argv:
        return True
    name = argv[0].rpartition("/")[2]
    if len(argv) == 1 and name in _SHELLS:
        return interactive
    script = argv[2] if name in _SHELLS and len(argv) == 3 and argv[1] in {"-c", "-lc", "-ec"} else " ".join(argv)
    script = script.strip().rstrip(";").strip()
    slept = _SLEEP.fullmatch(script)
    if slept is not None:
        return bool(slept[1]) or int(slept[2]) * _UNITS[slept[3]] >= _LONG_S
    return _WAITS.fullmatch(script) is not None


def variables(entries: object) -> dict[str, str]:
    """Return `NAME=value` entries as a mapping; a name without a value is left out, as Docker removes it."""
    if entries is None:
        return {}
    if not (isinstance(entries, list) and all(isinstance(entry, str) for entry in entries)):
        raise RefusalError(400, "docker", "Env must be a list of strings")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def wanted(body: Mapping[str, Any], config: Mapping[str, Any]) -> EnvironmentRequest:
    """Return the environment that a create request names."""
    host = body.get("HostConfig") or {}
    memory, pids = host.get("Memory") or 0, host.get("PidsLimit") or 0
    folder = body.get("WorkingDir") or config.get("WorkingDir") or None
    return EnvironmentRequest(
        str(body["Image"]), variables(body.get("Env")), folder,
        memory_mb=max(16, memory >> 20) if memory > 0 else None, pids=max(8, pids) if pids > 0 else None,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ExecSpec:
    """What an exec instance is to run."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str | None
    user: str | None
    tty: bool
    stdin: bool
    streams: frozenset[int]
    """Which of stdout (1) and stderr (2) its client wants."""

    def call(self, stdin: bytes = b"", *, detach: bool = False) -> ToolCall:
        """Return the call that runs it."""
        told: dict[str, Any] = {
            "argv": list(self.argv), "env": dict(self.env), "cwd": self.cwd, "user": self.user, "tty": self.tty,
        }  # fmt: skip
        return ToolCall("process", "run", told | ({"detach": True} if detach else {}), stdin)


def execution(body: Mapping[str, Any], user: str) -> ExecSpec:
    """Read an exec create request; user: the container's own.

    Raises:
        Refused: 400, it names no command.
    """
    argv = _words(body, "Cmd")
    if not argv or not argv[0]:
        raise RefusalError(400, "docker", "No exec command specified")
    env = variables(body.get("Env"))
    if any("\0" in word for word in (*argv, *env.values())):
        raise RefusalError(400, "docker", "a command and its variables cannot contain NUL")
    streams = frozenset(place for place, name in ((1, "AttachStdout"), (2, "AttachStderr")) if body.get(name, False))
    return ExecSpec(
        tuple(argv), env, str(body.get("WorkingDir") or "") or None, str(body.get("User") or "") or user or None,
        bool(body.get("Tty")), bool(body.get("AttachStdin")), streams,
    )  # fmt: skip


def main_of(container: Created) -> ExecSpec:
    """Return what runs a container's main command."""
    return ExecSpec(container.main, {}, None, container.user or None, container.tty, container.stdin, frozenset({1, 2}))


def ends_all(user: str) -> ToolCall:
    """Return the call that leaves no process of a container alive, as stopping it does."""
    argv = ["/bin/sh", "-c", "kill -9 -1"]
    return ToolCall("process", "run", {"argv": argv, "env": {}, "cwd": "/", "user": user or None, "tty": False})
