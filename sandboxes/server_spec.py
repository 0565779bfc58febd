"""What runs beside a task's calls (servers, services) and what it may reach, as the task's user writes it (pure)."""

import re
import shlex
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

AbsolutePath = Annotated[str, Field(pattern=r"^/[^\x00]*$", max_length=4096)]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=256)]
Text = Annotated[str, Field(pattern=r"^[^\x00]*$")]
EndpointName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,62}$")]
USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(:[A-Za-z0-9_][A-Za-z0-9_.-]*)?")
"""Matches a user of a service, with or without a group."""
_LOOPBACK = r"^http://(127\.0\.0\.1|localhost)(:[0-9]{1,5})?(/[\x21-\x7e]*)?$"


class _ToolServer(BaseModel):
    """The settings of every tool server: what its requests mean, and the limits of a response."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dialect: str = Field(
        default="http", description="Name of the rules that say which calls only read and what a call's key leaves out."
    )
    rules: tuple[dict[str, Any], ...] = Field(
        default=(), description="Rules of your own. They are tried before the rules of the dialect."
    )
    task: str = Field(
        default="",
        pattern=r"^((header|cookie|query|body):.+)?$",
        description="Where a request names its task, such as body:task_id. Empty: the task is the one in the URL.",
    )
    timeout_s: float | None = Field(
        default=None,
        gt=0,
        le=86_400,
        description="Longest silence before or within a response; limits.timeout_s by default.",
    )
    answer_bytes: int = Field(
        default=32 << 20,
        ge=0,
        le=1 << 28,
        description="Largest response that is recorded. A longer one is passed on and not recorded.",
    )


class Server(_ToolServer):
    """A tool server inside the sandbox. The endpoint of its name leads to its port on the sandbox's own loopback."""

    command: Text = Field(min_length=1, description="Bash runs it in workdir. It must stay in the foreground.")
    port: int = Field(ge=1, le=65535)
    env: dict[VariableName, Text] = Field(default_factory=dict)
    ready: Literal["tcp"] | Annotated[str, Field(pattern=r"^/[\x21-\x7e]*$")] = Field(
        default="tcp",
        description="When the server is ready. tcp: its port is open. A path: GET of it returns a status below 500.",
    )
    ready_s: float = Field(default=30.0, gt=0, le=600, description="Longest time that the server takes to get ready.")
    start: Literal["call", "root"] = Field(
        default="call",
        description="When the server starts. call: with a sandbox's first call to it. root: it runs in the task's root "
        "state.",
    )


class Farewell(BaseModel):
    """The request that tells an upstream that a session is no longer needed. `{session}` stands for its name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: Literal["POST", "PUT", "DELETE"] = "POST"
    path: Annotated[str, Field(pattern=r"^/[\x21-\x7e]*$")]
    body: Any = None


class Upstream(_ToolServer):
    """A server outside the sandboxes: a URL. Driver `http` sends requests to it, and to no other host."""

    upstream: str = Field(
        pattern=r"^https?://(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?(?:/[\x21\x24-\x3b\x3d\x40-\x7e]*)?$",
        max_length=2048,
        description="Scheme (http or https), host, port, and a path that precedes every target. It has no user, query "
        "or fragment.",
    )
    mode: Literal["replay", "pass"] = Field(
        default="replay",
        description="pass: no call is shared. replay: calls are shared if a rule says that they are stateless, or if "
        "they follow a rule's `open`, which starts a fresh session.",
    )
    bind: tuple[str, ...] = Field(
        default=(),
        description="Fields of JSON bodies, in both directions, that hold a session's name, in addition to the "
        "dialect's.",
    )
    lost: tuple[Annotated[int, Field(ge=400, le=499)], ...] = Field(
        default=(), description="Statuses that say that a session is gone. It is built again, and nothing is recorded."
    )
    farewell: Farewell | None = Field(
        default=None, description="The request that is sent when a session that a rule opened is closed."
    )


def _server_tag(value: Any) -> str:
    outside = isinstance(value, Upstream) or (isinstance(value, dict) and "upstream" in value)
    return "upstream" if outside else "server"


AnyServer = Annotated[
    Annotated[Server, Tag("server")] | Annotated[Upstream, Tag("upstream")], Discriminator(_server_tag)
]


class McpServer(BaseModel):
    """An MCP server inside the sandbox, an entry of `mcpServers`: over stdin and stdout, or over HTTP at its URL."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    command: Text | None = Field(
        default=None,
        min_length=1,
        description="The program that starts the server. Leave it out if one of `servers` has the port of its url.",
    )
    url: Annotated[str, Field(pattern=_LOOPBACK)] | None = Field(
        default=None, description="http://127.0.0.1:PORT/path, on the sandbox's own loopback."
    )
    args: tuple[Text, ...] = ()
    env: dict[VariableName, Text] = Field(default_factory=dict)
    cwd: AbsolutePath | None = None
    type: Literal["stdio", "http", "streamable-http"] | None = Field(
        default=None, description="The transport; http if there is a url, else stdio."
    )
    trust_hints: bool = Field(
        default=False,
        description="Believe a tool's readOnlyHint: its calls leave the server's memory, which Forkpoint cannot see, "
        "unchanged.",
    )
    ready_s: float = Field(default=60.0, gt=0, le=600, description="Longest wait for the response to `initialize`.")
    timeout_s: float | None = Field(
        default=None, gt=0, le=86_400, description="Longest silence; limits.timeout_s by default."
    )

    @property
    def port(self) -> int | None:
        """The port of the URL; None for a server over stdin and stdout."""
        return None if self.url is None else urlsplit(self.url).port or 80

    @model_validator(mode="after")
    def _check_transport(self) -> "McpServer":
        if (self.type in ("http", "streamable-http")) != (self.url is not None) and self.type is not None:
            raise ValueError(f"an MCP server of type {self.type!r} takes {'no url' if self.url else 'a url'}")
        if self.url is None and self.command is None:
            raise ValueError("an MCP server takes a command, or a url on the sandbox's loopback")
        return self


class Harness(BaseModel):
    """An agent that runs in the sandbox by itself, such as Claude Code: only its requests to the model leave it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    command: Text = Field(
        default="", description="/bin/sh runs it in workdir, without a terminal. Empty: each run names its own."
    )
    env: dict[VariableName, Text] = Field(
        default_factory=dict, description="Its variables. {model} stands for the URL at which it finds its model."
    )
    port: int = Field(default=8089, ge=1024, le=65535, description="The port of that URL, on the sandbox's loopback.")
    keep: tuple[Annotated[str, Field(pattern=r"^(all|first|slow|every [1-9][0-9]{0,3})$")], ...] = Field(
        default=("all",),
        description="Which turns can be entered again: all, the first, each n-th (every 5), those of over 10 s (slow).",
    )
    timeout_s: float = Field(
        default=1800.0, gt=0, le=86_400, description="Longest time that it works without a request to the model."
    )


HOST_PATTERN = (
    r"^(\*\.)?([a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9])?\.)+[a-z]([a-z0-9-]{0,61}[a-z0-9])?"
    r"(:([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5]))?$"
)
"""Matches a host that egress may name: a DNS name of two labels or more, whose last one begins with a letter. So no
form of an address matches: not `127.1`, `0x7f000001`, `0177.0.0.1` or `2130706433`."""
Host = Annotated[str, Field(pattern=HOST_PATTERN, max_length=253)]


class Egress(BaseModel):
    """The hosts that programs in a sandbox may reach, through the egress proxy and in no other way."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    hosts: tuple[Host, ...] = Field(
        min_length=1,
        max_length=64,
        description="HOST (port 80 for HTTP, port 443 for tunnels) or HOST:PORT, in lower case. *.DOMAIN stands for "
        "all names below a domain. The setting `egress` must list each of them.",
    )


def allows(entry: str, host: str, port: int, usual_port: int) -> bool:
    """Return whether an entry of `Egress.hosts` allows a host and port; `usual_port` is meant if it names none."""
    name, _, own_port = entry.partition(":")
    return port == (int(own_port) if own_port else usual_port) and _names(name, host)


def covers(allowed: str, named: str) -> bool:
    """Return whether a host that the administrator listed covers one that a spec names. Their ports must be equal."""
    (allowed_name, _, allowed_port), (name, _, port) = allowed.partition(":"), named.partition(":")
    # Only a wildcard covers more than its own text: a host does not cover the names below it.
    below = allowed_name.startswith("*.") and name.removeprefix("*.").endswith(allowed_name[1:])
    return allowed_port == port and (name == allowed_name or below)


def _names(pattern: str, host: str) -> bool:
    return host.endswith(pattern[1:]) if pattern.startswith("*.") else host == pattern


MAIN = "main"
"""The name of the container in which calls run, among the names of its services."""
MAX_SERVICES = 16
"""Most services of one sandbox. A larger number would start for minutes; compose files of benchmarks have 2 to 6."""

ServiceName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,30}$")]
HostName = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?$")]
VolumeName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]
VolumePath = Annotated[AbsolutePath, Field(pattern=r"^(/[^/\x00-\x20\\]+)+$", max_length=1024)]
Words = Text | tuple[Text, ...]
"""A command line. A string is split into words as a shell splits it, and no shell runs it (as in compose files)."""

_RESERVED = frozenset({MAIN, "localhost"})


class Service(BaseModel):
    """A side service: a program of another image that runs beside the calls and is part of the sandbox's state."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    image: str = Field(min_length=1, max_length=512, description="Name or ID of the service's image.")
    entrypoint: Words | None = Field(
        default=None, description="Replaces the image's entry point, and leaves out the image's command."
    )
    command: Words | None = Field(default=None, description="Replaces the image's command.")
    environment: dict[VariableName, Text] = Field(
        default_factory=dict, description="Variables in addition to the image's."
    )
    working_dir: AbsolutePath | None = Field(default=None, description="Replaces the image's working directory.")
    user: Annotated[str, Field(pattern=rf"^{USER.pattern}$")] | None = Field(
        default=None, max_length=128, description="user or user:group, as names of the image or numbers."
    )
    healthcheck: Words | None = Field(
        default=None,
        description="The service is ready once this command exits with 0. A string is run by the service's /bin/sh. "
        "A list begins with CMD or CMD-SHELL. Default: the image's own check.",
    )
    port: int | None = Field(
        default=None, ge=1, le=65535, description="Without a health check: the service is ready once this port is open."
    )
    ready_s: float = Field(default=60.0, gt=0, le=600, description="Longest time that the service takes to get ready.")
    depends_on: tuple[ServiceName, ...] = Field(default=(), description="Services that must be ready before this one.")


def words(line: Words) -> list[str]:
    """Return the words of a command line; a quotation that is not closed is a ValueError."""
    return shlex.split(line) if isinstance(line, str) else list(line)


def start_order(services: Mapping[str, Service]) -> list[str]:
    """Return the names of services in the order in which they start, whatever their order in the spec."""
    sorter = TopologicalSorter({name: sorted(services[name].depends_on) for name in sorted(services)})
    try:
        return list(sorter.static_order())
    except CycleError as error:
        raise ValueError(f"services depend on each other in a circle: {' -> '.join(error.args[1])}") from None


def check_services(services: Mapping[str, Service], volumes: Mapping[str, Mapping[str, Any]]) -> None:
    """Check what the fields of single services cannot show; a ValueError says what is wrong."""
    if len(services) > MAX_SERVICES:
        raise ValueError(f"a sandbox has at most {MAX_SERVICES} services, not {len(services)}")
    if taken := sorted(_RESERVED & services.keys()):
        raise ValueError(f"a service cannot be named {taken[0]!r}. Give it another name.")
    for name, service in services.items():
        _check_service(name, service, services)
    start_order(services)
    _check_volumes(services, volumes)


def _check_service(name: str, service: Service, services: Mapping[str, Service]) -> None:
    if unknown := sorted(set(service.depends_on) - services.keys()):
        raise ValueError(f"service {name!r} depends on {unknown[0]!r}, which is not a service")
    for line in (service.entrypoint, service.command):
        # Unclosed quotations are reported with the spec, not with the first start.
        words(line or "")
    if isinstance(service.healthcheck, tuple) and service.healthcheck[:1] not in (("CMD",), ("CMD-SHELL",)):
        raise ValueError(f"the health check of service {name!r} begins with neither CMD nor CMD-SHELL")


def _check_volumes(services: Mapping[str, Service], volumes: Mapping[str, Mapping[str, Any]]) -> None:
    places: set[tuple[str, str]] = set()
    for volume, users in volumes.items():
        if len(users) < 2:
            raise ValueError(
                f"volume {volume!r} has fewer than two users. A directory of one service needs no volume: all its "
                "files are part of the state."
            )
        for user, path in users.items():
            if user != MAIN and user not in services:
                raise ValueError(f"volume {volume!r} names {user!r}, which is not a service")
            if {".", ".."} & set(path.split("/")):
                raise ValueError(f"the path {path!r} of volume {volume!r} has '.' or '..'. Write it without.")
            if (user, path) in places:
                raise ValueError(f"two volumes have the path {path!r} of {user!r}")
            places.add((user, path))
