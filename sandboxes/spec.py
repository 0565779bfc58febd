"""The environment that a task runs in, as its user writes it (pure)."""

import re
from datetime import datetime
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from sandboxes.video_spec import VideoTools

AbsolutePath = Annotated[str, Field(pattern=r"^/[^\x00]*$", max_length=4096)]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=256)]
Text = Annotated[str, Field(pattern=r"^[^\x00]*$")]
EndpointName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,62}$")]
_LOOPBACK = r"^http://(127\.0\.0\.1|localhost)(:[0-9]{1,5})?(/[\x21-\x7e]*)?$"
_PASSWORD = re.compile(r"((?:^|[\s?&])password\s*=\s*|://[^:/?@]*:)(?:'(?:[^'\\]|\\.)*'|[^\s@&']+)", re.IGNORECASE)
"""Where a DSN, as a URL or as key=value, has its password; the first group goes before it."""
DatabaseName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]{0,62}$")]


class Limits(BaseModel):
    """What one sandbox may use. Memory, pids and disk are for all its processes together."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    memory_mb: int = Field(default=2048, ge=16, le=1 << 20)
    pids: int = Field(default=512, ge=8, le=1 << 16)
    disk_mb: int = Field(default=4096, ge=1, le=1 << 24, description="new bytes over the base, and the largest file")
    timeout_s: float = Field(default=120.0, gt=0, le=86_400, description="of a call that names none")
    output_bytes: int = Field(default=1 << 20, ge=0, le=1 << 28, description="kept of stdout and of stderr, each")


class Archive(BaseModel):
    """A tarball or directory on the proxy's machine, unpacked into the sandbox before set-up."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: AbsolutePath
    target: AbsolutePath = "/"


class _ToolServer(BaseModel):
    """What is said of a tool server wherever it runs: what requests to it mean, and the bounds of an answer."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dialect: str = Field(default="http", description="which calls read, what a call's key leaves out: rules by name")
    rules: tuple[dict[str, Any], ...] = Field(default=(), description="rules of one's own, before those of the dialect")
    task: str = Field(
        default="",
        pattern=r"^((header|cookie|query|body):.+)?$",
        description="where a request names its task, if not the one in the URL is meant: body:task_id",
    )
    timeout_s: float | None = Field(
        default=None, gt=0, le=86_400, description="of silence, before an answer or in it; limits.timeout_s by default"
    )
    answer_bytes: int = Field(
        default=32 << 20, ge=0, le=1 << 28, description="of a recorded answer; a longer one passes, and is not recorded"
    )


class Server(_ToolServer):
    """A tool server inside the sandbox: the endpoint of its name leads to its port on the sandbox's own loopback."""

    command: Text = Field(min_length=1, description="run by bash in workdir; it stays in the foreground")
    port: int = Field(ge=1, le=65535)
    env: dict[VariableName, Text] = Field(default_factory=dict)
    ready: Literal["tcp"] | Annotated[str, Field(pattern=r"^/[\x21-\x7e]*$")] = Field(
        default="tcp", description="ready once the port is open; or a path, once GET of it is answered below 500"
    )
    ready_s: float = Field(default=30.0, gt=0, le=600)
    start: Literal["call", "root"] = Field(
        default="call", description="with a sandbox's first call to it; 'root': it runs in the task's root state"
    )


class Farewell(BaseModel):
    """What an upstream is told when nobody needs a session any more. `{session}` stands for its name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: Literal["POST", "PUT", "DELETE"] = "POST"
    path: Annotated[str, Field(pattern=r"^/[\x21-\x7e]*$")]
    body: Any = None


class Upstream(_ToolServer):
    """A server outside Forkpoint's care: a URL, no sandbox. Driver `http` sends it requests, and to no other host."""

    upstream: str = Field(
        pattern=r"^https?://(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?(?:/[\x21\x24-\x3b\x3d\x40-\x7e]*)?$",
        max_length=2048,
        description="http or https, host, port, and a path before all others; no user, query or fragment",
    )
    mode: Literal["replay", "pass"] = Field(
        default="replay",
        description="'pass': no call is shared. 'replay': those are whose answer is known to come again: stateless "
        "ones by rule, and those behind a rule's `open`, which begins afresh",
    )
    bind: tuple[str, ...] = Field(
        default=(), description="fields of JSON bodies, both ways, that hold a session's name, beside the dialect's"
    )
    lost: tuple[Annotated[int, Field(ge=400, le=499)], ...] = Field(
        default=(), description="statuses that say that a session is gone: it is built again, and nothing is recorded"
    )
    farewell: Farewell | None = Field(default=None, description="sent when a session that a rule opened is let go")


def _kind_of_server(value: Any) -> str:
    outside = isinstance(value, Upstream) or (isinstance(value, dict) and "upstream" in value)
    return "upstream" if outside else "server"


AnyServer = Annotated[
    Annotated[Server, Tag("server")] | Annotated[Upstream, Tag("upstream")], Discriminator(_kind_of_server)
]


class McpServer(BaseModel):
    """An MCP server inside the sandbox, an entry of `mcpServers`: over stdin and stdout, or over HTTP at its url."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    command: Text | None = Field(
        default=None, min_length=1, description="starts it; left out where one of `servers` has the port of its url"
    )
    url: Annotated[str, Field(pattern=_LOOPBACK)] | None = Field(
        default=None, description="http://127.0.0.1:PORT/path: on the sandbox's own loopback"
    )
    args: tuple[Text, ...] = ()
    env: dict[VariableName, Text] = Field(default_factory=dict)
    cwd: AbsolutePath | None = None
    type: Literal["stdio", "http", "streamable-http"] | None = Field(
        default=None, description="http where there is a url, else stdio"
    )
    trust_hints: bool = Field(
        default=False,
        description="whether a tool with readOnlyHint is taken to leave the server's memory, which nobody sees, alone",
    )
    ready_s: float = Field(default=60.0, gt=0, le=600, description="for its answer to `initialize`")
    timeout_s: float | None = Field(
        default=None, gt=0, le=86_400, description="of silence; limits.timeout_s by default"
    )

    @property
    def port(self) -> int | None:
        """Where it is reached over HTTP."""
        return None if self.url is None else urlsplit(self.url).port or 80

    @model_validator(mode="after")
    def _one_way(self) -> "McpServer":
        if (self.type in ("http", "streamable-http")) != (self.url is not None) and self.type is not None:
            raise ValueError(f"an MCP server of type {self.type!r} takes {'no url' if self.url else 'a url'}")
        if self.url is None and self.command is None:
            raise ValueError("an MCP server takes a command, or a url on the sandbox's loopback")
        return self


SQL_DRIVERS = frozenset({"sqlite", "postgres"})
"""Drivers whose sandboxes are databases and nothing else: they serve the `sql` endpoint, and no shell."""
SHELLLESS_DRIVERS = SQL_DRIVERS | {"video"}
"""Drivers without a shell. Tasks of theirs with equal root states share one tree, unless told otherwise."""


class Database(BaseModel):
    """A database that the `sql` endpoint serves.

    Driver `sqlite`: source is a database file, a `.sql` script, or CSV files (a table each, named for the file).
    Driver `postgres`: source is the name of a database at dsn. It is cloned once and never written to.
    Drivers `local` and `container`: path is a SQLite file in the sandbox, which the shell sees too. source, if given,
    is a database file on the proxy's machine that is put there before set-up.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: Text | tuple[Text, ...] | None = None
    dsn: Text | None = Field(default=None, description="libpq's: a URL or key=value; only for driver postgres")
    path: AbsolutePath | None = Field(default=None, description="in the sandbox; only for drivers local and container")


class EnvironmentSpec(BaseModel):
    """What a task's sandboxes hold before the first call. Two equal specs over equal bases have one root state."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    driver: str = "local"
    base: Literal["host"] | AbsolutePath = Field(
        default="host",
        description="'host': this machine's own system, without homes and secrets; or a directory or tarball",
    )
    image: str | None = Field(
        default=None, min_length=1, max_length=512, description="of driver container, which needs one: name or id"
    )
    archives: tuple[Archive, ...] = ()
    files: dict[AbsolutePath, Text] = Field(default_factory=dict, description="path in the sandbox -> text")
    setup: tuple[Text, ...] = Field(default=(), description="shell commands, run in order; each must exit 0")
    env: dict[VariableName, Text] = Field(default_factory=dict)
    workdir: AbsolutePath = "/root"
    databases: dict[DatabaseName, Database] = Field(
        default_factory=dict, description="of the sql endpoint, by name; a call that names none means the first"
    )
    volatile: Literal["never", "once", "frozen"] = Field(
        default="never",
        description="of a statement that reads the clock or draws lots: its answer is never recorded, is recorded once "
        "for a state, or clock and lots stand still (sqlite only)",
    )
    frozen_at: datetime = Field(
        default=datetime.fromisoformat("2026-01-01T00:00:00+00:00"), description="what a frozen clock shows"
    )
    servers: dict[EndpointName, AnyServer] = Field(
        default_factory=dict,
        description="tool servers by the name of their endpoint: inside the sandbox, or for driver http elsewhere",
    )
    mcp_servers: dict[EndpointName, McpServer] = Field(
        default_factory=dict, description="of the mcp endpoint: the `mcpServers` of any client's configuration"
    )
    video: VideoTools | None = Field(default=None, description="of the video endpoint, for driver video")
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="what a driver from another package needs to know; part of the root state, and unused by ours",
    )
    limits: Limits = Limits()
    merge: Literal["on", "off"] = Field(default="on", description="one node for one state")
    cache: Literal["always", "never"] = Field(default="always", description="'never' runs each call: for baselines")
    share: Literal["on", "off"] | None = Field(
        default=None,
        description="whether tasks with equal root states have one tree; by default those of sqlite, postgres "
        "and video have",
    )

    @property
    def shared(self) -> bool:
        """Whether all tasks with this root state have one tree."""
        return self.driver in SHELLLESS_DRIVERS if self.share is None else self.share == "on"

    @property
    def hosted(self) -> dict[str, Server]:
        """The tool servers that run inside the sandbox."""
        return {name: server for name, server in self.servers.items() if isinstance(server, Server)}

    @property
    def upstreams(self) -> dict[str, Upstream]:
        """The servers that run elsewhere."""
        return {name: server for name, server in self.servers.items() if isinstance(server, Upstream)}

    @property
    def frozen_ms(self) -> int | None:
        """What a frozen clock shows, in milliseconds since 1970; None where clocks go on."""
        return int(self.frozen_at.timestamp() * 1000) if self.volatile == "frozen" else None

    def shown(self) -> "EnvironmentSpec":
        """Return what others may see of it: DSNs without their passwords."""
        databases = {
            name: database.model_copy(update={"dsn": _PASSWORD.sub(r"\1***", database.dsn)})
            if database.dsn
            else database
            for name, database in self.databases.items()
        }
        return self.model_copy(update={"databases": databases})

    @property
    def brought(self) -> tuple[str, ...]:
        """What is copied from the proxy's machine into a sandbox before set-up: archives and databases."""
        databases = (d.source for d in self.databases.values() if d.path is not None and isinstance(d.source, str))
        return (*(archive.source for archive in self.archives), *databases)

    @property
    def sql_dialect(self) -> Literal["sqlite", "postgres"]:
        """The SQL that the databases speak."""
        return "postgres" if self.driver == "postgres" else "sqlite"

    def root(self) -> dict[str, Any]:
        """Return what names the root state, as JSON members: where a database came from does not, its content does.

        That content, of the databases and of all else that the spec only names, is in `Driver.identity`.
        """
        told = self.model_dump(mode="json", exclude={"share"})
        for database in told["databases"].values():
            del database["source"], database["dsn"]
        told["video"] = None if self.video is None else self.video.root()
        for kind in ("servers", "mcp_servers", "video", "options"):
            if not told[kind]:
                # As before there were any: nobody's tree begins anew.
                del told[kind]
        return told

    @model_validator(mode="after")
    def _databases_fit(self) -> "EnvironmentSpec":
        for name, database in self.databases.items():
            given = {field for field in ("source", "dsn", "path") if getattr(database, field) is not None}
            needed, allowed = _DATABASE_FIELDS.get(self.driver, (None, set()))
            if needed is None:
                raise ValueError(f"driver {self.driver!r} has no databases: {', '.join(_DATABASE_FIELDS)} have")
            if not needed <= given <= allowed:
                raise ValueError(
                    f"database {name!r} of driver {self.driver!r} takes {', '.join(sorted(allowed))}; "
                    f"it needs {', '.join(sorted(needed))}"
                )
        if self.driver in SQL_DRIVERS and not self.databases:
            raise ValueError(f"driver {self.driver!r} needs `databases`")
        if self.driver in SHELLLESS_DRIVERS:
            shell = [f for f in ("archives", "files", "setup", "env") if getattr(self, f)]
            if shell:
                raise ValueError(f"driver {self.driver!r} runs no shell: leave {', '.join(shell)} out")
        if self.volatile == "frozen" and self.driver == "postgres":
            raise ValueError("the clock of a PostgreSQL server cannot be frozen: choose `volatile` never or once")
        return self

    @model_validator(mode="after")
    def _video_fits(self) -> "EnvironmentSpec":
        if (self.driver == "video") is not (self.video is not None):
            raise ValueError("driver 'video' needs `video`" if self.video is None else "`video` is of driver 'video'")
        return self

    @model_validator(mode="after")
    def _servers_fit(self) -> "EnvironmentSpec":
        if (self.hosted or self.mcp_servers) and self.driver not in SERVER_DRIVERS:
            raise ValueError(f"driver {self.driver!r} runs no servers: {', '.join(sorted(SERVER_DRIVERS))} do")
        if self.upstreams and self.driver != "http":
            raise ValueError(f"driver {self.driver!r} sends nothing to an `upstream`: driver 'http' does")
        taken = sorted(RESERVED_ENDPOINTS & self.servers.keys())
        if taken:
            raise ValueError(f"endpoint {taken[0]!r} is built in: give the server another name")
        ports = [server.port for server in self.hosted.values()]
        if len(set(ports)) < len(ports):
            raise ValueError("two servers have one port: they share a loopback")
        for name, mcp in self.mcp_servers.items():
            if mcp.command is None and mcp.port not in ports:
                raise ValueError(f"MCP server {name!r} has no command, and none of `servers` has port {mcp.port}")
            if mcp.command is not None and mcp.port in ports:
                raise ValueError(f"MCP server {name!r} and one of `servers` have one port: leave its command out")
        return self

    @model_validator(mode="after")
    def _nothing_but_upstreams(self) -> "EnvironmentSpec":
        if self.driver == "http":
            if not self.upstreams:
                raise ValueError("driver 'http' needs `servers` with an `upstream`")
            sandbox = [name for name in ("archives", "files", "setup", "env") if getattr(self, name)]
            if sandbox:
                raise ValueError(f"driver 'http' has no sandbox: leave {', '.join(sandbox)} out")
        return self

    @model_validator(mode="after")
    def _image_or_base(self) -> "EnvironmentSpec":
        if self.image is not None and self.driver != "container":
            raise ValueError(f"driver {self.driver!r} has no images: leave `image` out, or use driver 'container'")
        return self


SERVER_DRIVERS = frozenset({"local", "container"})
"""Drivers that run tool servers in their sandboxes."""
RESERVED_ENDPOINTS = frozenset({"shell", "sql", "video", "mcp", "docker", "e2b", "process", "archive", "r"})
"""Names that a URL has for something else."""

_DATABASE_FIELDS: dict[str, tuple[set[str], set[str]]] = {
    "sqlite": ({"source"}, {"source"}),
    "postgres": ({"dsn", "source"}, {"dsn", "source"}),
    "local": ({"path"}, {"path", "source"}),
    "container": ({"path"}, {"path", "source"}),
}
"""By driver: the fields that a database must have, and those that it may have."""
