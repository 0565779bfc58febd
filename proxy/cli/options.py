"""Options and arguments that several commands share, their completion in a shell, and how a command finds its proxy."""

import inspect
import os
import re
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import httpx
import typer

from forkpoint.exchange import PAGE
from proxy.cli.client import ControlClient, fail, proxy_url
from proxy.cli.text import shortened

_WITHIN_S = 1.0
"""Timeout of a completion, in seconds: a shell waits for it at each Tab."""
_NAMES = 200
"""Most names that are offered."""
_TITLE = 60
"""Longest title of a call beside a node, in characters."""
_NOT_PLAIN = re.compile(r"[^\w ./,+@%-]+")
"""What a description leaves out."""


def complete_task(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the names of tasks that begin with a text."""
    return [row["task"] for row in _rows(ctx, "tasks", q=incomplete) if row["task"].startswith(incomplete)][:_NAMES]


def complete_rollout(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the names of the rollouts of the task in the command line, newest first."""
    rows = _rows(ctx, "tasks", _task(ctx), "rollouts", sort="-created_at")
    names = dict.fromkeys(row["rollout"] for row in rows)
    return [name for name in names if name.startswith(incomplete)][:_NAMES]


def complete_node(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return the nodes of the task in the command line, each with its call."""
    view = _get(ctx, "tasks", _task(ctx), "tree")
    nodes = view["nodes"] if isinstance(view, dict) else []
    matching = [node for node in nodes if node["id"].startswith(incomplete)][:_NAMES]
    return [(node["id"], description((node["call"] or {"title": "start"})["title"])) for node in matching]


def description(title: str) -> str:
    """Return a call's title for a shell, with only characters that no shell interprets: an agent wrote it.

    zsh evaluates descriptions of completions, and Typer escapes no backslashes: one before a command substitution would
    run it in the user's shell.
    """
    return shortened(" ".join(_NOT_PLAIN.sub(" ", title).split()), _TITLE)


def _task(ctx: typer.Context) -> str:
    return str(ctx.params.get("task") or "")


def _rows(ctx: typer.Context, *path: str, **query: str) -> list[dict[str, Any]]:
    page = _get(ctx, *path, **query, limit=str(PAGE))
    return page["items"] if isinstance(page, dict) else []


def _get(ctx: typer.Context, *path: str, **query: str) -> Any:
    data = ctx.params.get("data") or os.environ.get("FORKPOINT_DATA")
    url = proxy_url(ctx.params.get("url") or os.environ.get("FORKPOINT_URL"), Path(data) if data else None)
    try:
        return None if url is None else ControlClient(url).read(*path, within_s=_WITHIN_S, **query)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return None


UrlOption = Annotated[
    str | None,
    typer.Option(
        "--url", envvar="FORKPOINT_URL", help="Base URL of a running proxy.",
        show_default="the proxy of --data, else port 8700",
    ),
]  # fmt: skip
DataOption = Annotated[
    Path | None,
    typer.Option("--data", envvar="FORKPOINT_DATA", help="Data directory of a running proxy.", show_default=False),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
TaskArgument = Annotated[str, typer.Argument(help="Name of the task.", metavar="TASK", autocompletion=complete_task)]
OnlyTask = Annotated[
    str | None,
    typer.Argument(help="Only this task.", metavar="TASK", show_default="all tasks", autocompletion=complete_task),
]
RolloutArgument = Annotated[
    str, typer.Argument(help="Name of the rollout.", metavar="ROLLOUT", autocompletion=complete_rollout)
]
NodeArgument = Annotated[
    str, typer.Argument(help="Name of a node, such as n12.", metavar="NODE", autocompletion=complete_node)
]
RootOption = Annotated[
    str | None,
    typer.Option("--root", help="Select a tree of the task by its root or any of its nodes.", show_default="current"),
]

LabelOption = Annotated[
    list[str] | None, typer.Option("--label", help="Only rollouts with this label, such as run=r7. Repeatable.")
]
FileToWrite = Annotated[Path, typer.Argument(help="File to write; - is stdout.", metavar="FILE")]
SnapshotsOption = Annotated[
    bool, typer.Option("--snapshots", help="Include snapshots, except those of live processes.")
]


def with_proxy(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options `--url` and `--data`, and a `ControlClient` as its parameter `proxy`."""

    @wraps(command)
    def run(*, url: str | None, data: Path | None, **arguments: Any) -> None:
        address = proxy_url(url, data)
        if address is None:
            fail(f"No proxy serves {data}. Start one with `forkpoint serve --data {data}`, or name one with --url.")
        command(proxy=ControlClient(address), **arguments)

    hints = get_type_hints(command, include_extras=True)
    signature = inspect.signature(command)
    kept = [
        parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in signature.parameters.items()
        if name != "proxy"
    ]
    options = {"url": UrlOption, "data": DataOption}
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in options.items()
    ]
    # Typer reads the options of a command from its signature.
    run.__signature__ = signature.replace(parameters=[*kept, *added])  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in (*kept, *added)}
    return run
