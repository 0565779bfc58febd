"""The rules that say what requests to a tool server mean: shipped in `rules/`, or written into a spec."""

import re
import tomllib
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from proxy.tree.keys import canonical_json
from sandboxes import process_output as process
from sandboxes.calls import ToolCall
from sandboxes.server_spec import Server, Upstream
from sandboxes.spec import EnvironmentSpec

_SHIPPED = Path(__file__).parent / "rules"
"""The directory of the shipped rules, one TOML file a dialect."""
_VERSION = 2
"""The version of how rules are read. It is part of the identity of each tree with servers: raising it drops them."""

_MODIFIED = re.compile(rb'"modified": "[^"]*"')
"""When a file was changed last, in the entries with which tools for files answer. A replay changes it later."""

_PLAN_TIMES = re.compile(rb'(?:actual(?: startup| total)?|planning|execution) time\\?"?[=:] ?[\d.]+', re.IGNORECASE)
"""The times that PostgreSQL's EXPLAIN ANALYZE prints, as text or as JSON."""


class RulesError(ValueError):
    """No rules have this name, or the rules are malformed."""


class RuleReply(BaseModel):
    """A reply of the proxy's own; the body is a JSON value, or a text that is sent as it is."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    status: int = Field(default=200, ge=200, le=599)
    body: Any = None
    headers: dict[str, str] = Field(default_factory=dict)


class Rule(BaseModel):
    """What requests of one kind mean. A source is `header:x`, `cookie:x`, `query:x`, `body:a.b` or `path:x`."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    on: str = Field(description="METHOD or A|B or *, then a path: {name} is a segment, {name...} all that follows")
    when: dict[str, Any] = Field(default_factory=dict, alias="if", description="body fields that must have this value")
    do: Literal["call", "health", "open", "close"] = "call"
    tool: str = Field(default="", description="a template over captures and body fields; METHOD /path by default")
    args: Literal["query+body", "query", "body", "none"] = "query+body"
    pick: tuple[str, ...] = Field(default=(), description="of a JSON body, nothing but these fields is in the key")
    drop: tuple[str, ...] = Field(default=(), description="fields of a JSON body that the key leaves out")
    archives: bool = Field(default=False, description="uploaded archives count by their contents")
    effect: Literal["read", "change"] | None = Field(default=None, description="on the server's memory; else by method")
    stateless: bool = Field(default=False, description="a call whose answer hangs on the call alone: once for all")
    cache: Literal["always", "never"] = "always"
    answers: Annotated[int, Field(ge=0, le=1000)] | Literal["quiet"] = Field(
        default=1, description="of a message on a WebSocket: how many answer it; 'quiet': all, until none comes"
    )
    alias: tuple[str, ...] = Field(
        default=(), description="of such a message: fields whose value its client chose, and finds in answers again"
    )
    commutes: bool = Field(default=False, description="may change places with others that wait at the same time")
    rollout: str = Field(default="", description="where the rollout's name is, if not in the URL; 'fresh': a new one")
    names: str = Field(
        default="", pattern=r"^(body:.+)?$", description="of `open` to an upstream: where its answer names the session"
    )
    parent: str = Field(default="", description="of `open`: the rollout that it forks from")
    reply: RuleReply | None = Field(default=None, description="answered by the proxy; of a call, without its server")

    @model_validator(mode="after")
    def _replies(self) -> "Rule":
        if self.do in ("health", "close") and self.reply is None:
            raise ValueError(f"a rule with `do = {self.do!r}` needs a `reply`, which the proxy sends")
        if self.stateless and (self.do != "call" or self.effect == "change"):
            raise ValueError("a `stateless` rule must be a `call` and must not change the state")
        method, _, path = self.on.partition(" ")
        if not method or not path.startswith("/"):
            raise ValueError(f"`on` must be a method and a path, such as 'POST /run', and not {self.on!r}")
        return self


class Rules(BaseModel):
    """The rules of one dialect: the first that fits counts, else a plain HTTP call.

    `headers` are in the key; None for all but known noise.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    about: str = ""
    headers: tuple[str, ...] | None = None
    request_id: str = Field(default="", description="header that identifies a request that may be retried")
    rollout: str = Field(default="", description="where the rollout's name is, if not in the URL and no rule says it")
    task: str = Field(default="", description="where the task's name is, if not the one in the URL is meant")
    mint: str = Field(default="", description="cookie under which a new rollout's name is given to its client")
    bind: tuple[str, ...] = Field(default=(), description="fields of JSON bodies, both ways, that hold that name")
    unsteady: tuple[str, ...] = Field(
        default=(), description="fields of JSON answers in which a replay may differ: durations, tracebacks"
    )
    results: tuple[int, ...] = Field(default=(), description="statuses above 499 that are results like any other")
    retry_status: int | None = Field(default=None, ge=500, le=599, description="answered to trouble of ours")
    trouble: Any = Field(
        default=None, description="sent on a WebSocket when a message cannot be answered, with {slug} and {detail}"
    )
    rule: tuple[Rule, ...] = ()


def rules_of(server: Server | Upstream) -> Rules:
    """Return a server's own rules, then those of its dialect. Raises RulesError if one is unknown or malformed."""
    shipped = _shipped(server.dialect)
    try:
        own = tuple(Rule.model_validate(rule) for rule in server.rules)
    except ValidationError as error:
        raise RulesError(f"a rule of the server cannot be read: {error.errors()[0]['msg']}") from error
    bind = server.bind if isinstance(server, Upstream) else ()
    more = {"rule": own + shipped.rule, "bind": bind + shipped.bind}
    return shipped.model_copy(update=more | ({"task": server.task} if server.task else {}))


def identity(spec: EnvironmentSpec) -> str:
    """Return a digest of all rules that shape an environment's keys; empty without servers. Raises RulesError."""
    if not spec.servers:
        return ""
    rules = {name: rules_of(server).model_dump(mode="json") for name, server in spec.servers.items()}
    return blake2b(b"%d" % _VERSION + canonical_json(rules), digest_size=16).hexdigest()


def steady(spec: EnvironmentSpec, call: ToolCall, body: bytes) -> bytes:
    """Return the part of a call's response body that a replay must reproduce."""
    if call.endpoint == "process":
        return process.by_stream(body)
    if call.endpoint == "files" and call.tool != "read":
        return _MODIFIED.sub(b"", body)
    if call.endpoint == "sql" and "explain" in str(call.arguments.get("sql")).lower():
        return _PLAN_TIMES.sub(b"", body)
    server = spec.servers.get(call.endpoint)
    unsteady = rules_of(server).unsteady if server is not None else ()
    if not unsteady:
        return body
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body
    for path in unsteady:
        value = without(value, path.split("."))
    return canonical_json(value)


def without(value: Any, path: list[str]) -> Any:
    """Return a JSON value without the member at a path."""
    if not isinstance(value, dict) or path[0] not in value:
        return value
    if len(path) == 1:
        return {name: member for name, member in value.items() if name != path[0]}
    return {**value, path[0]: without(value[path[0]], path[1:])}


@cache
def _shipped(name: str) -> Rules:
    names = sorted(path.stem for path in _SHIPPED.glob("*.toml"))
    if name not in names:
        raise RulesError(f"there is no dialect {name!r}. Use one of: {', '.join(names)}")
    return Rules.model_validate(tomllib.loads((_SHIPPED / f"{name}.toml").read_text()))
