"""Client of the control plane of a running proxy, for the commands."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import httpx
import typer

from forkpoint.address import DEFAULT_URL, base_url, token_headers
from forkpoint.exchange import PAGE, path_of
from proxy.address import read_address
from proxy.cli.text import printable

DEFAULT_DATA = Path("forkpoint-data")
REQUEST_S = 30.0
LONG_S = 600.0
"""Timeout of a request that moves or compares whole states, in seconds."""


def fail(message: str) -> NoReturn:
    """Print an error and exit with status 1."""
    # The message may quote servers and files: each line is escaped by itself, so only line breaks survive.
    for line in message.splitlines():
        typer.echo(printable(line), err=True)
    raise typer.Exit(1)


def proxy_url(url: str | None, data: Path | None) -> str | None:
    """Return the base URL of the proxy that a command talks to; None if no proxy serves the named directory.

    `url` (`--url` or FORKPOINT_URL) wins over `data` (`--data` or FORKPOINT_DATA). None looks at the default directory,
    then at the default port. A named directory has no such substitute: the command could change another proxy's tasks.
    """
    if url or data is None:
        return url or read_address(DEFAULT_DATA) or DEFAULT_URL
    return read_address(data)


class ControlClient:
    """The control plane at a base URL, with the token in FORKPOINT_TOKEN if it is set."""

    def __init__(self, url: str) -> None:
        self.url, self.headers = base_url(url), token_headers()
        # Each request opens its own client, so nothing has to be closed.
        self._client = partial(httpx.Client, base_url=f"{self.url}/api/v1", headers=self.headers)

    def request(self, method: str, *path: str, within_s: float = REQUEST_S, **more: Any) -> Any:
        """Return the JSON of a response, None if empty; a failed request ends the command with its error."""
        with self._reporting(), self._client(timeout=within_s) as client:
            response = client.request(method, path_of(*path), **more)
        _require_success(response)
        return response.json() if response.content else None

    def items(self, *path: str, most: int | None = None, **query: Any) -> Any:
        """Return the items of a list, from as many of its pages as `most` takes, or all; otherwise as `request`."""
        items: list[dict[str, Any]] = []
        sent = {name: value for name, value in query.items() if value is not None}
        while most is None or len(items) < most:
            limit = PAGE if most is None else min(PAGE, most - len(items))
            page = self.request("GET", *path, params={**sent, "limit": limit})
            items += page["items"]
            if page["next"] is None:
                break
            sent["cursor"] = page["next"]
        return items

    def read(self, *path: str, within_s: float, **query: str) -> Any:
        """Return the JSON of a GET request. Raises httpx.HTTPError without a response, or ValueError without JSON."""
        with self._client(timeout=within_s) as client:
            return client.get(path_of(*path), params=query).raise_for_status().json()

    @contextmanager
    def stream(self, method: str, *path: str, within: str = "api/v1", **more: Any) -> Iterator[httpx.Response]:
        """Send a request and yield its streaming response; `within` precedes the path's segments."""
        with (
            self._reporting(),
            self._client(timeout=LONG_S) as client,
            client.stream(method, f"{self.url}/{within}{path_of(*path)}", **more) as response,
        ):
            if not response.is_success:
                response.read()
                _require_success(response)
            yield response

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except (httpx.TransportError, httpx.InvalidURL) as error:
            fail(
                f"No proxy answers at {self.url} ({error}). Start one with `forkpoint serve`, or choose another with "
                "--url or --data."
            )


def _require_success(response: httpx.Response) -> None:
    if not response.is_success:
        fail(problem(response))


def problem(response: httpx.Response) -> str:
    """Return an error response in one line: the status, then title and detail of its problem details (RFC 9457)."""
    try:
        details = response.json()
    except ValueError:
        details = None
    members = details if isinstance(details, dict) else {}
    text = ": ".join(str(members[name]) for name in ("title", "detail") if members.get(name)) or response.text[:200]
    return f"{response.status_code} {text or response.reason_phrase}"
