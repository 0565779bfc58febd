"""The environment of a task, as its user writes it (pure). Tool servers and videos have modules of their own."""

import re
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from sandboxes.server_spec import (
    AbsolutePath,
    AnyServer,
    Egress,
    EndpointName,
    Harness,
    HostName,
    McpServer,
    Server,
    Service,
    ServiceName,
    Text,
    Upstream,
    VariableName,
    VolumeName,
    VolumePath,
    check_services,
)
from sandboxes.video_spec import VideoTools

_PASSWORD = re.compile(r"((?:^|[\s?&])password\s*=\s*|://[^:/?@]*:)(?:'(?:[^'\\]|\\.)*'|[^\s@&']+)", re.IGNORECASE)
"""Matches the password of a DSN, as a URL or as key=value, and what precedes it (group 1)."""
DatabaseName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]{0,62}$")]


class Limits(BaseModel):
    """The limits of one sandbox. Memory, pids and disk are for all its processes together."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    memory_mb: int = Field(default=2048, ge=16, le=1 << 20)
    pids: int = Field(default=512, ge=8, le=1 << 16)
    cpus: float | None = Field(
        default=None,
        gt=0,
        le=4096,
        description="CPUs, such as 0.5 or 2; none for all. Programs see so many, rounded up.",
    )
    disk_mb: int = Field(default=4096, ge=1, le=1 << 24, description="New bytes over the base, and the largest file.")
    timeout_s: float = Field(default=120.0, gt=0, le=86_400, description="Time limit of a call that names none.")
    output_bytes: int = Field(
        default=1 << 20, ge=0, le=1 << 28, description="Bytes that are kept of stdout, and as many of stderr."
    )
    output_keep: Literal["head", "ends"] = Field(
        default="head",
        description="What is kept of a command's longer output: the first bytes, or half of them and the last bytes.",
    )


class Archive(BaseModel):
    """A tarball or directory on the proxy's machine that is unpacked into the sandbox before set-up."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: AbsolutePath
    target: AbsolutePath = "/"


SQL_DRIVERS = frozenset({"sqlite", "postgres"})
"""Drivers whose sandboxes are only databases: they serve the `sql` endpoint and no shell."""
SHELLLESS_DRIVERS = SQL_DRIVERS | {"video"}
"""Drivers without a shell. Their tasks with equal root states share one tree, unless a spec says `share: off`."""
OUTSIDE_DRIVERS = frozenset({"http", "client"})
"""Drivers whose tools run outside of any sandbox of ours, so nothing of their states can be kept."""
SERVER_DRIVERS = frozenset({"local"})
"""Drivers that run tool servers in their sandboxes."""
RESERVED_ENDPOINTS = frozenset(
    {"shell", "sql", "video", "mcp", "docker", "e2b", "tvcache", "process", "archive", "harness", "r"}
)
"""Names of endpoints that are built in; a server cannot have them."""

_DATABASE_FIELDS: dict[str, tuple[set[str], set[str]]] = {
    "sqlite": ({"source"}, {"source"}),
    "postgres": ({"dsn", "source"}, {"dsn", "source"}),
    "local": ({"path"}, {"path", "source"}),
}
"""The fields that a database must have, and the fields that it may have, by driver."""


class Database(BaseModel):
    """A database that the `sql` endpoint serves.

    - Driver `sqlite`: `source` is a database file, a `.sql` script, or CSV files. Each CSV file becomes a table with
      the name of the file.
    - Driver `postgres`: `source` is the name of a database at `dsn`. It is cloned once and never written to.
    - Driver `local`: `path` is a SQLite file in the sandbox, which the shell sees too. `source`, if
      given, is a database file on the proxy's machine that is copied there before set-up.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: Text | tuple[Text, ...] | None = None
    dsn: Text | None = Field(
        default=None, description="A connection string of libpq, as a URL or as key=value. Only for driver postgres."
    )
    path: AbsolutePath | None = Field(default=None, description="Path in the sandbox. Only for driver local.")


class EnvironmentSpec(BaseModel):
    """The state of a task's sandboxes before the first call. Equal specs over equal bases have one root state."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    driver: str = "local"
    base: Literal["host"] | AbsolutePath = Field(
        default="host",
        description="host: this machine's own system without homes and secrets. Or a directory or tarball.",
    )
    image: str | None = Field(
        default=None,
        min_length=1,
        max_length=512,
        description="An image in place of a base: name or ID of an image of Docker's, or the path of an archive that "
        "`docker save`, `podman save` or skopeo has written, or of an OCI directory.",
    )
    archives: tuple[Archive, ...] = ()
    files: dict[AbsolutePath, Text] = Field(default_factory=dict, description="Text by path in the sandbox.")
    setup: tuple[Text, ...] = Field(default=(), description="Shell commands that run in order. Each must exit with 0.")
    env: dict[VariableName, Text] = Field(default_factory=dict)
    workdir: AbsolutePath | None = Field(
        default=None, description="Working directory. Default: that of the image, or /root without an image."
    )
    hostname: HostName | None = Field(
        default=None,
        description="Host name, for an image. Default: twelve digits that are the same for the whole task.",
    )
    databases: dict[DatabaseName, Database] = Field(
        default_factory=dict,
        description="Databases of the sql endpoint by name. A call without a name means the first.",
    )
    volatile: Literal["never", "once", "frozen"] = Field(
        default="never",
        description="Results of statements that read the clock or random numbers. never: they are not recorded. once: "
        "they are recorded once for each state. frozen: clock and random numbers stand still (sqlite only).",
    )
    frozen_at: datetime = Field(
        default=datetime.fromisoformat("2026-01-01T00:00:00+00:00"), description="The time that a frozen clock shows."
    )
    servers: dict[EndpointName, AnyServer] = Field(
        default_factory=dict,
        description="Tool servers by the name of their endpoint: inside the sandbox, or for driver http elsewhere.",
    )
    mcp_servers: dict[EndpointName, McpServer] = Field(
        default_factory=dict, description="Servers of the mcp endpoint: the `mcpServers` of any client's configuration."
    )
    harness: Harness | None = Field(
        default=None, description="An agent inside the sandbox, whose turns are the steps of its rollouts."
    )
    live: Literal["running", "frozen_between_calls"] = Field(
        default="running",
        description="What the processes in a sandbox do between two calls. frozen_between_calls: they stand still, so "
        "that no answer beside them grows old. Those beside a harness always do.",
    )
    services: dict[ServiceName, Service] = Field(
        default_factory=dict,
        description="Side services by name, beside an image: programs of other images that run beside the calls.",
    )
    volumes: dict[VolumeName, dict[ServiceName, VolumePath]] = Field(
        default_factory=dict,
        description="Directories that services share: for each volume its path by service, or by main for the "
        "container of the calls. The first path has the content at the start.",
    )
    aliases: tuple[ServiceName, ...] = Field(
        default=(), description="Further names that lead to the sandbox itself, beside an image."
    )
    egress: Egress | None = Field(
        default=None, description="The hosts that programs in the sandbox may reach, for driver local. None by default."
    )
    video: VideoTools | None = Field(default=None, description="Videos of the video endpoint, for driver video.")
    options: dict[str, Any] = Field(
        default_factory=dict, description="Settings for a driver from another package. They are part of the root state."
    )
    confined: bool = Field(
        default=False,
        description="Whether paths and URLs must be among the setting `sources`. Always true in the specs of tokens "
        "that see some tasks only.",
    )
    limits: Limits = Limits()
    timeouts: Literal["private", "shared"] = Field(
        default="private",
        description="Results of calls that ran out of wall time. private: they are their rollout's own, because they "
        "depend on how busy the machine was. shared: they are recorded for all rollouts like any result.",
    )
    own: tuple[Annotated[str, Field(min_length=1, max_length=200)], ...] = Field(
        default=(),
        max_length=100,
        description="Texts such as uuidgen or $RANDOM. A call with one of them in its tool's name or its arguments is "
        "each rollout's own: every rollout executes it, and nobody else gets its answer or its state.",
    )
    merge: Literal["on", "off"] = Field(default="on", description="on: equal states are one node of the tree.")
    cache: Literal["always", "never"] = Field(default="always", description="never: every call runs, for baselines.")
    share: Literal["on", "off"] | None = Field(
        default=None,
        description="Whether tasks with equal root states share one tree. By default tasks of sqlite, postgres and "
        "video do.",
    )

    @model_validator(mode="before")
    @classmethod
    def _name_the_driver(cls, given: Any) -> Any:
        """Take "container" for `local` with an image: its name in earlier versions, whose specs are still accepted."""
        if not isinstance(given, dict) or given.get("driver") != "container":
            return given
        if given.get("image") is None:
            raise ValueError("driver 'container' needs an `image`")
        return {**given, "driver": "local"}

    @property
    def shared(self) -> bool:
        """Whether all tasks with this root state share one tree."""
        return self.driver in SHELLLESS_DRIVERS if self.share is None else self.share == "on"

    @property
    def stands_still(self) -> bool:
        """Whether the processes in a sandbox are frozen between two calls."""
        return self.harness is not None or self.live == "frozen_between_calls"

    @property
    def shares_timeouts(self) -> bool:
        """Whether a result of a call that ran out of wall time may answer other rollouts."""
        return self.timeouts == "shared"

    @property
    def directory(self) -> str:
        """The working directory: of a spec that leaves it to its image, the one of a spec without an image."""
        return self.workdir or "/root"

    @property
    def hosted(self) -> dict[str, Server]:
        """The tool servers that run inside the sandbox, by endpoint."""
        return {name: server for name, server in self.servers.items() if isinstance(server, Server)}

    @property
    def upstreams(self) -> dict[str, Upstream]:
        """The servers that run elsewhere, by endpoint."""
        return {name: server for name, server in self.servers.items() if isinstance(server, Upstream)}

    @property
    def frozen_ms(self) -> int | None:
        """The time that a frozen clock shows, in milliseconds since 1970; None if clocks run."""
        return int(self.frozen_at.timestamp() * 1000) if self.volatile == "frozen" else None

    def redacted(self) -> "EnvironmentSpec":
        """Return the spec without the passwords in its DSNs, for people and exports."""
        databases = {
            name: database.model_copy(update={"dsn": _PASSWORD.sub(r"\1***", database.dsn)})
            if database.dsn
            else database
            for name, database in self.databases.items()
        }
        return self.model_copy(update={"databases": databases})

    @property
    def copied_sources(self) -> tuple[str, ...]:
        """Paths on the proxy's machine that are copied into a sandbox before set-up: archives and databases."""
        if not (self.archives or self.databases):
            return ()
        databases = (d.source for d in self.databases.values() if d.path is not None and isinstance(d.source, str))
        return (*(archive.source for archive in self.archives), *databases)

    @property
    def sql_dialect(self) -> Literal["sqlite", "postgres"]:
        """The dialect of SQL of the databases."""
        return "postgres" if self.driver == "postgres" else "sqlite"

    def root(self) -> dict[str, Any]:
        """Return the members that name the root state, as JSON; `Driver.identity` covers the content of databases."""
        members = self.model_dump(mode="json", exclude={"share", "confined"})
        # Earlier versions had no specs without one.
        members["workdir"] = self.workdir if self.image is not None else self.directory
        if self.hostname is None:
            del members["hostname"]
        if self.limits.cpus is None:
            del members["limits"]["cpus"]
        if self.limits.output_keep == "head":
            del members["limits"]["output_keep"]
        for database in members["databases"].values():
            del database["source"], database["dsn"]
        members["video"] = None if self.video is None else self.video.root()
        # Older versions had no such members. Without empty ones, their trees are found again.
        kinds = ("servers", "mcp_servers", "services", "volumes", "aliases", "egress", "video", "options", "harness")
        absent = {kind for kind in (*kinds, "own") if not members[kind]}
        absent |= {name for name, value in (("timeouts", "private"), ("live", "running")) if members[name] == value}
        return {name: value for name, value in members.items() if name not in absent}

    @model_validator(mode="after")
    def _check_databases(self) -> "EnvironmentSpec":
        for name, database in self.databases.items():
            given_fields = {field for field in ("source", "dsn", "path") if getattr(database, field) is not None}
            needed, allowed = _DATABASE_FIELDS.get(self.driver, (None, set()))
            if needed is None:
                raise ValueError(f"driver {self.driver!r} has no databases. Use one of: {', '.join(_DATABASE_FIELDS)}.")
            if not needed <= given_fields <= allowed:
                raise ValueError(
                    f"database {name!r} of driver {self.driver!r} takes {', '.join(sorted(allowed))}; "
                    f"it needs {', '.join(sorted(needed))}"
                )
        if self.driver in SQL_DRIVERS and not self.databases:
            raise ValueError(f"driver {self.driver!r} needs `databases`")
        if self.driver in SHELLLESS_DRIVERS:
            shell = [f for f in ("archives", "files", "setup", "env") if getattr(self, f)]
            if shell:
                raise ValueError(f"driver {self.driver!r} runs no shell. Leave out: {', '.join(shell)}.")
        if self.volatile == "frozen" and self.driver == "postgres":
            raise ValueError("the clock of a PostgreSQL server cannot be frozen. Set `volatile` to never or once.")
        return self

    @model_validator(mode="after")
    def _check_video(self) -> "EnvironmentSpec":
        if (self.driver == "video") is not (self.video is not None):
            raise ValueError(
                "driver 'video' needs `video`" if self.video is None else "only driver 'video' takes `video`"
            )
        return self

    @model_validator(mode="after")
    def _check_servers(self) -> "EnvironmentSpec":
        if (self.hosted or self.mcp_servers) and self.driver not in SERVER_DRIVERS:
            raise ValueError(
                f"driver {self.driver!r} runs no servers. Use one of: {', '.join(sorted(SERVER_DRIVERS))}."
            )
        if self.stands_still and self.driver not in SERVER_DRIVERS:
            raise ValueError(f"driver {self.driver!r} runs no processes. Leave out `harness` and `live`.")
        if self.upstreams and self.driver != "http":
            raise ValueError(f"driver {self.driver!r} has no upstreams. Use driver 'http'.")
        taken = sorted(RESERVED_ENDPOINTS & self.servers.keys())
        if taken:
            raise ValueError(f"endpoint {taken[0]!r} is built in. Give the server another name.")
        ports = [server.port for server in self.hosted.values()]
        ports += [self.harness.port] if self.harness is not None else []
        if len(set(ports)) < len(ports):
            raise ValueError("two servers have the same port, but share a loopback. Give them different ports.")
        for name, mcp in self.mcp_servers.items():
            if mcp.command is None and mcp.port not in ports:
                raise ValueError(f"MCP server {name!r} has no command, and none of `servers` has port {mcp.port}")
            if mcp.command is not None and mcp.port in ports:
                raise ValueError(f"MCP server {name!r} and one of `servers` have the same port. Leave out its command.")
        return self

    @model_validator(mode="after")
    def _check_services(self) -> "EnvironmentSpec":
        if (self.services or self.volumes) and self.image is None:
            raise ValueError("services run beside an image: name one (`image`), or leave `services` and `volumes` out.")
        check_services(self.services, self.volumes)
        return self

    @model_validator(mode="after")
    def _check_egress(self) -> "EnvironmentSpec":
        if self.egress is not None and self.driver not in SERVER_DRIVERS:
            raise ValueError(f"driver {self.driver!r} has no egress. Use one of: {', '.join(sorted(SERVER_DRIVERS))}.")
        return self

    @model_validator(mode="after")
    def _check_http_driver(self) -> "EnvironmentSpec":
        if self.driver == "http":
            if not self.upstreams:
                raise ValueError("driver 'http' needs `servers` with an `upstream`")
            sandbox = [name for name in ("archives", "files", "setup", "env") if getattr(self, name)]
            if sandbox:
                raise ValueError(f"driver 'http' has no sandbox. Leave out: {', '.join(sandbox)}.")
        return self

    @model_validator(mode="after")
    def _check_image(self) -> "EnvironmentSpec":
        if self.image is not None and self.driver != "local":
            raise ValueError(f"driver {self.driver!r} has no images. Leave out `image`, or use driver 'local'.")
        if self.image is not None and self.base != "host":
            raise ValueError("a sandbox has one root file system: leave out `image` or `base`.")
        if self.hostname is not None and self.image is None:
            raise ValueError("only sandboxes of an image have a host name of their own: leave out `hostname`.")
        return self
