"""A running proxy as the command line asks it."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn
from urllib.parse import quote

import httpx
import typer

from proxy.cli.text import printable

QUESTION_S = 30.0
LONG_S = 600.0


def fail(message: str) -> NoReturn:
    """Say what went wrong, and end with 1."""
    # Text of servers and files: line by line, so that its line ends stay and nothing else does.
    for line in message.splitlines():
        typer.echo(printable(line), err=True)
    raise typer.Exit(1)


class ControlClient:
    """The control plane at a base URL, with the token of FORKPOINT_TOKEN if there is one."""

    def __init__(self, url: str) -> None:
        self._url = url
        token = os.environ.get("FORKPOINT_TOKEN")
        headers = {"x-forkpoint-token": token} if token else {}
        # Opened for each question: nobody has to close it.
        self._client = partial(httpx.Client, base_url=url.rstrip("/") + "/api/v1/", headers=headers)

    def ask(self, method: str, *path: str, within_s: float = QUESTION_S, **more: Any) -> Any:
        """Ask, and return the answer's JSON; a refusal ends the command with its own words."""
        with self._told(), self._client(timeout=within_s) as client:
            response = client.request(method, _joined(path), **more)
        self._require_success(response)
        return response.json() if response.content else None

    @contextmanager
    def stream(self, method: str, *path: str, **more: Any) -> Iterator[httpx.Response]:
        """Ask for an answer that comes in pieces."""
        with (
            self._told(),
            self._client(timeout=LONG_S) as client,
            client.stream(method, _joined(path), **more) as response,
        ):
            if not response.is_success:
                response.read()
                self._require_success(response)
            yield response

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except (httpx.TransportError, httpx.InvalidURL) as error:
            fail(
                f"No proxy answers at {self._url} ({error}). Start one with `forkpoint serve`, or name another with "
                "--url."
            )

    def _require_success(self, response: httpx.Response) -> None:
        if response.is_success:
            return
        from proxy.workloads.runner import problem

        fail(problem(response))


def _joined(path: tuple[str, ...]) -> str:
    return "/".join(quote(part, safe="") for part in path)


def given(**options: object) -> Mapping[str, str]:
    """Return the options that were given, as query parameters."""
    return {name: str(value) for name, value in options.items() if value is not None}
