"""Tool servers of a task's environment, as its user writes them: in the sandbox, elsewhere, or speaking MCP (pure)."""

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

AbsolutePath = Annotated[str, Field(pattern=r"^/[^\x00]*$", max_length=4096)]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=256)]
Text = Annotated[str, Field(pattern=r"^[^\x00]*$")]
EndpointName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,62}$")]
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
