"""The drivers, dialects and endpoints that come with Forkpoint, as the entry points in `pyproject.toml` name them.

Each function imports its part when it is called, so an installation or a process pays only for what it uses.
"""
# ruff: noqa: PLC0415 - see above

from importlib.util import find_spec
from typing import TYPE_CHECKING

from sandboxes.plugins import DriverContext, PluginError

if TYPE_CHECKING:
    from proxy.compat.endpoints import Endpoint, EndpointContext
    from proxy.dialects.base import Dialect
    from sandboxes.driver import Driver
    from sandboxes.spec import EnvironmentSpec


def local_driver(context: DriverContext) -> "Driver":
    """Return the driver of namespaces and overlay layers on this machine."""
    from sandboxes.local.driver import LocalDriver

    return LocalDriver(context.directory, context.checkpointer(), context.sources)


def sqlite_driver(context: DriverContext) -> "Driver":
    """Return the driver of SQLite databases."""
    from sandboxes.sqlite.driver import SqliteDriver

    return SqliteDriver(context.directory, context.sources)


def postgres_driver(context: DriverContext) -> "Driver":
    """Return the driver of PostgreSQL clones. Raises PluginError if the extra `postgres` is not installed."""
    _require("postgres", "psycopg")
    from sandboxes.postgres.driver import PostgresDriver

    return PostgresDriver(context.directory, spares=context.spares)


def video_driver(context: DriverContext) -> "Driver":
    """Return the driver of video tools. Raises PluginError if the extra `video` is not installed."""
    _require("video", "av", "numpy", "PIL")
    from sandboxes.video.driver import VideoDriver

    return VideoDriver(context.directory, context.sources)


def http_driver(context: DriverContext) -> "Driver":
    """Return the driver of tool servers elsewhere."""
    from sandboxes.upstream.driver import HttpDriver

    return HttpDriver(context.directory)


def client_driver(context: DriverContext) -> "Driver":  # noqa: ARG001 - it keeps no files
    """Return the driver of sandboxes that belong to clients."""
    from sandboxes.client.driver import ClientDriver

    return ClientDriver()


def shell_dialect(spec: "EnvironmentSpec") -> "Dialect | None":
    """Return the `shell` endpoint; None for environments whose only servers are elsewhere."""
    from proxy.dialects import BuiltIn, shell

    return None if spec.upstreams else BuiltIn(shell.parse, spec)


def sql_dialect(spec: "EnvironmentSpec") -> "Dialect | None":
    """Return the `sql` endpoint; None for environments whose only servers are elsewhere."""
    from proxy.dialects import BuiltIn, sql

    return None if spec.upstreams else BuiltIn(sql.parse, spec)


def mcp_dialect(spec: "EnvironmentSpec") -> "Dialect | None":
    """Return the `mcp` endpoint; None for environments whose only servers are elsewhere."""
    from proxy.dialects.mcp import Mcp

    return None if spec.upstreams else Mcp(spec)


def video_dialect(spec: "EnvironmentSpec") -> "Dialect | None":
    """Return the `video` endpoint; None for environments without videos."""
    from proxy.dialects.video import VideoDialect

    return None if spec.video is None else VideoDialect(spec)


def docker_endpoint(context: "EndpointContext") -> "Endpoint":
    """Return the endpoint that speaks Docker's Engine API."""
    from proxy.compat.docker.endpoint import DockerEndpoint

    return DockerEndpoint(context)


def e2b_endpoint(context: "EndpointContext") -> "Endpoint":
    """Return the endpoint that speaks E2B's API."""
    from proxy.compat.e2b.endpoint import E2bEndpoint

    return E2bEndpoint(context)


def tvcache_endpoint(context: "EndpointContext") -> "Endpoint | None":
    """Return the endpoint that speaks the cache API of TVCACHE's authors; None without the driver `client`."""
    if "client" not in context.drivers:
        return None
    from proxy.compat.tvcache.endpoint import TvcacheEndpoint

    return TvcacheEndpoint(context)


def harness_endpoint(context: "EndpointContext") -> "Endpoint | None":
    """Return the endpoint that runs agents inside their sandboxes; None without the driver `local`."""
    if "local" not in context.drivers:
        return None
    from proxy.compat.harness.endpoint import HarnessEndpoint

    return HarnessEndpoint(context)


def _require(extra: str, *packages: str) -> None:
    if missing := [package for package in packages if find_spec(package) is None]:
        raise PluginError(f"driver {extra!r} needs {', '.join(missing)}: pip install 'forkpoint[{extra}]'")
